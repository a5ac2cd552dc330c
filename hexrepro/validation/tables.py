"""What a validation prints; `report.py` has the numbers and says what they mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from hexrepro.validation import report
from hexrepro.validation.lab import DIRECT
from hexrepro.validation.report import Compared


def table(compared: Sequence[Compared], rows: pd.DataFrame, confidence: float) -> Table:
    """One load of one setting; `rows` are those of `summary`."""
    setting, load = compared[0].setting, compared[0].load
    runs = report.replays(compared)
    apart = report.spread(compared).set_index(["policy", "of"])
    said = (
        f"{setting}, {load}: {runs['asked_qps'].mean():.3g} queries/s asked, {runs['realised_qps'].min():.3g} to"
        f" {runs['realised_qps'].max():.3g} realised; calls sent {1e3 * runs['late_p50_s'].median():.1f} ms late (P50),"
        f" {1e3 * runs['late_p99_s'].max():.0f} ms (worst P99)"
    )
    if (others := runs["others_cores"].max()) > 0.1:
        said += f"\nDISTURBED: other programs kept up to {others:.1f} cores busy, {runs['others_cores'].mean():.1f} on average"
    if (slowdown := compared[0].core_slowdown) is not None and slowdown > 1.1:
        said += (
            f"\nSHARED CORES: work on a server's core takes {slowdown:.2f} times as long while the others' work too;"
            " the profile, made one by one, knows nothing of it"
        )
    if failed := int(runs["failed_calls"].sum()):
        said += f"; {failed} calls failed"
    out = _table(
        said,
        caption=f"error of the simulated, % of the measured, ± half of its {confidence:.0%} interval; placed: with every call"
        "\nwhere the replay had it; noise: relative standard deviation from replay to replay / from simulation to simulation;"
        "\neach call, each query: mean |error| of the placed simulation / mean |difference| of two replays, %",
    )
    heads = ("s", "error", "noise", "placed")
    out.add_column("policy")
    for head in [f"{of}\n{h}" for of in ("mean", "P95") for h in heads]:
        out.add_column(head, justify="right")
    for head in ("P50", "calls", "TTFT", "queries/s"):
        out.add_column(f"{head}\nerror", justify="right")
    for head in ("call", "query"):
        out.add_column(f"each\n{head}", justify="right")
    for policy, of in rows.groupby("policy", sort=False):
        at = {row.metric: row for row in of.itertuples()}
        alpha = of["alpha"].iloc[0]
        line = [_named(policy) + ("" if pd.isna(alpha) else f"\nα={alpha:g}")]
        for metric in ("query_mean_s", "query_p95_s"):
            row = at[metric]
            line += [
                f"{row.measured:.2f}",
                _with_half(row.error, (row.error_high - row.error_low) / 2),
                f"{100 * row.noise:.1f} / {100 * row.simulated_noise:.1f}",
                _with_half(row.placed_error, row.placed_half),
            ]
        for metric in ("query_p50_s", "call_mean_s", "ttft_mean_s", "throughput_qps"):
            line.append(f"{100 * at[metric].error:+.1f}")
        for what in ("calls", "queries"):
            row = apart.loc[(policy, what)]
            line.append(f"{100 * row['mean_abs']:.0f} / {100 * row['repeat_mean_abs']:.0f}")
        out.add_row(*line)
    return out


def bar_table(rows: pd.DataFrame) -> Table | None:
    """Which bars are met, policy by policy; None where there is no bar."""
    rows = rows[rows["bar"].notna()]
    if rows.empty:
        return None
    out = _table("Bars: |error| at light load (?: its interval crosses the bar)")
    policies = list(dict.fromkeys(rows["policy"]))
    for head in ("setting", "metric", "bar", "", *map(_named, policies)):
        out.add_column(head)
    for (setting, metric), of in rows.groupby(["setting", "metric"], sort=False):
        of = of.set_index("policy")
        for what, column in (("simulated", "verdict"), ("placed", "placed_verdict")):
            cells = [str(of.loc[p, column]) if p in of.index else "" for p in policies]
            out.add_row(setting, metric, f"{of['bar'].iloc[0]:.0%}", what, *cells)
    return out


def rank_table(pairs: pd.DataFrame) -> Table:
    """How many pairs of policies differ clearly, and how many of those the simulator orders alike."""
    out = _table("Order of the policies, pair by pair")
    for head in ("setting", "load", "metric", "pairs", "measured clearly", "simulated alike", "not alike"):
        out.add_column(head)
    for (setting, load, metric), of in pairs.groupby(["setting", "load", "metric"], sort=False):
        clear = of[of["clear"]]
        agrees = clear["agrees"].astype(bool)
        wrong = ", ".join(f"{r.first} / {r.second}" for r in clear[~agrees].itertuples()) or "–"
        out.add_row(setting, load, metric, str(len(of)), str(len(clear)), str(int(agrees.sum())), wrong)
    return out


def _table(title: str, **options) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), **options
    )


def _named(policy: str) -> str:
    return "fixed placement" if policy == DIRECT else policy


def _with_half(error: float, half: float) -> str:
    return f"{100 * error:+.1f} ±{100 * half:.1f}" if np.isfinite(half) else f"{100 * error:+.1f}"
