"""Cost against attainment of all mixes that a plan judged, with the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from hexrepro.report.style import BLUE, COLUMN_IN, GREY, ORANGE, drawing, headline


def plan_figure(
    price_per_hour: Sequence[float],
    attainment: np.ndarray,
    meets: Sequence[bool],
    *,
    target: float,
    named: Mapping[int, str],
    title: str,
) -> Figure:
    """price_per_hour float[n] ($), attainment float[n, 3] (mean and interval), meets bool[n]; `named` mixes get their name, the
    first of them is the answer."""
    price, meets = np.asarray(price_per_hour), np.asarray(meets, bool)
    value, low, high = 100 * np.clip(np.asarray(attainment, np.float64), 0.0, 1.0).T
    with drawing(1.5 * COLUMN_IN, 3.2) as (figure, axes):
        ax = axes[0, 0]
        ax.axhline(100 * target, color="0.75", lw=0.8, zorder=0, label=f"demanded: {100 * target:.3g} %")
        for of, colour, label in (
            (~meets, GREY, "fails, or not shown to meet it"),
            (meets, BLUE, "meets the demand"),
        ):
            ends = np.maximum(0.0, [value[of] - low[of], high[of] - value[of]])
            ax.errorbar(
                price[of], value[of], yerr=ends, fmt="o", ms=3, lw=0.7, color=colour, label=label, zorder=2
            )
        order = np.lexsort((-value, price))
        best = np.maximum.accumulate(value[order])
        front = order[np.concatenate([[True], best[1:] > best[:-1]])]
        ax.step(price[front], value[front], where="post", color="0.3", lw=0.9, label="Pareto front", zorder=1)
        first = next(iter(named), None)
        by_price = sorted(named.items(), key=lambda item: -price[item[0]])
        for i, (at, text) in enumerate(by_price):
            colour = ORANGE if at == first else "0.3"
            if at == first:
                ax.plot(price[at], value[at], "*", color=colour, ms=10, zorder=4, label="the answer")
            ax.annotate(
                text, (price[at], value[at]), xytext=(0.5, 0.82 - 0.08 * i), textcoords="axes fraction", fontsize=6.5,
                color=colour, zorder=5, va="center", arrowprops=dict(arrowstyle="-", lw=0.4, color=colour, relpos=(0, 0.5)),
            )  # fmt: skip
        shown = [*(price[at] for at in named), 0.5 * price.min()]
        ax.set_xlim(0.8 * price.min(), 1.8 * max(shown))
        ax.set(xlabel="$ an hour", ylabel="queries within the SLO (%)")
        ax.set_ylim(max(0.0, min(100 * target - 60, value.max() - 5)), 102)
        ax.legend(frameon=False, loc="lower right")
        headline(figure, title)
    return figure
