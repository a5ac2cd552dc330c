"""What a workload looks like, in numbers: the statistics by which traces are compared."""

from __future__ import annotations

import numpy as np

from hexrepro.workload.types import Workload

PERCENTILES = (0, 25, 50, 75, 100)


def describe(workload: Workload) -> dict:
    """A plain dictionary of counts, quantiles and correlations.

    - ``queries``, ``calls``, ``distinct_queries`` (queries that differ in stages, lengths or dependencies);
    - ``calls_per_query``, ``input_tokens_per_query``, ``output_tokens_per_query``: means;
    - ``duration_s``, ``rate_qps``: when there are arrivals, the time of the last and the mean rate;
    - ``stages``: by stage, ``calls_per_query`` (mean), ``queries_by_calls`` ({calls: queries}), ``input`` and
      ``output`` ({percentile: tokens}), ``input_mean``, ``output_mean``, ``shared_tokens`` (mean template and
      context);
    - ``correlations`` (Pearson; NaN where a side does not vary): ``input_output`` by stage, over calls;
      ``successive_outputs`` by stage, over neighbouring calls of the stage in a query; ``inputs`` by (stage,
      stage) and ``output_and_calls`` by (stage, stage), over queries that have both: mean input with mean
      input, and mean output of the first with the number of calls of the second.
    """
    w = workload
    stages = range(len(w.stage_names))
    key = w.stage.astype(np.int64) * w.n_queries + w.query
    times = np.bincount(key, minlength=len(w.stage_names) * w.n_queries).reshape(-1, w.n_queries)
    with np.errstate(invalid="ignore"):
        mean_input = np.bincount(key, w.input_tokens, times.size).reshape(times.shape) / times
        mean_output = np.bincount(key, w.output_tokens, times.size).reshape(times.shape) / times

    summary: dict = {
        "name": w.name,
        "queries": w.n_queries,
        "distinct_queries": len(np.unique(distinct_queries(w))),
        "calls": w.n_calls,
        "calls_per_query": w.n_calls / w.n_queries,
        "input_tokens_per_query": float(w.input_tokens.sum(dtype=np.int64)) / w.n_queries,
        "output_tokens_per_query": float(w.output_tokens.sum(dtype=np.int64)) / w.n_queries,
    }
    if w.has_arrivals:
        span = float(w.arrival_s[-1] - w.arrival_s[0])
        summary["duration_s"] = float(w.arrival_s[-1])
        summary["rate_qps"] = (w.n_queries - 1) / span if span > 0 else float("nan")
    summary["stages"] = {}
    correlations: dict = {"input_output": {}, "successive_outputs": {}, "inputs": {}, "output_and_calls": {}}
    for s in stages:
        calls = np.flatnonzero(w.stage == s)
        if len(calls) == 0:
            continue
        name = w.stage_names[s]
        number, queries = np.unique(times[s], return_counts=True)
        shared = w.template_tokens[calls].astype(np.int64) + w.context_tokens[calls]
        summary["stages"][name] = {
            "calls_per_query": len(calls) / w.n_queries,
            "queries_by_calls": dict(zip(number.tolist(), queries.tolist(), strict=True)),
            "input": _quantiles(w.input_tokens[calls]),
            "output": _quantiles(w.output_tokens[calls]),
            "input_mean": float(w.input_tokens[calls].mean()),
            "output_mean": float(w.output_tokens[calls].mean()),
            "shared_tokens": float(shared.mean()),
        }
        correlations["input_output"][name] = _pearson(w.input_tokens[calls], w.output_tokens[calls])
        same = w.query[calls[1:]] == w.query[calls[:-1]]
        correlations["successive_outputs"][name] = _pearson(
            w.output_tokens[calls[:-1]][same], w.output_tokens[calls[1:]][same]
        )
        for other in stages:
            both = (times[s] > 0) & (times[other] > 0)
            if other == s or not both.any():
                continue
            pair = (name, w.stage_names[other])
            if s < other:
                correlations["inputs"][pair] = _pearson(mean_input[s, both], mean_input[other, both])
            correlations["output_and_calls"][pair] = _pearson(mean_output[s, both], times[other, both])
    summary["correlations"] = correlations
    return summary


def distinct_queries(workload: Workload) -> np.ndarray:
    """int64[q]: for each query, the first query with the same stages, lengths and dependencies."""
    w = workload
    relative = w.successors - w.query_offsets[w.query[w.successors]]
    columns = np.stack([w.stage, w.input_tokens, w.output_tokens, np.diff(w.succ_offsets)], axis=1)
    first: dict[tuple[bytes, bytes], int] = {}
    same = np.empty(w.n_queries, np.int64)
    offsets, edge_offsets = w.query_offsets.tolist(), w.succ_offsets[w.query_offsets].tolist()
    for i in range(w.n_queries):
        text = (
            columns[offsets[i] : offsets[i + 1]].tobytes(),
            relative[edge_offsets[i] : edge_offsets[i + 1]].tobytes(),
        )
        same[i] = first.setdefault(text, i)
    return same


def _quantiles(values: np.ndarray) -> dict[int, float]:
    return dict(zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True))


def _pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation; NaN with fewer than three pairs or when a side does not vary."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])
