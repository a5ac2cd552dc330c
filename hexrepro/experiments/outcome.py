"""From the times of finished cells to the rows of a table, with intervals and ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from hexrepro.experiments.cells import CellResult, Setting
from hexrepro.experiments.settings import Settings
from hexrepro.report import tables
from hexrepro.report.intervals import Interval, mean_interval, ratio_interval
from hexrepro.report.metrics import measure

FOCUS = "hexgen_flow"


@dataclass(frozen=True, eq=False)
class Outcome:
    """A finished setting: the result of each policy, and its rows of the table, the baseline first."""

    setting: Setting
    results: Mapping[str, CellResult]
    rows: Sequence[tables.Row]


def describe(setting: Setting) -> str:
    """A setting in words, for titles."""
    return f"{setting.trace}, {rate(setting)}; {hardware(setting)}; base SLO {setting.base_slo_s:.1f} s; {runs(setting)}"


def short(setting: Setting) -> str:
    """A setting in few words, for the progress."""
    return f"{setting.trace}, {rate(setting)}, {setting.profile}"


def rate(setting: Setting) -> str:
    """Its arrival rate in words."""
    return "recorded arrivals" if setting.rate_qps is None else f"{setting.rate_qps:g} queries/s"


def hardware(setting: Setting) -> str:
    """Its cluster, in which view, in words."""
    caching = setting.engine.prefix_caching
    return f"{setting.cluster.name}, {setting.profile} step times, prefix caching: {caching}"


def runs(setting: Setting) -> str:
    """Its number of runs in words."""
    return f"{len(setting.seeds)} arrival seeds" if len(setting.seeds) > 1 else "one run, so no interval"


def summarise(setting: Setting, results: Mapping[str, CellResult], settings: Settings) -> list[tables.Row]:
    """One row a policy, the baseline first."""
    samples = {name: _measure(setting, result, settings) for name, result in results.items()}
    base = samples[settings.baseline]
    metrics = list(base)

    def stacked(policy: str) -> np.ndarray:
        return np.stack([samples[policy][m] for m in metrics])

    def by_metric(interval: Interval) -> dict[str, Interval]:
        return {name: Interval(*(x[i] for x in interval)) for i, name in enumerate(metrics)}

    rows = []
    for policy in sorted(samples, key=lambda name: name != settings.baseline):
        values = by_metric(mean_interval(stacked(policy), settings.confidence))
        ratios = None
        if policy != settings.baseline:
            against = stacked(settings.baseline)
            ratios = by_metric(ratio_interval(stacked(policy), against, settings.confidence))
        rows.append(tables.Row(policy, results[policy].alpha, values, ratios))
    return rows


def normalised(setting: Setting, result: CellResult) -> np.ndarray:
    """float64[R, Q]: latencies over each query's SLO at scale 1."""
    return (result.finish_s - result.arrival_s) / (setting.base_slo_s * setting.workload.slo_scale)


def _measure(setting: Setting, result: CellResult, settings: Settings) -> dict[str, np.ndarray]:
    base_slo_s = setting.base_slo_s * setting.workload.slo_scale
    return measure(result.arrival_s, result.finish_s, base_slo_s, settings.slo_scale) | result.engine


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
    rows = {row.policy: row for row in outcome.rows}
    focus, baseline = rows[FOCUS], rows[settings.baseline]
    p95 = {name: _measure(outcome.setting, r, settings)["p95_s"] for name, r in outcome.results.items()}
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
