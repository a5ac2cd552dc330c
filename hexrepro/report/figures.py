"""SLO attainment against SLO scale: the figure of the main job and of the attainment study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from hexrepro.report.charts import policy_legend
from hexrepro.report.intervals import mean_band
from hexrepro.report.metrics import attainment, scale_at_attainment
from hexrepro.report.style import COLUMN_IN, PAGE_IN, STRONG, drawing, headline, line_of, name_of, save

__all__ = ["Curve", "attainment_figure", "attainment_panels", "curve_of", "save"]


class Curve(NamedTuple):
    """One policy in one setting: SLO scales float[K], the share of queries (0..1) that attain each, its interval, and
    the scale at which 95 % attain (inf when fewer ever do)."""

    scale: np.ndarray
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray
    scale_at_95: float


Panels = Mapping[tuple[str, str], Mapping[str, Curve]]


def curve_of(normalised: np.ndarray, scales: np.ndarray, confidence: float = 0.95) -> Curve:
    """The curve of normalised latencies float[R, Q] (see `metrics`): mean over runs, with its interval."""
    band = mean_band(attainment(normalised, scales).T, confidence)
    return Curve(scales, *band, float(scale_at_attainment(normalised, 0.95).mean()))


def attainment_figure(
    panels: Mapping[tuple[str, str], Mapping[str, np.ndarray]],
    *,
    title: str,
    baseline: str,
    confidence: float = 0.95,
    strong: Sequence[str] = STRONG,
) -> Figure:
    """The figure from latencies: panels are (rate label, trace) -> policy -> normalised latencies float[R, Q]."""
    strong = (*strong, baseline)
    curves = {}
    for place, policies in panels.items():
        ends = [scale_at_attainment(policies[p], 0.99).mean() for p in strong if p in policies]
        scales = np.linspace(1.0, max([3.0, *(1.15 * e for e in ends if np.isfinite(e))]), 160)
        curves[place] = {policy: curve_of(x, scales, confidence) for policy, x in policies.items()}
    return attainment_panels(curves, title=title, strong=strong)


def attainment_panels(panels: Panels, *, title: str, strong: Sequence[str] = STRONG) -> Figure:
    """A row of panels for each rate and a column for each trace; panels are (rate label, trace) -> policy -> curve.

    The policies in `strong` are drawn heavier, and where they reach 95 % is written beside the line.
    """
    rates = list(dict.fromkeys(rate for rate, _ in panels))
    traces = list(dict.fromkeys(trace for _, trace in panels))
    policies = list(dict.fromkeys(policy for curves in panels.values() for policy in curves))
    strong = [p for p in dict.fromkeys(strong) if p in policies]
    narrow = len(traces) == 1
    legend_rows = -(-len(policies) // (3 if narrow else 6))
    with drawing(
        COLUMN_IN if narrow else PAGE_IN,
        1.75 * len(rates) + 0.5 + 0.16 * legend_rows,
        len(rates),
        len(traces),
        sharey=True,
    ) as (figure, axes):
        for i, rate in enumerate(rates):
            for j, trace in enumerate(traces):
                ax = axes[i, j]
                if (rate, trace) not in panels:
                    ax.set_axis_off()
                    continue
                _draw_panel(ax, panels[rate, trace], strong)
                ax.set_title(f"{name_of(trace)}, {rate}")
                if j == 0:
                    ax.set_ylabel("SLO attainment (%)")
                if i == len(rates) - 1:
                    ax.set_xlabel("SLO scale (× base SLO)")
        policy_legend(figure, policies, strong, columns=3 if narrow else 6)
        headline(figure, title)
    return figure


def _draw_panel(ax: Axes, curves: Mapping[str, Curve], strong: Sequence[str]) -> None:
    ax.axhline(95, color="0.75", lw=0.6, zorder=0)
    for policy, curve in sorted(curves.items(), key=lambda item: item[0] in strong):
        colour, style = line_of(policy)
        heavy = policy in strong
        ax.plot(
            curve.scale,
            100 * curve.share,
            color=colour,
            ls=style,
            lw=1.8 if heavy else 1.0,
            zorder=3 if heavy else 2,
        )
        if np.isfinite(curve.low).all() and np.isfinite(curve.high).all():
            ax.fill_between(
                curve.scale,
                100 * curve.low,
                100 * curve.high,
                color=colour,
                alpha=0.25 if heavy else 0.10,
                lw=0,
                zorder=1,
            )
    end = _end([curves[p] for p in strong if p in curves] or list(curves.values()))
    marks = [(curves[p].scale_at_95, line_of(p)[0]) for p in strong if p in curves]
    for scale, colour in marks:
        if np.isfinite(scale) and scale <= end:
            _mark_95(ax, scale, colour, left=any(0 < other - scale < 0.13 * end for other, _ in marks))
    ax.set_xlim(min(c.scale[0] for c in curves.values()), end)
    ax.set_ylim(0, 103)
    ax.set_yticks([0, 25, 50, 75, 100])


def _end(curves: Sequence[Curve]) -> float:
    """A little beyond the scale where all these lines have reached 99 %, or the last scale there is."""
    last = max(c.scale[-1] for c in curves)
    reached = [c.scale[np.argmax(c.share >= 0.99)] if (c.share >= 0.99).any() else np.inf for c in curves]
    return float(min(last, max(3.0, 1.15 * max(reached))))


def _mark_95(ax: Axes, scale: float, colour, left: bool) -> None:
    """The dot where a line passes 95 %, and its scale; to the left where another dot is close by on the right."""
    ax.plot([scale], [95], "o", color=colour, ms=3, zorder=4)
    ax.annotate(
        f"{scale:.1f}",
        (scale, 95),
        xytext=(-3, -8) if left else (3, -8),
        ha="right" if left else "left",
        textcoords="offset points",
        color=colour,
        fontsize=7,
        fontweight="bold",
        path_effects=[withStroke(linewidth=1.5, foreground="white")],  # legible where it crosses a line
        zorder=5,
    )
