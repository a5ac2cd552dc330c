"""The brain of the live system: told what happens, it says where each call goes and how urgent it is there.

A plain object without I/O: every method takes the time on the caller's clock. It decides with the functions of
`hexrepro/scheduling` (see `decision.py`) and keeps what these may look at exactly as the simulator keeps it, so that the same
events give the same decisions. What a live server does not tell, it does not know: a preempted call counts as running.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.scheduling.policy import Policy, load_policy
from hexrepro.scheduling.views import SPEEDS, believe, instance_views
from hexrepro.serving.decision import NOBODY, OUTSIDE, address, decide, scratch
from hexrepro.serving.learning import Beliefs, Plan, Stage, Stages

# for checking only: it brings in SciPy's statistics, a second that a gateway without a tuner need not wait for
if TYPE_CHECKING:
    from hexrepro.tuning.online import OnlineTuner


class NoInstance(Exception):
    """No instance takes calls at present."""


@dataclass(frozen=True)
class Options:
    """How the coordinator believes and forgets.

    slo_s         SLO of a query that brings none, seconds from its arrival to its end
    window        finished calls of a stage whose median length is believed; 0 = the beliefs it started with stay
    plan_window   finished queries from which is learned what follows a stage; 0 = as above
    output_tokens belief about a stage before any call of it has finished
    idle_s        a query without calls under way ends after this time without a new one
    max_calls     calls of one query; a further one begins a new query of the same id
    speed_window  finished calls whose pace is held against the latency model, to correct an instance's speed; 0 = never
    max_stages    distinct stage names; calls of further ones share the stage `other`
    max_tenants   the same for tenants
    seed          for rules that draw
    """

    slo_s: float = 60.0
    window: int = 100
    plan_window: int = 200
    output_tokens: float = 256.0
    idle_s: float = 60.0
    max_calls: int = 1000
    speed_window: int = 0
    max_stages: int = 64
    max_tenants: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            whole = f.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise InputError(
                    f"coordinator: {f.name}={value!r} must be a {'whole ' if whole else ''}number"
                )
            least = 0 if f.name in ("window", "plan_window", "speed_window", "seed") else None
            if (least is None and not 0 < value < float("inf")) or (least is not None and value < least):
                raise InputError(
                    f"coordinator: {f.name}={value!r} must be {'0 or ' if least == 0 else ''}above 0"
                )


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


@dataclass(slots=True, eq=False)
class _Query:
    id: Hashable
    number: int
    arrival_s: float
    slo_s: float
    tenant: int
    frontier: tuple[tuple[int, int], ...] = ()  # (call, depth) of finished calls that no call waited for
    steps: dict[int, list[int]] = field(default_factory=dict)  # stage -> depths of its steps, ascending
    calls: int = 0  # so far
    under_way: int = 0
    last_s: float = 0.0  # when its latest call began or ended
    whole: bool = True  # none of its calls failed
    ending: bool = False  # no call will come after those under way


@dataclass(slots=True, eq=False)
class _Call:
    number: int
    query: _Query
    stage: Stage
    after: tuple[tuple[int, int], ...]
    depth: int
    input_tokens: int
    cached_tokens: int
    sequences: int
    output_estimate: float  # of each sequence
    prefill_left: float
    instance: int
    estimate_s: float
    budget_s: float
    key: float
    final: bool
    running: bool = False
    first_token_s: float | None = None
    batch: int = 0  # calls in the batch when its first token came


class TunerLog:
    """The events for an `OnlineTuner`, kept until its thread asks for them. The tuner belongs to whoever calls `catch_up`."""

    def __init__(self, tuner: OnlineTuner) -> None:
        self.tuner = tuner
        self._events: deque[tuple[str, tuple, dict]] = deque()

    def tell(self, event: str, *args, **values) -> None:
        self._events.append((event, args, values))

    def catch_up(self, now_s: float) -> float:
        """Pass on what has happened, let the tuner decide if it is time to, and return the alpha that it wants."""
        while self._events:
            event, args, values = self._events.popleft()
            getattr(self.tuner if event == "set_cluster" else self.tuner.history, event)(*args, **values)
        self.tuner.step(now_s)
        return self.tuner.alpha


class Coordinator:
    """Decides for each call. Calls and queries go by numbers of its own, which `call_arrived` returns.

    views      INSTANCE[M], what it believes of each instance
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
        self.views = instance_views(cluster)
        self.is_open = np.ones(len(cluster), bool)
        self.speed = np.ones(len(cluster))  # an instance takes so many times what its latency model says
        self.stages = Stages(
            beliefs, self.views, window=o.window, prior_output=o.output_tokens, most=o.max_stages
        )
        self.plan = Plan(beliefs.remaining, o.plan_window)
        self.tuner_log = TunerLog(tuner) if tuner is not None else None
        self._idle = self.views.copy()  # as configured
        self._there = len(cluster)  # instances that take calls
        self._memory = scratch(len(cluster))
        self._at_hand = self._memory.call[0]
        self._params, self._queue_params = self.policy.dispatch_vector, self.policy.queue_vector
        self._dispatch_at, self._queue_at = (
            address(self.policy.dispatch_rule),
            address(self.policy.queue_rule),
        )
        names = list(self.policy.dispatch_rule.defaults)
        self._alpha_at = names.index("alpha") if "alpha" in names else None
        self._columns = {name: self.views[name] for name in self.views.dtype.names}
        self._sequence = self._queries_seen = self._waiting = 0
        self._open: dict[Hashable, _Query] = {}
        self._calls: dict[int, _Call] = {}
        self._idle_queries: deque[tuple[float, _Query]] = deque()  # since when, in order
        self._tenants: dict[str, int] = {}
        self._paces: list[deque[float]] = [deque(maxlen=max(o.speed_window, 1)) for _ in cluster.instances]

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
        return len(self._open)

    def waiting(self) -> int:
        """Calls that wait, at all instances together."""
        return self._waiting

    def tenant_number(self, name: str) -> int:
        """The number by which rules know a tenant; those beyond `max_tenants` share the last."""
        number = self._tenants.get(name)
        if number is None:
            number = min(len(self._tenants), self.options.max_tenants - 1)
            if len(self._tenants) < self.options.max_tenants:
                self._tenants[name] = number
        return number

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
        query = self._open.get(query_id) if query_id is not None else None
        if query is not None and query.calls >= self.options.max_calls:
            self._let_go(query)
            query = None
        if query is None:
            query = self._query_arrived(query_id, now_s, slo_s, tenant)
        known = self.stages.get(stage, input_tokens, cached_tokens or 0)
        if cached_tokens is None:
            cached_tokens = int(known.cached_median)
        cached_tokens = max(0, min(cached_tokens, input_tokens - 1))
        believed = known.output_median if output_tokens is None else float(output_tokens)
        if max_tokens is not None:
            believed = min(believed, float(max_tokens))
        call = _Call(
            number=self._sequence,
            query=query,
            stage=known,
            after=query.frontier,
            depth=1 + max((depth for _, depth in query.frontier), default=-1),
            input_tokens=input_tokens,
            cached_tokens=cached_tokens,
            sequences=sequences,
            output_estimate=max(1.0, believed),
            prefill_left=0.0,
            instance=-1,
            estimate_s=0.0,
            budget_s=0.0,
            key=0.0,
            final=final,
        )
        try:
            self._place(call, now_s)
        except Exception:
            if not query.under_way:
                self._close(query, now_s, dropped=True)
            raise
        depths = query.steps.setdefault(known.index, [])
        at = bisect_left(depths, call.depth)
        if at == len(depths) or depths[at] != call.depth:
            depths.insert(at, call.depth)
        self._calls[call.number] = call
        query.calls += 1
        query.under_way += 1
        query.last_s = now_s
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
        return self._placement(call)

    def started(self, number: int, now_s: float) -> None:
        """The call went from the queue into the batch (simulator: `admit`)."""
        call = self._calls[number]
        if not call.running:
            self._start(call)

    def first_token(self, number: int, now_s: float) -> None:
        """The prompt has been computed."""
        call = self._calls[number]
        if not call.running:
            self._start(call)
        self._prompt_done(call)
        call.first_token_s, call.batch = now_s, int(self._columns["running"][call.instance])
        if call.query.whole:
            self._tell("first_token", call.query.number, number, now_s)

    def finished(
        self, number: int, now_s: float, output_tokens: int, *, cached_tokens: int | None = None
    ) -> None:
        """The call has all its tokens, those of all sequences. `cached_tokens`: of its prompt, as the server reports it."""
        call = self._calls.pop(number)
        self._leave(call)
        output_tokens = -(-output_tokens // call.sequences)
        query, stage = call.query, call.stage
        query.ending |= call.final
        self._learn_speed(call, now_s, output_tokens)
        self.stages.finished(stage, call.input_tokens, max(output_tokens, 1), cached_tokens)
        query.frontier = (*(f for f in query.frontier if f not in call.after), (number, call.depth))
        if query.whole:
            self._tell("call_finished", query.number, number, now_s, output_tokens)
        self._one_less(query, now_s)

    def failed(self, number: int, now_s: float, *, answered: bool = False) -> None:
        """The call ended without an answer: refused, cancelled or broken. Nothing is learned from its query, which goes on even
        if this was its last call: the client may try again, and its clock runs on.

        `answered`: it has its answer, but one without a length; then its query ends with its last call.
        """
        call = self._calls.pop(number)
        self._leave(call)
        query = call.query
        query.ending |= answered and call.final
        if query.whole:
            query.whole = False
            self._tell("query_dropped", query.number)
        self._one_less(query, now_s)

    def moved(
        self, number: int, now_s: float, *, avoid: frozenset[int] | set[int] = frozenset()
    ) -> Placement:
        """The call's instance has failed it: place it anew, not on `avoid` if there is another. Raises NoInstance, and then
        the call is where it was."""
        call = self._calls[number]
        allowed = self.is_open.copy()
        allowed[list(avoid)] = False
        if not allowed.any():
            allowed = self.is_open
        if not allowed.any():
            raise NoInstance("no instance takes calls at present")
        self._leave(call)
        call.running, call.first_token_s = False, None
        self._place(call, now_s, allowed)
        call.query.last_s = now_s
        if call.query.whole:
            self._tell("call_moved", call.query.number, number, call.instance)
        return self._placement(call)

    def query_finished(self, query_id: Hashable, now_s: float) -> bool:
        """No further calls will come. False if there is no such query."""
        query = self._open.get(query_id)
        if query is None:
            return False
        query.ending = True
        if query.under_way == 0:
            self._close(query, query.last_s)
        return True

    def expire(self, now_s: float) -> int:
        """End the queries that have been idle for too long; returns how many."""
        ended = 0
        while self._idle_queries and now_s - self._idle_queries[0][0] >= self.options.idle_s:
            since_s, query = self._idle_queries.popleft()
            if query.last_s == since_s and query.under_way == 0 and self._open.get(query.id) is query:
                self._close(query, since_s)
                ended += 1
        return ended

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
        believe(self.views, self._idle, m, factor)
        self.speed[m] = factor
        self._cluster_changed()

    def _cluster_changed(self) -> None:
        there = self.views[self.is_open] if self.is_open.any() else self.views
        self.stages.renew_means(np.ascontiguousarray(there) if not self.is_open.all() else self.views)
        if self.tuner_log is not None and self.is_open.any():
            instances = tuple(
                replace(spec, latency=replace(spec.latency, **{n: float(view[n]) for n in SPEEDS}))
                for spec, view in zip(self.cluster.instances, self.views, strict=True)
            )
            self._tell("set_cluster", Cluster(self.cluster.name, instances), (~self.is_open).tolist())

    # ---- inside --------------------------------------------------------------------------------------------

    def _query_arrived(
        self, query_id: Hashable | None, now_s: float, slo_s: float | None, tenant: str
    ) -> _Query:
        number = self._queries_seen
        self._queries_seen += 1
        query = _Query(
            id=("single", number) if query_id is None else query_id,
            number=number,
            arrival_s=now_s,
            slo_s=self.options.slo_s if slo_s is None else slo_s,
            tenant=self.tenant_number(tenant),
            last_s=now_s,
            ending=query_id is None,
        )
        self._open[query.id] = query
        self._tell("query_arrived", number, now_s, slo_s=query.slo_s, tenant=query.tenant)
        return query

    def _one_less(self, query: _Query, now_s: float) -> None:
        query.under_way -= 1
        query.last_s = now_s
        if query.under_way == 0:
            if query.ending:
                self._close(query, now_s)
            else:
                self._idle_queries.append((now_s, query))

    def _let_go(self, query: _Query) -> None:
        """It gets no further calls: it ends with those under way."""
        query.ending = True
        if query.under_way == 0:
            self._close(query, query.last_s)
        else:
            del self._open[query.id]

    def _close(self, query: _Query, now_s: float, dropped: bool = False) -> None:
        if self._open.get(query.id) is query:
            del self._open[query.id]
        if dropped or not query.whole:
            if query.whole:
                self._tell("query_dropped", query.number)
            return
        self.plan.learn({(depth, stage) for stage, depths in query.steps.items() for depth in depths})
        self._tell("query_finished", query.number, now_s)

    def _place(self, call: _Call, now_s: float, allowed: np.ndarray | None = None) -> None:
        """Decide, and book the call at its instance (simulator: `_dispatch` and `place`)."""
        query, stage = call.query, call.stage
        occurrence = bisect_left(query.steps.get(stage.index, ()), call.depth)
        remaining_s = 0.0
        for other, steps in self.plan.remaining(stage.index, occurrence):
            remaining_s += steps * self.stages.list[other].mean_s
        self._memory.call[0] = (
            self._sequence, query.number, query.tenant, stage.index, call.input_tokens, call.cached_tokens,
            call.output_estimate, now_s, query.arrival_s, query.slo_s, stage.mean_s, remaining_s, 0.0, (0.0, 0.0), 0, 0.0,
        )  # fmt: skip
        m, key = decide(
            self._memory, self.views, self.is_open if allowed is None else allowed, self._dispatch_at,
            self._params, self._queue_at, self._queue_params, self.options.seed,
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
        c = self._columns
        c["prefill_tokens"][m] += call.prefill_left
        c["output_tokens"][m] += call.output_estimate * call.sequences
        c["kv_tokens"][m] += call.input_tokens + call.output_estimate * call.sequences
        c["outstanding_s"][m] += call.estimate_s
        c["dispatched_s"][m] += call.estimate_s
        self._waiting += 1
        c["waiting"][m] += 1
        c["waiting_s"][m] += call.estimate_s

    def _start(self, call: _Call) -> None:
        c, m = self._columns, call.instance
        call.running = True
        c["running"][m] += 1
        self._not_waiting(call)

    def _not_waiting(self, call: _Call) -> None:
        c, m = self._columns, call.instance
        self._waiting -= 1
        c["waiting"][m] -= 1
        c["waiting_s"][m] = c["waiting_s"][m] - call.estimate_s if c["waiting"][m] > 0 else 0.0

    def _prompt_done(self, call: _Call) -> None:
        at = self._columns["prefill_tokens"]
        at[call.instance] = max(0.0, at[call.instance] - call.prefill_left)
        call.prefill_left = 0.0

    def _leave(self, call: _Call) -> None:
        """Take the call off its instance's account (simulator: `next_finished`)."""
        c, m = self._columns, call.instance
        if call.running:
            c["running"][m] -= 1
        else:
            self._not_waiting(call)
        if call.prefill_left > 0.0:
            self._prompt_done(call)
        outstanding = c["running"][m] + c["waiting"][m] > 0
        output_tokens = call.output_estimate * call.sequences
        kv_tokens = call.input_tokens + output_tokens
        c["outstanding_s"][m] = c["outstanding_s"][m] - call.estimate_s if outstanding else 0.0
        c["output_tokens"][m] = c["output_tokens"][m] - output_tokens if outstanding else 0.0
        c["kv_tokens"][m] = c["kv_tokens"][m] - kv_tokens if outstanding else 0.0

    def _learn_speed(self, call: _Call, now_s: float, output_tokens: int) -> None:
        """Hold the pace of the call's decode steps against the latency model at the batch that it ran in.

        Prompts of other calls lengthen steps too, on all instances alike; the median over calls and a band of 20 % around the
        present belief keep that noise out.
        """
        size = self.options.speed_window
        if size == 0 or call.first_token_s is None or output_tokens < 8 or call.sequences > 1:
            return
        m, at = call.instance, self._idle[call.instance]
        batch = 0.5 * (call.batch + self._columns["running"][m] + 1)
        kv_tokens = batch * (call.input_tokens + 0.5 * output_tokens)
        predicted_s = float(at["base_s"] + at["sequence_s"] * batch + at["kv_token_s"] * kv_tokens)
        paces = self._paces[m]
        paces.append((now_s - call.first_token_s) / (output_tokens - 1) / predicted_s)
        if len(paces) == size:
            factor = float(np.median(paces))
            paces.clear()
            if factor > 0 and not 1 / 1.2 < factor / self.speed[m] < 1.2:
                self.believe(m, factor)

    def _placement(self, call: _Call) -> Placement:
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

    def _tell(self, event: str, *args, **values) -> None:
        if self.tuner_log is not None:
            self.tuner_log.tell(event, *args, **values)
