"""The brain of the live system: told what happens, it says where each call goes and how urgent it is there.

A plain object without I/O: every method takes the time on the caller's clock. It decides with the functions of
`hexrepro/scheduling` (see `decision.py`) and keeps what these may look at exactly as the simulator keeps it, so that the same
events give the same decisions: the instances' load in `account.py`, the queries in `queries.py`, what is believed of stages in
`learning.py`. What a live server does not tell, it does not know: a preempted call counts as running.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.scheduling.policy import Policy, load_policy
from hexrepro.serving.account import Account
from hexrepro.serving.decision import NOBODY, OUTSIDE, address, decide, desk
from hexrepro.serving.learning import Beliefs, Plan, Stages
from hexrepro.serving.options import Options
from hexrepro.serving.queries import Call, Queries
from hexrepro.serving.tuner_log import TunerLog

if TYPE_CHECKING:  # see `tuner_log.py`
    from hexrepro.tuning.online import OnlineTuner


class NoInstance(Exception):
    """No instance takes calls at present."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a call goes.

    key            least first among the calls that wait there
    slo_s          of its query
    estimate_s     t_comp on that instance
    output_tokens  expected of all its sequences
    after          the calls of its query that it is taken to have waited for
    """

    call: int
    query: int
    stage: str
    instance: int
    key: float
    slo_s: float
    budget_s: float
    estimate_s: float
    output_tokens: float
    cached_tokens: int
    after: tuple[int, ...]


class Coordinator:
    """Decides for each call. Calls and queries go by numbers of its own, which `call_arrived` returns.

    views      INSTANCE[M], what it believes of each instance
    speed      float64[M], an instance takes so many times what its latency model says
    is_open    bool[M], the instances that take calls
    tuner_log  the events for the tuner, None without one
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy | str,
        options: Options | None = None,
        *,
        beliefs: Beliefs | None = None,
        tuner: OnlineTuner | None = None,
    ) -> None:
        self.cluster, self.policy, self.options = cluster, load_policy(policy), options or Options()
        o, beliefs = self.options, beliefs or Beliefs()
        self._account = Account(cluster, o.speed_window)
        self.views, self.speed = self._account.views, self._account.speed
        self.is_open = np.ones(len(cluster), bool)
        self.stages = Stages(
            beliefs, self.views, window=o.window, prior_output=o.output_tokens, most=o.max_stages
        )
        self.plan = Plan(beliefs.remaining, o.plan_window)
        self.tuner_log = TunerLog(tuner) if tuner is not None else None
        self._tell = self.tuner_log.tell if self.tuner_log is not None else _to_nobody
        self._queries = Queries(o, self.plan, self._tell)
        self._calls: dict[int, Call] = {}
        self._there = len(cluster)  # instances that take calls
        self._sequence = 0  # decisions so far
        self._desk = desk(len(cluster))
        self._at_hand = self._desk.call[0]
        dispatch, queue = self.policy.dispatch_rule, self.policy.queue_rule
        self._dispatch_at, self._queue_at = address(dispatch), address(queue)
        self._params, self._queue_params = self.policy.dispatch_vector, self.policy.queue_vector
        names = list(dispatch.defaults)
        self._alpha_at = names.index("alpha") if "alpha" in names else None

    # ---- what the gateway and its metrics look at ----------------------------------------------------------

    @property
    def alpha(self) -> float | None:
        """What the dispatch rule weighs with; None for a rule without alpha."""
        return None if self._alpha_at is None else float(self._params[self._alpha_at])

    @alpha.setter
    def alpha(self, value: float) -> None:
        if self._alpha_at is None:
            raise InputError(f"policy {self.policy.name} has no parameter alpha")
        self._params[self._alpha_at] = value

    @property
    def calls_under_way(self) -> int:
        return len(self._calls)

    @property
    def queries_under_way(self) -> int:
        return len(self._queries)

    @property
    def calls_waiting(self) -> int:
        """At all instances together."""
        return self._account.waiting

    # ---- queries and calls ---------------------------------------------------------------------------------

    def call_arrived(
        self,
        query_id: Hashable | None,
        stage: str,
        input_tokens: int,
        now_s: float,
        *,
        slo_s: float | None = None,
        tenant: str = "",
        cached_tokens: int | None = None,
        output_tokens: float | None = None,
        max_tokens: int | None = None,
        sequences: int = 1,
        final: bool = False,
    ) -> Placement:
        """A call has been issued: choose its instance and its place there. Raises NoInstance.

        query_id       calls with the same id belong together; None: a query of one call
        slo_s          seconds that the whole query may take, counted from its first call, which is the one that is asked
        cached_tokens  of the prompt, expected in every prefix cache; None: as learned of the stage
        output_tokens  expected by the caller; None: as learned of the stage. Bounded by `max_tokens`; both of each sequence
        sequences      that are generated side by side: the time is that of one, the memory that of all
        final          the query's last call, or one of its last: the query ends when it has finished
        """
        if not self._there:
            raise NoInstance("no instance takes calls at present")
        query = self._queries.of(query_id, now_s, slo_s, tenant)
        known = self.stages.get(stage, input_tokens, cached_tokens or 0)
        if cached_tokens is None:
            cached_tokens = int(known.cached_median)
        cached_tokens = max(0, min(cached_tokens, input_tokens - 1))
        believed = known.output_median if output_tokens is None else float(output_tokens)
        if max_tokens is not None:
            believed = min(believed, float(max_tokens))
        call = Call(
            number=self._sequence,
            query=query,
            stage=known,
            after=query.frontier,
            depth=1 + max((depth for _, depth in query.frontier), default=-1),
            input_tokens=input_tokens,
            cached_tokens=cached_tokens,
            sequences=sequences,
            output_estimate=max(1.0, believed),
            final=final,
        )
        try:
            self._place(call, now_s, self.is_open)
        except Exception:
            self._queries.not_issued(query, now_s)
            raise
        self._queries.issued(call, now_s)
        self._calls[call.number] = call
        if query.whole:
            self._tell(
                "call_dispatched",
                query.number,
                call.number,
                now_s,
                stage=known.name,
                input_tokens=input_tokens,
                instance=call.instance,
                key=call.key,
                estimate_s=call.estimate_s,
                budget_s=call.budget_s,
                template=known.index if cached_tokens else -1,
                template_tokens=cached_tokens,
            )
        return _placement(call)

    def started(self, number: int, now_s: float) -> None:
        """The call went from the queue into the batch."""
        self._account.start(self._calls[number])

    def first_token(self, number: int, now_s: float) -> None:
        """The prompt has been computed."""
        call = self._calls[number]
        self._account.first_token(call, now_s)
        if call.query.whole:
            self._tell("first_token", call.query.number, number, now_s)

    def finished(
        self, number: int, now_s: float, output_tokens: int, *, cached_tokens: int | None = None
    ) -> None:
        """The call has all its tokens, those of all sequences. `cached_tokens`: of its prompt, as the server reports it."""
        call = self._calls.pop(number)
        self._account.leave(call)
        output_tokens = -(-output_tokens // call.sequences)
        query = call.query
        query.ending |= call.final
        factor = self._account.slower_by(call, now_s, output_tokens)
        if factor is not None:
            self.believe(call.instance, factor)
        self.stages.finished(call.stage, call.input_tokens, max(output_tokens, 1), cached_tokens)
        self._queries.finished(call)
        if query.whole:
            self._tell("call_finished", query.number, number, now_s, output_tokens)
        self._queries.one_less(query, now_s)

    def failed(self, number: int, now_s: float, *, answered: bool = False) -> None:
        """The call ended without an answer: refused, cancelled or broken. Nothing is learned from its query, which goes on even
        if this was its last call: the client may try again, and its clock runs on.

        `answered`: it has its answer, but one without a length; then its query ends with its last call.
        """
        call = self._calls.pop(number)
        self._account.leave(call)
        call.query.ending |= answered and call.final
        self._queries.failed(call.query)
        self._queries.one_less(call.query, now_s)

    def moved(
        self, number: int, now_s: float, *, avoid: frozenset[int] | set[int] = frozenset()
    ) -> Placement:
        """The call's instance has failed it: place it anew, not on `avoid` if there is another. Raises NoInstance; then, and
        after any other failure, the call waits where it was."""
        call = self._calls[number]
        allowed = self.is_open.copy()
        allowed[list(avoid)] = False
        if not allowed.any():
            allowed = self.is_open
        if not allowed.any():
            raise NoInstance("no instance takes calls at present")
        self._account.leave(call)
        call.running, call.first_token_s = False, None
        try:
            self._place(call, now_s, allowed)
        except Exception:  # a fault in a user's rule
            self._account.book(call)
            raise
        call.query.last_s = now_s
        if call.query.whole:
            self._tell("call_moved", call.query.number, number, call.instance)
        return _placement(call)

    def query_finished(self, query_id: Hashable, now_s: float) -> bool:
        """No further calls will come. False if there is no such query."""
        return self._queries.end(query_id)

    def expire(self, now_s: float) -> int:
        """End the queries that have been idle for too long; returns how many."""
        return self._queries.expire(now_s)

    # ---- the cluster ---------------------------------------------------------------------------------------

    def instance_down(self, m: int) -> None:
        """From now on no call goes to instance m; its calls stay on its account until they are moved, fail or finish."""
        self._set_open(m, False)

    def instance_up(self, m: int) -> None:
        self._set_open(m, True)

    def _set_open(self, m: int, value: bool) -> None:
        if self.is_open[m] != value:
            self.is_open[m] = value
            self._there = int(self.is_open.sum())
            self._cluster_changed()

    def believe(self, m: int, factor: float) -> None:
        """Instance m takes `factor` times as long as its latency model says."""
        self._account.believe(m, factor)
        self._cluster_changed()

    def _cluster_changed(self) -> None:
        if self._there in (0, len(self.cluster)):
            self.stages.renew_means(self.views)
        else:
            self.stages.renew_means(np.ascontiguousarray(self.views[self.is_open]))
        if self.tuner_log is not None and self._there:
            self._tell("set_cluster", self._account.believed_cluster(), (~self.is_open).tolist())

    # ---- a decision ----------------------------------------------------------------------------------------

    def _place(self, call: Call, now_s: float, allowed: np.ndarray) -> None:
        """Decide, and book the call at its instance (simulator: `_dispatch`). `allowed`: bool[M]."""
        query, stage = call.query, call.stage
        remaining_s = 0.0
        for other, steps in self.plan.remaining(stage.index, query.steps_before(stage.index, call.depth)):
            remaining_s += steps * self.stages.list[other].mean_s
        self._desk.call[0] = (
            self._sequence, query.number, query.tenant, stage.index, call.input_tokens, call.cached_tokens,
            call.output_estimate, now_s, query.arrival_s, query.slo_s, stage.mean_s, remaining_s, 0.0, (0.0, 0.0), 0, 0.0,
        )  # fmt: skip
        m, key = decide(
            self._desk, self.views, allowed, self._dispatch_at, self._params, self._queue_at, self._queue_params,
            self.options.seed,
        )  # fmt: skip
        if m == NOBODY:
            raise NoInstance("no instance takes calls at present")
        if m == OUTSIDE:
            raise InputError(
                f"policy {self.policy.name}: dispatch rule {self.policy.dispatch} chose a place outside the cluster"
            )
        if key != key:
            raise InputError(f"policy {self.policy.name}: queue rule {self.policy.queue} gave NaN")
        self._sequence += 1
        at = self._at_hand
        call.instance, call.key = m, key
        call.estimate_s, call.budget_s = float(at["t_comp_s"]), float(at["budget_s"])
        call.prefill_left = float(call.input_tokens - call.cached_tokens)
        self._account.book(call)


def _placement(call: Call) -> Placement:
    return Placement(
        call=call.number,
        query=call.query.number,
        stage=call.stage.name,
        instance=call.instance,
        key=call.key,
        slo_s=call.query.slo_s,
        budget_s=call.budget_s,
        estimate_s=call.estimate_s,
        output_tokens=call.output_estimate * call.sequences,
        cached_tokens=call.cached_tokens,
        after=tuple(number for number, _ in call.after),
    )


def _to_nobody(event: str, *args, **values) -> None:
    """Without a tuner, nobody is told."""
