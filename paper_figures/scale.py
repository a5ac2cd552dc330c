"""Scale: P95 at constant load per instance, the time of one scheduling decision, and the simulator's speed.

Reads `scale`: 4 to 256 instances, and 10 to 10 000 queries in flight. Times are measured on the machine that ran it.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hexrepro.report.charts import bands, label_ends, plain_log, policy_legend
from hexrepro.report.ratios import policies_in
from hexrepro.report.results import Results, where
from hexrepro.report.style import PAGE_IN, SHADES, drawing, headline

EXPERIMENT = "scale"
TITLE = "Scale"
SEES = (
    "The P95 should not rise, since the load per instance is the same. A decision is asked from Python, as a live coordinator "
    "asks; a simulated one is cheaper, since it never leaves the compiled loop."
)


def draw(results: Results) -> Figure:
    """Latency and decision time against instances; decisions per second and time of the simulator against queries."""
    timings = results["timings"]
    instances = timings.drop_duplicates("scale_out").set_index("scale_out")["instances"]
    p95 = where(results["summary"], metric="p95_s", tenant="all")
    p95 = where(p95, profile=p95["profile"].iloc[0]).assign(instances=lambda f: f["scale_out"].map(instances))
    one = _scaled(where(timings, metric="decision_s"), 1e6)
    largest = timings["in_flight"].max()
    speed = _scaled(where(timings, metric="decisions_per_s", in_flight=largest), 1e-6)
    policies, sizes = policies_in(timings), sorted(instances)
    with drawing(PAGE_IN, 4.4, 2, 2) as (figure, axes):
        for ax, rows, title, ylabel in (
            (axes[0, 0], p95, "Latency at constant load per instance", "P95 latency (s)"),
            (axes[0, 1], one, "One decision, asked from Python", "time (µs)"),
            (
                axes[1, 0],
                speed,
                f"Simulator, {largest:.0f} queries at once",
                "decisions/s (million)",
            ),
        ):
            bands(ax, rows, "instances", order=policies, marker="o")
            ax.set_title(title)
            ax.set_xlabel("instances")
            ax.set_ylabel(ylabel)
            plain_log(ax, "x", sizes)
        for ax in (axes[0, 0], axes[0, 1], axes[1, 0]):
            ax.set_ylim(bottom=0)
        _drain(axes[1, 1], where(timings, metric="wall_s", policy="hexgen_flow"), sizes)
        policy_legend(figure, policies)
        headline(
            figure,
            f"From {sizes[0]} to {sizes[-1]} instances; 95 % intervals over seeds (latency) and repeats (times)",
        )
    return figure


def _drain(ax: Axes, rows: pd.DataFrame, sizes: list[int]) -> None:
    """Time to simulate so many queries to the end, a line for each cluster size."""
    rows = rows.assign(size=[f"{n} instances" for n in rows["instances"]])
    looks = {f"{n} instances": (SHADES[i % len(SHADES)], "-") for i, n in enumerate(sizes)}
    ends = bands(ax, rows, "in_flight", "size", order=list(looks), looks=looks, strong=(), marker="o")
    plain_log(ax, "x", sorted(set(rows["in_flight"])))
    plain_log(ax, "y")
    ax.set_title("Simulator, HexGen-Flow")
    ax.set_xlabel("queries in flight")
    ax.set_ylabel("time of one thread (s)")
    label_ends(ax, ends, looks=looks)


def _scaled(rows: pd.DataFrame, by: float) -> pd.DataFrame:
    return rows.assign(**(rows[["value", "ci_low", "ci_high"]] * by))
