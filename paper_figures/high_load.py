"""High load: P95 latency against the arrival rate on a cluster scaled out for 30 queries/s, and beyond into overload.

Reads `high_load`; how far the cluster is scaled out is in its YAML, with the reason.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from hexrepro.report.charts import bands, label_ends
from hexrepro.report.ratios import policies_in
from hexrepro.report.results import Results, views_in, where
from hexrepro.report.style import PAGE_IN, drawing, headline, name_of, view_of

EXPERIMENT = "high_load"
TITLE = "High load"
SEES = (
    "The lower line is the better one; where a line turns up, the policy has reached what it can carry. The dashed line is "
    "the rate of the claim."
)
CLAIMED_QPS = 30.0


def draw(results: Results) -> Figure:
    """The figure."""
    rows = where(results["summary"], metric="p95_s", tenant="all")
    views, places = (
        views_in(rows, only_defaults=True),
        list(dict.fromkeys(zip(rows["cluster"], rows["trace"], strict=True))),
    )
    with drawing(PAGE_IN, 0.5 + 2.3 * len(places), len(places), len(views), sharex=True) as (figure, axes):
        for i, (cluster, trace) in enumerate(places):
            for j, (profile, caching) in enumerate(views):
                ax = axes[i, j]
                here = where(rows, cluster=cluster, trace=trace, profile=profile, prefix_caching=caching)
                ends = bands(ax, here, "rate_qps", order=policies_in(here), marker="o")
                ax.axvline(CLAIMED_QPS, color="0.5", ls="--", lw=0.7, zorder=0)
                ax.set_ylim(bottom=0)
                ax.set_title(f"{name_of(cluster)}, {name_of(trace)}: {view_of(profile, caching)}")
                if i == len(places) - 1:
                    ax.set_xlabel("arrival rate (queries/s)")
                if j == 0:
                    ax.set_ylabel("P95 latency (s)")
                label_ends(ax, ends)
        headline(figure, "P95 latency against load on a scaled-out cluster; 95 % intervals")
    return figure
