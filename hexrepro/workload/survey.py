"""What `inspect` shows of a workload: sizes, shapes, times, burstiness and sharing, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hexrepro.workload.dag import levels
from hexrepro.workload.formats.prefixes import unbounded_hits
from hexrepro.workload.types import Workload

QUANTILES = (0.05, 0.5, 0.95, 1.0)
WINDOWS_S = (1, 10, 60, 600, 3600, 86400)
LEAST_WINDOWS, LEAST_QUERIES = (
    20,
    1.0,
)  # a dispersion needs so many windows, and so many queries in a mean one


@dataclass(frozen=True)
class Stage:
    """Calls of one stage, or of all: quantiles at :data:`QUANTILES`, lengths in tokens, times in seconds."""

    name: str
    calls: int
    input: np.ndarray
    output: np.ndarray
    shared: np.ndarray  # template and context
    tool_s: np.ndarray


@dataclass(frozen=True)
class Arrivals:
    """When queries come. ``gap_cv``: standard deviation over mean of the gaps, 1 for Poisson. ``dispersion``: window (s)
    -> variance over mean of the queries in a window, 1 for Poisson at any window."""

    span_s: float
    rate_qps: float
    gap_cv: float
    dispersion: dict[int, float]


@dataclass(frozen=True)
class Survey:
    """A workload in numbers. ``depth``: calls on the longest chain of a query, ``width``: the most calls of a query that
    have equally many calls in front of them; int64[q]."""

    queries: int
    calls: int
    calls_per_query: np.ndarray  # int64[q]
    depth: np.ndarray
    width: np.ndarray
    stages: tuple[Stage, ...]
    total: Stage
    arrivals: Arrivals | None
    shared_share: float  # of all prompt tokens: template and context
    found_share: float  # of all prompt tokens: what a cache without limit finds
    templates: int
    contexts: int
    tenants: tuple[tuple[str, int], ...]  # name, queries
    slo_scales: np.ndarray  # the distinct ones


def survey(w: Workload) -> Survey:
    """Measure a workload."""
    level = levels(w.succ_offsets, w.successors).astype(np.int64)
    depth = np.zeros(w.n_queries, np.int64)
    np.maximum.at(depth, w.query, level + 1)
    place, beside = np.unique(w.query * (level.max() + 1) + level, return_counts=True)
    width = np.zeros(w.n_queries, np.int64)
    np.maximum.at(width, place // (level.max() + 1), beside)
    stages = tuple(
        _stage(w, name, calls)
        for s, name in enumerate(w.stage_names)
        if len(calls := np.flatnonzero(w.stage == s))
    )
    prompts = int(w.input_tokens.sum(dtype=np.int64))
    shared = w.template_tokens.astype(np.int64) + w.context_tokens
    hits = unbounded_hits(w.template, w.template_tokens, w.context, w.context_tokens)
    queries_of = np.bincount(w.tenant, minlength=len(w.tenant_names)).tolist()
    return Survey(
        queries=w.n_queries,
        calls=w.n_calls,
        calls_per_query=np.diff(w.query_offsets),
        depth=depth,
        width=width,
        stages=stages,
        total=_stage(w, "all", np.arange(w.n_calls)),
        arrivals=_arrivals(w.arrival_s) if w.has_arrivals else None,
        shared_share=int(shared.sum()) / prompts,
        found_share=int(hits.sum()) / prompts,
        templates=len(np.unique(w.template[w.template >= 0])),
        contexts=len(np.unique(w.context[w.context >= 0])),
        tenants=tuple(zip(w.tenant_names, queries_of, strict=True)),
        slo_scales=np.unique(w.slo_scale),
    )


def _stage(w: Workload, name: str, calls: np.ndarray) -> Stage:
    def quantiles(values: np.ndarray) -> np.ndarray:
        # values that occur: a length between two others means nothing
        return np.quantile(values, QUANTILES, method="inverted_cdf")

    return Stage(
        name,
        len(calls),
        quantiles(w.input_tokens[calls]),
        quantiles(w.output_tokens[calls]),
        quantiles(w.template_tokens[calls].astype(np.int64) + w.context_tokens[calls]),
        quantiles(w.tool_time_s[calls]),
    )


def _arrivals(arrival_s: np.ndarray) -> Arrivals:
    gaps = np.diff(arrival_s)
    span_s = float(arrival_s[-1] - arrival_s[0])
    if span_s == 0:
        return Arrivals(0.0, float("nan"), float("nan"), {})
    dispersion = {}
    for window_s in WINDOWS_S:
        windows = int(span_s // window_s)
        if windows >= LEAST_WINDOWS and len(arrival_s) / windows >= LEAST_QUERIES:
            counts = np.bincount(((arrival_s - arrival_s[0]) // window_s).astype(np.int64))[:windows]
            dispersion[window_s] = float(counts.var(ddof=1) / counts.mean())
    cv = float(gaps.std(ddof=1) / gaps.mean()) if len(gaps) > 1 else float("nan")
    return Arrivals(span_s, len(gaps) / span_s, cv, dispersion)
