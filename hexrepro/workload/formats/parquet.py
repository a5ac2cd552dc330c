"""Parquet with one row a call: the whole of a `Workload`, given back unchanged.

A file made elsewhere needs only ``query``, ``stage``, ``input_tokens`` and ``output_tokens``; all other columns have a
default (see :data:`COLUMNS`). Queries are numbered in order of their first row, calls in order of their rows inside the
query. A file with a wrong row is refused, with the row, the field, the value and what would be right: a program wrote it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hexrepro.errors import InputError
from hexrepro.workload.dag import csr, edges, topological_order
from hexrepro.workload.formats.report import Report
from hexrepro.workload.formats.rows import trace_name
from hexrepro.workload.types import Workload

# column -> (kind, default; None when there is none); the last three are the query's, the same in all its rows
COLUMNS: dict[str, tuple[str, object]] = {
    "query": ("id", None),
    "stage": ("text", None),
    "input_tokens": ("int", None),
    "output_tokens": ("int", None),
    "wait_for": ("list", None),
    "tool_time_s": ("float", 0.0),
    "template": ("int", -1),
    "template_tokens": ("int", 0),
    "context": ("int", -1),
    "context_tokens": ("int", 0),
    "arrival_s": ("float", np.nan),
    "tenant": ("text", "default"),
    "slo_scale": ("float", 1.0),
}
_OPTIONAL = {"wait_for", *(name for name, (_, default) in COLUMNS.items() if default is not None)}
_METADATA_KEY = b"hexrepro.workload"


def read(path: Path, report: Report, block_tokens: int | None = None) -> Workload:
    """The reader of the registry."""
    workload = read_parquet(path)
    report.rows = workload.n_calls
    return workload


def write_parquet(workload: Workload, path: str | Path) -> None:
    """The whole workload, one row a call; `read_parquet` gives back an equal one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    w = workload
    before, after = edges(w.succ_offsets, w.successors)
    order = np.lexsort((before, after))
    inside = before[order] - w.query_offsets[w.query[before[order]]]
    offsets = np.concatenate([[0], np.cumsum(w.n_predecessors)]).astype(np.int32)

    def names(index: np.ndarray, words: tuple[str, ...]) -> pa.Array:
        return pa.DictionaryArray.from_arrays(pa.array(index, pa.int32()), pa.array(words, pa.string()))

    table = pa.table(
        {
            "query": pa.array(w.query),
            "stage": names(w.stage, w.stage_names),
            "input_tokens": pa.array(w.input_tokens),
            "output_tokens": pa.array(w.output_tokens),
            "wait_for": pa.ListArray.from_arrays(pa.array(offsets), pa.array(inside.astype(np.int32))),
            "tool_time_s": pa.array(w.tool_time_s),
            "template": pa.array(w.template),
            "template_tokens": pa.array(w.template_tokens),
            "context": pa.array(w.context),
            "context_tokens": pa.array(w.context_tokens),
            "arrival_s": pa.array(w.arrival_s[w.query], from_pandas=True),  # NaN is written as null
            "tenant": names(w.tenant[w.query], w.tenant_names),
            "slo_scale": pa.array(w.slo_scale[w.query]),
        }
    )
    about = {"name": w.name, "stage_names": w.stage_names, "tenant_names": w.tenant_names}
    pq.write_table(table.replace_schema_metadata({_METADATA_KEY: json.dumps(about).encode()}), path)


def read_parquet(path: str | Path) -> Workload:
    """A workload from Parquet with the columns of :data:`COLUMNS`, one row a call."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    try:
        # not through the dataset reader, which would take names like year=2020 in a path as columns
        with pq.ParquetFile(path) as file:
            table = file.read()
    except FileNotFoundError:
        raise InputError(f"{path}: cannot be read (no such file)") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable Parquet file ({' '.join(str(error).split())})") from None
    if table.num_rows == 0:
        raise InputError(f"{path}: holds no rows; it needs one row a call")
    for name in COLUMNS:
        if name not in table.column_names and name not in _OPTIONAL:
            raise InputError(f"{path}: the column {name} is missing; it has {', '.join(table.column_names)}")
    about = _about(path, table.schema.metadata)

    query, rows = _queries(path, table.column("query").combine_chunks())
    n_calls = table.num_rows
    query_offsets = np.concatenate([[0], np.cumsum(np.bincount(query))])
    stage_names, stage = _words(path, table, "stage", rows, about.get("stage_names"))
    tenant_names, tenant = _words(path, table, "tenant", rows, about.get("tenant_names"))
    numbers = {
        name: _numbers(path, table, name, rows)
        for name, (kind, _) in COLUMNS.items()
        if kind in ("int", "float")
    }
    before, after = _wait_for(path, table, rows, query, query_offsets)
    what = str(path)
    order = topological_order(query_offsets, before, after, what)
    if np.any(order != np.arange(n_calls)):
        place = np.empty(n_calls, np.int64)
        place[order] = np.arange(n_calls)
        before, after = place[before], place[after]
        stage, tenant, rows = stage[order], tenant[order], rows[order]
        numbers = {name: values[order] for name, values in numbers.items()}
    succ_offsets, successors = csr(n_calls, before, after)

    def of_query(name: str, values: np.ndarray) -> np.ndarray:
        """One value a query, which all its rows must agree on."""
        first = values[query_offsets[:-1]]
        differs = ~((values == first[query]) | ((values != values) & (first != first)[query]))
        if differs.any():
            at = int(np.argmax(differs))
            shown = (tenant_names[values[at]], tenant_names[first[query[at]]]) if name == "tenant" else None
            a, b = shown or (values[at], first[query[at]])
            raise InputError(
                f"{path}: row {rows[at]} (query {query[at]}): {name} is {a} but {b} "
                "in the query's first row; it must be the same in all rows of a query"
            )
        return first

    columns = {name: numbers[name] for name, (_, default) in COLUMNS.items() if name in numbers}
    per_query = {name: of_query(name, columns.pop(name)) for name in ("arrival_s", "slo_scale")}
    per_query["tenant"] = of_query("tenant", tenant)
    try:
        return Workload(
            name=about.get("name", trace_name(path)),
            stage_names=stage_names,
            stage=stage,
            tenant_names=tenant_names,
            succ_offsets=succ_offsets,
            successors=successors,
            query_offsets=query_offsets,
            **columns,
            **per_query,
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _about(path: Path, metadata: dict[bytes, bytes] | None) -> dict:
    """Name, stage names and tenant names as `write_parquet` noted them; {} in a file made elsewhere."""
    if not metadata or _METADATA_KEY not in metadata:
        return {}
    try:
        about = json.loads(metadata[_METADATA_KEY])
        return {
            "name": str(about["name"]),
            "stage_names": tuple(map(str, about["stage_names"])),
            "tenant_names": tuple(map(str, about["tenant_names"])),
        }
    except (ValueError, TypeError, KeyError):
        raise InputError(
            f"{path}: its hexrepro.workload metadata is damaged; write it anew, or remove it"
        ) from None


def _queries(path: Path, column) -> tuple[np.ndarray, np.ndarray]:
    """``query`` int64[n], numbered in order of first row, and ``rows`` int64[n], the file's rows in order of
    query."""
    if column.null_count:
        raise InputError(f"{path}: row {_first_null(column)}: query is missing; it must name the row's query")
    ids = column.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    rows = np.argsort(ids, kind="stable")  # dictionary indices are given in order of first appearance
    return ids[rows], rows


def _first_null(column) -> int:
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


def _words(
    path: Path, table, name: str, rows: np.ndarray, known: tuple[str, ...] | None
) -> tuple[tuple, np.ndarray]:
    """A column of words as ``(names, int64[n])``; the names in the noted order, or else in order of
    appearance."""
    import pyarrow as pa

    if name not in table.column_names:
        return ("default",), np.zeros(len(rows), np.int64)
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # an empty or many-chunk column may stay chunked
        column = column.chunk(0)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise InputError(f"{path}: column {name} holds {column.type}; it must hold text")
    if column.null_count:
        raise InputError(f"{path}: row {_first_null(column)}: {name} is missing; it must be a name")
    encoded = column.dictionary_encode()
    found = encoded.dictionary.to_pylist()
    index = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    names = known if known is not None and set(found) <= set(known) else tuple(found)
    empty = [word for word in found if not word]
    if empty:
        at = int(np.argmax(index == found.index("")))
        raise InputError(f"{path}: row {at}: {name} is empty; it must be a name")
    return names, np.array([names.index(word) for word in found], np.int64)[index][rows]


def _numbers(path: Path, table, name: str, rows: np.ndarray) -> np.ndarray:
    """A column of numbers in order of ``rows``: int64[n] or float64[n], checked for what a single value can
    get wrong."""
    import pyarrow as pa

    kind, default = COLUMNS[name]
    if name not in table.column_names:
        return np.full(len(rows), default, np.int64 if kind == "int" else np.float64)
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0)
    right = _RIGHT[name]
    if not (
        pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)
    ):
        raise InputError(f"{path}: column {name} holds {column.type}; it must hold {right}")
    if column.null_count and name != "arrival_s":
        raise InputError(f"{path}: row {_first_null(column)}: {name} is missing; it must be {right}")
    values = column.to_numpy(zero_copy_only=False)
    if kind == "float":
        values = values.astype(np.float64)
        bad = ~(np.isfinite(values) & (values >= 0))
        bad |= (values == 0) & (name == "slo_scale")
        if name == "arrival_s":  # nothing at all means no arrivals; a mixture is refused later
            bad &= ~np.isnan(values)
    else:
        least = 1 if name in ("input_tokens", "output_tokens") else COLUMNS[name][1]
        with np.errstate(invalid="ignore"):
            bad = ~((values >= least) & (values < 2**31))
            if values.dtype.kind == "f":
                bad |= values != np.floor(values)
    if bad.any():
        at = int(np.argmax(bad))
        raise InputError(
            f"{path}: row {at} ({_place(table, at)}): {name} is {values[at]}; it must be {right}"
        )
    return values.astype(np.int64 if kind == "int" else np.float64)[rows]


_RIGHT = {
    "input_tokens": "a whole number of tokens from 1",
    "output_tokens": "a whole number of tokens from 1",
    "template": "an id from 0, or -1 for none",
    "template_tokens": "a whole number of tokens from 0",
    "context": "an id from 0, or -1 for none",
    "context_tokens": "a whole number of tokens from 0",
    "tool_time_s": "finite seconds, not negative",
    "arrival_s": "finite seconds, not negative (or missing in every row)",
    "slo_scale": "a finite number above 0",
}


def _place(table, row: int) -> str:
    """The query and the call of a file's row, in words."""
    ids = table.column("query").slice(0, row + 1).to_pylist()
    return f"query {ids[-1]} call {ids[:-1].count(ids[-1])}"


def _wait_for(
    path: Path, table, rows: np.ndarray, query: np.ndarray, query_offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Dependencies ``(before, after)`` as call indices. Without the column every call waits for the one
    before it."""
    import pyarrow as pa

    if "wait_for" not in table.column_names:
        chained = np.flatnonzero(query[1:] == query[:-1])
        return chained, chained + 1
    column = table.column("wait_for").combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0)
    right = "a list of calls of the query by number, from 0 (empty for none)"
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not is_list or not (
        pa.types.is_integer(column.type.value_type) or pa.types.is_null(column.type.value_type)
    ):
        raise InputError(f"{path}: column wait_for holds {column.type}; it must hold {right}")
    if column.null_count:
        at = _first_null(column)
        raise InputError(f"{path}: row {at} ({_place(table, at)}): wait_for is missing; it must be {right}")
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.slice(offsets[0], offsets[-1] - offsets[0])
    # file rows -> call indices
    call_of_row = np.empty(len(rows), np.int64)
    call_of_row[rows] = np.arange(len(rows))
    row = np.repeat(np.arange(len(rows)), np.diff(offsets))
    if values.null_count:
        at = int(row[_first_null(values)])
        raise InputError(
            f"{path}: row {at} ({_place(table, at)}): wait_for holds a missing value; it must be {right}"
        )
    number = values.to_numpy(zero_copy_only=False).astype(np.int64)
    after = call_of_row[row]
    size = np.diff(query_offsets)[query[after]]
    bad = (number < 0) | (number >= size)
    if bad.any():
        k = int(np.argmax(bad))
        raise InputError(
            f"{path}: row {row[k]} ({_place(table, row[k])}): wait_for holds {number[k]}; "
            f"the query has calls 0 to {size[k] - 1}"
        )
    before = query_offsets[query[after]] + number
    pair = np.lexsort((before, after))
    twice = (before[pair][1:] == before[pair][:-1]) & (after[pair][1:] == after[pair][:-1])
    if twice.any():
        k = int(pair[1:][np.argmax(twice)])
        raise InputError(
            f"{path}: row {row[k]} ({_place(table, row[k])}): wait_for holds {number[k]} twice; "
            "name each call once"
        )
    return before, after
