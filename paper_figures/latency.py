"""P95 latency of every policy against vLLM's, and the whole distribution of latencies.

Reads `attainment`, whose grid it is: Traces 1–3 at 0.5 and 1.0 queries/s on three clusters, both hardware views.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from hexrepro.report.ratios import dot_figure, policies_in, trace_and_rate
from hexrepro.report.results import DEFAULTS, Results, where
from hexrepro.report.style import PAGE_IN, drawing, headline, line_of, name_of, view_of

EXPERIMENT = "attainment"
TITLE = "Latency"
SEES = (
    "Left of the line at 1 a policy beats vLLM; a hollow dot is a tie. The distributions show that the whole of it "
    "moves, not only the tail."
)


def draw(results: Results) -> dict[str, Figure]:
    """File name -> figure."""
    figures = {"latency_p95": p95(results["summary"])}
    for profile, caching in DEFAULTS:
        part = where(results["quantiles"], cluster="hetero1", profile=profile, prefix_caching=caching)
        if len(part):
            figures[f"latency_distribution_{profile}"] = distribution(part)
    return figures


def p95(summary) -> Figure:
    """P95 over vLLM's, a dot for each setting."""
    return dot_figure(
        where(summary, metric="p95_s_ratio"),
        columns="cluster",
        series=("trace", "rate_qps"),
        label=trace_and_rate,
        xlabel="P95 latency / vLLM's",
        title="P95 latency against vLLM's, seeds paired; 95 % intervals",
    )


def distribution(quantiles) -> Figure:
    """For each policy a box: the middle half, the middle nine tenths, the median, and P99; intervals at median and P95."""
    traces = list(dict.fromkeys(quantiles["trace"]))
    rates = sorted(set(quantiles["rate_qps"]))
    policies = policies_in(quantiles)
    tail = quantiles[quantiles["p"] >= 0.945]
    farthest = tail[["ci_high", "latency_s"]].max(axis=1).groupby(tail["trace"]).max()
    with drawing(PAGE_IN, 0.7 + 1.8 * len(rates), len(rates), len(traces), sharey=True, sharex="col") as (
        figure,
        axes,
    ):
        for i, rate in enumerate(rates):
            for j, trace in enumerate(traces):
                ax = axes[i, j]
                for y, policy in enumerate(policies):
                    part = where(quantiles, trace=trace, rate_qps=rate, policy=policy)
                    if len(part):
                        _box(ax, y, part.set_index(part["p"].round(2)), line_of(policy)[0])
                ax.set_title(f"{name_of(trace)}, {rate:g} queries/s")
                ax.set_yticks(range(len(policies)), [name_of(p) for p in policies])
                ax.set_ylim(len(policies) - 0.4, -0.6)
                ax.set_xlim(0, 1.05 * farthest[trace])
                ax.grid(axis="x", lw=0.3, color="0.85")
                if i == len(rates) - 1:
                    ax.set_xlabel("latency of a query (s)")
        first = quantiles.iloc[0]
        headline(
            figure,
            f"{name_of(first['cluster'])}, {view_of(first['profile'], first['prefix_caching'])}\n"
            "box P25–P75 with median, line P5–P95, dot P99; dark bars: 95 % intervals of median and P95",
        )
    return figure


def _box(ax, y: float, q, colour) -> None:
    at = q["latency_s"]
    ax.plot([at[0.05], at[0.95]], [y, y], color=colour, lw=1.0, solid_capstyle="butt")
    ax.barh(y, at[0.75] - at[0.25], left=at[0.25], height=0.6, color=colour, alpha=0.55, lw=0)
    ax.plot([at[0.5]] * 2, [y - 0.3, y + 0.3], color="white", lw=1.4)
    ax.plot([at[0.99]], [y], ".", color=colour, ms=3)
    for p in (0.5, 0.95):
        ax.plot(
            [q["ci_low"][p], q["ci_high"][p]], [y, y], color="0.15", lw=1.6, solid_capstyle="butt", zorder=4
        )
