"""Hypothesis strategies: small workloads and clusters that provoke what goes wrong in a scheduler.

Every time is a dyadic rational (a multiple of 2^-24 s, and sums stay below 2^20 s), so floats are exact and
two simulators that are both right agree to the bit, whatever order they add in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from hexrepro.cluster.latency import LatencyModel
from hexrepro.cluster.types import Cluster, InstanceSpec
from hexrepro.workload.types import Workload


def make_workload(queries: list[dict[str, Any]], name: str = "drawn", n_tenants: int = 1) -> Workload:
    """A Workload from plain dicts.

    A query: {arrival_s, tenant=0, slo_scale=1, calls}. A call: {input_tokens, output_tokens, stage=0,
    template=-1, template_tokens=0, context=-1, context_tokens=0, tool_time_s=0, after=[]}; `after` holds the
    places of its prerequisites in the query's list of calls, all before its own.
    """
    calls = [call for query in queries for call in query["calls"]]
    offsets = np.cumsum([0] + [len(query["calls"]) for query in queries])
    successors: list[list[int]] = [[] for _ in calls]
    for first, query in zip(offsets, queries, strict=False):
        for place, call in enumerate(query["calls"]):
            for before in call.get("after", ()):
                successors[first + before].append(int(first) + place)
    n_stages = 1 + max(call.get("stage", 0) for call in calls)

    def column(field: str, default: int = 0) -> np.ndarray:
        return np.array([call.get(field, default) for call in calls], dtype=np.int32)

    return Workload(
        name=name,
        stage_names=tuple(f"stage {i}" for i in range(n_stages)),
        stage=column("stage"),
        input_tokens=column("input_tokens"),
        output_tokens=column("output_tokens"),
        template=column("template", -1),
        template_tokens=column("template_tokens"),
        context=column("context", -1),
        context_tokens=column("context_tokens"),
        tool_time_s=np.array([float(call.get("tool_time_s", 0.0)) for call in calls]),
        succ_offsets=np.cumsum([0] + [len(s) for s in successors]).astype(np.int32),
        successors=np.array([s for followers in successors for s in sorted(followers)], dtype=np.int32),
        query_offsets=offsets.astype(np.int32),
        arrival_s=np.array([float(query["arrival_s"]) for query in queries]),
        tenant=np.array([query.get("tenant", 0) for query in queries], dtype=np.int32),
        tenant_names=tuple(f"tenant {i}" for i in range(n_tenants)),
        slo_scale=np.array([float(query.get("slo_scale", 1.0)) for query in queries]),
    )


def make_instance(
    name: str, coefficients, kv_blocks: int, block_size=16, max_num_seqs=256, budget=2048
) -> InstanceSpec:
    """coefficients: base_s, prefill_token_s, prefill_context_s, sequence_s, kv_token_s."""
    return InstanceSpec(
        name=name,
        gpu="none",
        model="none",
        view="test",
        tensor_parallel=1,
        latency=LatencyModel(*coefficients),
        kv_blocks=kv_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )


def dyadic(smallest: int, greatest: int, per: int = 1024) -> st.SearchStrategy[float]:
    return st.integers(smallest, greatest).map(lambda k: k / per)


MAX_TENANTS = 3


@st.composite
def dependencies(draw: st.DrawFn, n: int) -> list[list[int]]:
    """Prerequisites of each of n calls: a chain, a fan out and in, no edges, stages with a barrier, or
    anything.
    """
    shape = draw(st.sampled_from(["chain", "fan", "apart", "stages", "any"]))
    if shape == "chain":
        return [[i - 1] if i else [] for i in range(n)]
    if shape == "fan":
        return [[]] + [[0] for _ in range(1, n - 1)] + ([list(range(1, n - 1)) or [0]] if n > 1 else [])
    if shape == "apart":
        return [[] for _ in range(n)]
    if shape == "stages":
        level = sorted(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
        below = [max((x for x in level if x < mine), default=None) for mine in level]
        return [[j for j in range(n) if level[j] == before] for before in below]
    return [sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(n)]


@st.composite
def workloads(
    draw: st.DrawFn, max_queries: int = 12, max_calls: int = 8, max_input: int = 120, max_output: int = 24
) -> Workload:
    n_stages = draw(st.integers(1, 3))
    n_tenants = draw(st.integers(1, MAX_TENANTS))
    template_tokens = draw(st.lists(st.integers(1, max_input // 2), max_size=3))
    n_contexts = draw(st.integers(0, 3))
    context_tokens: dict[tuple[int, int], int] = {}  # (template, context) -> length: one for all calls
    queries = []
    now = 0
    for _ in range(draw(st.integers(1, max_queries))):
        # ties, bursts, gaps; 1/256 s
        now += draw(st.one_of(st.just(0), st.integers(0, 64), st.integers(0, 4096)))
        n = draw(st.integers(1, max_calls))
        context = draw(st.integers(-1, n_contexts - 1))  # one schema a query
        calls = []
        for after in draw(dependencies(n)):
            template = draw(st.integers(-1, len(template_tokens) - 1))
            shared_template = template_tokens[template] if template >= 0 else 0
            shared_context = 0
            call_context = context if draw(st.booleans()) else -1
            if call_context >= 0:
                if (template, call_context) not in context_tokens:
                    context_tokens[template, call_context] = draw(st.integers(1, max_input // 2))
                shared_context = context_tokens[template, call_context]
            own = draw(st.one_of(st.integers(1, 8), st.integers(1, max_input)))
            calls.append(
                dict(
                    stage=draw(st.integers(0, n_stages - 1)),
                    input_tokens=shared_template + shared_context + own,
                    output_tokens=draw(st.one_of(st.just(1), st.integers(1, max_output))),
                    template=template,
                    template_tokens=shared_template,
                    context=call_context,
                    context_tokens=shared_context,
                    tool_time_s=draw(st.one_of(st.just(0.0), dyadic(0, 512, 256))),
                    after=after,
                )
            )
        tenant = draw(st.integers(0, n_tenants - 1))
        queries.append(
            dict(arrival_s=now / 256, tenant=tenant, slo_scale=draw(dyadic(1, 64, 8)), calls=calls)
        )
    return make_workload(queries, n_tenants=n_tenants)


def blocks_needed(workload: Workload, block_size: int) -> int:
    """Blocks of the largest call. The KV of the last token is never written."""
    tokens = workload.input_tokens + workload.output_tokens - 1
    return int(-(-tokens.max() // block_size))


@st.composite
def clusters(draw: st.DrawFn, workload: Workload, max_instances: int = 4) -> Cluster:
    """One to four instances that can hold every call of the workload, some of them barely."""
    instances = []
    for i in range(draw(st.integers(1, max_instances))):
        block_size = draw(st.sampled_from([1, 4, 16]))
        least = blocks_needed(workload, block_size)
        kv_blocks = least + draw(
            st.one_of(st.integers(0, 3), st.integers(0, least), st.integers(0, 20 * least))
        )
        seqs = draw(st.one_of(st.integers(1, 4), st.integers(1, 32)))
        budget = max(seqs, draw(st.one_of(st.integers(1, 16), st.integers(1, 256), st.just(2048))))
        zero_or = [
            st.one_of(st.just(0.0), dyadic(0, greatest, per))
            for greatest, per in ((8, 8192), (4, 65536), (8, 4096), (8, 65536))
        ]
        coefficients = (draw(dyadic(1, 64)), *(draw(c) for c in zero_or))
        instances.append(make_instance(f"instance {i}", coefficients, kv_blocks, block_size, seqs, budget))
    return Cluster("drawn", tuple(instances))


batching = st.sampled_from(["chunked", "prefill_first"])
prefix_caching = st.sampled_from(["off", "template", "full"])


@st.composite
def runs(draw: st.DrawFn, **sizes: int) -> tuple[Workload, Cluster, str, str]:
    """(workload, cluster, batching, prefix caching)."""
    workload = draw(workloads(**sizes))
    return workload, draw(clusters(workload)), draw(batching), draw(prefix_caching)


@st.composite
def pressed_runs(draw: st.DrawFn) -> tuple[Workload, Cluster, str, str]:
    """The same as `runs`, made for the KV pool: one instance, a burst of calls that share prefixes, small blocks, a pool that
    holds a few of them. Every run evicts, most preempt, and resumed calls find what is left of their own blocks.
    """
    template_tokens = draw(st.lists(st.integers(1, 24), min_size=1, max_size=3))
    context_tokens = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    queries = []
    now = 0
    for _ in range(draw(st.integers(3, 14))):
        now += draw(st.integers(0, 8))
        template = draw(st.integers(-1, len(template_tokens) - 1))
        context = draw(st.integers(-1, len(context_tokens) - 1))
        shared = template_tokens[template] if template >= 0 else 0
        behind = context_tokens[context] if context >= 0 else 0
        call = dict(
            input_tokens=shared + behind + draw(st.integers(1, 24)),
            output_tokens=draw(st.integers(1, 40)),
            template=template,
            template_tokens=shared,
            context=context,
            context_tokens=behind,
        )
        queries.append(
            dict(
                arrival_s=now / 64,
                tenant=draw(st.integers(0, 2)),
                slo_scale=draw(dyadic(1, 64, 8)),
                calls=[call],
            )
        )
    workload = make_workload(queries, n_tenants=MAX_TENANTS)
    block_size = draw(st.sampled_from([1, 4]))
    kv_blocks = blocks_needed(workload, block_size) + draw(st.integers(0, 24 // block_size))
    seqs = draw(st.integers(2, 6))
    budget = max(seqs, draw(st.sampled_from([8, 32, 256])))
    instance = make_instance("one", (1 / 64, 1 / 4096, 0.0, 0.0, 0.0), kv_blocks, block_size, seqs, budget)
    return workload, Cluster("pressed", (instance,)), draw(batching), draw(prefix_caching)
