"""DynoSim's ``agentic_mooncake``: Mooncake's JSON lines with dependencies between the requests.

A row is a call. ``wait_for`` lists the request ids that must end before it starts, ``delay`` and ``tool_wait_ms`` are the
milliseconds after that. Rows that wait for nothing start at ``timestamp``; their delay counts for nothing, and neither does
the timestamp of rows that wait. Lengths and ``hash_ids`` are as in `mooncake`. A query is what hangs together by
``wait_for`` or has one ``session_id``; it arrives when its first call starts.

The writer adds ``stage``, ``tenant`` and ``slo_scale``, which the reader takes back and DynoSim passes over. Shared
prefixes are written as whole blocks: what a template or context has beyond its last whole block is lost, and so is the
workload's name. A query of which all first calls wait for a tool comes back as arriving when the first of them starts; without
arrivals a first call's tool time is lost.

Source: docs/dynosim/trace-formats.md, lib/data-gen/src/mooncake.rs and lib/mocker/src/loadgen/{trace,driver}.rs in
github.com/ai-dynamo/dynamo. Its version 2, which begins with a header line, is refused.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from hexrepro.errors import InputError
from hexrepro.workload.dag import csr, edges, levels
from hexrepro.workload.formats import mooncake
from hexrepro.workload.formats.build import Calls, build, distinct_pairs
from hexrepro.workload.formats.prefixes import to_blocks
from hexrepro.workload.formats.report import Report, counted
from hexrepro.workload.formats.rows import Field, Rows, trace_name
from hexrepro.workload.types import Workload

WRITE_BLOCK_TOKENS = 64
SCHEMA = "dynamo.agentic_mooncake"
FIELDS = mooncake.FIELDS | {
    "request_id": Field("text", "a name that no other row has"),
    "wait_for": Field("texts", "a list of other rows' request_id, without cycles"),
    "tool_wait_ms": mooncake.FIELDS["delay"],
    "stage": Field("text", "the name of a stage"),
    "tenant": Field("text", "the name of a tenant"),
    "slo_scale": Field("float", "a finite number above 0"),
    "schema": Field("text", "missing"),
}


def read(path: Path, report: Report, block_tokens: int | None = None) -> Workload:
    """The reader of the registry."""
    rows = mooncake.read_rows(path, report, FIELDS)
    if rows.given("schema"):
        raise InputError(
            f"{path}: begins with the header of agentic_mooncake version 2; "
            "hexrepro reads version 1, of which every row is a call with request_id and wait_for"
        )
    n = len(rows)
    before, after = _dependencies(rows)
    output_tokens = rows.whole("output_length")
    input_tokens, prefixes = mooncake.prompts(rows, block_tokens)
    stage_names, stage = rows.words("stage", default="call")
    tenant_names, tenant = rows.words("tenant", default="default")
    slo_scale = rows.number("slo_scale", 1.0)
    rows.refuse(slo_scale == 0, "slo_scale", FIELDS["slo_scale"].right)
    query = _hanging_together(rows, before, after)
    first = np.zeros(int(query.max(initial=0)) + 1, np.int64)
    first[query[::-1]] = np.arange(n)[::-1]
    for field, values in (("tenant", tenant), ("slo_scale", slo_scale)):
        other = (values != values[first][query]) & ~rows.bad[first][query]
        rows.refuse(other, field, "the same in all rows of a query")

    waits = np.zeros(n, bool)
    waits[after] = True
    timestamp_ms = rows.number("timestamp", np.nan)
    mooncake.refuse_without_arrival(rows, ~waits, timestamp_ms)
    wait_ms = rows.number("delay", 0.0) + rows.number("tool_wait_ms", 0.0)
    unused = int((~waits & (wait_ms > 0)).sum())
    if unused:
        report.note(
            f"a delay counts for nothing in {counted(unused, 'row')} that waits for nothing, as in DynoSim"
        )
    # the first calls start at their own times, the query with the earliest of them
    start_ms = np.where(waits, np.inf, np.nan_to_num(timestamp_ms))
    arrival_ms = np.full(n, np.inf)
    np.minimum.at(arrival_ms, query, start_ms)
    wait_ms[~waits] = start_ms[~waits] - arrival_ms[query[~waits]]
    dated = not np.isnan(timestamp_ms[~waits & ~rows.bad]).any()
    calls = Calls(
        query=query,
        stage_names=stage_names,
        stage=stage,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        arrival_s=arrival_ms[query] / 1000 if dated else np.full(n, np.nan),
        before=before,
        after=after,
        tool_time_s=np.where(rows.bad, 0.0, wait_ms) / 1000,
        tenant_names=tenant_names,
        tenant=tenant,
        slo_scale=slo_scale,
        prefixes=prefixes,
    )
    return build(trace_name(path), rows, calls)


def _dependencies(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """``(before, after)`` as rows, each pair once; refuses rows without a name of their own, or that wait for what is not
    there or for themselves."""
    import pyarrow as pa

    n = len(rows)
    rows.refuse(rows.blank("request_id"), "request_id", FIELDS["request_id"].right)
    values, offsets = rows.lists("wait_for")
    encoded = pa.concat_arrays([rows.columns["request_id"], values]).dictionary_encode()
    number = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    request, wanted = number[:n], number[n:]
    named = np.flatnonzero(~rows.bad)
    owner_of = np.full(len(encoded.dictionary), -1)  # -1 stays where no row has the name
    owner_of[request[named][::-1]] = named[::-1]  # the first row of a name has it
    twice = np.zeros(n, bool)
    twice[named] = owner_of[request[named]] != named
    rows.refuse(twice, "request_id", FIELDS["request_id"].right)

    after = np.repeat(np.arange(n), np.diff(offsets))
    before = owner_of[wanted]
    lost = np.zeros(n, bool)
    lost[after[before < 0]] = True

    def unknown(i: int) -> list[str]:
        span = slice(offsets[i], offsets[i + 1])
        return [name for name, b in zip(values[span].to_pylist(), before[span], strict=True) if b < 0]

    rows.refuse(lost, "wait_for", "request_ids of usable rows", unknown)
    before, after = distinct_pairs(before[before >= 0], after[before >= 0], n)
    stuck = levels(*csr(n, before, after)) < 0
    rows.refuse(stuck, "wait_for", "free of cycles: through others it waits for a row that waits for itself")
    return before, after


def _hanging_together(rows: Rows, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """int64[n]: the query of each row."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(rows)
    _, session = rows.words("session_id", default="?")
    tied = np.flatnonzero(~rows.blank("session_id"))
    one = np.concatenate([before, tied])
    other = np.concatenate([after, n + session[tied]])
    size = n + int(session.max(initial=0)) + 1
    graph = coo_array((np.ones(len(one), bool), (one, other)), shape=(size, size))
    return connected_components(graph, directed=False)[1][:n].astype(np.int64)


# ---- writing -----------------------------------------------------------------------------------------------


def write_agentic_mooncake(
    workload: Workload, path: str | Path, block_tokens: int | None = WRITE_BLOCK_TOKENS
) -> None:
    """A workload as agentic_mooncake, gzipped if the path ends in .gz. ``block_tokens``: tokens a hash id stands for."""
    w = workload
    ids, starts = to_blocks(
        w.template,
        w.template_tokens,
        w.context,
        w.context_tokens,
        w.input_tokens,
        block_tokens or WRITE_BLOCK_TOKENS,
    )
    before, after = edges(w.succ_offsets, w.successors)
    order = np.lexsort((before, after))
    prerequisites = before[order].tolist()
    waits = np.concatenate([[0], np.cumsum(w.n_predecessors)]).tolist()
    place = (np.arange(w.n_calls) - w.query_offsets[w.query]).tolist()
    query = w.query.tolist()
    stages = [json.dumps(name) for name in w.stage_names]
    start_ms = ((w.arrival_s[w.query] + w.tool_time_s) * 1000).tolist()
    tool_ms = (w.tool_time_s * 1000).tolist()
    of_query = [
        "".join(
            (f',"tenant":{json.dumps(w.tenant_names[t])}' if w.tenant_names[t] != "default" else "")
            + (f',"slo_scale":{s!r}' if s != 1 else "")
            for t, s in [pair]
        )
        for pair in zip(w.tenant.tolist(), w.slo_scale.tolist(), strict=True)
    ]
    lengths = zip(w.stage.tolist(), w.input_tokens.tolist(), w.output_tokens.tolist(), strict=True)
    starts = starts.tolist()

    path = Path(path)
    with (
        gzip.open(path, "wt", encoding="utf-8")
        if path.suffix == ".gz"
        else path.open("w", encoding="utf-8") as file
    ):
        for i, (stage, input_tokens, output_tokens) in enumerate(lengths):
            q = query[i]
            waiting = ",".join(f'"{q}.{place[b]}"' for b in prerequisites[waits[i] : waits[i + 1]])
            if waiting:
                when = f'"wait_for":[{waiting}],"delay":0.0,"tool_wait_ms":{tool_ms[i]!r},'
            else:
                when = '"wait_for":[],' + (f'"timestamp":{start_ms[i]!r},' if w.has_arrivals else "")
            blocks = ",".join(map(str, ids[starts[i] : starts[i + 1]].tolist()))
            file.write(
                f'{{"request_id":"{q}.{place[i]}","session_id":"{q}",{when}"input_length":{input_tokens},'
                f'"output_length":{output_tokens},"stage":{stages[stage]}{of_query[q]},"hash_ids":[{blocks}]}}\n'
            )
