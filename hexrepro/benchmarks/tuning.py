"""The offline search: how its wall time splits between sampler and simulation, and whether it finds what the dense grid does.

α of HexGen-Flow, silicon view, P95 over SEEDS arrival seeds, each sampler as conf/tuning/sampler has it. Candidates lie on the
steps of 0.01 of the dense grid, so that the two can agree. Samplers are run in turns, each search from nothing.
"""

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from hexrepro.cluster import load_cluster
from hexrepro.errors import InputError
from hexrepro.paths import conf_dir
from hexrepro.report.intervals import ratio_interval
from hexrepro.report.tables import factor
from hexrepro.scheduling import base_slo_s, load_policy
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator import EngineOptions
from hexrepro.tuning import choice
from hexrepro.tuning.evaluate import Evaluator, Problem
from hexrepro.tuning.objective import objective
from hexrepro.tuning.offline import Search, search
from hexrepro.tuning.samplers import Sampling, open_storage
from hexrepro.tuning.space import read_space
from hexrepro.workload import arrival_times, generate

SEEDS, FIRST_SEED = 32, 1_000_000
ROUNDS = 5
SPACE = {"alpha": {"low": 0.0, "high": 1.0, "step": 0.01}}
JOINT = "joint"  # conf/tuning/space/joint.yaml
SAMPLERS = ("tpe", "grid", "cmaes", "nsga2", "gp")
OF_ONE = ("grid", "gp")  # not on the joint space: its grid has too many points, and GP is too slow
SLOW = ("gp",)  # once
STORAGES = {"a journal file": "journal:{}/tune.log", "SQLite": "sqlite:///{}/tune.db"}
CLUSTERS, TRACES, RATES_QPS = ("hetero1", "hetero2"), ("trace1", "trace2", "trace3"), (0.5, 1.0)


def run() -> dict[str, float]:
    """Measure, print, and return the figures."""
    console = Console()
    console = console if console.is_terminal else Console(width=130)
    figures = {}
    load = problem("hetero1", "trace1", 0.5)
    search_once(load, Sampling("dense"))  # compile, and let Optuna import what it needs
    search_once(load, sampling("tpe"))
    joint = yaml.safe_load((conf_dir() / "tuning" / "space" / f"{JOINT}.yaml").read_text(encoding="utf-8"))
    for name, space, estimator in (
        ("α", SPACE, "median"),
        ("the joint space", joint["tuning"]["space"], joint["estimator"]),
    ):
        with console.status(f"overhead, {name}"):
            measured = _overhead(replace(load, estimator=estimator), space)
        console.print(_overhead_table(name, measured))
        console.print()
        for key, searches in measured.items():
            figures[f"overhead {name}, {key}"] = statistics.median(s.overhead for s in searches)
    with console.status("agreement") as status:
        rows = []
        for cluster in CLUSTERS:
            for trace in TRACES:
                for rate_qps in RATES_QPS:
                    status.update(f"agreement: {cluster}, {trace}, {rate_qps:g}/s")
                    rows.append(
                        (f"{cluster}, {trace}, {rate_qps:g}/s", *_agreement(cluster, trace, rate_qps))
                    )
    table = Table(
        "", "dense α*", "95 % interval", "tpe α*", "inside", "tpe's P95 against dense's best",
        title=f"The dense grid of 101 points, and {sampling('tpe').trials} trials of TPE", box=None,
    )  # fmt: skip
    for name, dense, interval, found, ratio in rows:
        inside = interval.low <= found <= interval.high
        table.add_row(
            name, f"{dense:g}", f"{interval.low:g} – {interval.high:g}", f"{found:g}", "yes" if inside else "no",
            factor(ratio),
        )  # fmt: skip
    console.print(table)
    figures["agreeing"] = sum(i.low <= f <= i.high for _, _, i, f, _ in rows) / len(rows)
    figures["worst P95 against dense"] = max(float(r.value) for *_, r in rows)
    return figures


def problem(cluster: str, trace: str, rate_qps: float, n_queries: int | None = None) -> Problem:
    """Silicon view, template prefixes cached."""
    workload, machines = generate(trace, n_queries=n_queries), load_cluster(cluster, "silicon")
    seeds = FIRST_SEED + np.arange(SEEDS)
    return Problem(
        workload=workload,
        cluster=machines,
        engine=EngineOptions(),
        estimator="median",
        base_slo_s=base_slo_s(workload, instance_views(machines)),
        slo_scale=5.0,
        arrivals_s=np.stack([arrival_times("poisson", workload.n_queries, rate_qps, int(s)) for s in seeds]),
        seeds=seeds,
    )


def sampling(name: str) -> Sampling:
    """A sampler as it is configured."""
    file = conf_dir() / "tuning" / "sampler" / f"{name}.yaml"
    return Sampling(**yaml.safe_load(file.read_text(encoding="utf-8")), seed=0)


def search_once(load: Problem, how: Sampling, space: dict = SPACE, storage: str | None = None) -> Search:
    """One search from nothing."""
    searched = read_space(space, load_policy("hexgen_flow"), estimator=load.estimator)
    evaluator = Evaluator(load, searched, [objective("p95")])
    return search(evaluator, how, storage=open_storage(storage))


def _overhead(load: Problem, space: dict) -> dict[str, list[Search]]:
    """Name -> its searches. Samplers whose packages are missing are left out."""
    cases = {name: (sampling(name), None) for name in SAMPLERS}
    if space is SPACE:
        cases = {"dense, without Optuna": (Sampling("dense"), None), **cases}
        cases |= {f"tpe, in {where}": (sampling("tpe"), url) for where, url in STORAGES.items()}
    else:
        cases = {name: case for name, case in cases.items() if name not in OF_ONE}
    found: dict[str, list[Search]] = {}
    for i in range(ROUNDS):
        for name, (how, url) in cases.items():
            if i and how.name in SLOW:
                continue
            with tempfile.TemporaryDirectory() as directory:
                try:
                    result = search_once(load, how, space, url and url.format(Path(directory).as_posix()))
                except InputError:  # an optional package is missing
                    continue
            found.setdefault(name, []).append(result)
    return found


def _overhead_table(name: str, measured: dict[str, list[Search]]) -> Table:
    table = Table(
        "", "trials", "candidates", "wall time, s", "sampler, s", "simulation, s", "sampler's share", "a trial costs it",
        "best α", "P95, s",
        title=f"Searching {name}: Trace 1 at 0.5/s, Hetero-1, {SEEDS} arrival seeds; medians of {ROUNDS} searches", box=None,
    )  # fmt: skip
    for key, searches in measured.items():
        first, n = searches[0], len(searches[0].trials)
        sampler_s, simulation_s = (
            statistics.median(getattr(s, kind) for s in searches) for kind in ("sampler_s", "simulation_s")
        )
        shares = sorted(s.overhead for s in searches)
        best = first.best()
        table.add_row(
            key, str(n), str(len(first.candidates)), f"{sampler_s + simulation_s:.2f}", f"{sampler_s:.2f}",
            f"{simulation_s:.2f}", f"{statistics.median(shares):.0%} ({shares[0]:.0%}–{shares[-1]:.0%})",
            f"{1e3 * sampler_s / n:.1f} ms", f"{first.candidates[best]['alpha']:g}",
            f"{first.scores[0, best].mean():.1f}",
        )  # fmt: skip
    return table


def _agreement(cluster: str, trace: str, rate_qps: float):
    """Dense α*, its interval, TPE's α*, and the P95 at the latter over that at the former, seeds paired."""
    load = problem(cluster, trace, rate_qps)
    dense, found = (search_once(load, how) for how in (Sampling("dense"), sampling("tpe")))
    alphas = [c["alpha"] for c in dense.candidates]
    interval = choice.best_interval(dense.costs[0], alphas)
    ratio = ratio_interval(found.scores[0, found.best()], dense.scores[0, dense.best()])
    return alphas[dense.best()], interval, found.candidates[found.best()]["alpha"], ratio
