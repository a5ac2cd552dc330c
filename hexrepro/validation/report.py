"""Measured against simulated, as numbers: errors with their intervals, the noise of both sides, ranks.

What is compared. The question is how far the simulator is off for this trace and these arrivals; so queries are no sample, and
are the same on both sides. A real system answers a little differently each time (two calls that come at nearly the same time
change places, and then all that follows goes elsewhere), and so does the simulation once its calls come late by a drawn time.
Each metric is therefore taken replay by replay, and its mean over the replays is held against its mean over the simulations.

How sure. Two or three replays say little of their own spread. The chaos comes from dispatch, so at one load the replays of all
policies with one dispatch rule are taken to be equally noisy, relative to their means: their variances are pooled, and errors
have Student's interval with the pooled degrees of freedom. Replays without gateway are pooled over the loads. The simulations'
own spread stands beside it: where it is about the measured one, the simulator is as chaotic as the system.

What decisions add. Where dispatch depends on a race, single replays differ a lot and a mean over few of them is not sharp. So
each replay is also simulated with every call on the instance where that replay had it: what then is left of the error is the
engines' and the queues' alone, pair by pair, and its interval is narrow.

Which order. Two policies differ clearly where the difference of their means is outside its interval, pooled as above and
widened for the number of pairs at a load (Bonferroni). There, and only there, the simulator must order them alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from hexrepro.errors import InputError
from hexrepro.report.metrics import quantile, throughput_qps
from hexrepro.simulator import Result
from hexrepro.validation.fidelity import compare_runs
from hexrepro.validation.lab import DIRECT, About
from hexrepro.validation.replay import Replay
from hexrepro.workload.types import Workload

RANKED = ("query_mean_s", "query_p95_s", "throughput_qps")


@dataclass(frozen=True)
class Compared:
    """One policy at one load: R replays and N simulations of one workload.

    drawn      N simulations; `drawn_s` float64[N, n], what came before each call in them: API, gateway, and drawn lateness
    placed     R simulations, each with every call where one replay had it; `placed_s` float64[R, n] likewise
    """

    setting: str
    load: str
    policy: str
    dispatch: str
    alpha: float | None
    rate_qps: float
    workload: Workload
    replays: Sequence[Replay]
    about: Sequence[About]
    drawn: Sequence[Result]
    drawn_s: np.ndarray
    placed: Sequence[Result]
    placed_s: np.ndarray
    core_slowdown: float | None = None  # see `core_sharing.py`

    @property
    def labels(self) -> dict:
        return dict(
            setting=self.setting,
            load=self.load,
            policy=self.policy,
            alpha=self.alpha,
            rate_qps=self.rate_qps,
        )

    @cached_property
    def done(self) -> np.ndarray:
        """bool[q]: the queries that finished in every replay; the others are left out on both sides."""
        done = np.all([np.isfinite(r.finish_s) for r in self.replays], axis=0)
        if not done.any():
            said = self.replays[0].report(self.workload)
            raise InputError(
                f"{self.setting}, {self.load}, {self.policy}: no query finished in every replay: {said}"
            )
        return done

    @cached_property
    def metrics(self) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Metric -> its values in the replays float64[R], in the simulations [N], and in those placed as measured [R]."""
        done = self.done
        calls = done[self.workload.query]

        def one(run: Replay | Result, before_s: np.ndarray | float) -> dict[str, float]:
            latency_s = run.latency_s[done]
            return {
                "query_mean_s": latency_s.mean(),
                "query_p50_s": quantile(latency_s, 0.50),
                "query_p95_s": quantile(latency_s, 0.95),
                "call_mean_s": (run.call_finish_s - run.release_s + before_s)[calls].mean(),
                "ttft_mean_s": (run.first_token_s - run.release_s + before_s)[calls].mean(),
                "throughput_qps": throughput_qps(run.arrival_s[done], run.finish_s[done]),
            }

        measured = [one(run, 0.0) for run in self.replays]
        drawn = [one(run, before_s) for run, before_s in zip(self.drawn, self.drawn_s, strict=True)]
        placed = [one(run, before_s) for run, before_s in zip(self.placed, self.placed_s, strict=True)]
        return {
            name: tuple(np.array([float(run[name]) for run in runs]) for runs in (measured, drawn, placed))
            for name in measured[0]
        }


Values = Mapping[str, np.ndarray]


class Noise:
    """Relative standard deviation of a metric between replays, pooled as said above."""

    def __init__(self, compared: Sequence[Compared], values: Sequence[Values], confidence: float) -> None:
        """values: of each of `compared`, metric -> float64[R]."""
        self._sum: dict[tuple, float] = defaultdict(float)
        self._freedom: dict[tuple, int] = defaultdict(int)
        self._level = (1 + confidence) / 2
        for of, metrics in zip(compared, values, strict=True):
            for metric, replays in metrics.items():
                key = self._key(of, metric)
                self._sum[key] += float(((replays / replays.mean() - 1) ** 2).sum())
                self._freedom[key] += len(replays) - 1

    @staticmethod
    def _key(of: Compared, metric: str) -> tuple:
        return (of.dispatch, None if of.policy == DIRECT else of.load, metric)

    def variance(self, of: Compared, metric: str) -> tuple[float, int]:
        """Of one replay, relative to its mean; and its degrees of freedom."""
        key = self._key(of, metric)
        return (self._sum[key] / self._freedom[key] if self._freedom[key] else np.nan), self._freedom[key]

    def half(self, parts: Sequence[tuple[Compared, str, int]]) -> float:
        """Half of the interval of a difference (or of one mean) of means over so many replays each; Welch's, relative."""
        terms = [(v / n, f) for (v, f), n in ((self.variance(of, m), n) for of, m, n in parts)]
        total = sum(v for v, _ in terms)
        if not total > 0:
            return 0.0 if total == 0 else np.nan
        keys = {self._key(of, metric) for of, metric, _ in parts}
        freedom = terms[0][1] if len(keys) == 1 else total**2 / sum(v**2 / f for v, f in terms)
        return float(stats.t.ppf(self._level, freedom) * np.sqrt(total))


def summary(
    compared: Sequence[Compared], bars: Mapping[str, float], confidence: float = 0.95
) -> pd.DataFrame:
    """One row a metric of a policy at a load, of one setting. Errors and noise are fractions of the measured value.

    measured, measured_low, measured_high   mean over the replays, with its interval
    simulated, simulated_low, simulated_high  mean over the simulations, and the band in which that share of them lies
    error, error_low, error_high            simulated / measured - 1, with the interval of both means
    noise, simulated_noise                  relative standard deviation from replay to replay, from simulation to simulation
    placed_error, placed_half               error with every call where the replay had it, and half its interval
    bar, verdict, placed_verdict            at light load: met or missed, with a "?" where the interval crosses the bar
    """
    values = [of.metrics for of in compared]
    noise = Noise(compared, [{m: v[0] for m, v in x.items()} for x in values], confidence)
    rest = Noise(compared, [{m: v[2] / v[0] for m, v in x.items()} for x in values], confidence)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    rows = []
    for of, metrics in zip(compared, values, strict=True):
        for metric, (real, model, placed) in metrics.items():
            measured, simulated = real.mean(), model.mean()
            error = simulated / measured - 1
            half = noise.half([(of, metric, len(real))])
            # the mean of the simulations is known to within their spread over the root of their number
            spread = model.std(ddof=1) / measured if len(model) > 1 else 0.0
            off = np.hypot((1 + error) * half, stats.norm.ppf(tails[1]) * spread / np.sqrt(len(model)))
            low, high = np.quantile(model, tails)
            ratio, rest_half = (placed / real).mean(), rest.half([(of, metric, len(real))])
            bar = bars.get(metric) if of.load == "light" else None
            rows.append(
                {
                    **of.labels,
                    "metric": metric,
                    "measured": measured,
                    "measured_low": measured * (1 - half),
                    "measured_high": measured * (1 + half),
                    "simulated": simulated,
                    "simulated_low": low,
                    "simulated_high": high,
                    "error": error,
                    "error_low": error - off,
                    "error_high": error + off,
                    "noise": real.std(ddof=1) / measured if len(real) > 1 else np.nan,
                    "simulated_noise": model.std(ddof=1) / simulated if len(model) > 1 else np.nan,
                    "placed_error": ratio - 1,
                    "placed_half": ratio * rest_half,
                    "repeats": len(real),
                    "bar": bar,
                    "verdict": _verdict(error, off, bar),
                    "placed_verdict": _verdict(ratio - 1, ratio * rest_half, bar),
                }
            )
    return pd.DataFrame(rows)


def _verdict(error: float, half: float, bar: float | None) -> str | None:
    if bar is None:
        return None
    if abs(error) <= bar:
        return "met" if abs(error) + half <= bar else "met?"
    return "missed?" if abs(error) - half <= bar else "missed"


def ranks(compared: Sequence[Compared], confidence: float = 0.95) -> pd.DataFrame:
    """One row a pair of policies, load and metric.

    measured, simulated  how many times the second's value is the first's
    clear                the measured ratio is outside the noise
    agrees               the simulator orders them as measured; None where that is not clear
    """
    compared = [of for of in compared if of.policy != DIRECT]
    values = [of.metrics for of in compared]
    policies = len({of.policy for of in compared})
    level = 1 - (1 - confidence) / max(1, policies * (policies - 1) // 2)
    noise = Noise(compared, [{m: v[0] for m, v in x.items()} for x in values], level)
    rows = []
    for (of, ours), (other, theirs) in combinations(zip(compared, values, strict=True), 2):
        if of.load != other.load:
            continue
        for metric in RANKED:
            (a, sim_a), (b, sim_b) = ours[metric][:2], theirs[metric][:2]
            measured, simulated = b.mean() / a.mean(), sim_b.mean() / sim_a.mean()
            half = noise.half([(of, metric, len(a)), (other, metric, len(b))])
            clear = abs(np.log(measured)) > half
            rows.append(
                dict(
                    setting=of.setting,
                    load=of.load,
                    metric=metric,
                    first=of.policy,
                    second=other.policy,
                    measured=measured,
                    simulated=simulated,
                    half_interval=half,
                    clear=bool(clear),
                    agrees=bool((measured > 1) == (simulated > 1)) if clear else None,
                )
            )
    return pd.DataFrame(rows)


def spread(compared: Sequence[Compared]) -> pd.DataFrame:
    """Errors one by one, not of means: one row for the calls and one for the queries of each policy at each load.

    mean_abs, p95_abs  of |error|, with every call where the replay had it; mean over the replays
    repeat_mean_abs    the mean of |difference| between two replays, where there are several
    """
    rows = []
    for of in compared:
        done = of.done
        calls = done[of.workload.query]
        real = {
            "calls": [(run.call_finish_s - run.release_s)[calls] for run in of.replays],
            "queries": [run.latency_s[done] for run in of.replays],
        }
        model = {
            "calls": [
                (run.call_finish_s - run.release_s + before_s)[calls]
                for run, before_s in zip(of.placed, of.placed_s, strict=True)
            ],
            "queries": [run.latency_s[done] for run in of.placed],
        }
        for what, measured in real.items():
            errors = [np.abs(m / r - 1) for m, r in zip(model[what], measured, strict=True)]
            between = [np.abs(a / b - 1).mean() for a, b in combinations(measured, 2)]
            rows.append(
                {
                    **of.labels,
                    "of": what,
                    "n": len(errors[0]),
                    "mean_abs": np.mean(errors),
                    "p95_abs": np.mean([np.quantile(e, 0.95) for e in errors]),
                    "repeat_mean_abs": np.mean(between) if between else np.nan,
                }
            )
    return pd.DataFrame(rows)


def queries(compared: Sequence[Compared]) -> pd.DataFrame:
    """One row a query of a policy at a load: mean and standard deviation over the replays, and over the simulations."""
    parts = []
    for of in compared:
        done = of.done
        real = np.stack([run.latency_s[done] for run in of.replays])
        model = np.stack([run.latency_s[done] for run in of.drawn])
        numbers = dict(
            query=np.flatnonzero(done),
            measured_s=real.mean(axis=0),
            measured_sd_s=real.std(axis=0, ddof=1) if len(real) > 1 else np.nan,
            simulated_s=model.mean(axis=0),
            simulated_sd_s=model.std(axis=0),
        )
        parts.append(pd.DataFrame({**of.labels, **numbers}))
    return pd.concat(parts, ignore_index=True)


def calls(compared: Sequence[Compared]) -> pd.DataFrame:
    """One row a call and replay, beside the simulation that has each call where the replay had it; as in `compare_runs`."""
    parts = []
    for of in compared:
        for repeat, run in enumerate(of.replays):
            check = compare_runs(of.workload, run, of.placed[repeat], of.placed_s[repeat])
            parts.append(check.calls.assign(**of.labels, repeat=repeat))
    return pd.concat(parts, ignore_index=True)


def replays(compared: Sequence[Compared]) -> pd.DataFrame:
    """One row a replay: when it was, the load generator's rate and lateness, what failed, how the servers share cores."""
    rows = []
    for of in compared:
        for repeat, (run, about) in enumerate(zip(of.replays, of.about, strict=True)):
            asked, realised = run.rates_qps(of.workload)
            late = run.lateness_s
            rows.append(
                {
                    **of.labels,
                    "repeat": repeat,
                    **about._asdict(),
                    "asked_qps": asked,
                    "realised_qps": realised,
                    "late_p50_s": np.median(late) if len(late) else np.nan,
                    "late_p99_s": np.quantile(late, 0.99) if len(late) else np.nan,
                    "failed_calls": len(run.errors),
                    "unfinished_queries": int((~np.isfinite(run.finish_s)).sum()),
                    "stopped": run.stopped,
                    "core_slowdown": of.core_slowdown,
                }
            )
    return pd.DataFrame(rows)
