"""From the times of finished cells to numbers with intervals: of all queries, and of each tenant's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from hexrepro.experiments.cells import CellResult, Setting
from hexrepro.experiments.settings import Settings
from hexrepro.experiments.tidy import ALL
from hexrepro.report import tables
from hexrepro.report.intervals import Interval, mean_interval, ratio_interval
from hexrepro.report.metrics import cost_per_1000, jain_index, measure, middle, throughput_qps

FOCUS = "hexgen_flow"


@dataclass(frozen=True, eq=False)
class Measured:
    """One policy in one setting, for all queries or one tenant's.

    samples: metric -> float64[R], one value a seed; values: its mean with interval; ratios: to the baseline, seeds
    paired (None for the baseline itself).
    """

    policy: str
    alpha: float | None
    tenant: str
    samples: Mapping[str, np.ndarray]
    values: Mapping[str, Interval]
    ratios: Mapping[str, Interval] | None


@dataclass(frozen=True, eq=False)
class Outcome:
    """A finished setting: the result of each policy and its numbers, the baseline first."""

    setting: Setting
    results: Mapping[str, CellResult]
    measured: Sequence[Measured]

    @property
    def rows(self) -> list[tables.Row]:
        """One row a policy, of all queries."""
        return [tables.Row(m.policy, m.alpha, m.values, m.ratios) for m in self.measured if m.tenant == ALL]


def describe(setting: Setting, settings: Settings) -> str:
    """A setting in words, for titles."""
    parts = [
        f"{setting.trace}, {rate(setting)}; {hardware(setting)}",
        f"base SLO {setting.base_slo_s:.1f} s",
        runs(setting),
    ]
    if settings.scored is not None:
        parts.append(f"only the middle {settings.scored} queries count")
    return "; ".join(parts)


def short(setting: Setting, settings: Settings) -> str:
    """A setting in few words, for the progress."""
    axes = "".join(f", {name} {value}" for name, value in settings.axes.items())
    where = f"{setting.cluster.name}, {setting.profile}, caching {setting.engine.prefix_caching}"
    return f"{setting.trace}, {rate(setting)}, {where}{axes}"


def rate(setting: Setting) -> str:
    """Its arrivals in words."""
    if setting.rate_qps is None:
        return "recorded arrivals"
    process = "" if setting.arrivals == "poisson" else f" ({setting.arrivals})"
    return f"{setting.rate_qps:g} queries/s{process}"


def hardware(setting: Setting) -> str:
    """Its cluster, in which view, in words."""
    caching = setting.engine.prefix_caching
    times = f" × {setting.scale_out}" if setting.scale_out > 1 else ""
    return f"{setting.cluster.name}{times}, {setting.profile} step times, prefix caching: {caching}"


def runs(setting: Setting) -> str:
    """Its number of runs in words."""
    return f"{len(setting.seeds)} arrival seeds" if len(setting.seeds) > 1 else "one run, so no interval"


def counted(setting: Setting, settings: Settings) -> dict[str, np.ndarray]:
    """Which queries count, for all and for each tenant where there are several: name -> int[q]."""
    n = setting.workload.n_queries
    every = np.arange(n)[middle(n, settings.scored)]
    names, tenant = setting.workload.tenant_names, setting.workload.tenant[every]
    found = {ALL: every}
    if len(names) > 1:
        found |= {name: every[tenant == i] for i, name in enumerate(names) if (tenant == i).any()}
    return found


def latency_s(result: CellResult) -> np.ndarray:
    """float64[R, Q]: from a query's arrival to the end of its last call."""
    return result.finish_s - result.arrival_s


def normalised(setting: Setting, result: CellResult) -> np.ndarray:
    """float64[R, Q]: latencies over each query's SLO at scale 1."""
    return latency_s(result) / (setting.base_slo_s * setting.workload.slo_scale)


def summarise(setting: Setting, results: Mapping[str, CellResult], settings: Settings) -> list[Measured]:
    """Every policy's numbers with intervals, the baseline first; all policies and metrics share their resamples."""
    samples = {name: _samples(setting, result, settings) for name, result in results.items()}
    base = samples[settings.baseline]
    order = sorted(samples, key=lambda name: name != settings.baseline)
    at = [(policy, tenant, metric) for policy in order for tenant in base for metric in base[tenant]]
    stacked = np.stack([samples[policy][tenant][metric] for policy, tenant, metric in at])
    against = np.stack([base[tenant][metric] for _, tenant, metric in at])
    values = mean_interval(stacked, settings.confidence)
    ratios = ratio_interval(stacked, against, settings.confidence)

    rows, begin = [], 0
    for policy in order:
        for tenant, by_metric in samples[policy].items():
            end = begin + len(by_metric)
            own, ratio = (_named(by_metric, x, begin, end) for x in (values, ratios))
            begin = end
            against_itself = policy == settings.baseline
            rows.append(
                Measured(
                    policy, results[policy].alpha, tenant, by_metric, own, None if against_itself else ratio
                )
            )
    return rows


def _named(metrics: Mapping[str, np.ndarray], of: Interval, begin: int, end: int) -> dict[str, Interval]:
    ends = zip(of.value[begin:end], of.low[begin:end], of.high[begin:end], strict=True)
    return {metric: Interval(*each) for metric, each in zip(metrics, ends, strict=True)}


def _samples(setting: Setting, result: CellResult, settings: Settings) -> dict[str, dict[str, np.ndarray]]:
    """Tenant -> metric -> one value a seed. How the instances were used is a matter of all queries."""
    base_slo_s = setting.base_slo_s * setting.workload.slo_scale
    found = {
        tenant: measure(
            result.arrival_s[:, queries], result.finish_s[:, queries], base_slo_s[queries], settings.slo_scale
        )
        for tenant, queries in counted(setting, settings).items()
    }
    found[ALL] |= result.engine
    if setting.cluster.price_per_hour is not None:
        # of all queries, whichever count: the instances are paid for all the while
        throughput = throughput_qps(result.arrival_s, result.finish_s)
        found[ALL]["cost_per_1000"] = cost_per_1000(setting.cluster.price_per_hour, throughput)
    if len(found) > 1:
        shares = np.stack([of["attainment"] for tenant, of in found.items() if tenant != ALL], axis=-1)
        found[ALL]["jain_attainment"] = jain_index(shares)
    return found


def gain_tables(outcomes: Sequence[Outcome], settings: Settings) -> Iterator[Table]:
    """For each view a table of what HexGen-Flow gains; nothing when it was not run."""
    if FOCUS not in settings.policies or settings.baseline == FOCUS:
        return
    for profile in settings.profiles:
        shown = [outcome for outcome in outcomes if outcome.setting.profile == profile]
        title = f"What {FOCUS} gains over {settings.baseline}: {hardware(shown[0].setting)}"
        gains = [_gain(outcome, settings) for outcome in shown]
        yield tables.gain_table(title, FOCUS, settings.baseline, gains)


def _gain(outcome: Outcome, settings: Settings) -> tables.Gain:
    of = {m.policy: m for m in outcome.measured if m.tenant == ALL}
    focus, baseline = of[FOCUS], of[settings.baseline]
    p95 = {name: m.samples["p95_s"] for name, m in of.items()}
    best = min((name for name in p95 if name != FOCUS), key=lambda name: p95[name].mean())
    return tables.Gain(
        setting=f"{outcome.setting.trace}, {rate(outcome.setting)}",
        alpha=focus.alpha,
        p95_ratio=focus.ratios["p95_s"],
        throughput_ratio=focus.ratios["throughput_qps"],
        scale_baseline=baseline.values["scale_at_95"],
        scale=focus.values["scale_at_95"],
        best_other=best,
        best_other_ratio=ratio_interval(p95[best], p95[FOCUS], settings.confidence),
    )
