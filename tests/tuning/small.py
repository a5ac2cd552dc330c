"""A small load for the tests of the search."""

from __future__ import annotations

import numpy as np

from hexrepro.cluster import load_cluster
from hexrepro.scheduling import base_slo_s
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator import EngineOptions
from hexrepro.tuning.evaluate import Problem
from hexrepro.workload import arrival_times, generate

ALPHA = {"alpha": {"low": 0.0, "high": 1.0, "step": 0.01}}


def small_problem(
    seeds: int = 3, n_queries: int = 6, estimator: str = "median", tenants: bool = False
) -> Problem:
    workload, cluster = generate("trace1", n_queries=n_queries), load_cluster("hetero1", "silicon")
    if tenants:
        tenant = np.arange(n_queries) % 2
        workload = workload.with_tenants(tenant, ("gold", "bronze"), np.where(tenant == 0, 1.0, 2.0))
    arrivals_s = [arrival_times("poisson", n_queries, 1.0, seed) for seed in range(seeds)]
    return Problem(
        workload=workload,
        cluster=cluster,
        engine=EngineOptions(),
        estimator=estimator,
        base_slo_s=base_slo_s(workload, instance_views(cluster)),
        slo_scale=2.0,
        arrivals_s=np.stack(arrivals_s),
        seeds=np.arange(seeds),
    )
