"""The online tuner: it watches the tail latency, and when that degrades it replays the recent past for other alphas.

A plain object: told what happens, asked for alpha. The simulator's loop and the gateway use the same one. It sees what a
live coordinator sees: no true length of an unfinished call, no future arrival.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.report.metrics import quantile
from hexrepro.scheduling.estimates import estimate
from hexrepro.scheduling.policy import Policy
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator.engine import EngineOptions
from hexrepro.tuning.history import History
from hexrepro.tuning.replay import BadWindow, make_replay, predicted_p95_s

TRIGGERS = ("threshold", "test", "always")
FINALISTS = 3  # candidates that get all seeds
CANDIDATES = (
    0.0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class OnlineOptions:
    """How the tuner works. The paper gives the window and the least predicted P95; the rest is ours.

    window_s       the history that is watched and replayed
    candidates     alphas that are tried; closer together near 0, where the score changes fastest
    seeds          replays of each: the first as recorded, the others with drawn gaps
    interval_s     least time between two decisions
    trigger        threshold: the window's P95 exceeds `threshold` times the reference. test: the window's latencies are
                   greater than the reference window's (Mann-Whitney, level `level`). always: every `interval_s`
    threshold      see trigger
    rearm          hysteresis: after a decision the trigger fires again once the P95 has been below `rearm` times the
                   reference, or after `patience_s`
    patience_s     see rearm
    level          level of the tests
    sure           move only when the paired gain over the present alpha is outside noise at `level` (t-test over seeds)
    memory_s       half-life with which earlier decisions' predictions still count, so that the choice rests on more than one
                   window, and on the heavy ones most; 0 = the present window alone. With memory, `sure` does not apply
    least_gain     move only for a predicted gain of more than this share of the P95
    race           successive halving: after 1, 2, 4, ... seeds only the better half goes on
    donors         finished queries kept beyond the window, to guess from
    """

    window_s: float = 100.0
    candidates: tuple[float, ...] = CANDIDATES
    seeds: int = 8
    interval_s: float = 60.0
    trigger: str = "always"
    threshold: float = 1.2
    rearm: float = 1.1
    patience_s: float = 100.0
    level: float = 0.05
    sure: bool = True
    memory_s: float = 300.0
    least_gain: float = 0.01
    race: bool = True
    donors: int = 30

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", tuple(float(a) for a in self.candidates))
        positive = ("window_s", "interval_s", "threshold", "rearm", "patience_s")
        for name in positive:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise InputError(f"tuner: {name}={value!r} must be a positive number")
        for name, least in (("seeds", 2), ("donors", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"tuner: {name}={value!r} must be a whole number of at least {least}")
        for name in ("memory_s", "least_gain"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise InputError(f"tuner: {name}={value!r} must be 0 or a positive number")
        if not (isinstance(self.level, int | float) and 0 < self.level < 1):
            raise InputError(f"tuner: level={self.level!r} must lie between 0 and 1")
        if self.trigger not in TRIGGERS:
            raise InputError(f"tuner: trigger={self.trigger!r} is unknown (one of: {', '.join(TRIGGERS)})")
        if not self.candidates or not all(0 <= a <= 1 for a in self.candidates):
            raise InputError(f"tuner: candidates={self.candidates} must be alphas between 0 and 1")


@dataclass(frozen=True)
class Decision:
    """What the tuner did at one time, and why. `predicted`: alpha -> (mean P95 in s, seeds it was simulated with)."""

    time_s: float
    reason: str
    alpha_before: float
    alpha: float
    finished: int = 0
    under_way: int = 0
    arrivals: int = 0
    tail_s: float = math.nan
    reference_s: float = math.nan
    predicted: dict[float, tuple[float, int]] = field(default_factory=dict)
    cost_ms: float = 0.0

    @property
    def moved(self) -> bool:
        return self.alpha != self.alpha_before


class OnlineTuner:
    """Feed `history` with events, keep `set_cluster` up to date, and call `step` now and then.

    alpha        what the dispatch rule should use
    decisions    all decisions so far, those that kept alpha for want of data among them
    """

    def __init__(
        self,
        policy: Policy,
        cluster: Cluster,
        *,
        options: OnlineOptions | None = None,
        engine: EngineOptions | None = None,
        seed: int = 0,
        workers: int = 1,
    ) -> None:
        if "alpha" not in policy.dispatch_rule.defaults:
            raise InputError(f"tuner: policy {policy.name} has no parameter alpha to tune")
        self.options, self.engine, self.policy = options or OnlineOptions(), engine or EngineOptions(), policy
        self.alpha = float(policy.dispatch_params.get("alpha", policy.dispatch_rule.defaults["alpha"]))
        self.history = History()
        self.decisions: list[Decision] = []
        self._seed, self._workers = seed, workers
        self._decided_s = -math.inf
        self._reference: np.ndarray | None = None  # latencies of the window that others are held against
        self._armed = True
        self._clock_s = -math.inf
        # predicted P95 of each candidate, summed over decisions with memory
        self._scores: dict[float, float] = {}
        self._scored_s = -math.inf
        self.set_cluster(cluster)

    def set_cluster(self, cluster: Cluster, closed: Sequence[bool] | None = None) -> None:
        """The instances as the coordinator believes them to be, and which of them take no new calls."""
        self._cluster = cluster
        self._closed = np.zeros(len(cluster), bool) if closed is None else np.array(closed, bool)

    def step(self, now_s: float) -> Decision | None:
        """Decide if it is time to. Returns the decision; None when nothing asked for one."""
        if now_s < self._clock_s:
            return self._log(now_s, f"the clock stepped back from {self._clock_s:g} s")
        self._clock_s = now_s
        self.history.forget(now_s - self.options.window_s, keep=self.options.donors)
        if now_s - self._decided_s < self.options.interval_s:
            return None
        tail = self._latencies(now_s)
        reason = self._trigger(tail, now_s)
        return None if reason is None else self.decide(now_s, reason)

    # ---- the trigger ---------------------------------------------------------------------------------------

    def _latencies(self, now_s: float) -> np.ndarray:
        """Latencies of the queries that finished in the window; one that is under way counts as long as it has lasted
        once that is longer than any of them."""
        done = [q.finish_s - q.arrival_s for q in self.history.finished_since(now_s - self.options.window_s)]
        longest = max(done, default=0.0)
        late = [age for q in self.history.open.values() if (age := now_s - q.arrival_s) > longest]
        return np.array(done + late)

    def _trigger(self, tail: np.ndarray, now_s: float) -> str | None:
        """Why to decide now; None when all is well. Keeps the reference: the best window since the last decision."""
        o = self.options
        if o.trigger == "always":
            return "interval"
        if len(tail) < 5:
            return None
        p95_s = float(quantile(tail, 0.95))
        if self._reference is None or p95_s < float(quantile(self._reference, 0.95)):
            self._reference = tail
        reference_s = float(quantile(self._reference, 0.95))
        if p95_s <= o.rearm * reference_s or now_s - self._decided_s >= o.patience_s:
            self._armed = True
        if not self._armed:
            return None
        if o.trigger == "threshold":
            worse = p95_s > o.threshold * reference_s
            return f"P95 {p95_s:.1f} s > {o.threshold:g} x {reference_s:.1f} s" if worse else None
        p = stats.mannwhitneyu(tail, self._reference, alternative="greater").pvalue
        return f"latencies greater than in the reference window (p = {p:.2g})" if p < o.level else None

    # ---- the decision --------------------------------------------------------------------------------------

    def decide(self, now_s: float, reason: str = "asked") -> Decision:
        """Replay the window for the candidates and move alpha if that helps."""
        began = time.perf_counter()
        o = self.options
        rng = np.random.default_rng([self._seed, len(self.decisions)])
        self._decided_s, self._armed = now_s, False
        try:
            replay = make_replay(
                self.history,
                now_s,
                window_s=o.window_s,
                seeds=o.seeds,
                cluster=self._cluster,
                closed=self._closed,
                rng=rng,
            )
        except BadWindow as bad:
            return self._log(now_s, f"{reason}; kept: {bad}", began)
        predicted = self._predict(replay)
        alpha, verdict = self._choose(predicted, now_s)
        tail, reference = self._latencies(now_s), self._reference
        if alpha != self.alpha:
            self._reference = None  # another alpha has another tail
        return self._log(
            now_s,
            f"{reason}; {verdict}",
            began,
            alpha,
            tail_s=math.nan if len(tail) == 0 else float(quantile(tail, 0.95)),
            reference_s=math.nan if reference is None else float(quantile(reference, 0.95)),
            predicted={a: (float(p.mean()), len(p)) for a, p in predicted.items()},
        )

    def _log(
        self, now_s: float, reason: str, began: float | None = None, alpha: float | None = None, **found
    ) -> Decision:
        """Note a decision, and use the alpha it came to; without one the present alpha is kept."""
        before, history = self.alpha, self.history
        self.alpha = before if alpha is None else alpha
        decision = Decision(
            time_s=now_s,
            reason=reason,
            alpha_before=before,
            alpha=self.alpha,
            finished=len(history.finished),
            under_way=len(history.open),
            arrivals=len(history.arrivals),
            cost_ms=0.0 if began is None else 1e3 * (time.perf_counter() - began),
            **found,
        )
        self.decisions.append(decision)
        return decision

    def _predict(self, replay) -> dict[float, np.ndarray]:
        """P95 of the replay for each candidate and the present alpha, float64[seeds] each (fewer for one that lost early)."""
        o = self.options
        beliefs = estimate(
            replay.workload,
            instance_views(self._cluster),
            prefix_caching=self.engine.prefix_caching,
        )
        alphas = sorted({*o.candidates, self.alpha})

        def run(chosen: list[float], seeds: slice) -> np.ndarray:
            return predicted_p95_s(
                replay,
                self.policy,
                self._cluster,
                chosen,
                engine=self.engine,
                estimates=beliefs,
                seeds=seeds,
                workers=self._workers,
            )

        if not o.race:
            return dict(zip(alphas, run(alphas, slice(None)), strict=True))
        # successive halving: after 1, 2, 4, ... seeds the better half goes on, and the present alpha always does
        result = dict.fromkeys(alphas, np.zeros(0))
        running, seen = alphas, 0
        while seen < o.seeds:
            upto = min(max(1, 2 * seen), o.seeds)
            for alpha, more in zip(running, run(running, slice(seen, upto)), strict=True):
                result[alpha] = np.concatenate([result[alpha], more])
            seen = upto
            ranked = sorted(running, key=lambda a: float(result[a].mean()))
            kept = {*ranked[: max(FINALISTS, len(ranked) // 2)], self.alpha}
            running = [a for a in running if a in kept]
        return result

    def _choose(self, predicted: dict[float, np.ndarray], now_s: float) -> tuple[float, str]:
        """Alpha from now on, and why."""
        o, now = self.options, predicted[self.alpha]
        if o.memory_s > 0.0:
            return self._choose_with_memory(predicted, now_s)
        whole = {a: p for a, p in predicted.items() if len(p) == len(now)}
        best = min(whole, key=lambda a: (whole[a].mean(), abs(a - self.alpha)))
        gain = now - whole[best]
        if best == self.alpha or gain.mean() <= o.least_gain * now.mean():
            return self.alpha, "the present alpha is as good as the best"
        if o.sure:
            spread = gain.std(ddof=1) / math.sqrt(len(gain))
            p = float(stats.t.sf(gain.mean() / spread, len(gain) - 1)) if spread > 0 else 0.0
            if p >= o.level:
                return self.alpha, f"alpha = {best:g} gains {gain.mean():.1f} s, within noise (p = {p:.2g})"
        return best, f"alpha = {best:g} gains {gain.mean():.1f} s of {now.mean():.1f} s"

    def _choose_with_memory(self, predicted: dict[float, np.ndarray], now_s: float) -> tuple[float, str]:
        o, scores = self.options, self._scores
        # who lost the race has fewer seeds: level these with what the same ones say of the finalists
        most = max(len(p) for p in predicted.values())
        whole = np.mean([p for p in predicted.values() if len(p) == most], axis=0)
        kept = 0.5 ** ((now_s - self._scored_s) / o.memory_s)
        self._scored_s = now_s
        for alpha, p95_s in predicted.items():
            mean_s = p95_s.mean() * whole.mean() / whole[: len(p95_s)].mean()
            scores[alpha] = kept * scores.get(alpha, 0.0) + float(mean_s)
        best = min(o.candidates, key=lambda a: (scores[a], abs(a - self.alpha)))
        # an alpha from outside the candidates was not scored before: it is left for the best one
        share = 1.0 - scores[best] / scores[self.alpha] if self.alpha in o.candidates else math.inf
        if best == self.alpha or share <= o.least_gain:
            return self.alpha, "the present alpha is as good as the best"
        return best, f"alpha = {best:g} gains {min(share, 1.0):.1%} over the windows remembered"
