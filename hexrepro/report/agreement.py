"""Simulated against measured latencies, as a picture: query by query, and as distributions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hexrepro.report.charts import plain_log
from hexrepro.report.style import GREY, ORANGE, PAGE_IN, Colour, drawing, headline, line_of, name_of

LOOKS: dict[str, tuple[Colour, str]] = {"fixed": (ORANGE, "fixed placement")}
MEASURED = dict(ls="-", lw=3.0, zorder=2)  # below, light and thick
SIMULATED = dict(ls=(0, (3, 1.2)), lw=1.1, zorder=3)  # above it, dark and dashed


def agreement_figure(queries: pd.DataFrame, *, title: str) -> Figure:
    """A column for each load; above, each query's mean latency simulated against measured; below, the distributions.

    queries: columns load, policy, rate_qps, measured_s, measured_sd_s, simulated_s, simulated_sd_s. The bars are one standard
    deviation between replays, and between simulations. Below, a policy's two curves are shades of its colour.
    """
    loads = list(dict.fromkeys(queries["load"]))
    policies = list(dict.fromkeys(queries["policy"]))
    with drawing(PAGE_IN, 6.2, 2, len(loads)) as (figure, axes):
        for j, load in enumerate(loads):
            of = queries[queries["load"] == load]
            _scatter(axes[0, j], of, policies)
            axes[0, j].set_title(f"{load}, {of['rate_qps'].iloc[0]:.3g} queries/s")
            _distributions(axes[1, j], of, policies)
        axes[0, 0].set_ylabel("simulated latency of a query (s)")
        axes[1, 0].set_ylabel("share of queries")
        handles = [Line2D([], [], color=_look(p)[0], ls="", marker="o", ms=4) for p in policies]
        labels = [_look(p)[1] for p in policies]
        handles += [Line2D([], [], color=_lighter(GREY), **MEASURED)]
        handles += [Line2D([], [], color=_darker(GREY), **SIMULATED)]
        figure.legend(
            handles,
            [*labels, "measured", "simulated"],
            loc="outside lower center",
            ncols=len(handles),
            frameon=False,
        )
        headline(figure, title)
    return figure


def _look(policy: str) -> tuple[Colour, str]:
    return LOOKS.get(policy) or (line_of(policy)[0], name_of(policy))


def _lighter(colour: Colour) -> Colour:
    return _towards(colour, 1.0, 0.5)


def _darker(colour: Colour) -> Colour:
    return _towards(colour, 0.0, 0.25)


def _towards(colour: Colour, end: float, share: float) -> Colour:
    """Mixed with that share of black (0) or white (1)."""
    red, green, blue = ((1 - share) * c + share * end for c in colour)
    return red, green, blue


def _scatter(ax, of: pd.DataFrame, policies: Sequence[str]) -> None:
    for policy in policies:
        part = of[of["policy"] == policy]
        ax.errorbar(
            part["measured_s"],
            part["simulated_s"],
            xerr=part["measured_sd_s"].fillna(0.0),
            yerr=part["simulated_sd_s"],
            fmt="o",
            ms=2.6,
            mew=0,
            elinewidth=0.5,
            alpha=0.75,
            color=_look(policy)[0],
        )
    ends = of[["measured_s", "simulated_s"]].to_numpy()
    low, high = 0.9 * ends.min(), 1.1 * ends.max()
    ax.plot([low, high], [low, high], color="0.6", lw=0.7, zorder=0)
    for which in "xy":
        plain_log(ax, which)
        getattr(ax, f"set_{which}lim")(low, high)
    ax.set_aspect("equal", adjustable="box")
    ax.set_xlabel("measured latency of a query (s)")


def _distributions(ax, of: pd.DataFrame, policies: Sequence[str]) -> None:
    for policy in policies:
        part = of[of["policy"] == policy]
        share = (np.arange(len(part)) + 1) / len(part)
        colour = _look(policy)[0]
        for column, shade, line in (("measured_s", _lighter, MEASURED), ("simulated_s", _darker, SIMULATED)):
            ax.step(np.sort(part[column].to_numpy()), share, where="post", color=shade(colour), **line)
    plain_log(ax, "x")
    ax.set_ylim(0, 1.02)
    ax.set_xlabel("latency of a query (s)")
