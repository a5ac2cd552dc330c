"""From rows to a `Workload`: queries that lack a row are left out, the rest is put in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hexrepro.errors import InputError
from hexrepro.workload.dag import csr, topological_order
from hexrepro.workload.formats.report import Report
from hexrepro.workload.formats.rows import Rows
from hexrepro.workload.types import Workload


@dataclass
class Calls:
    """What a reader found, a call a row (n rows, in the file's order), before anything is left out.

    ``query``: int64[n], any label that the rows of a query share. ``before``, ``after``: int64[e], dependencies as rows.
    ``arrival_s``: float64[n], when the query of the row arrives: the least over its rows counts; NaN = the file has none.
    ``skip``: bool[n], rows that are no calls of the workload although nothing is wrong with them.
    ``prefixes``: from the kept rows int64[m], in the file's order, to the columns template, template_tokens, context and
    context_tokens, each int[m]; None = nothing is shared.
    """

    query: np.ndarray
    stage_names: tuple[str, ...]
    stage: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    arrival_s: np.ndarray
    before: np.ndarray
    after: np.ndarray
    tool_time_s: np.ndarray
    tenant_names: tuple[str, ...] = ("default",)
    tenant: np.ndarray | None = None
    slo_scale: np.ndarray | None = None
    skip: np.ndarray | None = None
    prefixes: Callable[[np.ndarray], dict[str, np.ndarray]] | None = None


def build(name: str, rows: Rows, calls: Calls) -> Workload:
    """The workload of the usable rows; InputError when there are none."""
    import pandas as pd

    n = len(rows)
    query = pd.factorize(calls.query)[0]  # np.unique takes five times as long
    kept = np.flatnonzero(~lost_queries(rows, query)[query]) if n else np.zeros(0, np.int64)
    if calls.skip is not None:
        kept = kept[~calls.skip[kept]]
    if len(kept) == 0:
        raise nothing_left(rows.report)

    # queries in order of arrival, and of their first rows where that says nothing; calls in the file's order
    n_queries = int(query.max()) + 1
    first_row = np.full(n_queries, n)
    np.minimum.at(first_row, query[kept], kept)
    arrival_s = np.full(n_queries, np.inf)
    with np.errstate(invalid="ignore"):
        np.minimum.at(arrival_s, query[kept], calls.arrival_s[kept])  # NaN where one is NaN
    rank = np.empty(n_queries, np.int64)
    rank[np.lexsort((first_row, arrival_s))] = np.arange(n_queries)
    order = kept[np.argsort(rank[query[kept]], kind="stable")]
    sizes = np.bincount(rank[query[kept]])
    query_offsets = np.concatenate([[0], np.cumsum(sizes[sizes > 0])])

    place = np.full(n, -1)
    place[order] = np.arange(len(order))
    inside = (place[calls.before] >= 0) & (place[calls.after] >= 0)
    before, after = place[calls.before[inside]], place[calls.after[inside]]
    topological = topological_order(query_offsets, before, after, str(rows.report.path))
    order = order[topological]
    place[order] = np.arange(len(order))
    before, after = place[calls.before[inside]], place[calls.after[inside]]
    succ_offsets, successors = csr(len(order), before, after)

    columns = {}
    if calls.prefixes is not None:
        columns = calls.prefixes(kept)
        in_file = np.empty(n, np.int64)
        in_file[kept] = np.arange(len(kept))
        columns = {field: values[in_file[order]] for field, values in columns.items()}
    none = np.full(len(order), -1)
    heads = order[query_offsets[:-1]]
    return Workload(
        name=name,
        stage_names=calls.stage_names,
        stage=calls.stage[order],
        input_tokens=calls.input_tokens[order],
        output_tokens=calls.output_tokens[order],
        **{
            "template": none,
            "template_tokens": none + 1,
            "context": none,
            "context_tokens": none + 1,
            **columns,
        },
        tool_time_s=calls.tool_time_s[order],
        succ_offsets=succ_offsets,
        successors=successors,
        query_offsets=query_offsets,
        arrival_s=arrival_s[query[heads]],
        tenant=np.zeros(len(heads), np.int64) if calls.tenant is None else calls.tenant[heads],
        tenant_names=calls.tenant_names,
        slo_scale=np.ones(len(heads)) if calls.slo_scale is None else calls.slo_scale[heads],
    )


def distinct_pairs(before: np.ndarray, after: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Dependencies between n rows, each once, in order of ``before``."""
    if len(before) == 0:
        return before, after
    key = np.sort(before * np.int64(n) + after)  # np.unique takes five times as long
    key = key[np.append(True, key[1:] != key[:-1])]
    return key // n, key % n


def lost_queries(rows: Rows, query: np.ndarray) -> np.ndarray:
    """bool[q]: queries with an unusable row. A query of which other rows were fine is counted as left out with them."""
    lost = np.bincount(query, rows.bad) > 0
    fine = lost[query] & ~rows.bad
    rows.report.left_queries += len(np.unique(query[fine]))
    rows.report.left_calls += int(fine.sum())
    return lost


def nothing_left(report: Report) -> InputError:
    """The error for a file of which no row can be used."""
    if report.reasons:
        return InputError(report.first())
    return InputError(f"{report.path}: holds no calls; it must hold at least one")
