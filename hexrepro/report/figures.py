"""Figures in one style: the same colour for a policy everywhere, units on the axes, an interval around every line."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hexrepro.report.intervals import mean_band
from hexrepro.report.metrics import attainment, scale_at_attainment

_BLUE, _ORANGE, _GREEN, _RED, _PINK, _BROWN, _ROSE, _GREY, _YELLOW, _SKY = sns.color_palette("colorblind")
_BLACK = (0.0, 0.0, 0.0)
_LINES = {
    "hexgen_flow": (_BLUE, "-"),
    "vllm": (_BLACK, "-"),
    "eft": (_GREEN, "-"),
    "wb_fcfs": (_SKY, "--"),
    "rr_pq": (_GREY, "--"),
    "low": (_BROWN, "-"),
    "ray": (_ORANGE, "-"),
    "qlm": (_RED, "-"),
    "vtc": (_PINK, "-"),
    "llf": (_PINK, ":"),
    "as_released": (_YELLOW, "-"),
    "random": (_GREY, ":"),
}
_OTHERS = sns.color_palette("husl", 12)
_STRONG = ("hexgen_flow", "vllm")
COLUMN_IN, PAGE_IN = 3.5, 7.2

_STYLE = {
    **sns.axes_style("ticks"),
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "pdf.fonttype": 42,
    "svg.hashsalt": "hexrepro",
}


def line_of(policy: str) -> tuple[tuple[float, float, float], str]:
    """Colour and line style of a policy; a policy of the user's own gets one by its name."""
    return _LINES.get(policy) or (_OTHERS[zlib.crc32(policy.encode()) % len(_OTHERS)], "-.")


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write STEM.png (200 dpi) and STEM.pdf; the same figure gives the same bytes."""
    files = [stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.pdf")]
    with mpl.rc_context(_STYLE):
        figure.savefig(files[0], dpi=200, metadata={"Software": None})
        figure.savefig(files[1], metadata={"CreationDate": None})
    return files


def attainment_figure(
    panels: Mapping[tuple[str, str], Mapping[str, np.ndarray]],
    *,
    title: str,
    baseline: str,
    confidence: float = 0.95,
    strong: Sequence[str] = _STRONG,
) -> Figure:
    """SLO attainment against SLO scale, a row of panels for each rate and a column for each trace.

    panels: (rate label, trace label) -> policy -> normalised latencies float[R, Q]. The policies in `strong` are drawn
    heavier, and where they reach 95 % is written beside the line.
    """
    rates = list(dict.fromkeys(rate for rate, _ in panels))
    traces = list(dict.fromkeys(trace for _, trace in panels))
    policies = list(dict.fromkeys(policy for curves in panels.values() for policy in curves))
    strong = [p for p in dict.fromkeys((*strong, baseline)) if p in policies]
    width = COLUMN_IN if len(traces) == 1 else PAGE_IN
    legend_rows = -(-len(policies) // (3 if len(traces) == 1 else 6))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, 1.75 * len(rates) + 0.5 + 0.16 * legend_rows), layout="constrained")
        axes = figure.subplots(len(rates), len(traces), squeeze=False, sharey=True)
        for i, rate in enumerate(rates):
            for j, trace in enumerate(traces):
                ax = axes[i, j]
                if (rate, trace) not in panels:
                    ax.set_axis_off()
                    continue
                _draw_panel(ax, panels[rate, trace], strong, confidence)
                ax.set_title(f"{trace.replace('trace', 'Trace ')}, {rate}")
                if j == 0:
                    ax.set_ylabel("SLO attainment (%)")
                if i == len(rates) - 1:
                    ax.set_xlabel("SLO scale (× base SLO)")
        handles = [
            Line2D([], [], color=line_of(p)[0], ls=line_of(p)[1], lw=1.8 if p in strong else 1.0)
            for p in policies
        ]
        figure.legend(
            handles, policies, loc="outside lower center", ncols=3 if len(traces) == 1 else 6, frameon=False
        )
        figure.suptitle(title, fontsize=8.5, x=0.01, ha="left")
    return figure


def _scales(curves: Mapping[str, np.ndarray], strong: Sequence[str]) -> np.ndarray:
    """Scales from 1 to a little beyond where the heavier lines have reached 99 %."""
    ends = [scale_at_attainment(curves[p], 0.99).mean() for p in strong if p in curves]
    return np.linspace(1.0, max([3.0, *(1.15 * e for e in ends if np.isfinite(e))]), 160)


def _draw_panel(ax: Axes, curves: Mapping[str, np.ndarray], strong: Sequence[str], confidence: float) -> None:
    scales = _scales(curves, strong)
    ax.axhline(95, color="0.75", lw=0.6, zorder=0)
    for policy, normalised in sorted(curves.items(), key=lambda item: item[0] in strong):
        colour, style = line_of(policy)
        band = mean_band(100.0 * attainment(normalised, scales).T, confidence)
        heavy = policy in strong
        ax.plot(
            scales, band.value, color=colour, ls=style, lw=1.8 if heavy else 1.0, zorder=3 if heavy else 2
        )
        if np.isfinite(band.low).all() and np.isfinite(band.high).all():
            ax.fill_between(
                scales, band.low, band.high, color=colour, alpha=0.25 if heavy else 0.10, lw=0, zorder=1
            )
    for policy in strong:
        if policy in curves:
            _mark_95(
                ax, float(scale_at_attainment(curves[policy], 0.95).mean()), line_of(policy)[0], scales[-1]
            )
    ax.set_xlim(scales[0], scales[-1])
    ax.set_ylim(0, 103)
    ax.set_yticks([0, 25, 50, 75, 100])
    sns.despine(ax=ax)


def _mark_95(ax: Axes, scale: float, colour, limit: float) -> None:
    if not np.isfinite(scale) or scale > limit:
        return
    ax.plot([scale], [95], "o", color=colour, ms=3, zorder=4)
    ax.annotate(
        f"{scale:.1f}",
        (scale, 95),
        xytext=(3, -8),
        textcoords="offset points",
        color=colour,
        fontsize=7,
        fontweight="bold",
        zorder=5,
    )
