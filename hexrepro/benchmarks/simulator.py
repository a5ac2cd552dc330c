"""The simulator: LLM calls per second on one core, an alpha sweep, start-up, memory.

The workload is Trace 1 (CHESS DAGs) on Hetero-1, silicon view, with chunked prefill, KV accounting and template prefix
caching on, unless a row says otherwise. Each figure comes from a process of its own, so that one does not warm up the
next, and rows that are compared are measured in turns.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

ROUNDS = 5
SECONDS = 0.6  # how long one measurement of one row lasts, about
QUERIES = 10_000  # of the large workload
ALPHAS, SEEDS = 101, 16  # of the sweep
START = "from hexrepro.benchmarks.simulator import first_run; first_run()"
ROWS = "from hexrepro.benchmarks.simulator import throughput; throughput()"
SWEEP = "from hexrepro.benchmarks.simulator import alpha_sweep; alpha_sweep()"


def run() -> dict[str, float]:
    """Measure, print, and return the figures."""
    console = Console()
    with tempfile.TemporaryDirectory() as empty, console.status("cold start") as status:
        environment = os.environ | {"HEXREPRO_CACHE": empty}
        environment.pop("NUMBA_CACHE_DIR", None)
        cold = _in_process(START, environment)
        warm = []
        for i in range(ROUNDS):
            status.update(f"warm start {i + 1}/{ROUNDS}")
            warm.append(_in_process(START, environment))
        status.update("throughput")
        rows = _in_process(ROWS, environment)
        status.update("alpha sweep")
        sweep = _in_process(SWEEP, environment)
    warm_start_s = statistics.median([process["wall_s"] for process in warm])

    table = Table(
        "one core", "calls a run", "calls/s", "ratio to the first", title="LLM calls simulated", box=None
    )
    for row in rows["rows"]:
        low, middle, high = row["ratio"]
        table.add_row(
            row["name"],
            f"{row['calls']:,}",
            f"{row['calls_per_s']:,.0f}",
            f"{middle:.2f} ({low:.2f}-{high:.2f})",
        )
    console.print(table)
    console.print()
    table = Table("", "median", "range", box=None, show_header=False)
    table.add_row(
        "101 alpha x 16 seeds of Trace 1, all cores", f"{sweep['wall_s']:.2f} s", _range(sweep["walls_s"])
    )
    table.add_row(
        "the same on one core", f"{sweep['one_core_s']:.2f} s", f"{sweep['speedup']:.2f} times as long"
    )
    table.add_row(
        "cold start, empty Numba cache", f"{cold['wall_s']:.1f} s", "process, import and first simulation"
    )
    table.add_row("warm start", f"{warm_start_s:.2f} s", _range([p["wall_s"] for p in warm]))
    table.add_row(
        "peak memory, throughput and sweep", f"{max(rows['peak_mib'], sweep['peak_mib']):.0f} MiB", ""
    )
    table.add_row("peak memory, cold start", f"{cold['peak_mib']:.0f} MiB", "compiling")
    console.print(table)
    return {
        "calls_per_s_one_core": rows["rows"][0]["calls_per_s"],
        "alpha_sweep_101x16_s": sweep["wall_s"],
        "cold_start_s": cold["wall_s"],
        "warm_start_s": warm_start_s,
        "peak_mib": max(rows["peak_mib"], sweep["peak_mib"]),
    }


def _in_process(code: str, environment: dict[str, str]) -> dict:
    """Run code in a fresh interpreter; what it printed as JSON, with the process's wall time and peak memory."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the benchmark's process ended with {process.returncode}")
    return {"wall_s": wall_s, "peak_mib": usage.ru_maxrss / 1024} | json.loads(printed or "{}")


def _inputs(queries: int | None = None):
    from hexrepro.cluster import load_cluster
    from hexrepro.workload import generate

    return generate("trace1", n_queries=queries), load_cluster("hetero1", "silicon")


def _arrivals(workload, runs: int):
    import numpy as np

    from hexrepro.workload import arrival_times

    return np.stack([arrival_times("poisson", workload.n_queries, 0.5, seed) for seed in range(runs)])


def first_run() -> None:
    """Import and simulate Trace 1 once."""
    from hexrepro.simulator import simulate_grid

    workload, cluster = _inputs()
    simulate_grid(workload, cluster, "hexgen_flow", arrivals_s=_arrivals(workload, 1), workers=1)


def throughput() -> None:
    """Calls per second on one core, over policies, caching modes and sizes; prints JSON."""
    from hexrepro.simulator import EngineOptions, simulate_grid

    small, cluster = _inputs()
    large, _ = _inputs(QUERIES)

    def case(name: str, workload, policy: str, caching: str) -> tuple[str, int, Callable[[int], None]]:
        engine = EngineOptions(prefix_caching=caching)
        arrivals = _arrivals(workload, 1)

        def simulate(runs: int) -> None:
            times = arrivals.repeat(runs, axis=0)
            simulate_grid(workload, cluster, policy, arrivals_s=times, engine=engine, workers=1)

        return name, workload.n_calls, simulate

    cases = [
        case("hexgen_flow, template caching", small, "hexgen_flow", "template"),
        case("vllm", small, "vllm", "template"),
        case("eft", small, "eft", "template"),
        case("vtc", small, "vtc", "template"),
        case("caching off", small, "hexgen_flow", "off"),
        case("full caching", small, "hexgen_flow", "full"),
        case(f"{QUERIES} queries, eft", large, "eft", "template"),
    ]
    rates: list[list[float]] = [[] for _ in cases]
    repeats = [_repeats(simulate) for _, _, simulate in cases]
    for _ in range(ROUNDS):
        for i, (_, calls, simulate) in enumerate(cases):
            rates[i].append(repeats[i] * calls / _seconds(simulate, repeats[i]))
    rows = []
    for (name, calls, _), measured in zip(cases, rates, strict=True):
        ratios = sorted(a / b for a, b in zip(measured, rates[0], strict=True))
        ratio = (ratios[0], statistics.median(ratios), ratios[-1])
        rows.append(
            {"name": name, "calls": calls, "calls_per_s": statistics.median(measured), "ratio": ratio}
        )
    print(json.dumps({"rows": rows}))


def alpha_sweep() -> None:
    """101 alpha x 16 arrival seeds on Trace 1, on all cores and on one, in turns; prints JSON."""
    import numpy as np

    from hexrepro.scheduling import load_policy
    from hexrepro.simulator import simulate_grid

    workload, cluster = _inputs()
    policy = load_policy("hexgen_flow")
    alphas = np.linspace(0.0, 1.0, ALPHAS)
    params = np.stack([policy.with_params(alpha=float(alpha)).dispatch_vector for alpha in alphas]).repeat(
        SEEDS, axis=0
    )
    arrivals = np.tile(_arrivals(workload, SEEDS), (ALPHAS, 1))

    def sweep(workers: int | None) -> float:
        start = time.perf_counter()
        simulate_grid(workload, cluster, policy, arrivals_s=arrivals, dispatch_params=params, workers=workers)
        return time.perf_counter() - start

    sweep(1)  # warm up
    walls, singles = [], []
    for _ in range(ROUNDS):
        walls.append(sweep(None))
        singles.append(sweep(1))
    ratios = [single / wall for single, wall in zip(singles, walls, strict=True)]
    figures = {
        "wall_s": statistics.median(walls),
        "walls_s": walls,
        "one_core_s": statistics.median(singles),
        "speedup": statistics.median(ratios),
    }
    print(json.dumps(figures))


def _seconds(simulate: Callable[[int], None], runs: int) -> float:
    """CPU time: on one core it is the wall time of a machine with nothing else to do."""
    start = time.process_time()
    simulate(runs)
    return time.process_time() - start


def _repeats(simulate: Callable[[int], None]) -> int:
    """How many runs last about SECONDS; one run alone is mostly set-up, so it is guessed from several."""
    return max(1, round(SECONDS / max((_seconds(simulate, 9) - _seconds(simulate, 1)) / 8, 1e-6)))


def _range(values: list[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f} s"
