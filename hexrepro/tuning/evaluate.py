"""Many candidates on many arrival seeds, in one compiled call.

Parameters of the dispatch rule differ from run to run inside one grid call. What the kernel takes once a call (the queue
rule and its parameters, the estimator's window, tenants' weights) splits a batch into groups, one call each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hexrepro import simulator
from hexrepro.cluster.types import Cluster
from hexrepro.scheduling import Policy
from hexrepro.scheduling.estimates import estimate
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator import EngineOptions
from hexrepro.tuning.objective import Objective
from hexrepro.tuning.space import WEIGHT, Candidate, Space
from hexrepro.workload.types import Workload


@dataclass(frozen=True, eq=False)
class Problem:
    """The load and the cluster for which something is tuned, and the arrivals on which candidates are tried.

    arrivals_s: float64[S, Q], seeds: int64[S]. base_slo_s is the SLO at scale 1 of a query whose own scale is 1; the
    scheduler works towards `slo_scale` times that.
    """

    workload: Workload
    cluster: Cluster
    engine: EngineOptions
    estimator: str
    base_slo_s: float
    slo_scale: float
    arrivals_s: np.ndarray
    seeds: np.ndarray


# Looks a result up by what it is, or lets it be computed: (candidates) -> scores, see experiments/evaluations.py
Store = Callable[[Sequence[Candidate], Callable[[], np.ndarray]], np.ndarray]


class Evaluator:
    """Scores of candidates, each of which is simulated once.

    `seconds` and `runs` count what was simulated; `calls` the compiled calls.
    """

    def __init__(
        self,
        problem: Problem,
        space: Space,
        objectives: Sequence[Objective],
        *,
        workers: int | None = None,
        store: Store | None = None,
    ) -> None:
        self.problem, self.space, self.objectives = problem, space, tuple(objectives)
        self.seconds, self.runs, self.calls = 0.0, 0, 0
        self._workers, self._store = workers, store
        self._known: dict[tuple, np.ndarray] = {}  # candidate -> float64[objectives, S]

    def __call__(self, candidates: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """float64[objectives, candidates, S], one value a candidate and arrival seed."""
        candidates = [self.space.clean(c) for c in candidates]
        missing = {k: c for c in candidates if (k := tuple(c.values())) not in self._known}
        if missing:
            start = time.perf_counter()
            new = list(missing.values())
            scores = self._store(new, lambda: self._simulate(new)) if self._store else self._simulate(new)
            self._known |= {key: scores[:, i] for i, key in enumerate(missing)}
            self.seconds += time.perf_counter() - start
        return np.stack([self._known[tuple(c.values())] for c in candidates], axis=1)

    def _simulate(self, candidates: Sequence[Candidate]) -> np.ndarray:
        p, n_seeds = self.problem, len(self.problem.seeds)
        policies = [self.space.policy(c) for c in candidates]
        groups: dict[tuple, list[int]] = {}
        for i, (candidate, policy) in enumerate(zip(candidates, policies, strict=True)):
            groups.setdefault(_group(candidate, policy), []).append(i)
        scores = np.empty((len(self.objectives), len(candidates), n_seeds))
        for members in groups.values():
            candidate, policy = candidates[members[0]], policies[members[0]]
            vectors = np.stack([policies[i].dispatch_vector for i in members])
            grid = simulator.simulate_grid(
                self._weighted(candidate),
                p.cluster,
                policy,
                arrivals_s=np.tile(p.arrivals_s, (len(members), 1)),
                dispatch_params=np.repeat(vectors, n_seeds, axis=0),
                seeds=np.tile(p.seeds, len(members)),
                base_slo=p.slo_scale * p.base_slo_s,
                engine=p.engine,
                estimates=self._estimates(candidate),
                workers=self._workers,
            )
            base_slo_s = (
                p.base_slo_s * p.workload.slo_scale
            )  # the tenants' own, whatever the scheduler was told
            for o, objective in enumerate(self.objectives):
                values = objective.values(grid.arrival_s, grid.finish_s, base_slo_s)
                scores[o, members] = values.reshape(len(members), n_seeds)
            self.runs += len(members) * n_seeds
            self.calls += 1
        return scores

    def _weighted(self, candidate: Candidate) -> Workload:
        workload = self.problem.workload
        weights = {k.removeprefix(WEIGHT): v for k, v in candidate.items() if k.startswith(WEIGHT)}
        if not weights:
            return workload
        by_tenant = np.array([weights.get(name, 1.0) for name in workload.tenant_names])
        return replace(workload, slo_scale=workload.slo_scale * by_tenant[workload.tenant])

    def _estimates(self, candidate: Candidate):
        p = self.problem
        if "window" not in candidate:
            return p.estimator
        return estimate(
            p.workload,
            instance_views(p.cluster),
            estimator=p.estimator,
            window=int(candidate["window"]),
            prefix_caching=p.engine.prefix_caching,
        )


def _group(candidate: Candidate, policy: Policy) -> tuple:
    """What candidates must have in common to share a grid call."""
    weights = tuple((k, v) for k, v in candidate.items() if k.startswith(WEIGHT))
    queue = (policy.queue, tuple(policy.queue_vector))
    return policy.dispatch, queue, policy.client, candidate.get("window"), weights
