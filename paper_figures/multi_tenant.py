"""Tenants with SLOs of 1, 1.5 and 2 times the base: each tenant's SLO attainment, and how even it is between them.

Reads `multi_tenant`; the tenants and their shares are in its YAML, with the reason.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from hexrepro.report.ratios import dot_figure, trace_and_rate
from hexrepro.report.results import Results, where
from hexrepro.report.style import name_of

EXPERIMENT = "multi_tenant"
TITLE = "Tenants with mixed SLOs"
SEES = (
    "Further right is better in every column. A policy that knows deadlines can serve the tight tenant as well as the loose "
    "one; Jain's index is 1 when all tenants attain equally, and also when all fare equally badly."
)


def draw(results: Results) -> dict[str, Figure]:
    """A figure a cluster: a column for each tenant, and one for Jain's index."""
    summary = results["summary"]
    attained = where(summary, metric="attainment")
    attained = attained[attained["tenant"] != "all"]
    shares = ["value", "ci_low", "ci_high"]
    attained = attained.assign(**(100 * attained[shares].clip(0, 1)))
    tenants = dict.fromkeys(attained["tenant"])
    jain = where(summary, metric="jain_attainment").assign(tenant="fairness")
    jain = jain.assign(**jain[shares].clip(0, 1))
    rows = pd.concat([attained, jain])
    return {
        f"multi_tenant_{cluster}": dot_figure(
            where(rows, cluster=cluster),
            columns="tenant",
            series=("trace", "rate_qps"),
            label=trace_and_rate,
            xlabel=lambda tenant: "SLO attainment (%)" if tenant in tenants else "Jain's index of attainment",
            title=f"{name_of(cluster)}: SLO attainment by tenant; 95 % intervals",
            name=lambda tenant: f"{tenant} SLO" if tenant in tenants else tenant,
            ties=False,
        )
        for cluster in dict.fromkeys(rows["cluster"])
    }
