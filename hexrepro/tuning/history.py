"""What a coordinator has seen: queries, their calls, and how those followed each other.

Fed with events as they happen, by the simulator's loop or by the gateway; nothing in it looks ahead. What an event leaves
out is inferred: a call waits for those calls of its query that had finished when it was released.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

# One call of a finished query; indices count from the query's first call.
STEP = np.dtype(
    [
        ("stage", np.int32),
        ("input_tokens", np.int32),
        ("output_tokens", np.int32),
        ("template", np.int32),
        ("template_tokens", np.int32),
        ("tool_time_s", np.float64),
        ("depth", np.int32),  # longest chain of prerequisites before it
    ]
)


@dataclass(slots=True)
class Call:
    """One LLM call. Times in seconds; None = not yet."""

    stage: int
    input_tokens: int
    template: int
    template_tokens: int
    instance: int
    key: float
    estimate_s: float
    budget_s: float
    release_s: float
    after: tuple[int, ...]  # the calls of its query that it waited for
    depth: int
    tool_time_s: float
    first_token_s: float | None = None
    finish_s: float | None = None
    output_tokens: int = 0  # seen so far; all of them once it has finished


@dataclass(slots=True)
class Query:
    """One query; `frontier` are its finished calls that no other finished call waited for."""

    arrival_s: float
    slo_s: float
    tenant: int
    calls: list[Call] = field(default_factory=list)
    index: dict[Hashable, int] = field(default_factory=dict)
    frontier: tuple[int, ...] = ()
    finish_s: float | None = None
    steps: np.ndarray | None = None  # STEP[k], once it has finished
    edges: np.ndarray | None = None  # int32[e, 2], (before, after)
    # (stage, how many steps of that stage so far) -> depth; parallel calls are one step
    places: dict[tuple[int, int], int] | None = None


class History:
    """The finished and the unfinished queries. `forget` drops what a window no longer covers.

    Event methods take the ids of the caller's choice, and times in seconds on the caller's clock.
    """

    def __init__(self) -> None:
        self.stages: dict[Hashable, int] = {}
        self.open: dict[Hashable, Query] = {}  # in order of arrival
        self.finished: list[Query] = []  # in order of finish
        self.arrivals: list[float] = []  # of all queries, in order

    # ---- events --------------------------------------------------------------------------------------------

    def query_arrived(self, query: Hashable, time_s: float, *, slo_s: float, tenant: int = 0) -> None:
        self.open[query] = Query(time_s, slo_s, tenant)
        self.arrivals.append(time_s)

    def call_dispatched(
        self,
        query: Hashable,
        call: Hashable,
        time_s: float,
        *,
        stage: Hashable,
        input_tokens: int,
        instance: int,
        key: float = 0.0,
        estimate_s: float = 0.0,
        budget_s: float = 0.0,
        template: int = -1,
        template_tokens: int = 0,
    ) -> None:
        """A call was released and sent to an instance, with the queue key and estimates that it got."""
        record = self.open[query]
        calls = record.calls
        after = record.frontier
        ready_s = max((calls[i].finish_s for i in after), default=record.arrival_s)
        record.index[call] = len(calls)
        calls.append(
            Call(
                stage=self.stages.setdefault(stage, len(self.stages)),
                input_tokens=input_tokens,
                template=template,
                template_tokens=template_tokens,
                instance=instance,
                key=key,
                estimate_s=estimate_s,
                budget_s=budget_s,
                release_s=time_s,
                after=after,
                depth=1 + max((calls[i].depth for i in after), default=-1),
                tool_time_s=max(0.0, time_s - ready_s),
            )
        )

    def call_moved(self, query: Hashable, call: Hashable, instance: int) -> None:
        """A call was taken from its instance and sent to another; what it had generated is lost."""
        record = self._call(query, call)
        record.instance, record.first_token_s, record.output_tokens = instance, None, 0

    def first_token(self, query: Hashable, call: Hashable, time_s: float) -> None:
        self._call(query, call).first_token_s = time_s

    def call_finished(self, query: Hashable, call: Hashable, time_s: float, output_tokens: int) -> None:
        record = self.open[query]
        index = record.index[call]
        done = record.calls[index]
        done.finish_s, done.output_tokens = time_s, max(output_tokens, 1)
        if done.first_token_s is None:
            done.first_token_s = time_s
        record.frontier = (*(i for i in record.frontier if i not in done.after), index)

    def query_finished(self, query: Hashable, time_s: float) -> None:
        """All its calls have finished. A query without calls is dropped: it says nothing of the load."""
        record = self.open.pop(query)
        record.finish_s = time_s
        if record.calls:
            _close(record)
            self.finished.append(record)

    def query_dropped(self, query: Hashable) -> None:
        """It was refused, cancelled or failed: its arrival counts, its calls do not."""
        self.open.pop(query, None)

    def _call(self, query: Hashable, call: Hashable) -> Call:
        record = self.open[query]
        return record.calls[record.index[call]]

    # ---- the window ----------------------------------------------------------------------------------------

    def forget(self, before_s: float, keep: int = 0) -> None:
        """Drop finished queries that ended before a time, but for the last `keep`, and arrivals before it."""
        first = next((i for i, q in enumerate(self.finished) if q.finish_s >= before_s), len(self.finished))
        del self.finished[: max(0, min(first, len(self.finished) - keep))]
        first = next((i for i, t in enumerate(self.arrivals) if t >= before_s), len(self.arrivals))
        del self.arrivals[:first]

    def finished_since(self, time_s: float) -> list[Query]:
        return [q for q in self.finished if q.finish_s >= time_s]

    def running(self) -> Iterator[tuple[Query, int]]:
        """Each unfinished call that was dispatched, with its query and index."""
        for record in self.open.values():
            for index, call in enumerate(record.calls):
                if call.finish_s is None:
                    yield record, index


def _close(record: Query) -> None:
    calls = record.calls
    record.steps = np.array(
        [
            (c.stage, c.input_tokens, c.output_tokens, c.template, c.template_tokens, c.tool_time_s, c.depth)
            for c in calls
        ],
        STEP,
    )
    pairs = [(before, i) for i, c in enumerate(calls) for before in c.after]
    record.edges = np.array(pairs, np.int32).reshape(-1, 2)
    record.places = places(calls)


def places(calls: list[Call]) -> dict[tuple[int, int], int]:
    """Where a query passed: (stage, 1 for its first step of that stage, 2 for the second, ...) -> depth."""
    result, count = {}, {}
    for depth, stage in sorted({(c.depth, c.stage) for c in calls}):
        count[stage] = count.get(stage, 0) + 1
        result[stage, count[stage]] = depth
    return result
