"""P95 latency against α, the weight of execution speed against queueing, for HexGen-Flow.

Reads `alpha_sensitivity`: α from 0 to 1 for each trace, cluster and view, with the authors' best α marked, and over (α, rate).
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hexrepro.report.charts import bands, plain_log
from hexrepro.report.results import Results, views_in, where
from hexrepro.report.style import PAGE_IN, SHADES, drawing, empty, headline, name_of, view_of

EXPERIMENT = "alpha_sensitivity"
TITLE = "Sensitivity to α"
SEES = (
    "A flat stretch means that any α on it will do; a steep end is to be avoided. A star is the authors' best α, a dot in "
    "the map ours at that rate. The axis of α is stretched near zero, where a loaded cluster's best α lies."
)
STYLES = ("-", "--", ":")
KEYS = ["cluster", "profile", "prefix_caching", "trace", "rate_qps"]


def draw(results: Results) -> dict[str, Figure]:
    """File name -> figure."""
    authors = where(results["paper_alpha"], policy="hexgen_flow")
    rows = where(results["alpha"], metric="p95_s", policy="hexgen_flow")
    figures = {"alpha_sensitivity": lines(rows, authors)}
    if "alpha_rate" in results:
        figures["alpha_sensitivity_rates"] = heat(results["alpha_rate"], authors)
    return figures


def lines(rows: pd.DataFrame, authors: pd.DataFrame) -> Figure:
    """P95 against α: a panel for each view and cluster, a colour for each trace, a line style for its lower and higher rate,
    a star at the authors' α."""
    clusters, views = list(dict.fromkeys(rows["cluster"])), views_in(rows, only_defaults=True)
    traces = sorted(set(rows["trace"]))
    stars = authors.set_index(KEYS)["paper_alpha"]
    with drawing(
        PAGE_IN if len(clusters) > 1 else 0.6 * PAGE_IN,
        0.9 + 2.2 * len(views),
        len(views),
        len(clusters),
        sharex=True,
        sharey="row",
    ) as (figure, axes):
        for i, (profile, caching) in enumerate(views):
            for j, cluster in enumerate(clusters):
                ax = axes[i, j]
                here = where(rows, profile=profile, prefix_caching=caching, cluster=cluster)
                if here.empty:
                    empty(ax)
                    continue
                for trace, colour in zip(traces, SHADES, strict=False):
                    for k, (rate, part) in enumerate(where(here, trace=trace).groupby("rate_qps")):
                        bands(ax, part, "alpha", "trace", looks={trace: (colour, STYLES[k])}, strong=())
                        theirs = stars.get((cluster, profile, caching, trace, rate), np.nan)
                        _star(ax, part[np.isclose(part["alpha"], theirs)], colour)
                plain_log(ax, "y")
                _alpha_axis(ax)
                ax.set_title(f"{name_of(cluster)}: {view_of(profile, caching)}")
                if i == len(views) - 1:
                    ax.set_xlabel("α (0: queue only, 1: execution speed only)")
                if j == 0:
                    ax.set_ylabel("P95 latency (s)")
        handles = [Line2D([], [], color=c, lw=1.5) for _, c in zip(traces, SHADES, strict=False)]
        names = [name_of(trace) for trace in traces]
        handles.append(Line2D([], [], color="white", marker="*", mec="black", ms=8, ls=""))
        names.append("authors' best α")
        rates = [sorted(set(where(rows, trace=trace)["rate_qps"])) for trace in traces]
        for style, of_traces in zip(STYLES, zip(*rates, strict=False), strict=False):
            handles.append(Line2D([], [], color="0.3", ls=style, lw=1.2))
            names.append(" or ".join(f"{rate:g}" for rate in dict.fromkeys(of_traces)) + " queries/s")
        figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
        headline(figure, "P95 latency of HexGen-Flow against α; 95 % intervals")
    return figure


def heat(rows: pd.DataFrame, authors: pd.DataFrame) -> Figure:
    """How much worse than the best α at the same rate (seeds paired), over (α, rate)."""
    rows = where(rows, policy="hexgen_flow")
    views = views_in(rows, only_defaults=True)
    columns = list(dict.fromkeys(rows[["cluster", "trace"]].itertuples(index=False, name=None)))
    with drawing(PAGE_IN, 0.7 + 2.1 * len(views), len(views), len(columns), sharex=True, sharey="row") as (
        figure,
        axes,
    ):
        mesh = None
        for i, (profile, caching) in enumerate(views):
            for j, (cluster, trace) in enumerate(columns):
                ax = axes[i, j]
                place = dict(profile=profile, prefix_caching=caching, cluster=cluster, trace=trace)
                part = where(rows, **place)
                if part.empty:
                    empty(ax)
                    continue
                grid = where(part, metric="p95_s_ratio_best").pivot_table(
                    index="rate_qps", columns="alpha", values="value"
                )
                between = (grid.columns[1:] + grid.columns[:-1]) / 2
                edges = np.array([-0.0008, *between, 1.08])
                mesh = ax.pcolormesh(
                    edges,
                    np.arange(len(grid) + 1) - 0.5,
                    grid,
                    cmap="rocket_r",
                    norm="log",
                    vmin=1,
                    vmax=3,
                    rasterized=True,
                )
                ratios = where(part, metric="p95_s_ratio_best")
                ties = ratios[(ratios["ci_low"] <= 1.0) & (ratios["ci_high"] >= 1.0)]
                rows_of = {rate: y for y, rate in enumerate(grid.index)}
                ax.plot(
                    ties["alpha"], ties["rate_qps"].map(rows_of), "o", mfc="none", mec="0.45", mew=0.4, ms=2.2
                )
                best = where(part, metric="best").set_index("rate_qps")["value"].reindex(grid.index)
                ax.plot(best, range(len(grid)), "o", color="black", mec="white", mew=0.5, ms=4)
                for row in where(authors, **place).to_dict("records"):
                    y = np.interp(
                        row["rate_qps"], grid.index, range(len(grid))
                    )  # between the rows of two rates
                    ax.plot([row["paper_alpha"]], [y], "*", color="white", mec="black", mew=0.5, ms=8)
                _alpha_axis(ax)
                ax.set_yticks(range(len(grid)), [f"{rate:g}" for rate in grid.index])
                view = view_of(profile, caching).replace(" step times", "")
                ax.set_title(f"{name_of(cluster)}, {name_of(trace)}: {view}")
                if i == len(views) - 1:
                    ax.set_xlabel("α")
                if j == 0:
                    ax.set_ylabel("arrival rate (queries/s)")
        if mesh is not None:
            ticks = [1, 1.5, 2, 3]
            bar = figure.colorbar(mesh, ax=axes, label="P95 / P95 at the best α", ticks=ticks, extend="max")
            bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
            bar.ax.minorticks_off()
        headline(
            figure,
            "P95 latency over (α, arrival rate); dot: best α, circles: ties with it, star: the authors' best α",
        )
    return figure


def _star(ax: Axes, at: pd.DataFrame, colour) -> None:
    if len(at):
        ax.plot(at["alpha"], at["value"], "*", color=colour, mec="black", mew=0.5, ms=8, zorder=5)


def _alpha_axis(ax: Axes) -> None:
    """α from 0 to 1, logarithmic down to 0.01 and linear below."""
    ax.set_xscale("symlog", linthresh=0.01, linscale=0.5)
    ax.set_xticks([0, 0.01, 0.1, 1.0], ["0", "0.01", "0.1", "1"])
    ax.set_xlim(-0.0008, 1.08)
