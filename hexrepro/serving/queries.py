"""The queries under way, as their calls show them: which calls belong together, and when a query is over."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from hexrepro.serving.learning import Plan, Stage
from hexrepro.serving.options import Options


@dataclass(slots=True, eq=False)
class Query:
    """A query that is not over.

    frontier  (call, depth) of finished calls that no call waited for
    steps     stage -> depths of its steps, ascending
    calls     so far
    last_s    when its latest call began or ended
    whole     none of its calls failed
    ending    no call will come after those under way
    """

    id: Hashable
    number: int
    arrival_s: float
    slo_s: float
    tenant: int
    frontier: tuple[tuple[int, int], ...] = ()
    steps: dict[int, list[int]] = field(default_factory=dict)
    calls: int = 0
    under_way: int = 0
    last_s: float = 0.0
    whole: bool = True
    ending: bool = False

    def steps_before(self, stage: int, depth: int) -> int:
        """How many of its steps of that stage are nearer to its start."""
        return bisect_left(self.steps.get(stage, ()), depth)


@dataclass(slots=True, eq=False)
class Call:
    """A call under way.

    after            (call, depth) of the calls that it is taken to have waited for
    output_estimate  tokens of each sequence
    prefill_left     tokens of the prompt that are still to be computed
    batch            calls in the batch when its first token came
    """

    number: int
    query: Query
    stage: Stage
    after: tuple[tuple[int, int], ...]
    depth: int
    input_tokens: int
    cached_tokens: int
    sequences: int
    output_estimate: float
    final: bool
    prefill_left: float = 0.0
    instance: int = -1
    estimate_s: float = 0.0
    budget_s: float = 0.0
    key: float = 0.0
    running: bool = False
    first_token_s: float | None = None
    batch: int = 0


class Queries:
    """What the coordinator knows of queries. `plan` learns from those that end well; `tell` passes events to the tuner."""

    def __init__(self, options: Options, plan: Plan, tell: Callable[..., None]) -> None:
        self._options, self._plan, self._tell = options, plan, tell
        self._seen = 0
        self._open: dict[Hashable, Query] = {}
        self._idle: deque[tuple[float, Query]] = deque()  # since when, in order
        self._tenants: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def get(self, query_id: Hashable) -> Query | None:
        """The query of that id, if one is under way."""
        return self._open.get(query_id)

    def of(self, query_id: Hashable | None, now_s: float, slo_s: float | None, tenant: str) -> Query:
        """The query that a call belongs to, which begins with it if there is none, or none that takes more calls."""
        query = self._open.get(query_id) if query_id is not None else None
        if query is not None and query.calls >= self._options.max_calls:
            self._let_go(query)
            query = None
        return query or self._arrived(query_id, now_s, slo_s, tenant)

    def tenant_number(self, name: str) -> int:
        """The number by which rules know a tenant; those beyond `max_tenants` share the last."""
        number = self._tenants.get(name)
        if number is None:
            number = min(len(self._tenants), self._options.max_tenants - 1)
            if len(self._tenants) < self._options.max_tenants:
                self._tenants[name] = number
        return number

    def issued(self, call: Call, now_s: float) -> None:
        """The call has been placed."""
        query = call.query
        depths = query.steps.setdefault(call.stage.index, [])
        at = bisect_left(depths, call.depth)
        if at == len(depths) or depths[at] != call.depth:
            depths.insert(at, call.depth)
        query.calls += 1
        query.under_way += 1
        query.last_s = now_s

    def not_issued(self, query: Query, now_s: float) -> None:
        """A call of it could not be placed; if it was to be its first, the query never was."""
        if not query.calls:
            self._close(query, now_s, dropped=True)

    def finished(self, call: Call) -> None:
        """The call has its answer: those that come now wait for it, and no longer for what it waited for."""
        query = call.query
        query.frontier = (*(f for f in query.frontier if f not in call.after), (call.number, call.depth))

    def failed(self, query: Query) -> None:
        """A call of it failed: nothing is learned from it."""
        if query.whole:
            query.whole = False
            self._tell("query_dropped", query.number)

    def one_less(self, query: Query, now_s: float) -> None:
        """A call of it is no longer under way."""
        query.under_way -= 1
        query.last_s = now_s
        if query.under_way == 0:
            if query.ending:
                self._close(query, now_s)
            else:
                self._idle.append((now_s, query))

    def end(self, query_id: Hashable) -> bool:
        """No further calls will come. False if there is no such query."""
        query = self._open.get(query_id)
        if query is None:
            return False
        query.ending = True
        if query.under_way == 0:
            self._close(query, query.last_s)
        return True

    def expire(self, now_s: float) -> int:
        """End those that have been idle for too long; returns how many."""
        ended = 0
        while self._idle and now_s - self._idle[0][0] >= self._options.idle_s:
            since_s, query = self._idle.popleft()
            if query.last_s == since_s and query.under_way == 0 and self._open.get(query.id) is query:
                self._close(query, since_s)
                ended += 1
        return ended

    # ---- inside --------------------------------------------------------------------------------------------

    def _arrived(self, query_id: Hashable | None, now_s: float, slo_s: float | None, tenant: str) -> Query:
        number = self._seen
        self._seen += 1
        query = Query(
            id=("single", number) if query_id is None else query_id,
            number=number,
            arrival_s=now_s,
            slo_s=self._options.slo_s if slo_s is None else slo_s,
            tenant=self.tenant_number(tenant),
            last_s=now_s,
            ending=query_id is None,
        )
        self._open[query.id] = query
        self._tell("query_arrived", number, now_s, slo_s=query.slo_s, tenant=query.tenant)
        return query

    def _let_go(self, query: Query) -> None:
        """It gets no further calls: it ends with those under way."""
        query.ending = True
        if query.under_way == 0:
            self._close(query, query.last_s)
        else:
            del self._open[query.id]

    def _close(self, query: Query, now_s: float, dropped: bool = False) -> None:
        if self._open.get(query.id) is query:
            del self._open[query.id]
        if dropped or not query.whole:
            if query.whole:
                self._tell("query_dropped", query.number)
            return
        self._plan.learn({(depth, stage) for stage, depths in query.steps.items() for depth in depths})
        self._tell("query_finished", query.number, now_s)
