"""The near future of a cluster, guessed from its recent past: a workload that can be simulated for any alpha.

It holds the queries under way, from where they stand, and the arrivals of the last window once more; these count. Behind
them the window comes a second time, so that the cluster does not run empty around the last of them.

What a coordinator can't know is drawn from what it has seen: how long a call under way will get, from the lengths of its
stage that exceed what it has generated; what comes after it, from a finished query that passed the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hexrepro.cluster.types import Cluster
from hexrepro.report.metrics import quantile
from hexrepro.scheduling.estimates import Estimates
from hexrepro.scheduling.policy import Policy
from hexrepro.simulator.engine import EngineOptions, Start, simulate_grid
from hexrepro.simulator.state import STARTED
from hexrepro.tuning.history import STEP, Call, History, Query, places
from hexrepro.workload.dag import csr
from hexrepro.workload.types import Workload


class BadWindow(Exception):
    """There is too little in the window to say anything; the message says what is missing."""


@dataclass(frozen=True, eq=False)
class Replay:
    """`workload`: the queries under way, then those to come, of which `start.watched` count; arrivals_s: float64[S, q], one row
    a seed."""

    workload: Workload
    start: Start
    arrivals_s: np.ndarray


@dataclass(frozen=True, eq=False)
class _Part:
    """A whole query, as far as it is known or guessed."""

    steps: np.ndarray  # STEP[k]
    edges: np.ndarray  # int32[e, 2]
    source: Query


def make_replay(
    history: History,
    now_s: float,
    *,
    window_s: float,
    seeds: int,
    cluster: Cluster,
    closed: np.ndarray,
    rng: np.random.Generator,
) -> Replay:
    """The replay at `now_s`. Seed 0 takes the window's arrivals as they were, the others draw their gaps with replacement and
    shuffle the queries. Raises BadWindow.
    """
    since_s = now_s - window_s
    finished = history.finished
    if not finished:
        raise BadWindow("no query has finished yet")
    donors, lengths = _Donors(finished), _lengths(finished, len(history.stages))
    generated = _Progress(history, cluster, now_s)
    under_way = [_complete(q, donors, lengths, generated, rng) for q in history.open.values()]
    again = [_Part(q.steps, q.edges, q) for q in finished if q.arrival_s >= since_s]
    again += [part for part in under_way if part.source.arrival_s >= since_s]
    if len(again) < 2:
        raise BadWindow(f"{len(again)} queries arrived in the last {window_s:g} s, at least 2 are needed")
    again.sort(key=lambda part: part.source.arrival_s)
    offsets_s = np.array([part.source.arrival_s for part in again]) - since_s

    n, first = len(again), len(under_way)
    arrivals_s = np.empty((seeds, first + 2 * n))
    arrivals_s[:, :first] = [part.source.arrival_s for part in under_way]
    gaps_s = np.diff(offsets_s, prepend=0.0)
    for seed in range(seeds):
        if seed == 0:
            arrivals_s[seed, first:] = now_s + np.concatenate([offsets_s, window_s + offsets_s])
        else:
            order = first + np.concatenate([rng.permutation(n), n + rng.permutation(n)])
            arrivals_s[seed, order] = now_s + np.cumsum(rng.choice(gaps_s, 2 * n))
    return Replay(
        _workload(under_way + again + again, list(history.stages)),
        Start(now_s, _started(under_way, generated), closed, warm=True, watched=first + n),
        arrivals_s,
    )


def predicted_p95_s(
    replay: Replay,
    policy: Policy,
    cluster: Cluster,
    alphas: Sequence[float],
    *,
    engine: EngineOptions,
    estimates: Estimates | str = "median",
    seeds: slice = slice(None),
    workers: int = 1,
) -> np.ndarray:
    """float64[A, S]: the P95 latency that the replay gives for each alpha and seed, over the queries that count."""
    rows = replay.arrivals_s[seeds]
    params = np.stack([policy.with_params(alpha=float(alpha)).dispatch_vector for alpha in alphas])
    grid = simulate_grid(
        replay.workload,
        cluster,
        policy,
        arrivals_s=np.tile(rows, (len(alphas), 1)),
        dispatch_params=np.repeat(params, len(rows), axis=0),
        seeds=np.tile(np.arange(len(rows)), len(alphas)),
        base_slo=1.0,  # the workload's SLO scales are in seconds
        engine=engine,
        estimates=estimates,
        start=replay.start,
        workers=workers,
    )
    return quantile(grid.latency_s[:, : replay.start.watched], 0.95).reshape(len(alphas), len(rows))


class _Progress:
    """How many tokens each call under way has generated: as reported, else by the clock and the latency model."""

    def __init__(self, history: History, cluster: Cluster, now_s: float) -> None:
        self._now_s = now_s
        self._running: list[list[Call]] = [[] for _ in cluster.instances]
        for query, index in history.running():
            call = query.calls[index]
            if call.first_token_s is not None:
                self._running[call.instance].append(call)
        self._step_s = [
            spec.latency.step_s(0, 0.0, len(calls), sum(c.input_tokens for c in calls))
            for spec, calls in zip(cluster.instances, self._running, strict=True)
        ]

    def of(self, call: Call) -> int:
        if call.finish_s is not None or call.first_token_s is None:
            return call.output_tokens if call.finish_s is not None else 0
        if call.output_tokens > 0:
            return call.output_tokens
        return 1 + max(0, int((self._now_s - call.first_token_s) / self._step_s[call.instance]))


def _lengths(donors: Sequence[Query], stages: int) -> list[np.ndarray]:
    """The output lengths seen of each stage, ascending."""
    steps = np.concatenate([q.steps for q in donors])
    return [np.sort(steps["output_tokens"][steps["stage"] == stage]) for stage in range(stages)]


def _draw_length(seen: np.ndarray, generated: int, rng: np.random.Generator) -> int:
    """A length that exceeds what has been generated; where none was seen that does, one token more."""
    longer = len(seen) - int(np.searchsorted(seen, generated, side="right"))
    return int(seen[len(seen) - longer + rng.integers(longer)]) if longer else generated + 1


def _complete(
    query: Query,
    donors: _Donors,
    lengths: list[np.ndarray],
    generated: _Progress,
    rng: np.random.Generator,
) -> _Part:
    """A query under way with the calls that it is expected to make yet."""
    calls = query.calls
    outputs = [
        c.output_tokens if c.finish_s is not None else _draw_length(lengths[c.stage], generated.of(c), rng)
        for c in calls
    ]
    steps = np.array(
        [
            (c.stage, c.input_tokens, out, c.template, c.template_tokens, c.tool_time_s, c.depth)
            for c, out in zip(calls, outputs, strict=True)
        ],
        STEP,
    )
    edges = [(before, i) for i, c in enumerate(calls) for before in c.after]
    last = max((c.depth for c in calls), default=-1)
    donor, depth = donors.draw(calls, rng)
    if donor is not None:
        rest = np.flatnonzero(donor.steps["depth"] > depth)
        ends = [i for i, c in enumerate(calls) if c.depth == last]
        place = np.full(len(donor.steps), -1)
        place[rest] = len(calls) + np.arange(len(rest))
        inner = place[donor.edges]
        inner = inner[inner[:, 1] >= 0]
        # what the donor's first remaining calls waited for is this query's last step
        first = set(place[rest].tolist()) - set(inner[inner[:, 0] >= 0, 1].tolist())
        edges += [(before, after) for after in first for before in ends]
        edges += inner[inner[:, 0] >= 0].tolist()
        steps = np.concatenate([steps, donor.steps[rest]])
    return _Part(steps, np.array(edges, np.int32).reshape(-1, 2), query)


class _Donors:
    """Finished queries, found by the places that they passed."""

    def __init__(self, finished: Sequence[Query]) -> None:
        self._all = finished
        self._passed: dict[tuple[int, int], list[tuple[Query, int]]] = {}
        for query in finished:
            for place, depth in query.places.items():
                self._passed.setdefault(place, []).append((query, depth))

    def draw(self, calls: list[Call], rng: np.random.Generator) -> tuple[Query | None, int]:
        """One that passed the place where a query with these calls stands, and the depth at which it did.

        Where nobody came as far in that stage, one of those that came furthest; None where nobody was ever there.
        """
        if not calls:
            return self._all[rng.integers(len(self._all))], -1
        (stage, count), _ = max(places(calls).items(), key=lambda item: item[1])
        while count > 0 and (stage, count) not in self._passed:
            count -= 1
        if count == 0:
            return None, 0
        passed = self._passed[stage, count]
        return passed[rng.integers(len(passed))]


def _workload(parts: Sequence[_Part], stages: Sequence) -> Workload:
    steps = np.concatenate([part.steps for part in parts])
    sizes = np.array([len(part.steps) for part in parts])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    edges = np.concatenate(
        [part.edges + offset for part, offset in zip(parts, offsets[:-1], strict=True)]
    ).astype(np.int64)
    succ_offsets, successors = csr(len(steps), edges[:, 0], edges[:, 1])
    none = np.full(len(steps), -1)
    return Workload(
        name="replay",
        stage_names=tuple(str(stage) for stage in stages),
        stage=steps["stage"],
        input_tokens=steps["input_tokens"],
        output_tokens=steps["output_tokens"],
        template=steps["template"],
        template_tokens=steps["template_tokens"],
        context=none,
        context_tokens=np.zeros(len(steps)),
        tool_time_s=steps["tool_time_s"],
        succ_offsets=succ_offsets,
        successors=successors,
        query_offsets=offsets,
        arrival_s=np.full(len(parts), np.nan),
        tenant=np.array([part.source.tenant for part in parts]),
        tenant_names=tuple(str(i) for i in range(1 + max(part.source.tenant for part in parts))),
        slo_scale=np.array([part.source.slo_s for part in parts]),
    )


def _started(under_way: Sequence[_Part], generated: _Progress) -> np.ndarray:
    """STARTED[k]: the calls that were dispatched, in the order that `Start` asks for."""
    finished, running, waiting = [], [], []
    first = 0
    for part in under_way:
        for index, call in enumerate(part.source.calls):
            row = (first + index, call.instance)
            rest = (call.key, call.estimate_s, call.budget_s)
            if call.finish_s is not None:
                finished.append((*row, call.output_tokens, *rest))
            elif call.first_token_s is not None:
                tokens = min(generated.of(call), int(part.steps["output_tokens"][index]) - 1)
                running.append((call.first_token_s, (*row, tokens, *rest)))
            else:
                waiting.append((call.release_s, (*row, 0, *rest)))
        first += len(part.steps)
    rows = [row for _, row in sorted(running) + sorted(waiting)]
    return np.array(finished + rows, STARTED)
