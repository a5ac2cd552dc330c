"""Whole runs to try a policy on: small workloads drawn at random, simulated, checked from outside, and made small.

All times drawn are multiples of 1/1024 s, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hexrepro.cluster.latency import LatencyModel
from hexrepro.cluster.types import Cluster, InstanceSpec
from hexrepro.scheduling.estimates import Estimates, estimate
from hexrepro.scheduling.policy import Policy
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator import EngineOptions, GridResult, Result, simulate_grid
from hexrepro.testing.shrinking import shrunk
from hexrepro.workload.types import Workload

BASE_SLO_S = 8.0
CASES = 40
TIMES = ("release_s", "admit_s", "first_token_s", "call_finish_s")


@dataclass(frozen=True)
class Call:
    stage: int
    input_tokens: int
    output_tokens: int
    after: tuple[int, ...] = ()  # places of its prerequisites in its query


@dataclass(frozen=True)
class Query:
    arrival_s: float
    calls: tuple[Call, ...]
    tenant: int = 0
    slo_scale: float = 1.0


@dataclass(frozen=True)
class Case:
    """What is run: some queries on some instances."""

    queries: tuple[Query, ...]
    instances: tuple[InstanceSpec, ...]

    def workload(self) -> Workload:
        calls = [call for query in self.queries for call in query.calls]
        offsets = np.cumsum([0, *(len(query.calls) for query in self.queries)])
        successors: list[list[int]] = [[] for _ in calls]
        for first, query in zip(offsets, self.queries, strict=False):
            for place, call in enumerate(query.calls):
                for before in call.after:
                    successors[first + before].append(int(first) + place)
        n, stages = len(calls), 1 + max(call.stage for call in calls)
        return Workload(
            name="drawn",
            stage_names=tuple(f"stage{i}" for i in range(stages)),
            stage=np.array([c.stage for c in calls], np.int32),
            input_tokens=np.array([c.input_tokens for c in calls], np.int32),
            output_tokens=np.array([c.output_tokens for c in calls], np.int32),
            template=np.full(n, -1, np.int32),
            template_tokens=np.zeros(n, np.int32),
            context=np.full(n, -1, np.int32),
            context_tokens=np.zeros(n, np.int32),
            tool_time_s=np.zeros(n),
            succ_offsets=np.cumsum([0, *(len(s) for s in successors)]).astype(np.int32),
            successors=np.array([c for s in successors for c in sorted(s)], np.int32),
            query_offsets=offsets.astype(np.int32),
            arrival_s=np.array([q.arrival_s for q in self.queries]),
            tenant=np.array([q.tenant for q in self.queries], np.int32),
            tenant_names=tuple(f"tenant{i}" for i in range(1 + max(q.tenant for q in self.queries))),
            slo_scale=np.array([q.slo_scale for q in self.queries]),
        )

    def cluster(self) -> Cluster:
        named = [replace(spec, name=f"instance{m}") for m, spec in enumerate(self.instances)]
        return Cluster("drawn", tuple(named))

    def describe(self) -> str:
        """The case in one line: `after` is left out, every number that matters is there."""
        queries = [
            f"query {i} at {q.arrival_s:g} s with "
            + ", ".join(f"{c.input_tokens} → {c.output_tokens} tokens" for c in q.calls[:3])
            + (f" and {len(q.calls) - 3} more calls" if len(q.calls) > 3 else "")
            for i, q in enumerate(self.queries[:3])
        ]
        if len(self.queries) > 3:
            queries.append(f"{len(self.queries) - 3} more queries")
        count = len(self.instances)
        return f"{count} instance{'s' if count > 1 else ''}; {'; '.join(queries)}"


def instance(
    base_s: float, *, seqs: int = 8, blocks: int = 4096, prefill_token_s: float = 0.0
) -> InstanceSpec:
    return InstanceSpec(
        name="one", gpu="none", model="none", view="test", tensor_parallel=1,
        latency=LatencyModel(base_s, prefill_token_s), kv_blocks=blocks, max_num_seqs=seqs,
    )  # fmt: skip


def draw_case(rng: np.random.Generator, size: int) -> Case:
    """Up to `size` queries in bursts and gaps; chains, fans and independent calls; instances with few or many slots."""
    queries, now = [], 0
    for _ in range(size):
        now += int(rng.choice([0, rng.integers(0, 200), rng.integers(0, 4000)]))
        count = int(rng.integers(1, 6))
        shape = rng.choice(["chain", "fan", "apart"])
        calls = []
        for i in range(count):
            after = {"chain": (i - 1,), "fan": (0,), "apart": ()}[shape] if i else ()
            calls.append(
                Call(int(rng.integers(0, 3)), int(rng.integers(1, 200)), int(rng.integers(1, 40)), after)
            )
        tenant = int(rng.integers(0, 2))
        queries.append(Query(now / 1024, tuple(calls), tenant, float(rng.choice([0.5, 1.0, 4.0]))))
    specs = [
        instance(
            int(rng.integers(1, 65)) / 1024,
            seqs=int(rng.choice([1, 2, 8])),
            blocks=int(
                rng.choice([16, 64, 4096])
            ),  # 16 blocks hold the largest call, 239 tokens, and little more
            prefill_token_s=int(rng.integers(0, 3)) / 1024,
        )
        for _ in range(int(rng.integers(1, 2 + min(size, 3))))
    ]
    return Case(tuple(queries), tuple(specs))


def cases(seed: int, count: int = CASES) -> Iterator[Case]:
    """`count` cases, the small ones first."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        yield draw_case(rng, 1 + i * 12 // count)


def beliefs(case: Case, workload: Workload | None = None) -> Estimates:
    return estimate(workload or case.workload(), instance_views(case.cluster()), prefix_caching="off")


def run(
    policy: Policy,
    case: Case,
    *,
    workload: Workload | None = None,
    estimates: Estimates | None = None,
    copies: int = 1,
    workers: int = 1,
) -> GridResult:
    """`copies` equal runs of a case, each with the same seed."""
    workload = workload or case.workload()
    return simulate_grid(
        workload,
        case.cluster(),
        policy,
        arrivals_s=np.tile(workload.arrival_s, (copies, 1)),
        seeds=np.zeros(copies, np.int64),
        base_slo=BASE_SLO_S,
        engine=EngineOptions(prefix_caching="off"),
        estimates=estimates or beliefs(case, workload),
        workers=workers,
        detail=True,
    )


def smallest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case with fewer queries, calls, tokens and instances, as long as `fails` holds of it."""
    return shrunk(case, _simpler, fails)


def _simpler(case: Case) -> Iterator[Case]:
    for i in range(len(case.queries) if len(case.queries) > 1 else 0):
        yield replace(case, queries=case.queries[:i] + case.queries[i + 1 :])
    for m in range(len(case.instances) if len(case.instances) > 1 else 0):
        yield replace(case, instances=case.instances[:m] + case.instances[m + 1 :])
    for i, query in enumerate(case.queries):
        changes = []
        if len(query.calls) > 1:
            changes.append(query.calls[:-1])  # no other call can wait for the last
        for j, call in enumerate(query.calls):
            for field in ("input_tokens", "output_tokens"):
                if (value := getattr(call, field)) > 1:
                    shorter = replace(call, **{field: value // 2})
                    changes.append((*query.calls[:j], shorter, *query.calls[j + 1 :]))
        for calls in changes:
            yield replace(
                case, queries=(*case.queries[:i], replace(query, calls=calls), *case.queries[i + 1 :])
            )


# ---- what must hold of a run; each answers with what is wrong, or None ----------------------------------------------------


def lost_or_doubled(case: Case, result: Result) -> str | None:
    """Conservation: every call is dispatched once, to an instance that there is, and finishes once, after what it waited for;
    and the instances have made as many tokens as the calls have."""
    w = case.workload()
    for name in TIMES:
        if not np.isfinite(getattr(result, name)).all():
            return f"call {int(np.argmin(np.isfinite(getattr(result, name))))} has no {name}"
    times = np.stack([getattr(result, name) for name in TIMES])
    if (np.diff(times, axis=0) < 0).any():
        return f"call {int(np.argmax((np.diff(times, axis=0) < 0).any(axis=0)))} finishes before it begins"
    ready_s = w.arrival_s[w.query].copy()
    for call in range(w.n_calls):
        for successor in w.successors[w.succ_offsets[call] : w.succ_offsets[call + 1]]:
            ready_s[successor] = max(ready_s[successor], result.call_finish_s[call])
    if (result.release_s != ready_s).any():
        return f"call {int(np.argmax(result.release_s != ready_s))} is not dispatched when what it waited for ends"
    if (result.finish_s != np.maximum.reduceat(result.call_finish_s, w.query_offsets[:-1])).any():
        return "a query does not end with its last call"
    for m in range(len(case.instances)):
        mine = result.instance == m
        made = int(result.decode_tokens[m] + mine.sum())
        wanted = int(w.output_tokens[mine].sum())
        if not wanted - result.preemptions[m] <= made <= wanted:
            return f"instance {m} has made {made} tokens for calls that have {wanted}"
    return None


def idle_with_work(case: Case, result: Result) -> str | None:
    """Work conservation: an instance computes whenever a call that was sent to it is not finished."""
    for m in range(len(case.instances)):
        mine = np.flatnonzero(result.instance == m)
        covered, until = 0.0, -np.inf
        for call in mine[np.argsort(result.release_s[mine], kind="stable")]:
            begin, end = result.release_s[call], result.call_finish_s[call]
            covered += max(0.0, end - max(begin, until))
            until = max(until, end)
        if abs(covered - result.busy_s[m]) > 1e-9 * max(1.0, covered):
            return f"instance {m} computes for {result.busy_s[m]:.4g} s of the {covered:.4g} s in which it has a call"
    return None


def sees_the_future(policy: Policy, case: Case, seed: int) -> str | None:
    """The oracle boundary: the same beliefs, other true lengths. Until the first call ends whose length differs, every
    decision must be the same."""
    w, known = case.workload(), beliefs(case)
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.uniform(size=w.n_calls) < 0.5, w.output_tokens, rng.integers(1, 40, w.n_calls))
    other = replace(w, output_tokens=lengths.astype(np.int32))
    one = run(policy, case, estimates=known).run(0)
    two = run(policy, case, workload=other, estimates=known).run(0)
    changed = w.output_tokens != other.output_tokens
    if not changed.any():
        return None
    until = min(one.call_finish_s[changed].min(), two.call_finish_s[changed].min())
    decided = (one.release_s < until) & (two.release_s < until)
    elsewhere = decided & (one.instance != two.instance)
    # two starts later than `until` may differ: the calls ahead in the queue end otherwise by then
    later = decided & (np.minimum(one.admit_s, until) != np.minimum(two.admit_s, until))
    for differ, what in ((elsewhere, "goes to another instance"), (later, "starts at another time")):
        if differ.any():
            call = int(np.argmax(differ))
            return (
                f"call {call}, released at {one.release_s[call]:.4g} s, {what} when only the lengths of calls differ"
                f" that end at {until:.4g} s or later"
            )
    return None


def same(one: GridResult, two: GridResult) -> bool:
    """Whether all runs of both are equal to the bit."""
    for name, values in vars(one).items():
        other = getattr(two, name)
        if not (values == values[:1]).all() or not np.array_equal(values, other):
            return False
    return True
