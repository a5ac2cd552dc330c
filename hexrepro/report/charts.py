"""The two shapes that most figures are made of: dots with intervals, and lines with bands.

A ratio whose interval contains 1 is a tie and is drawn hollow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, NullFormatter, NullLocator

from hexrepro.report.style import BLACK, STRONG, line_of, name_of

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")


def dots(
    ax: Axes,
    places: Sequence[float],
    rows: pd.DataFrame,
    *,
    colours: Sequence,
    marker: str = "o",
    ties: bool = True,
    size: float = 3.6,
) -> None:
    """Horizontal: one dot a row at x = value with its interval, y = place; hollow when `ties` and 1 is in the interval.

    rows: columns value, ci_low, ci_high; as many rows as places and colours.
    """
    for y, colour, value, low, high in zip(
        places, colours, rows["value"], rows["ci_low"], rows["ci_high"], strict=True
    ):
        if not np.isfinite(value):
            continue
        tie = ties and low <= 1.0 <= high
        if np.isfinite(low) and np.isfinite(high):
            ax.plot([low, high], [y, y], color=colour, lw=0.9, solid_capstyle="butt", zorder=2)
        ax.plot(
            [value],
            [y],
            marker,
            color=colour,
            mfc="white" if tie else colour,
            mec=colour,
            mew=0.8,
            ms=size,
            zorder=3,
        )


def bands(
    ax: Axes,
    frame: pd.DataFrame,
    x: str,
    by: str = "policy",
    *,
    order: Sequence[str] | None = None,
    looks: Mapping[str, tuple] | None = None,
    strong: Sequence[str] = STRONG,
    marker: str = "",
    scale: float = 1.0,
) -> dict[str, tuple[float, float]]:
    """A line with its interval as a band for each value of `by`; returns the last point of each.

    frame: columns x, `by`, value, ci_low, ci_high. looks: value of `by` -> (colour, line style), else the policies'.
    """
    ends = {}
    for key in order if order is not None else list(dict.fromkeys(frame[by])):
        part = frame[(frame[by] == key) & np.isfinite(frame["value"])].sort_values(x)
        if part.empty:
            continue
        colour, style = (looks or {}).get(key) or line_of(str(key))
        heavy = key in strong
        xs, ys = part[x].to_numpy(float), scale * part["value"].to_numpy(float)
        ax.plot(
            xs,
            ys,
            color=colour,
            ls=style,
            marker=marker,
            ms=2.5,
            lw=1.8 if heavy else 1.1,
            zorder=4 if heavy else 3,
        )
        low, high = (scale * part[c].to_numpy(float) for c in ("ci_low", "ci_high"))
        known = np.isfinite(low) & np.isfinite(high)
        if known.all():
            ax.fill_between(xs, low, high, color=colour, alpha=0.2, lw=0, zorder=1)
        ends[key] = (xs[-1], ys[-1])
    return ends


def label_ends(
    ax: Axes,
    ends: Mapping[str, tuple[float, float]],
    *,
    names: Mapping[str, str] | None = None,
    looks: Mapping[str, tuple] | None = None,
    gap_pt: float = 8.0,
    pad_pt: float = 4.0,
) -> None:
    """Write each line's name at its right end, pushed apart vertically so that no two overlap.

    Call it after the axes' limits and scales are set; it leaves room to the right through the layout.
    """
    if not ends:
        return
    figure = ax.figure
    figure.draw_without_rendering()
    points = {key: ax.transData.transform(end) * 72.0 / figure.dpi for key, end in ends.items()}
    keys = sorted(points, key=lambda key: points[key][1])
    wanted = np.array([points[key][1] for key in keys])
    placed = spread(wanted, gap_pt)
    for key, y, at in zip(keys, wanted, placed, strict=True):
        colour = ((looks or {}).get(key) or line_of(str(key)))[0]
        ax.annotate(
            (names or {}).get(key, name_of(str(key))),
            ends[key],
            xytext=(pad_pt, at - y),
            textcoords="offset points",
            va="center",
            ha="left",
            color=colour,
            fontsize=7,
            fontweight="bold" if key in STRONG else "normal",
            annotation_clip=False,
        )


def spread(wanted: np.ndarray, gap: float) -> np.ndarray:
    """Positions at least `gap` apart, in the same order, as near as can be (least squares). wanted: ascending float[N].

    With positions p_i = u_i + i·gap the condition is that u ascends: isotonic regression, by pooling neighbours.
    """
    pools: list[list[float]] = []  # [sum, count]
    for i, y in enumerate(np.asarray(wanted, float)):
        pools.append([y - i * gap, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    levels = np.concatenate([np.full(int(count), total / count) for total, count in pools])
    return levels + np.arange(len(levels)) * gap


def policy_legend(
    figure: Figure, policies: Sequence[str], strong: Sequence[str] = STRONG, columns: int = 6
) -> None:
    """Colours of the policies below the figure."""
    handles = [
        Line2D([], [], color=line_of(p)[0], ls=line_of(p)[1], lw=1.8 if p in strong else 1.0)
        for p in policies
    ]
    figure.legend(
        handles,
        [name_of(p) for p in policies],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
    )


def marker_legend(
    figure: Figure,
    labels: Sequence[str],
    *,
    tie: bool = True,
    columns: int = 7,
    colours: Mapping[str, object] | None = None,
) -> None:
    """What the markers (and, where they are not named on an axis, the colours) mean, below the figure."""
    handles = [
        Line2D([], [], color=BLACK, marker=m, ls="", ms=4) for m, _ in zip(MARKERS, labels, strict=False)
    ]
    labels = list(labels)
    for name, colour in (colours or {}).items():
        handles.append(Line2D([], [], color=colour, lw=2))
        labels.append(name)
    if tie:
        handles.append(Line2D([], [], color=BLACK, marker="o", mfc="white", ls="", ms=4))
        labels.append("hollow: tie (interval contains 1)")
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


class _PlainLog(Locator):
    """Ticks of a logarithmic axis: the finest of a few usual series of which no more than seven fall into the view."""

    series = (
        (1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
        (1, 1.5, 2, 3, 4, 5, 7),
        (1, 2, 3, 5),
        (1, 2, 5),
        (1, 3),
        (1,),
    )

    def __call__(self):
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        low, high = max(min(vmin, vmax), 1e-12), max(vmin, vmax)
        decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
        inside: list[float] = []
        for series in self.series:
            inside = [float(f"{d * s:.6g}") for d in decades for s in series if low <= d * s <= high]
            if len(inside) <= 7:
                break
        return inside


def plain_log(ax: Axes, which: str, ticks: Iterable[float] | None = None) -> None:
    """A logarithmic axis with these ticks, or with some that fit, written as plain numbers."""
    getattr(ax, f"set_{which}scale")("log")
    axis = getattr(ax, f"{which}axis")
    axis.set_major_locator(_PlainLog() if ticks is None else FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_minor_formatter(NullFormatter())
    if ticks is not None:
        axis.set_minor_locator(NullLocator())
