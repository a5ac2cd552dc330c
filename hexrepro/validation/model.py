"""What the simulator says of the measured servers: the loads to replay, and the simulations of what was replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hexrepro.cluster.types import Cluster
from hexrepro.experiments.settings import Settings
from hexrepro.report.metrics import quantile
from hexrepro.scheduling import Policy
from hexrepro.simulator import EngineOptions, Result, simulate_grid
from hexrepro.validation.config import Case, Options
from hexrepro.validation.fidelity import (
    BY_QUERY,
    call_overhead_s,
    drawn_lateness,
    simulate_measured,
    simulate_placed,
)
from hexrepro.validation.lab import DIRECT
from hexrepro.validation.replay import Replay
from hexrepro.workload import Workload, arrival_times

FIXED = replace(BY_QUERY, name=DIRECT)


@dataclass(frozen=True)
class Load:
    """What is replayed at one load: the workload with arrivals, each policy with its alpha, and the base SLO.

    The last policy may be FIXED, which is replayed without a gateway.
    """

    name: str
    rate_qps: float
    workload: Workload
    policies: Sequence[Policy]
    base_slo_s: float


def loads_of(
    case: Case, cluster: Cluster, settings: Settings, options: Options, policies: Sequence[Policy]
) -> list[Load]:
    """Rates, arrivals, alphas and the base SLO, all from what the simulator says of these instances."""
    engine = EngineOptions(prefix_caching=case.shared)
    alphas, chosen = settings.selection.alphas, settings.selection

    def tried_alphas(workload: Workload, policy: Policy, arrivals_s: np.ndarray, base_slo: float):
        """Each arrival row with each alpha that is to be tried: results in order of alpha, then row."""
        tried = [policy]
        if policy.name in chosen.policies and settings.alpha is None:
            tried = [policy.with_params(alpha=a) for a in alphas]
        params = np.repeat([p.dispatch_vector for p in tried], len(arrivals_s), axis=0)
        grid = simulate_grid(
            workload, cluster, policy, arrivals_s=np.tile(arrivals_s, (len(tried), 1)), dispatch_params=params,
            base_slo=base_slo, engine=engine,
        )  # fmt: skip
        return tried, grid

    # a query's SLO is a multiple of what it takes alone
    apart_s = 1e6 * np.arange(case.workload.n_queries)
    alone = simulate_grid(
        case.workload, cluster, policies[0], arrivals_s=apart_s[None], base_slo=1.0, engine=engine
    )
    base_slo_s = float(f"{alone.latency_s.mean() * settings.slo_scale:.2g}")
    capacity = []
    for policy in policies:
        _, grid = tried_alphas(case.many, policy, np.zeros((1, case.many.n_queries)), base_slo_s)
        capacity.append(case.many.n_queries / grid.makespan_s.min())
    found = []
    for name, (of, times) in options.loads.items():
        # two digits: a profile that differs in the third asks for the same replays
        rate_qps = float(f"{times * (min if of == 'least' else max)(capacity):.2g}")
        n = case.workload.n_queries
        seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
        others_s = np.stack([arrival_times("poisson", n, rate_qps, seed) for seed in seeds])
        best = []
        for policy in policies:
            tried, grid = tried_alphas(case.workload, policy, others_s, base_slo_s)
            p95_s = quantile(grid.latency_s, 0.95).reshape(len(tried), -1).mean(axis=1)
            best.append(tried[int(np.argmin(p95_s))])
        best += [FIXED] * options.fixed_placement
        workload = case.workload.with_arrivals(arrival_times("poisson", n, rate_qps, options.seed))
        found.append(Load(name, rate_qps, workload, best, base_slo_s))
    return found


def simulated(
    case: Case, load: Load, cluster: Cluster, policy: Policy, before_s: float | np.ndarray
) -> Result:
    """One simulation, with what comes before each call reaches its engine."""
    known = dict(shared=case.shared, base_slo=load.base_slo_s)
    return simulate_measured(load.workload, cluster.instances, before_s, policy, **known)


def simulations(
    case: Case,
    load: Load,
    cluster: Cluster,
    policy: Policy,
    replays: Sequence[Replay],
    api_s: np.ndarray,
    gateway_s: np.ndarray,
    options: Options,
) -> dict[str, Any]:
    """The simulations of one policy at one load, as `Compared` has them.

    api_s      float64[M], what each server's API adds to a call. Where it will go is not known beforehand: the mean counts
    gateway_s  float64[k], what the gateway added to k calls; one of these is drawn for each call
    """
    late_s = np.stack([call_overhead_s(run, 0.0) for run in replays])
    drawn_s = drawn_lateness(late_s, options.simulations, options.seed) + api_s.mean()
    drawn_s += np.random.Generator(np.random.PCG64([options.seed, 6])).choice(gateway_s, drawn_s.shape)
    at = np.stack([run.instance for run in replays])
    placed_s = late_s + np.where(at >= 0, api_s[at], api_s.mean()) + np.median(gateway_s)
    known = dict(shared=case.shared, base_slo=load.base_slo_s)
    return dict(
        drawn=[simulated(case, load, cluster, policy, s) for s in drawn_s],
        drawn_s=drawn_s,
        placed=[
            simulate_placed(load.workload, cluster.instances, s, policy, where, **known)
            for s, where in zip(placed_s, at, strict=True)
        ],
        placed_s=placed_s,
    )
