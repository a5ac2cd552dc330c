"""Tables for a reader at a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from hexrepro.report.intervals import Interval


@dataclass(frozen=True)
class Column:
    """A metric as it is shown: `scale` times its value, with `digits` decimals."""

    metric: str
    title: str
    digits: int
    scale: float = 1.0


@dataclass(frozen=True)
class Row:
    """One policy: its metrics, and their ratios to the baseline (none for the baseline itself)."""

    policy: str
    alpha: float | None
    values: Mapping[str, Interval]
    ratios: Mapping[str, Interval] | None


def columns(slo_scale: float, priced: bool = False) -> list[Column]:
    """What a comparison shows; with the cost where the prices of all instances are known."""
    cost = [Column("cost_per_1000", "$ per 1 000\nqueries", 2)] if priced else []
    return [
        Column("mean_s", "mean\ns", 1),
        Column("p50_s", "P50\ns", 1),
        Column("p95_s", "P95\ns", 1),
        Column("p99_s", "P99\ns", 1),
        Column("throughput_qps", "throughput\nqueries/s", 3),
        Column("attainment", f"SLO × {slo_scale:g}\nattained, %", 1, scale=100.0),
        Column("scale_at_95", "SLO scale\nat 95 %", 2),
        Column("scale_at_99", "SLO scale\nat 99 %", 2),
        *cost,
    ]


def comparison_table(
    title: str, rows: Sequence[Row], shown: Sequence[Column], confidence: float = 0.95
) -> Table:
    """Two lines a policy: the value with the half-width of its interval, and the ratio to the baseline with its own."""
    baseline = next((row.policy for row in rows if row.ratios is None), "baseline")
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=f"± half of the {confidence:.0%} interval over arrival seeds; × ratio to {baseline}, seeds paired; "
        "≈ instead of × is a tie: the ratio's interval contains 1",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("policy\nα", no_wrap=True)
    for column in shown:
        table.add_column(column.title, justify="right")
    for row in rows:
        head = Text(row.policy, style="bold" if row.policy == "hexgen_flow" else "")
        if row.ratios is None:
            head.append("\nbaseline", style="dim")
        elif row.alpha is not None:
            head.append(f"\nα = {row.alpha:g}", style="dim")
        table.add_row(head, *(_cell(row, column) for column in shown))
    return table


def _cell(row: Row, column: Column) -> Text:
    text = Text(with_half_width(row.values[column.metric], column.digits, column.scale))
    if row.ratios is not None:
        ratio = row.ratios[column.metric]
        if not np.isfinite(ratio.value):
            text.append("\n–", style="dim")
        elif ratio.is_tie and np.isfinite(ratio.high):
            text.append(f"\n≈{with_half_width(ratio, 2)}", style="dim")
        else:
            text.append(f"\n×{with_half_width(ratio, 2)}", style="cyan")
    return text


def with_half_width(interval: Interval, digits: int, scale: float = 1.0) -> str:
    """'12.3 ±0.4'; the half-width is left out where it is unknown (one seed)."""
    value, half = float(interval.value) * scale, float(interval.high - interval.low) / 2 * scale
    if not np.isfinite(value):
        return "never" if np.isinf(value) else "–"
    return f"{value:.{digits}f} ±{half:.{digits}f}" if np.isfinite(half) else f"{value:.{digits}f}"


@dataclass(frozen=True)
class Gain:
    """What one policy gains over the baseline in one setting."""

    setting: str
    alpha: float | None
    p95_ratio: Interval
    throughput_ratio: Interval
    scale_baseline: Interval
    scale: Interval
    best_other: str
    best_other_ratio: Interval


def gain_table(title: str, policy: str, baseline: str, gains: Sequence[Gain]) -> Table:
    """The short answer: one line a setting. Factors above 1 are in the policy's favour."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name, justify in (
        ("setting", "left"),
        ("α", "right"),
        (f"P95 lower than\n{baseline}'s by", "right"),
        ("throughput\nhigher by", "right"),
        (f"SLO scale at 95 %\n{baseline} → {policy}", "right"),
        ("least P95 of\nthe others", "left"),
        ("its P95, against\n" + policy + "'s", "right"),
    ):
        table.add_column(name, justify=justify)
    for gain in gains:
        table.add_row(
            gain.setting,
            "–" if gain.alpha is None else f"{gain.alpha:g}",
            factor(_inverse(gain.p95_ratio)),
            factor(gain.throughput_ratio),
            f"{with_half_width(gain.scale_baseline, 1)} → {with_half_width(gain.scale, 1)}",
            gain.best_other,
            factor(gain.best_other_ratio),
        )
    return table


def factor(interval: Interval) -> str:
    """'1.71 × (1.65–1.78)', and whether that is a tie."""
    value, low, high = (float(x) for x in interval)
    if not np.isfinite(value):
        return "–"
    if np.isnan(low) or (low <= 0 and np.isinf(high)):  # one run
        return f"{value:.2f} ×"
    most = "∞" if np.isinf(high) else f"{high:.2f}"
    return f"{value:.2f} × ({low:.2f}–{most}){' tie' if interval.is_tie else ''}"


def _inverse(interval: Interval) -> Interval:
    """A ratio turned round; an end at or below 0 (few seeds, or one) becomes infinity."""
    with np.errstate(divide="ignore"):
        value, low, high = (np.divide(1.0, np.maximum(x, 0.0)) for x in interval)
        return Interval(value, high, low)
