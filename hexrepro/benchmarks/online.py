"""The online tuner: what one decision costs on one core, by the load, with the race and without.

Trace 1 on Hetero-1, silicon view, a window of 100 s, 21 candidates × 8 replays. A coordinator watches 400 s of it at α = 0.1
and then decides again and again from that state, both ways in turns. CPU time, so that a busy machine matters less.
"""

import statistics
import time
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from hexrepro.cluster import load_cluster
from hexrepro.scheduling import load_policy
from hexrepro.simulator import Simulation
from hexrepro.tuning.feed import Feed
from hexrepro.tuning.online import OnlineOptions, OnlineTuner
from hexrepro.workload import arrival_times, generate

RATES_QPS = (0.1, 0.2, 0.3, 0.4, 0.5)
WATCHED_S = 400.0
ROUNDS = 15
NEVER = OnlineOptions(trigger="threshold", threshold=1e9)


def run() -> dict[str, float]:
    """Measure, print, and return the figures."""
    console = Console()
    console = console if console.is_terminal else Console(width=110)
    table = Table(
        "queries/s", "arrivals in the window", "queries under way", "replays", "a decision, ms", "all replays, ms",
        "the race saves", title="One decision on one core, median (least–most)", box=None,
    )  # fmt: skip
    figures = {}
    for rate_qps in RATES_QPS:
        with console.status(f"{rate_qps:g} queries/s"):
            tuner = watched(rate_qps)
            cost_ms = {race: [] for race in (True, False)}
            for turn in range(ROUNDS + 1):
                for race, costs in cost_ms.items():
                    took = decide(tuner, race)
                    if turn:  # the first of each may compile
                        costs.append(took)
        last = tuner.decisions[-2]
        medians = {race: statistics.median(costs) for race, costs in cost_ms.items()}
        table.add_row(
            f"{rate_qps:g}", str(last.arrivals), str(last.under_way), str(sum(n for _, n in last.predicted.values())),
            *(f"{medians[race]:.0f} ({min(c):.0f}–{max(c):.0f})" for race, c in cost_ms.items()),
            f"{medians[False] / medians[True]:.1f} ×",
        )  # fmt: skip
        figures[f"ms a decision at {rate_qps:g}/s"] = medians[True]
        figures[f"race at {rate_qps:g}/s"] = medians[False] / medians[True]
    console.print(table)
    return figures


def watched(rate_qps: float) -> OnlineTuner:
    """A tuner that has watched the cluster under this load, and has decided nothing."""
    n = int(2 * rate_qps * WATCHED_S) + 20
    workload = generate("trace1", n_queries=n).with_arrivals(arrival_times("poisson", n, rate_qps, seed=3))
    cluster, policy = load_cluster("hetero1", "silicon"), load_policy("hexgen_flow").with_params(alpha=0.1)
    tuner = OnlineTuner(policy, cluster, options=NEVER)
    Feed(Simulation(workload, cluster, policy), tuner).advance(WATCHED_S)
    return tuner


def decide(tuner: OnlineTuner, race: bool) -> float:
    """CPU milliseconds of one decision from the same state."""
    tuner.options, tuner.alpha = replace(OnlineOptions(), memory_s=0.0, race=race), 0.1
    began = time.process_time()
    tuner.decide(WATCHED_S)
    return 1e3 * (time.process_time() - began)
