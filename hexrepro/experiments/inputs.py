"""The settings of a comparison: workloads, clusters and arrivals, from checked config values."""

from __future__ import annotations

import sys
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

import numpy as np

from hexrepro import scheduling
from hexrepro.cluster.profiles import load_cluster
from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.experiments.cells import Setting
from hexrepro.experiments.explain import suggest
from hexrepro.experiments.settings import Settings, Traffic
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator import EngineOptions
from hexrepro.simulator.engine import check_fits
from hexrepro.workload import (
    Workload,
    arrival_times,
    generate,
    interleave,
    read,
    read_times_s,
    trace_names,
    with_cached_share,
    with_random_tenants,
)


def settings_of(settings: Settings) -> list[Setting]:
    """Every cluster view, trace and rate, in the order in which they are run."""
    chosen = settings.selection
    if chosen.first_seed < settings.seeds:
        raise InputError(
            f"selection.first_seed={chosen.first_seed} must be at least seeds={settings.seeds}: "
            "alpha is chosen on arrivals that are not reported"
        )
    traffic = settings.traffic
    traces = [load_trace(name, traffic) for name in traffic.traces]
    # arrivals of one number of queries at one rate, the same in every cluster view
    drawn: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
    result = []
    for profile in settings.profiles:
        cluster = load_cluster(
            settings.cluster, profile, model=traffic.model, scale_out=settings.scale_out[profile]
        )
        engine = engine_options(settings, profile)
        for trace in traces:
            for rate_qps in traffic.rates_qps:
                workload, base_slo_s = _asked(trace, rate_qps, settings, cluster, engine)
                check_fits(workload, cluster, decode_blocks=engine.decode_blocks)
                key = (trace.name, rate_qps)
                if key not in drawn:
                    drawn[key] = _arrivals(workload, _total_rate_qps(rate_qps, settings), settings)
                arrivals_s, selection_arrivals_s = drawn[key]
                result.append(
                    Setting(
                        profile=profile,
                        trace=trace.name,
                        arrivals=traffic.arrivals_name if rate_qps is not None else "recorded",
                        rate_qps=rate_qps,
                        workload=workload,
                        cluster=cluster,
                        scale_out=settings.scale_out[profile],
                        engine=engine,
                        estimator=settings.estimator,
                        base_slo_s=base_slo_s,
                        slo_scale=settings.slo_scale,
                        arrivals_s=arrivals_s,
                        seeds=np.arange(len(arrivals_s)),
                        selection_arrivals_s=selection_arrivals_s,
                        selection_seeds=chosen.first_seed + np.arange(chosen.seeds),
                    )
                )
    return result


def _asked(
    trace: Workload, rate_qps: float | None, settings: Settings, cluster: Cluster, engine: EngineOptions
) -> tuple[Workload, float]:
    """What the cluster is asked at this rate, and the base SLO of the trace in it (s)."""
    seed = settings.traffic.trace_seed
    if settings.traffic.cached_share is not None:
        trace = with_cached_share(trace, settings.traffic.cached_share)
    if settings.tenants is not None:
        who = settings.tenants
        trace = with_random_tenants(trace, who.names, who.slo_scales, who.shares, seed)
    views = instance_views(cluster)
    base_slo_s = scheduling.base_slo_s(trace, views, prefix_caching=engine.prefix_caching)
    if settings.background is None:
        return trace, base_slo_s
    if rate_qps is None:
        raise InputError("background needs a rate of the trace beside it: give workload.rate_qps")
    other = settings.background
    if other.trace not in trace_names():
        raise InputError(f"background.workload={other.trace} is unknown{suggest(other.trace, trace_names())}")
    queries = max(1, round(trace.n_queries * other.rate_qps / rate_qps))
    second = generate(other.trace, seed=seed, n_queries=queries)
    # every SLO is a multiple of one base SLO, the trace's; the second workload's is its own
    own_s = scheduling.base_slo_s(second, views, prefix_caching=engine.prefix_caching)
    scale = other.slo_scale * own_s / base_slo_s
    second = second.with_tenants(np.zeros(queries, np.int32), (other.trace,), scale)
    if trace.tenant_names == ("default",):
        trace = trace.with_tenants(trace.tenant, (trace.name,), trace.slo_scale)
    return interleave([trace, second], seed), base_slo_s


def _total_rate_qps(rate_qps: float | None, settings: Settings) -> float | None:
    """The rate of all queries together."""
    return rate_qps if settings.background is None else rate_qps + settings.background.rate_qps


def _arrivals(
    workload: Workload, rate_qps: float | None, settings: Settings
) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals of the reported seeds float64[R, Q], and of those on which alpha is chosen float64[S, Q], seconds.

    Recorded arrivals are as many runs as they have stretches of Q queries, at most the number of seeds; alpha is then
    chosen on Poisson arrivals of that rate.
    """
    traffic, chosen, n = settings.traffic, settings.selection, workload.n_queries
    process, options = traffic.arrivals, dict(traffic.arrival_options)
    if rate_qps is None or process == "recorded":
        reported = _recorded(workload, rate_qps, settings)
        ends_s = reported[:, -1]
        rate_qps = rate_qps or ((n - 1) / ends_s.mean() if ends_s.mean() > 0 else float(n))
        process, options = "poisson", {}
    else:
        reported = None

    def draw(first: int, count: int) -> np.ndarray:
        return np.stack(
            [arrival_times(process, n, rate_qps, seed, **options) for seed in range(first, first + count)]
        )

    return draw(0, settings.seeds) if reported is None else reported, draw(chosen.first_seed, chosen.seeds)


def _recorded(workload: Workload, rate_qps: float | None, settings: Settings) -> np.ndarray:
    """Recorded arrivals float64[R, Q]: the trace's own as one run, or a file's, cut into runs one after the other."""
    n, file = workload.n_queries, settings.traffic.arrivals_file
    if file is None:
        if not workload.has_arrivals:
            raise InputError(
                f"workload {workload.name!r} holds no arrivals: give it a rate, workload.rate_qps=0.5"
                ", or recorded times, workload.arrivals_file=FILE"
            )
        return arrival_times("recorded", n, rate_qps, times_s=workload.arrival_s)[None, :]
    times_s = read_times_s(file)
    if len(times_s) < n:
        raise InputError(f"{file}: holds {len(times_s)} times; the workload needs at least {n}")
    # one factor for the whole file: a busy stretch stays busier than a quiet one
    times_s = arrival_times("recorded", len(times_s), rate_qps, times_s=times_s)
    runs = min(settings.seeds, len(times_s) // n)
    cut = times_s[: runs * n].reshape(runs, n)
    return cut - cut[:, :1]


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
        return _from_file(traffic.path)
    if name not in trace_names():
        raise InputError(f"workload.traces: {name} is unknown{suggest(name, [*trace_names(), 'file'])}")
    return _generated(name, traffic.trace_seed, traffic.n_queries)


_generated = lru_cache(maxsize=8, typed=True)(generate)  # all jobs of a sweep ask for the same few


def _from_file(path: str) -> Workload:
    """The user's file, of any format; what was left out of it is said on stderr, once."""
    file = Path(path)
    try:
        edited = file.stat().st_mtime_ns
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return _read_once(file, edited)


@lru_cache(maxsize=4)
def _read_once(path: Path, edited: int) -> Workload:
    """The file as it was when last ``edited``."""
    loaded = read(path)
    for line in loaded.report.lines():
        print(f"hexrepro: {line}", file=sys.stderr)
    return loaded.workload
