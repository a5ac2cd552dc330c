"""Throughput: completed queries/s against vLLM's, and goodput, the highest arrival rate that still meets a given SLO.

Reads `throughput`: Traces 1–3 on three clusters; goodput is found by bisection over the arrival rate.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from hexrepro.report.ratios import dot_figure, trace_and_rate
from hexrepro.report.results import Results, where
from hexrepro.report.style import name_of

EXPERIMENT = "throughput"
TITLE = "Throughput and goodput"
SEES = (
    "Completed queries per second count from the first arrival to the last finish, so the slowest query decides much of "
    "it. Goodput is the number to plan a cluster with: further right is better."
)


def draw(results: Results) -> dict[str, Figure]:
    """File name -> figure."""
    figures = {}
    if "summary" in results:
        figures["throughput"] = dot_figure(
            where(results["summary"], metric="throughput_qps_ratio", tenant="all"),
            columns="cluster",
            series=("trace", "rate_qps"),
            label=trace_and_rate,
            xlabel="completed queries/s / vLLM's",
            title="Throughput against vLLM's, seeds paired; 95 % intervals",
        )
    goodput = results["goodput"]
    share = 100 * goodput["attainment"].iloc[0]
    figures["throughput_goodput"] = dot_figure(
        goodput.assign(value=goodput["rate_at_qps"]),
        columns="cluster",
        series=("trace", "slo_scale"),
        label=lambda key: f"{name_of(str(key[0]))}, SLO scale {key[1]:g}",
        xlabel="highest rate (queries/s)",
        title=f"Goodput: highest arrival rate at which {share:.0f} % of the queries meet the SLO; 95 % intervals",
        ties=False,
    )
    return figures
