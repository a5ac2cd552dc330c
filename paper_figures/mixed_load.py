"""Beside another load: Text-to-SQL queries with short chat calls on the same instances, P95 of each against the chat's rate.

Reads `mixed_load`; the chat calls have the shape of a public conversation trace, and why so many is in its YAML.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from hexrepro.report.charts import bands, plain_log, policy_legend
from hexrepro.report.ratios import policies_in
from hexrepro.report.results import Results, views_in, where
from hexrepro.report.style import PAGE_IN, drawing, empty, headline, name_of, views_line

EXPERIMENT = "mixed_load"
TITLE = "Beside another load"
SEES = (
    "The lower line is the better one. What a policy does for one load may cost the other: look at both pages before you "
    "choose."
)
CHAT = "chat"


def draw(results: Results) -> dict[str, Figure]:
    """A figure for each of the two loads."""
    rows = where(results["summary"], metric="p95_s")
    alone = rows[
        (rows["chat_qps"] == 0) & (rows["tenant"] == "all")
    ]  # without chat, all queries are Text-to-SQL
    queries = pd.concat([alone, rows[~rows["tenant"].isin((CHAT, "all")) & (rows["chat_qps"] > 0)]])
    return {
        "mixed_load": _load(queries, "Text-to-SQL queries"),
        "mixed_load_chat": _load(where(rows, tenant=CHAT), "chat calls"),
    }


def _load(rows: pd.DataFrame, what: str) -> Figure:
    traces, views = list(dict.fromkeys(rows["trace"])), views_in(rows, only_defaults=True)
    policies = policies_in(rows)
    with drawing(PAGE_IN, 0.8 + 1.9 * len(views), len(views), len(traces), sharex=True) as (figure, axes):
        for i, (profile, caching) in enumerate(views):
            for j, trace in enumerate(traces):
                ax = axes[i, j]
                here = where(rows, trace=trace, profile=profile, prefix_caching=caching)
                if here.empty:
                    empty(ax)
                    continue
                bands(ax, here, "chat_qps", order=policies, marker="o")
                plain_log(ax, "y")
                ax.set_title(f"{name_of(trace)}, {profile} step times")
                if i == len(views) - 1:
                    ax.set_xlabel("chat calls per second")
                if j == 0:
                    ax.set_ylabel("P95 latency (s)")
        policy_legend(figure, policies)
        cluster, rate = rows["cluster"].iloc[0], rows["rate_qps"].iloc[0]
        title = f"P95 of the {what} on {name_of(cluster)}, {rate:g} Text-to-SQL queries/s; 95 % intervals"
        headline(figure, f"{title}\n{views_line(views)}")
    return figure
