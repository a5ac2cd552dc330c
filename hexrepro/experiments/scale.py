"""How things grow: latency at constant load per instance, the simulator's speed, and the time of one scheduling decision.

Latencies are simulated, and come from the cache of cells like a comparison's. Times are measured on this machine, anew
each time: a number of queries all at once, drained by one simulator thread; and one decision after the other, asked from
Python as a live coordinator asks. Their intervals are over repeats.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from omegaconf import DictConfig
from rich import box
from rich.table import Table

from hexrepro import simulator
from hexrepro.experiments import Job, cells, outputs, tidy
from hexrepro.experiments.cache import check_cache_dir, prune
from hexrepro.experiments.cells import Setting
from hexrepro.experiments.compare import cells_of, policies_of
from hexrepro.experiments.inputs import settings_of
from hexrepro.experiments.outcome import Outcome, summarise
from hexrepro.experiments.printed import Printed
from hexrepro.experiments.progress import Cells
from hexrepro.experiments.settings import Settings, number, read_settings, section, whole
from hexrepro.report.intervals import mean_interval
from hexrepro.scheduling import Policy
from hexrepro.scheduling.estimates import budget_s, cluster_means_s, solo_latency_s
from hexrepro.scheduling.views import CALL, instance_views
from hexrepro.workload import generate

DECISIONS = 2000  # asked one after the other in one repeat


@dataclass(frozen=True)
class Sizes:
    """What is grown: the cluster, so many times over, with its rate and queries; and the queries in flight."""

    scale_outs: tuple[int, ...]
    rate_qps: float
    queries: int
    in_flight: tuple[int, ...]
    repeats: int


def run(job: Job) -> None:
    """Simulate and time every size, print, and write summary.csv, samples.csv and timings.csv."""
    settings = read_settings(job.cfg, job.choices)
    sizes, trace = _sizes(job.cfg), settings.traffic.traces[0]
    policies = policies_of(settings)
    grown = [_grown(settings, sizes, size) for size in sizes.scale_outs]
    plan = [(of, setting) for of in grown for setting in settings_of(of)]
    outputs.check_writable(job.run_dir)
    cache = check_cache_dir()

    printed = Printed()
    rows: list[dict] = []
    samples: list[dict] = []
    timings: list[dict] = []
    with Cells(len(plan) * len(policies), printed.out) as progress:
        for of, setting in plan:
            instances = len(setting.cluster)
            what = f"{instances} instances, {setting.rate_qps:g} queries/s, {setting.profile}"
            progress.begin(what)
            results = {}
            for cell in cells_of(setting, policies, of):
                results[cell.policy.name] = cells.get(cell, cache, of.workers, calls=False)
                progress.advance(results[cell.policy.name].cached)
            outcome = Outcome(setting, results, summarise(setting, results, of))
            rows += list(outputs.summary(of, [outcome]))
            samples += list(outputs.samples(of, [outcome]))
            progress.begin(f"timing {instances} instances")
            if setting.profile == settings.profiles[0]:
                chosen = [
                    p.with_params(alpha=results[p.name].alpha) if _has_alpha(p) else p for p in policies
                ]
                timings += _timings(setting, chosen, sizes, of, trace)
            progress.setting_done(what)
    printed.add(_latency_table(rows))
    printed.add(_timing_table(timings, sizes))
    with outputs.all_or_nothing(job.run_dir) as part:
        tidy.write(part / "summary.csv", rows)
        tidy.write(part / "samples.csv", samples)
        tidy.write(part / "timings.csv", timings)
        (part / "tables.txt").write_text(printed.text(), encoding="utf-8")
        outputs.write_config(job, part)
    prune(cache)
    printed.results(job.run_dir)


def _sizes(cfg: DictConfig) -> Sizes:
    known = ("scale_outs", "rate_qps", "queries", "in_flight", "repeats")
    given = section(cfg, "scale", known, experiment="scale")

    def sizes(name: str) -> tuple[int, ...]:
        values = given[name] if isinstance(given[name], list) else [given[name]]
        return tuple(whole(x, f"scale.{name}") for x in values)

    return Sizes(
        scale_outs=sizes("scale_outs"),
        rate_qps=number(given["rate_qps"], "scale.rate_qps", above=0.0, unit=" queries/s"),
        queries=whole(given["queries"], "scale.queries"),
        in_flight=sizes("in_flight"),
        repeats=whole(given["repeats"], "scale.repeats", least=2),
    )


def _grown(settings: Settings, sizes: Sizes, size: int) -> Settings:
    """The cluster `size` times over, with as many times the rate and the queries."""
    traffic = replace(
        settings.traffic,
        traces=settings.traffic.traces[:1],
        rates_qps=(size * sizes.rate_qps,),
        n_queries=size * sizes.queries,
    )
    return replace(
        settings,
        scale_out=dict.fromkeys(settings.profiles, size),
        traffic=traffic,
        axes=settings.axes | {"scale_out": size},
    )


def _has_alpha(policy: Policy) -> bool:
    return "alpha" in policy.dispatch_rule.defaults


# ---- times -------------------------------------------------------------------------------------------------


def _timings(
    setting: Setting, policies: Sequence[Policy], sizes: Sizes, settings: Settings, trace: str
) -> Iterator[dict]:
    """Rows of timings.csv for one cluster: of draining so many queries, and of one decision."""
    for policy in policies:
        for queries in sizes.in_flight:
            wall_s, calls = _drain_s(
                setting, policy, queries, sizes.repeats, settings.traffic.trace_seed, trace
            )
            measured = {"wall_s": wall_s, "decisions_per_s": calls / wall_s}
            yield from _timed(setting, policy, settings, measured, in_flight=queries)
        one_s = decision_s(setting, policy, sizes.repeats)
        yield from _timed(setting, policy, settings, {"decision_s": one_s}, in_flight=None)


def _drain_s(
    setting: Setting, policy: Policy, queries: int, repeats: int, seed: int, trace: str
) -> tuple[np.ndarray, int]:
    """Seconds that one thread takes to simulate `queries` queries that arrive at once (float64[repeats]), and their calls."""
    workload = generate(trace, seed=seed, n_queries=queries)
    wall_s = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        simulator.simulate_grid(
            workload,
            setting.cluster,
            policy,
            arrivals_s=np.zeros((1, queries)),
            base_slo=setting.slo_s,
            engine=setting.engine,
            estimates=setting.estimator,
            workers=1,
        )
        wall_s.append(time.perf_counter() - start)
    return np.array(wall_s[1:]), workload.n_calls  # the first run also warms up


def decision_s(setting: Setting, policy: Policy, repeats: int, decisions: int = DECISIONS) -> np.ndarray:
    """Seconds of one decision asked from Python (float64[repeats]): the call's execution time on each kind of instance, its
    share of the SLO, the dispatch rule, and its key in the queue. The instances are loaded at random.
    """
    views = instance_views(setting.cluster)
    rng = np.random.Generator(np.random.PCG64(0))
    for name in (
        "waiting_s",
        "outstanding_s",
        "dispatched_s",
        "prefill_tokens",
        "output_tokens",
        "kv_tokens",
    ):
        views[name] = rng.uniform(1.0, 100.0, len(views))
    views["running"], views["waiting"] = rng.integers(0, 20, (2, len(views)))
    _, first_of_kind = np.unique(views["kind"], return_index=True)
    call = np.zeros(1, CALL)[0]
    call["input_tokens"], call["cached_tokens"], call["output_tokens"] = 6000, 3000, 80.0
    call["slo_s"], call["remaining_s"] = setting.slo_s, 10.0
    means = cluster_means_s(views, np.array([6000.0]), np.array([3000.0]), np.array([80.0]))
    call["stage_mean_s"] = means[0]
    dispatch_params, queue_params = policy.dispatch_vector, policy.queue_vector

    def decide(sequence: int) -> None:
        call["sequence"], call["draw"] = sequence, (0.3, 0.7)
        kinds = [solo_latency_s(views[m], 6000, 3000, 80.0) for m in first_of_kind]
        t_comp_s = np.array(kinds)[views["kind"]]
        call["budget_s"] = budget_s(call["slo_s"], 1.0, call["stage_mean_s"], call["remaining_s"])
        call["instance"] = policy.dispatch_rule(call, t_comp_s, views, dispatch_params)
        call["t_comp_s"] = t_comp_s[call["instance"]]
        policy.queue_rule(call, queue_params)

    decide(0)  # compiles
    took_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        for sequence in range(decisions):
            decide(sequence)
        took_s.append((time.perf_counter() - start) / decisions)
    return np.array(took_s)


def _timed(
    setting: Setting,
    policy: Policy,
    settings: Settings,
    measured: dict[str, np.ndarray],
    in_flight: int | None,
) -> Iterator[dict]:
    alpha = policy.dispatch_params.get("alpha") if _has_alpha(policy) else None
    same = tidy.labels(settings, setting, policy.name, alpha) | {"rate_qps": None}
    for metric, values in measured.items():
        mean = mean_interval(values, settings.confidence)
        yield {
            **same,
            "instances": len(setting.cluster),
            "in_flight": in_flight,
            "metric": metric,
            "value": float(mean.value),
            "ci_low": float(mean.low),
            "ci_high": float(mean.high),
            "repeats": len(values),
        }


# ---- what is printed ---------------------------------------------------------------------------------------


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in columns:
        table.add_column(name, justify="left" if name in ("policy", "step times") else "right")
    return table


def _latency_table(rows: Sequence[dict]) -> Table:
    table = _table(
        "P95 latency at constant load per instance", "step times", "cluster ×", "queries/s", "policy", "P95 s"
    )
    for row in rows:
        if row["metric"] == "p95_s":
            half = (row["ci_high"] - row["ci_low"]) / 2
            table.add_row(
                row["profile"],
                str(row["scale_out"]),
                f"{row['rate_qps']:g}",
                row["policy"],
                f"{row['value']:.1f} ±{half:.1f}",
            )
    return table


def _timing_table(timings: Sequence[dict], sizes: Sizes) -> Table:
    table = _table(
        "Measured on this machine, one thread",
        "policy",
        "instances",
        *(f"{n} queries at once, s" for n in sizes.in_flight),
        f"decisions/s at {sizes.in_flight[-1]}",
        "one decision from Python, µs",
    )
    at: dict[tuple, dict[Any, dict]] = {}
    for row in timings:
        at.setdefault((row["policy"], row["instances"]), {})[row["metric"], row["in_flight"]] = row
    for (policy, instances), of in at.items():
        table.add_row(
            policy,
            str(instances),
            *(f"{of['wall_s', n]['value']:.3g}" for n in sizes.in_flight),
            f"{of['decisions_per_s', sizes.in_flight[-1]]['value']:,.0f}",
            f"{1e6 * of['decision_s', None]['value']:.0f}",
        )
    return table
