"""Dependencies between the calls of a query, as CSR arrays.

``successors[succ_offsets[i]:succ_offsets[i + 1]]`` are the calls that wait for call i. Everything here is
vectorised over all calls of a workload; nothing loops over calls in Python except to word an error.
"""

from __future__ import annotations

import numpy as np

from hexrepro.errors import InputError


def concat_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """All the integers of the ranges ``[starts[k], starts[k] + lengths[k])``, one range after the other
    (int64)."""
    starts = np.asarray(starts, np.int64)
    lengths = np.asarray(lengths, np.int64)
    total = int(lengths.sum())
    if total == 0:
        return np.zeros(0, np.int64)
    first = np.cumsum(lengths) - lengths
    return np.arange(total, dtype=np.int64) + np.repeat(starts - first, lengths)


def csr(n_calls: int, before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges ``before[k] -> after[k]`` (call indices) as ``(succ_offsets int32[n + 1], successors int32[e])``.

    Successors of one call come out in ascending order.
    """
    before = np.asarray(before, np.int64)
    after = np.asarray(after, np.int64)
    order = np.lexsort((after, before))
    offsets = np.zeros(n_calls + 1, np.int32)
    np.cumsum(np.bincount(before, minlength=n_calls), out=offsets[1:])
    return offsets, after[order].astype(np.int32)


def edges(succ_offsets: np.ndarray, successors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of :func:`csr`: ``(before int32[e], after int32[e])``."""
    n_calls = len(succ_offsets) - 1
    before = np.repeat(np.arange(n_calls, dtype=np.int32), np.diff(succ_offsets))
    return before, np.asarray(successors, np.int32)


def barrier_edges(group: np.ndarray, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges of a workflow whose groups of calls follow each other behind barriers.

    ``group``: int[n], the number of each call's group inside its query; it may only grow along the calls of a
    query. Calls of one group are parallel; each waits for every call of the group before it. Returns
    ``(before, after)``.
    """
    group = np.asarray(group, np.int64)
    query = np.asarray(query, np.int64)
    n_calls = len(group)
    if n_calls == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    is_start = np.ones(n_calls, bool)
    is_start[1:] = (group[1:] != group[:-1]) | (query[1:] != query[:-1])
    start = np.flatnonzero(is_start)
    size = np.diff(np.append(start, n_calls))
    # a group is followed by the next one unless that belongs to the next query
    has_next = np.append(query[start[1:]] == query[start[:-1]], False)
    next_start = np.append(start[1:], 0)
    next_size = np.append(size[1:], 0)
    run = np.cumsum(is_start) - 1  # which group each call is in
    fan_out = np.where(has_next[run], next_size[run], 0)
    before = np.repeat(np.arange(n_calls, dtype=np.int64), fan_out)
    after = concat_ranges(next_start[run], fan_out)
    return before, after


def levels(succ_offsets: np.ndarray, successors: np.ndarray) -> np.ndarray:
    """Length of the longest chain of prerequisites before each call (int32[n]); -1 for calls on or behind a
    cycle."""
    n_calls = len(succ_offsets) - 1
    succ_offsets = np.asarray(succ_offsets, np.int64)
    waiting = np.bincount(successors, minlength=n_calls)
    level = np.full(n_calls, -1, np.int32)
    frontier = np.flatnonzero(waiting == 0)
    depth = 0
    while len(frontier):
        level[frontier] = depth
        reached = successors[concat_ranges(succ_offsets[frontier], np.diff(succ_offsets)[frontier])]
        calls, hits = np.unique(reached, return_counts=True)
        waiting[calls] -= hits
        frontier = calls[waiting[calls] == 0]
        depth += 1
    return level


def find_cycle(succ_offsets: np.ndarray, successors: np.ndarray) -> list[int] | None:
    """The calls of one cycle, in order from its first call, or None when there is none."""
    level = levels(succ_offsets, successors)
    stuck = np.flatnonzero(level < 0)
    if len(stuck) == 0:
        return None
    before, after = edges(succ_offsets, successors)
    inside = (level[before] < 0) & (level[after] < 0)
    predecessor = dict(zip(after[inside].tolist(), before[inside].tolist(), strict=True))
    # every stuck call has a stuck predecessor, so walking back must come round
    seen: dict[int, int] = {}
    call = int(stuck[0])
    walk: list[int] = []
    while call not in seen:
        seen[call] = len(walk)
        walk.append(call)
        call = predecessor[call]
    cycle = walk[seen[call] :][::-1]
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]


def topological_order(
    query_offsets: np.ndarray, before: np.ndarray, after: np.ndarray, what: str
) -> np.ndarray:
    """A permutation int64[n] of the calls that puts every prerequisite first and leaves each query's calls
    together.

    An order that is already topological is left alone. ``what`` names the source in the error for a cycle.
    """
    n_calls = int(query_offsets[-1])
    if np.all(np.asarray(before) < np.asarray(after)):
        return np.arange(n_calls)
    succ_offsets, successors = csr(n_calls, before, after)
    refuse_cycle(succ_offsets, successors, query_offsets, what)
    level = levels(succ_offsets, successors)
    query = np.repeat(np.arange(len(query_offsets) - 1), np.diff(query_offsets))
    return np.lexsort((np.arange(n_calls), level, query))


def refuse_cycle(
    succ_offsets: np.ndarray, successors: np.ndarray, query_offsets: np.ndarray, what: str
) -> None:
    """InputError naming the query and the calls when the dependencies hold a cycle."""
    cycle = find_cycle(succ_offsets, successors)
    if cycle is None:
        return
    query = int(np.searchsorted(query_offsets, cycle[0], side="right")) - 1
    first = int(query_offsets[query])
    around = [*cycle, cycle[0]]
    shown = around if len(around) <= 8 else [*around[:7], cycle[0]]
    path = " -> ".join(str(call - first) for call in shown)
    raise InputError(
        f"{what}: query {query}: its calls wait for each other in a cycle (calls {path}); "
        "dependencies must form a directed graph without cycles"
    )
