"""Bursts: P95 against vLLM's when queries do not come as a Poisson process.

Reads `bursty`: on–off phases, gamma gaps with a coefficient of variation of 2 and 4, and a rate that wanders like that of a
public trace.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from hexrepro.report.ratios import dot_figure, trace_and_rate
from hexrepro.report.results import Results, where

EXPERIMENT = "bursty"
TITLE = "Bursty arrivals"
SEES = "Each column is an arrival process with the same mean rate. Left of the line at 1 a policy beats vLLM."


def draw(results: Results) -> Figure:
    """The figure."""
    return dot_figure(
        where(results["summary"], metric="p95_s_ratio", tenant="all"),
        columns="arrivals",
        series=("trace", "rate_qps"),
        label=trace_and_rate,
        xlabel="P95 / vLLM's",
        title="P95 latency against vLLM's under bursty arrivals, seeds paired; 95 % intervals",
    )
