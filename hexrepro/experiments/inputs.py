"""The settings of a comparison: workloads, clusters and arrivals, from checked config values."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from hexrepro.cluster.profiles import load_cluster
from hexrepro.errors import InputError
from hexrepro.experiments.cells import Setting
from hexrepro.experiments.explain import suggest
from hexrepro.experiments.settings import Settings, Traffic
from hexrepro.scheduling import base_slo_s
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator import EngineOptions
from hexrepro.simulator.engine import check_fits
from hexrepro.workload import Workload, arrival_times, generate, load, trace_names


def settings_of(settings: Settings) -> list[Setting]:
    """Every cluster view, trace and rate, in the order in which they are run."""
    chosen = settings.selection
    if chosen.first_seed < settings.seeds:
        raise InputError(
            f"selection.first_seed={chosen.first_seed} must be at least seeds={settings.seeds}: "
            "alpha is chosen on arrivals that are not reported"
        )
    loads = [
        (workload, rate_qps, *_arrivals(workload, rate_qps, settings))
        for workload in (load_trace(name, settings.traffic) for name in settings.traffic.traces)
        for rate_qps in settings.traffic.rates_qps
    ]
    result = []
    for profile in settings.profiles:
        cluster = load_cluster(settings.cluster, profile, model=settings.traffic.model)
        engine = engine_options(settings, profile)
        for workload, rate_qps, arrivals_s, selection_arrivals_s in loads:
            check_fits(workload, cluster, decode_blocks=engine.decode_blocks)
            result.append(
                Setting(
                    profile=profile,
                    trace=workload.name,
                    rate_qps=rate_qps,
                    workload=workload,
                    cluster=cluster,
                    engine=engine,
                    estimator=settings.estimator,
                    base_slo_s=base_slo_s(
                        workload, instance_views(cluster), prefix_caching=engine.prefix_caching
                    ),
                    slo_scale=settings.slo_scale,
                    arrivals_s=arrivals_s,
                    seeds=np.arange(len(arrivals_s)),
                    selection_arrivals_s=selection_arrivals_s,
                    selection_seeds=chosen.first_seed + np.arange(chosen.seeds),
                )
            )
    return result


def _arrivals(
    workload: Workload, rate_qps: float | None, settings: Settings
) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals of the reported seeds float64[R, Q], and of those on which alpha is chosen float64[S, Q], seconds.

    Recorded arrivals are one run, whatever the number of seeds; alpha is then chosen on Poisson arrivals of that rate.
    """
    traffic, chosen, n = settings.traffic, settings.selection, workload.n_queries
    process, options = traffic.arrivals, dict(traffic.arrival_options)
    if rate_qps is None or process == "recorded":
        if not workload.has_arrivals:
            raise InputError(
                f"workload {workload.name!r} holds no arrivals: give it a rate, workload.rate_qps=0.5"
            )
        recorded_s = arrival_times("recorded", n, rate_qps, times_s=workload.arrival_s)
        process, options, seeds = "poisson", {}, 0
        rate_qps = (n - 1) / recorded_s[-1] if recorded_s[-1] > 0 else float(n)
    else:
        seeds = settings.seeds

    def draw(first: int, count: int) -> np.ndarray:
        return np.stack(
            [arrival_times(process, n, rate_qps, seed, **options) for seed in range(first, first + count)]
        )

    reported = draw(0, seeds) if seeds else recorded_s[None, :]
    return reported, draw(chosen.first_seed, chosen.seeds)


def engine_options(settings: Settings, profile: str) -> EngineOptions:
    """The engine's options in one cluster view."""
    known = [f.name for f in fields(EngineOptions) if f.name != "prefix_caching"]
    for name in settings.engine:
        if name not in known:
            raise InputError(f"engine.{name} is no option{suggest(name, known)}")
    return EngineOptions(**settings.engine, prefix_caching=settings.prefix_caching[profile])


def load_trace(name: str, traffic: Traffic) -> Workload:
    """A trace by name, or the user's file."""
    if name == "file":
        if traffic.path is None:
            raise InputError("workload.path has no value; give the trace: workload.path=FILE")
        return load(traffic.path)
    if name not in trace_names():
        raise InputError(f"workload.traces: {name} is unknown{suggest(name, [*trace_names(), 'file'])}")
    return generate(name, seed=traffic.trace_seed, n_queries=traffic.n_queries)
