"""Workloads that several test modules use, and what they ask of them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from hypothesis import strategies as st

from hexrepro.workload import Workload, describe, distinct_queries, generate
from hexrepro.workload.dag import csr

SEEDS = range(5)


def fields(**changed: object) -> dict:
    """Two queries: a chain of three calls, and a call with two parallel successors."""
    values = {
        "name": "two",
        "stage_names": ("plan", "write"),
        "stage": [0, 1, 1, 0, 1, 1],
        "input_tokens": [100, 200, 300, 100, 250, 260],
        "output_tokens": [5, 10, 20, 5, 30, 40],
        "template": [0, 1, 1, 0, 1, 1],
        "template_tokens": [50, 80, 80, 50, 80, 80],
        "context": [-1, 0, 0, -1, 1, 1],
        "context_tokens": [0, 60, 60, 0, 90, 90],
        "tool_time_s": [0.0, 0.5, 0.0, 0.0, 0.0, 0.0],
        "succ_offsets": [0, 1, 2, 2, 4, 4, 4],
        "successors": [1, 2, 4, 5],
        "query_offsets": [0, 3, 6],
        "arrival_s": [0.0, 1.5],
        "tenant": [0, 0],
        "tenant_names": ("default",),
        "slo_scale": [1.0, 1.0],
    }
    return values | changed


@st.composite
def workloads(draw, max_queries: int = 6) -> Workload:
    """Any small workload: random graphs, lengths, templates, contexts, tenants; with or without arrivals."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q = draw(st.integers(1, max_queries))
    calls_each = rng.integers(1, 7, q)
    offsets = np.concatenate([[0], np.cumsum(calls_each)])
    n = int(offsets[-1])
    query = np.repeat(np.arange(q), calls_each)
    before, after = np.nonzero(np.triu(query[:, None] == query[None, :], 1) & (rng.random((n, n)) < 0.4))
    succ_offsets, successors = csr(n, before, after)
    lengths = rng.integers(1, 50, 4)  # one a template
    template = rng.integers(-1, 4, n)
    template_tokens = np.where(template < 0, 0, lengths[template])
    context = np.where(rng.random(n) < 0.5, query, -1)
    context_tokens = np.where(context < 0, 0, 7 + (context * 5 + template) % 11)
    tenants = draw(st.integers(1, 3))
    return Workload(
        name="any",
        stage_names=("a", "b", "c"),
        stage=rng.integers(0, 3, n),
        input_tokens=template_tokens + context_tokens + rng.integers(1, 90, n),
        output_tokens=rng.integers(1, 40, n),
        template=template,
        template_tokens=template_tokens,
        context=context,
        context_tokens=context_tokens,
        tool_time_s=rng.random(n) * (rng.random(n) < 0.3),
        succ_offsets=succ_offsets,
        successors=successors,
        query_offsets=offsets,
        arrival_s=np.cumsum(rng.random(q)) if draw(st.booleans()) else np.full(q, np.nan),
        tenant=rng.integers(0, tenants, q),
        tenant_names=tuple(f"tenant {t}" for t in range(tenants)),
        slo_scale=rng.choice([0.5, 1.0, 2.0], q),
    )


@lru_cache
def traces(name: str) -> list[Workload]:
    """A trace at each of the seeds."""
    return [generate(name, seed) for seed in SEEDS]


def named_correlations(workload: Workload) -> np.ndarray:
    """The six that tie calls of a query together, over the distinct queries, and that of successive
    revisions' outputs."""
    found = describe(workload.take(np.unique(distinct_queries(workload))))["correlations"]
    return np.array(
        [
            found["input_output"]["candidate"],
            found["successive_outputs"]["candidate"],
            found["inputs"]["candidate", "revise"],
            found["output_and_calls"]["generate_unit_test", "evaluate"],
            found["inputs"]["generate_unit_test", "evaluate"],
            found["input_output"]["keywords"],
            found["successive_outputs"]["revise"],
        ]
    )
