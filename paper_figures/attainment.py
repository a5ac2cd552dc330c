"""SLO attainment against SLO scale: which share of the queries meets a deadline of so many times the base SLO.

Reads `attainment`: Traces 1–3 at 0.5 and 1.0 queries/s on three clusters, all policies. A figure for each cluster and
hardware view (with the caching that belongs to the view), and one of the scale at which 95 % attain in all conditions.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from hexrepro.report.charts import MARKERS, dots, marker_legend, plain_log
from hexrepro.report.figures import Curve, attainment_panels
from hexrepro.report.results import CONDITIONS, DEFAULTS, Results, where
from hexrepro.report.style import PAGE_IN, drawing, headline, line_of, name_of, row_label, view_of

EXPERIMENT = "attainment"
TITLE = "SLO attainment"
SEES = (
    "The line that rises further left is the better one; the numbers say where a heavy line passes 95 %. "
    "The last figure puts those scales side by side, for 95 % and 99 %."
)
PAIR = ("vllm", "hexgen_flow")


def draw(results: Results) -> dict[str, Figure]:
    """File name -> figure."""
    figures = {}
    curves, summary = results["curves"], results["summary"]
    for cluster in dict.fromkeys(curves["cluster"]):
        for profile, caching in DEFAULTS:
            labels = {"cluster": cluster, "profile": profile, "prefix_caching": caching}
            part = where(curves, **labels)
            if len(part):
                figures[f"attainment_{cluster}_{profile}"] = _cluster(part, where(summary, **labels))
    figures["attainment_scales"] = scales(summary)
    return figures


def _cluster(curves, summary) -> Figure:
    at_95 = where(summary, metric="scale_at_95").set_index(["trace", "rate_qps", "policy"])["value"]
    panels: dict = {}
    for (rate, trace, policy), part in curves.groupby(["rate_qps", "trace", "policy"], sort=False):
        panel = panels.setdefault((f"{rate:g} queries/s", trace), {})
        columns = (part[c].to_numpy(float) for c in ("scale", "attainment", "ci_low", "ci_high"))
        panel[policy] = Curve(*columns, float(at_95[trace, rate, policy]))
    first, seeds = curves.iloc[0], int(summary["seeds"].max())
    return attainment_panels(
        panels,
        title=f"{name_of(first['cluster'])}, {view_of(first['profile'], first['prefix_caching'])}; "
        f"mean and 95 % interval over {seeds} arrival seeds",
    )


def scales(summary) -> Figure:
    """The scale at which 95 % attain, vLLM's and HexGen-Flow's, for each cluster, condition and setting."""
    clusters = list(dict.fromkeys(summary["cluster"]))
    conditions = [c for c in CONDITIONS if len(where(summary, profile=c[0], prefix_caching=c[1]))]
    rows = where(summary, metric=["scale_at_95", "scale_at_99"], policy=list(PAIR))
    settings = list(dict.fromkeys(zip(rows["trace"], rows["rate_qps"], strict=True)))
    ends = rows["ci_low"].min(), rows["ci_high"].max()
    with drawing(
        PAGE_IN, 0.7 + 1.25 * len(conditions), len(conditions), len(clusters), sharex="col", sharey=True
    ) as (figure, axes):
        for i, (profile, caching) in enumerate(conditions):
            for j, cluster in enumerate(clusters):
                ax = axes[i, j]
                part = where(rows, cluster=cluster, profile=profile, prefix_caching=caching)
                for policy in PAIR:
                    for k, (metric, marker) in enumerate(
                        zip(("scale_at_95", "scale_at_99"), MARKERS, strict=False)
                    ):
                        these = where(part, policy=policy, metric=metric).set_index(["trace", "rate_qps"])
                        these = these.reindex(settings)
                        places = [y + 0.2 * (k - 0.5) for y in range(len(settings))]
                        colours = [line_of(policy)[0]] * len(these)
                        dots(ax, places, these, colours=colours, marker=marker, ties=False, size=3)
                ax.set_yticks(
                    range(len(settings)), [f"{name_of(trace)}, {rate:g}/s" for trace, rate in settings]
                )
                ax.set_ylim(len(settings) - 0.4, -0.6)
                plain_log(ax, "x", (1, 2, 5, 10, 20, 50, 100))
                ax.set_xlim(0.9 * ends[0], 1.1 * ends[1])
                ax.grid(axis="x", lw=0.3, color="0.85")
                if i == 0:
                    ax.set_title(name_of(cluster))
                if i == len(conditions) - 1:
                    ax.set_xlabel("SLO scale (× base SLO)")
                if j == 0:
                    row_label(ax, profile, caching)
        marker_legend(
            figure,
            ["at 95 %", "at 99 %"],
            tie=False,
            colours={name_of(p): line_of(p)[0] for p in PAIR},
        )
        headline(figure, "SLO scale that 95 % and 99 % of the queries attain; 95 % intervals")
    return figure
