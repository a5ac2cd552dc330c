"""One run that can be stopped, looked at, changed, copied and gone on with.

`simulate` runs a workload to its end under one policy on a cluster that stays as it is. Here the cluster may change on the
way, as may the dispatch rule's parameters: for experiments with a controller in the loop, such as the online tuner.
"""

from __future__ import annotations

import copy

import numpy as np

from hexrepro.cluster.types import Cluster
from hexrepro.compiled import njit
from hexrepro.errors import InputError
from hexrepro.scheduling.estimates import Estimates, cluster_means_s, estimate
from hexrepro.scheduling.policy import Policy, load_policy
from hexrepro.scheduling.views import believe, check_factor, instance_views
from hexrepro.simulator.engine import EngineOptions, explain, set_up, writable
from hexrepro.simulator.instance import change_speed
from hexrepro.simulator.loop import DONE, Arrivals, Rules, advance, begin
from hexrepro.simulator.state import allocate
from hexrepro.workload.types import Workload


class Simulation:
    """A run in progress. Times are in seconds from the start of the workload's arrivals.

    now_s      how far it has come: all events up to and including this time have happened
    calls      what has become of each call: records with the fields of `state.CALL_STATE`, among them instance, release_s,
               admit_s, first_token_s and finish_s (NaN while unknown)
    finish_s   float64[q]: when each query finished; inf while it has not
    params     float64[P]: the dispatch rule's parameters; may be changed between two calls of `advance`
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        policy: Policy | str,
        *,
        base_slo: float | None = None,
        engine: EngineOptions | None = None,
        estimates: Estimates | str = "median",
        seed: int = 0,
    ) -> None:
        if not workload.has_arrivals:
            raise InputError(
                f"workload {workload.name!r} holds no arrival times: give it some with with_arrivals()"
            )
        engine = engine or EngineOptions()
        self.workload, self.policy = workload, load_policy(policy)
        self.params = self.policy.dispatch_vector
        self._learned = estimates == "median"
        if isinstance(estimates, str):
            estimates = estimate(
                workload, instance_views(cluster), estimator=estimates, prefix_caching=engine.prefix_caching
            )
        self._estimates = estimates
        self._views, self.slo_s, self._load, self._options = set_up(
            workload, cluster, self.policy, base_slo, engine, estimates
        )
        self._arrival_s = writable(workload.arrival_s)
        self._order = np.argsort(self._arrival_s, kind="stable")
        self._seed = np.int64(seed)
        self._memory = allocate(self._load, self._views, self._options)
        self._end_s = np.full(workload.n_queries, np.inf)
        self.now_s = 0.0
        self._slowdown, self._believed = np.ones(len(self._views)), np.ones(len(self._views))
        _begin(self._load, self._options, self._views, self._memory)

    @property
    def calls(self) -> np.ndarray:
        return self._memory.calls

    @property
    def instances(self) -> np.ndarray:
        """INSTANCE[M]: what the scheduler sees of each instance."""
        return self._memory.views

    @property
    def is_open(self) -> np.ndarray:
        """bool[M]: which instances take new calls."""
        return self._memory.is_open

    @property
    def done(self) -> bool:
        return int(self._memory.clock["unfinished"][0]) == 0

    @property
    def finish_s(self) -> np.ndarray:
        finished = self.calls["finish_s"]
        return np.where(
            np.add.reduceat(np.isnan(finished), self.workload.query_offsets[:-1]) == 0, self._end_s, np.inf
        )

    def advance(self, until_s: float = np.inf) -> None:
        """Go through all events up to and including `until_s`."""
        if until_s < self.now_s:
            raise InputError(f"until_s={until_s:g} lies before {self.now_s:g} s, where the run stands")
        policy = self.policy
        status, where = _advance(
            self._load,
            self._options,
            Arrivals(self._arrival_s, self._order, self.slo_s),
            Rules(policy.dispatch_rule, self.params, policy.queue_rule, policy.queue_vector, self._seed),
            self._memory,
            self._end_s,
            float(until_s),
        )
        if status != DONE:
            raise InputError(explain(status, int(where), self.policy, len(self._views)))
        self.now_s = float(until_s)

    def close_instance(self, m: int) -> None:
        """From now on instance m gets no new calls; it finishes those it has."""
        if self.is_open.sum() == 1 and self.is_open[m]:
            raise InputError(f"instance {m} is the last that takes calls: the cluster can't do without it")
        self._set_open(m, False)

    def open_instance(self, m: int) -> None:
        """From now on instance m gets calls (again)."""
        self._set_open(m, True)

    def _set_open(self, m: int, value: bool) -> None:
        self._memory.is_open[m] = value
        self._renew_means()

    def slow_down(self, m: int, factor: float) -> None:
        """From its next step on, instance m takes `factor` times as long as its latency model says.

        The scheduler does not know: see `believe`.
        """
        check_factor(m, factor)
        self._slowdown[m] = factor
        self._change_speed(m)

    def believe(self, m: int, factor: float) -> None:
        """The scheduler has learned that instance m takes `factor` times as long as its latency model says."""
        check_factor(m, factor)
        self._believed[m] = factor
        self._change_speed(m)  # which ends the present step by the old step times: before these change
        believe(self.instances, self._views, m, factor)
        self._renew_means()

    def _change_speed(self, m: int) -> None:
        """The engine computes with the scheduler's step times: set how far the truth is from these."""
        factor = float(self._slowdown[m] / self._believed[m])
        _change_speed(self._load, self._options, self._memory, m, factor, self.now_s)

    def _renew_means(self) -> None:
        """Take the cluster's mean times over the instances that are there, at the speed they are believed to have."""
        if not self._learned:  # the caller's own estimates, the truth, or running medians stay as they are
            return
        known = self._estimates
        there = np.ascontiguousarray(self.instances[self.is_open])
        stage_s = cluster_means_s(there, known.input_median, known.cached_median, known.output_median)
        self._load.tasks["stage_mean_s"] = stage_s[self.workload.stage]
        self._load.tasks["remaining_s"] = (known.plan.remaining @ stage_s)[known.plan.position]

    def fork(self) -> Simulation:
        """A copy that goes its own way."""
        other = copy.copy(self)
        other.params = self.params.copy()
        other._load = self._load._replace(tasks=self._load.tasks.copy())
        other._memory = copy.deepcopy(self._memory)
        other._end_s = self._end_s.copy()
        other._slowdown, other._believed = self._slowdown.copy(), self._believed.copy()
        return other


@njit(_nrt=False)
def _begin(load, options, views, mem):
    begin(load, options, views, mem)


@njit(_nrt=False)
def _advance(load, options, arrivals, rules, mem, end_s, until_s):
    return advance(load, options, arrivals, rules, mem, end_s, until_s)


@njit(_nrt=False)
def _change_speed(load, options, mem, m, slowdown, now):
    change_speed(load, mem, options, m, slowdown, now)
