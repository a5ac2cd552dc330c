"""The online tuner over a day whose load and cluster change, against fixed alphas and the best alpha in hindsight.

Every policy sees the same day at the same seed. A seed is one entry in the cache, computed in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from rich import box
from rich.table import Table

from hexrepro.cluster.profiles import load_cluster
from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.experiments import Job, outputs, tidy
from hexrepro.experiments.cache import (
    check_cache_dir,
    code_version,
    fingerprint,
    prune,
    write_atomically,
)
from hexrepro.experiments.compare import policies_of
from hexrepro.experiments.day import ClusterClock, Day, believed_cluster, day_workload, read_day, sliding
from hexrepro.experiments.explain import suggest
from hexrepro.experiments.inputs import engine_options
from hexrepro.experiments.printed import Printed
from hexrepro.experiments.progress import Cells
from hexrepro.experiments.settings import Settings, number, read_settings
from hexrepro.report.intervals import Interval, mean_interval, ratio_interval
from hexrepro.report.metrics import attainment, quantile, scale_at_attainment
from hexrepro.report.tables import with_half_width
from hexrepro.scheduling import Policy, base_slo_s
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator import EngineOptions
from hexrepro.simulator.engine import usable_cores
from hexrepro.simulator.session import Simulation
from hexrepro.tuning import online
from hexrepro.tuning.feed import Feed
from hexrepro.tuning.online import OnlineOptions, OnlineTuner
from hexrepro.workload import Workload

TAIL_WINDOW_S = 200.0  # of the sliding P95 that is drawn and that recovery is read from
SAMPLE_S = 20.0
HINDSIGHT = "hindsight"


@dataclass(frozen=True)
class Hindsight:
    """At the start of each window of `window_s`, all `candidates` are tried on the true future, and the one is used whose
    P95 over the queries that are under way or arrive in the window is least, seen `ahead_s` beyond the window's end."""

    window_s: float
    ahead_s: float
    candidates: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """What one seed runs: the fixed alphas, the tuners by name, and hindsight."""

    profile: str
    day: Day
    cluster: Cluster
    policy: Policy
    engine: EngineOptions
    slo_s: float
    slo_scale: float
    fixed: tuple[float, ...]
    tuners: Mapping[str, OnlineOptions]
    start_alpha: float
    poll_s: float
    recovered_at: float
    hindsight: Hindsight
    trace_seed: int

    def key(self, seed: int) -> str:
        """Its name in the cache."""
        return fingerprint(code_version(), _recipe(), self, seed)


@cache
def _recipe() -> tuple[str, ...]:
    """The sources, beside the simulator's, that decide what a day gives."""
    here, there = Path(__file__), Path(online.__file__).parent
    files = [here, here.with_name("day.py"), *sorted(there.glob("*.py"))]
    return tuple(file.read_text(encoding="utf-8") for file in files)


def run(job: Job) -> None:
    """Run every seed, print what the tuner gains and what it costs, and write the tables."""
    settings = read_settings(job.cfg, job.choices)
    plans = list(_plans(settings, job))
    outputs.check_writable(job.run_dir)
    directory = check_cache_dir()
    printed = Printed()
    rows, timeline = [], []
    with Cells(len(plans) * settings.seeds, printed.out, unit="seeds") as progress:
        for plan in plans:
            progress.begin(plan.profile)
            by_seed = _all_seeds(plan, settings, directory, progress)
            progress.setting_done(f"day, {plan.profile}")
            table, found = _summarise(plan, by_seed, settings)
            printed.add(table)
            rows += found
            timeline += _timeline(plan, by_seed[0], settings)
    with outputs.all_or_nothing(job.run_dir) as part:
        tidy.write(part / "alpha_online.csv", rows)
        tidy.write(part / "timeline.csv", timeline)
        (part / "tables.txt").write_text(printed.text(), encoding="utf-8")
        outputs.write_config(job, part)
    prune(directory)
    printed.results(job.run_dir)


# ---- from the config ---------------------------------------------------------------------------------------


def _plans(settings: Settings, job: Job) -> Iterator[Plan]:
    plain = OmegaConf.to_container(job.cfg, resolve=True, throw_on_missing=True)
    policies = [p for p in policies_of(settings) if "alpha" in p.dispatch_rule.defaults]
    if len(policies) != 1:
        raise InputError(
            f"policy: one policy with a parameter alpha is tuned, not {len(policies)}; give policy=hexgen_flow"
        )
    tuners = {name: _options(name, spec) for name, spec in plain["tuners"].items()}
    if not tuners:
        raise InputError("tuners is empty; name at least one, such as tuners.mine={trigger: always}")
    hindsight = plain["hindsight"]
    for profile in settings.profiles:
        cluster = load_cluster(settings.cluster, profile, scale_out=settings.scale_out[profile])
        engine = engine_options(settings, profile)
        day = read_day(plain["day"], cluster)
        views = instance_views(cluster)
        workload = day_workload(day, 0, settings.traffic.trace_seed)
        base = base_slo_s(workload, views, prefix_caching=engine.prefix_caching)
        yield Plan(
            profile=profile,
            day=day,
            cluster=cluster,
            policy=policies[0],
            engine=engine,
            slo_s=base,
            slo_scale=settings.slo_scale,
            fixed=tuple(float(number(a, "fixed", least=0.0, most=1.0)) for a in plain["fixed"]),
            tuners=tuners,
            start_alpha=number(plain["start_alpha"], "start_alpha", least=0.0, most=1.0),
            poll_s=number(plain["poll_s"], "poll_s", above=0.0),
            recovered_at=number(plain["recovered_at"], "recovered_at", least=1.0),
            hindsight=Hindsight(
                number(hindsight["window_s"], "hindsight.window_s", above=0.0),
                number(hindsight["ahead_s"], "hindsight.ahead_s", least=0.0),
                tuple(
                    float(number(a, "hindsight.candidates", least=0.0, most=1.0))
                    for a in hindsight["candidates"]
                ),
            ),
            trace_seed=settings.traffic.trace_seed,
        )


def _options(name: str, spec: Mapping[str, Any] | None) -> OnlineOptions:
    known = [field.name for field in fields(OnlineOptions)]
    for option in spec or {}:
        if option not in known:
            raise InputError(f"tuners.{name}.{option} is no option{suggest(str(option), known)}")
    return OnlineOptions(**{k: tuple(v) if isinstance(v, list) else v for k, v in (spec or {}).items()})


# ---- one seed ----------------------------------------------------------------------------------------------


def _all_seeds(plan: Plan, settings: Settings, directory: Path, progress: Cells) -> list[dict]:
    """What `run_seed` gives for each seed, from the cache where it is there."""
    files = [directory / f"{plan.key(seed)}.day.json" for seed in range(settings.seeds)]
    missing = [seed for seed, file in enumerate(files) if not file.exists()]
    for _ in range(settings.seeds - len(missing)):
        progress.advance(cached=True)
    workers = min(settings.workers or usable_cores(), len(missing))
    if workers <= 1:
        for seed in missing:
            _store(files[seed], run_seed(plan, seed))
            progress.advance(cached=False)
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(run_seed, plan, seed): seed for seed in missing}
            try:
                for future in as_completed(futures):
                    _store(files[futures[future]], future.result())
                    progress.advance(cached=False)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [json.loads(file.read_text()) for file in files]


def _store(file: Path, result: dict) -> None:
    write_atomically(file, lambda part: part.write_text(json.dumps(result)))


def run_seed(plan: Plan, seed: int) -> dict:
    """Every policy on the day of one seed: name -> its metrics, its sliding P95 and its alpha, sampled every SAMPLE_S."""
    workload = day_workload(plan.day, seed, plan.trace_seed)
    result = {}
    for alpha in plan.fixed:
        simulation, clock = _begin(plan, workload, alpha)
        clock.advance(simulation, plan.day.length_s)
        simulation.advance()
        result[f"{alpha:g}"] = _measure(plan, workload, simulation, [(0.0, alpha)])
    for name, options in plan.tuners.items():
        simulation, tuner = _tuned(plan, workload, options, seed)
        alphas = [(0.0, plan.start_alpha)] + [(d.time_s, d.alpha) for d in tuner.decisions if d.moved]
        costs_ms = [d.cost_ms for d in tuner.decisions if d.predicted]
        result[name] = _measure(plan, workload, simulation, alphas) | {
            "moves": float(sum(d.moved for d in tuner.decisions)),
            "decisions": float(len(costs_ms)),
            "decision_ms": float(np.mean(costs_ms)) if costs_ms else 0.0,
            "cost_share": sum(costs_ms) / 1e3 / plan.day.length_s,
        }
    simulation, alphas = _in_hindsight(plan, workload)
    result[HINDSIGHT] = _measure(plan, workload, simulation, alphas)
    for measured in result.values():
        measured["recovery_s"] = _recovery_s(plan, measured["tail_s"], result[HINDSIGHT]["tail_s"])
    return result


def _begin(plan: Plan, workload: Workload, alpha: float) -> tuple[Simulation, ClusterClock]:
    simulation = Simulation(
        workload,
        plan.cluster,
        plan.policy.with_params(alpha=alpha),
        base_slo=plan.slo_s * plan.slo_scale,
        engine=plan.engine,
    )
    clock = ClusterClock(plan.day, plan.cluster)
    clock.begin(simulation)
    return simulation, clock


def _tuned(
    plan: Plan, workload: Workload, options: OnlineOptions, seed: int
) -> tuple[Simulation, OnlineTuner]:
    simulation, clock = _begin(plan, workload, plan.start_alpha)
    tuner = OnlineTuner(simulation.policy, plan.cluster, options=options, engine=plan.engine, seed=seed)
    tuner.set_cluster(plan.cluster, ~simulation.is_open)
    feed = Feed(simulation, tuner)
    now_s = 0.0
    while now_s < plan.day.length_s:
        now_s += plan.poll_s
        if clock.advance(simulation, now_s):
            tuner.set_cluster(believed_cluster(plan.cluster, simulation), ~simulation.is_open)
        feed.advance(now_s)
    simulation.advance()
    return simulation, tuner


def _in_hindsight(plan: Plan, workload: Workload) -> tuple[Simulation, list[tuple[float, float]]]:
    h, index = plan.hindsight, list(plan.policy.dispatch_rule.defaults).index("alpha")
    simulation, clock = _begin(plan, workload, plan.start_alpha)
    alphas, alpha = [], plan.start_alpha
    for begin_s in np.arange(0.0, plan.day.length_s, h.window_s):
        end_s = min(begin_s + h.window_s, plan.day.length_s)
        tail_s = {}
        under_way = (workload.arrival_s < end_s) & ~(simulation.finish_s <= begin_s)
        for candidate in h.candidates:
            trial, trial_clock = simulation.fork(), clock.copy()
            trial.params[index] = candidate
            trial_clock.advance(trial, end_s + h.ahead_s)
            ages_s = np.minimum(trial.finish_s, trial.now_s)[under_way] - workload.arrival_s[under_way]
            tail_s[candidate] = float(quantile(ages_s, 0.95)) if under_way.any() else 0.0
        alpha = min(tail_s, key=lambda a: (tail_s[a], abs(a - alpha)))
        alphas.append((float(begin_s), alpha))
        simulation.params[index] = alpha
        clock.advance(simulation, end_s)
    simulation.advance()
    return simulation, alphas


def _measure(
    plan: Plan, workload: Workload, simulation: Simulation, alphas: list[tuple[float, float]]
) -> dict[str, Any]:
    finish_s = simulation.finish_s
    latency_s = finish_s - workload.arrival_s
    normalised = latency_s / (plan.slo_s * workload.slo_scale)
    times_s = np.arange(SAMPLE_S, plan.day.length_s + SAMPLE_S / 2, SAMPLE_S)
    tail_s = sliding(times_s, finish_s, latency_s, TAIL_WINDOW_S)
    changed_s, values = np.array(alphas).T
    return {
        "p95_s": float(quantile(latency_s, 0.95)),
        "p99_s": float(quantile(latency_s, 0.99)),
        "mean_s": float(latency_s.mean()),
        "attainment": float(attainment(normalised, plan.slo_scale)),
        "scale_at_95": float(scale_at_attainment(normalised, 0.95)),
        "mean_alpha": float(np.mean(values[np.searchsorted(changed_s, times_s, side="right") - 1])),
        "tail_s": [None if np.isnan(x) else round(float(x), 3) for x in tail_s],
        "alphas": values[np.searchsorted(changed_s, times_s, side="right") - 1].tolist(),
    }


def _recovery_s(plan: Plan, tail_s: list, hindsight_s: list) -> list[float]:
    """For each change for the worse: how long after it the sliding P95 was last above `recovered_at` times hindsight's.

    0 when it never was; at most the time to the cluster's next change or the day's end. tail_s, hindsight_s: one value
    every SAMPLE_S, None while too few queries had finished.
    """
    changes, times_s = plan.day.changes, SAMPLE_S * np.arange(1, len(tail_s) + 1)
    above = np.array(tail_s, np.float64) > plan.recovered_at * np.array(hindsight_s, np.float64)
    result = []
    for change, end_s in zip(changes, [c.at_s for c in changes[1:]] + [plan.day.length_s], strict=True):
        if change.event == "join" or (change.event == "slow" and change.factor <= 1.0):
            continue
        late = np.flatnonzero(above & (times_s > change.at_s) & (times_s <= end_s))
        result.append(float(times_s[late[-1]] - change.at_s) if len(late) else 0.0)
    return result


# ---- all seeds together ------------------------------------------------------------------------------------

METRICS = ("p95_s", "p99_s", "mean_s", "attainment", "scale_at_95", "mean_alpha", "recovery_s")
TUNER_METRICS = ("moves", "decisions", "decision_ms", "cost_share")


def _summarise(plan: Plan, by_seed: list[dict], settings: Settings) -> tuple[Table, list[dict]]:
    """The printed table and the tidy rows. Ratios are to the best fixed alpha (the least mean P95), seeds paired."""
    samples = {
        name: {
            metric: np.array([np.mean(seed[name][metric]) for seed in by_seed], np.float64)
            for metric in METRICS + (TUNER_METRICS if name in plan.tuners else ())
        }
        for name in by_seed[0]
    }
    fixed = [f"{alpha:g}" for alpha in plan.fixed]
    best = min(fixed, key=lambda name: samples[name]["p95_s"].mean())
    table = Table(
        title=f"A day on {plan.cluster.name}, {plan.profile} step times, {len(by_seed)} seeds; best fixed α = {best}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    heads = (
        "α",
        "mean α",
        "mean\ns",
        "P95\ns",
        "P95 against best fixed",
        "P95 regret to\nhindsight, s",
        "recovery\ns",
    )
    for head in (*heads, "moves", "ms a\ndecision", "share of\none core"):
        table.add_column(head, justify="left" if head == "α" else "right")
    rows = []
    for name, by_metric in samples.items():
        kind = "fixed" if name in fixed else name
        labels = _labels(plan, settings, kind, float(name) if name in fixed else None)
        p95_s = by_metric["p95_s"]
        derived = {
            "p95_s_ratio": ratio_interval(p95_s, samples[best]["p95_s"], settings.confidence),
            "mean_s_ratio": ratio_interval(by_metric["mean_s"], samples[best]["mean_s"], settings.confidence),
            "regret_s": mean_interval(p95_s - samples[HINDSIGHT]["p95_s"], settings.confidence),
        }
        values = {m: mean_interval(x, settings.confidence) for m, x in by_metric.items()} | derived
        rows += [
            labels
            | {
                "metric": metric,
                "value": float(interval.value),
                "ci_low": float(interval.low),
                "ci_high": float(interval.high),
                "seeds": len(by_seed),
            }
            for metric, interval in values.items()
        ]
        table.add_row(name, *_cells(values, name == best))
    return table, rows


def _cells(values: Mapping[str, Interval], is_best: bool) -> list[str]:
    ratio = values["p95_s_ratio"]
    against = "best fixed" if is_best else f"{'≈' if ratio.is_tie else '×'}{with_half_width(ratio, 3)}"
    cells = [with_half_width(values["mean_alpha"], 2), with_half_width(values["mean_s"], 1)]
    cells += [with_half_width(values["p95_s"], 1), against, with_half_width(values["regret_s"], 1)]
    cells += [with_half_width(values["recovery_s"], 0)]
    if "moves" in values:
        cells += [with_half_width(values["moves"], 1), with_half_width(values["decision_ms"], 1)]
        cells += [f"{float(values['cost_share'].value):.2%}"]
    else:
        cells += ["", "", ""]
    return cells


def _labels(plan: Plan, settings: Settings, policy: str, alpha: float | None) -> dict[str, Any]:
    return {
        "experiment": settings.experiment,
        "cluster": plan.cluster.name,
        "profile": plan.profile,
        "prefix_caching": plan.engine.prefix_caching,
        "trace": "day",
        "arrivals": "day",
        "rate_qps": None,
        "policy": policy,
        "alpha": alpha,
        "tenant": tidy.ALL,
    }


def _timeline(plan: Plan, seed: dict, settings: Settings) -> list[dict]:
    """The day of the first seed, a row every SAMPLE_S and policy: alpha, sliding P95, the load, and what happened."""
    times_s = np.arange(SAMPLE_S, plan.day.length_s + SAMPLE_S / 2, SAMPLE_S)
    events = {int(np.searchsorted(times_s, change.at_s)): change.label for change in plan.day.changes}
    fixed = {f"{alpha:g}": alpha for alpha in plan.fixed}
    rows = []
    for name, measured in seed.items():
        alpha = fixed.get(name)
        labels = _labels(plan, settings, "fixed" if alpha is not None else name, alpha)
        for i, time_s in enumerate(times_s):
            phase = plan.day.phase(min(time_s, plan.day.length_s) - SAMPLE_S / 2)
            rows.append(
                labels
                | {
                    "seed": 0,
                    "time_s": time_s,
                    "used_alpha": measured["alphas"][i],
                    "p95_window_s": measured["tail_s"][i],
                    "load_qps": phase.rate_qps,
                    "phase_trace": phase.trace,
                    "event": events.get(i, ""),
                }
            )
    return rows
