"""Ablation: round robin or workload-balanced dispatch (WB), with first-come-first-served or the urgency queue (PQ).

Reads `ablation`: under one SLO for all, and with tenants of mixed SLOs, where a priority queue can matter.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from hexrepro.report.ratios import dot_figure, trace_and_rate
from hexrepro.report.results import Results, where
from hexrepro.report.style import name_of

EXPERIMENT = "ablation"
TITLE = "Ablation"
SEES = (
    "Left of the line at 1 a part helps. What PQ adds to WB is the distance between WB+FCFS and HexGen-Flow; compare it "
    "under one SLO and under mixed SLOs."
)
PARTS = ("rr_pq", "wb_fcfs", "hexgen_flow")
MIXES = {"one": "one SLO", "mixed": "mixed SLOs"}


def draw(results: Results) -> Figure:
    """A column for each cluster and mix of SLOs."""
    rows = where(results["summary"], metric="scale_at_95_ratio", policy=list(PARTS), tenant="all")
    rows = rows.sort_values(
        ["cluster", "slo_mix"], key=lambda c: c.map({"mixed": "two"}).fillna(c), kind="stable"
    )
    names = {c: name_of(c) for c in ("hetero1", "hetero2")}
    rows = where(rows, cluster=list(names))
    rows = rows.assign(
        column=[
            f"{names[c]}, {MIXES.get(m, m)}" for c, m in zip(rows["cluster"], rows["slo_mix"], strict=True)
        ]
    )
    return dot_figure(
        rows,
        columns="column",
        series=("trace", "rate_qps"),
        label=trace_and_rate,
        xlabel="SLO scale at 95 %\n/ RR+FCFS",
        title="SLO scale that 95 % attain, against round robin + FCFS (vLLM), seeds paired; 95 % intervals",
    )
