"""α-tuning at work over a day whose load, mix and cluster change, against fixed α and the best α in hindsight.

Reads `alpha_online`: the day of one seed as a timeline, and the P95 of each way of choosing α over all seeds.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from hexrepro.report.charts import dots, label_ends, plain_log
from hexrepro.report.claims import TUNERS
from hexrepro.report.results import Results, views_in, where
from hexrepro.report.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PAGE_IN,
    drawing,
    headline,
    name_of,
    view_of,
)

EXPERIMENT = "alpha_online"
TITLE = "α-tuning over a day"
SEES = (
    "The tuner's α follows load, mix and cluster; what that is worth is the distance of its P95 from the best fixed α, and "
    "what a perfect choice at every moment would add is the distance to hindsight."
)
LOOKS = {
    "paper": (ORANGE, "-"),
    "continuous": (BLUE, "-"),
    "hindsight": (GREEN, "-"),
    "best fixed": (BLACK, "-"),
    "worst fixed": (GREY, "--"),
}
MINUTE_S = 60.0


def draw(results: Results) -> dict[str, Figure]:
    """File name -> figure."""
    totals_of = results["alpha_online"]
    return {"alpha_tuning": timeline(results["timeline"], totals_of), "alpha_tuning_p95": totals(totals_of)}


def fixed_ends(totals_of: pd.DataFrame) -> dict[str, float]:
    """The fixed α with the least and the greatest mean P95."""
    p95 = where(totals_of, metric="p95_s", policy="fixed").set_index("alpha")["value"]
    return {"best fixed": float(p95.idxmin()), "worst fixed": float(p95.idxmax())}


def timeline(rows: pd.DataFrame, totals_of: pd.DataFrame) -> Figure:
    """The day of one seed: load and mix, α, and the P95 of the latest queries, with what happened to the cluster."""
    profile, caching = views_in(rows)[0]
    rows = where(rows, profile=profile, prefix_caching=caching)
    ends = fixed_ends(where(totals_of, profile=profile, prefix_caching=caching))
    parts = {p: where(rows, policy=p) for p in (*TUNERS, "hindsight") if p in set(rows["policy"])}
    for name, alpha in ends.items():
        parts[name] = rows[(rows["policy"] == "fixed") & np.isclose(rows["alpha"], alpha)]
    names = TUNERS | {name: f"{name} (α = {alpha:g})" for name, alpha in ends.items()}
    with drawing(PAGE_IN, 5.0, 3, 1, sharex=True, height_ratios=[1, 1.3, 2]) as (figure, axes):
        load, chosen, tail = axes[:, 0]
        day = next(iter(parts.values())).sort_values("time_s")
        minutes = day["time_s"].to_numpy() / MINUTE_S
        load.fill_between(minutes, day["load_qps"], step="pre", color="0.75", lw=0)
        load.set_ylim(0, 1.25 * day["load_qps"].max())
        load.set_ylabel("load\n(queries/s)")
        phase = (day["phase_trace"] != day["phase_trace"].shift()) | (
            day["load_qps"] != day["load_qps"].shift()
        )
        for _, part in day.groupby(phase.cumsum()):
            middle = part["time_s"].mean() / MINUTE_S
            load.annotate(
                name_of(part["phase_trace"].iloc[0]),
                (middle, part["load_qps"].iloc[0]),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
            )
        alpha_ends, tail_ends = {}, {}
        for policy, part in parts.items():
            part = part.sort_values("time_s")
            colour, style = LOOKS[policy]
            at = part["time_s"].to_numpy() / MINUTE_S
            if policy in (*TUNERS, "hindsight"):
                chosen.step(at, part["used_alpha"], where="pre", color=colour, ls=style, lw=1.2)
                alpha_ends[policy] = (at[-1], part["used_alpha"].iloc[-1])
            tail.plot(at, part["p95_window_s"], color=colour, ls=style, lw=1.2)
            last = part["p95_window_s"].last_valid_index()
            tail_ends[policy] = (at[-1], part["p95_window_s"].loc[last])
        chosen.set_ylim(-0.03, 1.03)
        chosen.set_ylabel("α")
        plain_log(tail, "y")
        tail.set_ylabel("P95 of the latest\nqueries (s)")
        tail.set_xlabel("time (min)")
        tail.set_xlim(0, minutes[-1])
        events = day[day["event"].fillna("") != ""]
        for time_s, event in zip(events["time_s"], events["event"], strict=True):
            for ax in (chosen, tail):
                ax.axvline(time_s / MINUTE_S, color="0.55", lw=0.7, ls=":", zorder=0)
            tail.annotate(
                str(event),
                (time_s / MINUTE_S, 0.98),
                xycoords=("data", "axes fraction"),
                xytext=(2, 0),
                textcoords="offset points",
                rotation=90,
                va="top",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
                fontsize=6.5,
                color="0.35",
            )
        label_ends(chosen, alpha_ends, names=names, looks=LOOKS)
        label_ends(tail, tail_ends, names=names, looks=LOOKS)
        headline(figure, f"α over a day, one seed; {view_of(profile, caching)}")
    return figure


def totals(rows: pd.DataFrame) -> Figure:
    """P95 over the whole day: each fixed α, the tuners and hindsight."""
    rows = where(rows, metric="p95_s")
    views = views_in(rows)
    fixed = sorted(where(rows, policy="fixed")["alpha"].unique())
    others = [p for p in (*TUNERS, "hindsight") if p in set(rows["policy"])]
    shades = sns.color_palette("blend:#999999,#222222", len(fixed))
    with drawing(PAGE_IN, 0.7 + 0.17 * (len(fixed) + len(others)), 1, len(views), sharey=True) as (
        figure,
        axes,
    ):
        for ax, (profile, caching) in zip(axes[0], views, strict=True):
            here = where(rows, profile=profile, prefix_caching=caching)
            still = where(here, policy="fixed").set_index("alpha").reindex(fixed)
            dots(ax, range(len(fixed)), still, colours=shades, ties=False)
            moving = where(here, policy=others).set_index("policy").reindex(others)
            places = range(len(fixed), len(fixed) + len(others))
            dots(ax, places, moving, colours=[LOOKS[p][0] for p in others], ties=False, marker="D")
            names = [f"fixed α = {alpha:g}" for alpha in fixed] + [TUNERS.get(p, p) for p in others]
            ax.set_yticks(range(len(names)), names)
            ax.set_ylim(len(names) - 0.5, -0.5)
            plain_log(ax, "x")
            ax.grid(axis="x", which="both", lw=0.3, color="0.85")
            ax.set_xlabel("P95 latency over the day (s)")
            ax.set_title(view_of(profile, caching))
        seeds = int(rows["seeds"].max())
        headline(figure, f"P95 over the day by how α is chosen; mean and 95 % interval over {seeds} seeds")
    return figure
