"""Mooncake traces: JSON lines with timestamp, input_length, output_length and hash_ids, a row a call.

Times are milliseconds from the start of the trace. ``hash_ids`` name the prompt's blocks, of 512 tokens in the published
traces, the last one perhaps partly filled; prompts that begin with the same ids share that prefix (see `prefixes`). The
block size is not in the file: it is found from lengths and numbers of blocks, or given. Rows with one ``session_id`` are
turns of one query: each waits for the one before it, and then for ``delay`` ms, or else for the time between the two
timestamps. Other rows are queries of their own. The stage of every call is ``call``.

Sources: FAST25-release in github.com/kvcache-ai/Mooncake; for session_id, delay and the other names input_tokens,
output_tokens, created_time and delay_ms: docs/dynosim/trace-formats.md and lib/data-gen/src/mooncake.rs in
github.com/ai-dynamo/dynamo.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from hexrepro.errors import InputError
from hexrepro.workload.dag import concat_ranges
from hexrepro.workload.formats.build import Calls, build
from hexrepro.workload.formats.json_lines import read_jsonl
from hexrepro.workload.formats.prefixes import from_blocks
from hexrepro.workload.formats.report import Report, counted
from hexrepro.workload.formats.rows import Field, Rows, trace_name
from hexrepro.workload.types import Workload

BLOCK_TOKENS = 512  # of the published traces
_TOKENS = "a whole number of tokens from 1"
_MS = "milliseconds, finite and not negative"
FIELDS = {
    "timestamp": Field("float", _MS),
    "input_length": Field("int", _TOKENS),
    "output_length": Field("int", _TOKENS),
    "hash_ids": Field("ints", "a list of block ids, whole numbers from 0"),
    "session_id": Field("text", "the name of a session"),
    "delay": Field("float", _MS),
}
ALIASES = {
    "created_time": "timestamp",
    "input_tokens": "input_length",
    "output_tokens": "output_length",
    "delay_ms": "delay",
}


class HasDependencies(InputError):
    """The file has more than this format says."""


def read(path: Path, report: Report, block_tokens: int | None = None) -> Workload:
    """The reader of the registry."""
    rows = read_rows(path, report, FIELDS | {"wait_for": Field("texts", "missing")})
    if rows.given("wait_for"):
        raise HasDependencies(f"{path}: has wait_for, which is agentic_mooncake's; name that format, or none")
    n = len(rows)
    timestamp_ms = rows.number("timestamp", np.nan)
    output_tokens = rows.whole("output_length")
    input_tokens, prefixes = prompts(rows, block_tokens)

    _, session = rows.words("session_id", default="?")
    session = np.where(rows.blank("session_id"), session.max(initial=0) + 1 + np.arange(n), session)
    order = np.argsort(session, kind="stable")
    follows = session[order[1:]] == session[order[:-1]]
    before, after = order[:-1][follows], order[1:][follows]
    wait_ms = _waits(rows, session, before, after, timestamp_ms)
    first = np.ones(n, bool)
    first[after] = False
    refuse_without_arrival(rows, first, timestamp_ms)
    arrival_s = np.full(n, np.inf)
    arrival_s[first] = timestamp_ms[first] / 1000
    calls = Calls(
        query=session,
        stage_names=("call",),
        stage=np.zeros(n, np.int64),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        arrival_s=arrival_s,
        before=before,
        after=after,
        tool_time_s=wait_ms / 1000,
        prefixes=prefixes,
    )
    return build(trace_name(path), rows, calls)


def _waits(
    rows: Rows, session: np.ndarray, before: np.ndarray, after: np.ndarray, timestamp_ms: np.ndarray
) -> np.ndarray:
    """Milliseconds float64[n] from the end of a session's last turn to the next; 0 for a first one."""
    import pandas as pd

    n = len(rows)
    delay_ms = rows.number("delay", np.nan)
    first = np.ones(n, bool)
    first[after] = False
    right = "0 or missing in the first turn of a session"
    rows.refuse(first & (np.nan_to_num(delay_ms) > 0), "delay", right)
    last_ms = np.full(n, np.nan)
    last_ms[after] = pd.Series(timestamp_ms).groupby(session).ffill().to_numpy()[before]
    since_ms = timestamp_ms - last_ms
    wait_ms = np.where(np.isnan(delay_ms), np.nan_to_num(since_ms), delay_ms)
    wait_ms[first] = 0.0
    rows.refuse(wait_ms < 0, "timestamp", "no earlier than the session's turn before")
    return np.maximum(wait_ms, 0.0)


def refuse_without_arrival(rows: Rows, first: np.ndarray, timestamp_ms: np.ndarray) -> None:
    """A timestamp for all the rows that begin a query, or for none."""
    missing = first & np.isnan(timestamp_ms)
    if not missing[~rows.bad].all():
        given = first & ~rows.bad & ~missing
        if given.any():
            rows.refuse(missing, "timestamp", "given, as in other rows that begin a query")


def read_rows(path: Path, report: Report, fields: dict[str, Field]) -> Rows:
    """JSON lines, with the other names that some fields go by."""
    import pyarrow.compute as pc

    wanted = fields | {other: fields[name] for other, name in ALIASES.items() if name in fields}
    rows = read_jsonl(path, report, wanted)
    for other, name in ALIASES.items():
        if name in fields:
            rows.columns[name] = pc.coalesce(rows.columns[name], rows.columns.pop(other))
    return rows


def prompts(rows: Rows, block_tokens: int | None) -> tuple[np.ndarray, Callable | None]:
    """Prompt lengths int64[n], and what finds the shared prefixes of the kept rows (None = no row has hash_ids).

    ``block_tokens``: tokens that a hash id stands for; None = find it.
    """
    ids, offsets = rows.lists("hash_ids")
    blocks = np.diff(offsets)
    missing = rows.missing("input_length")
    rows.refuse(missing & (blocks == 0), "input_length", FIELDS["input_length"].right)
    input_tokens = rows.whole("input_length", default=0)
    if len(ids) == 0:
        rows.report.note("no row has hash_ids: nothing is known to be shared")
        return input_tokens, None
    known = ~missing & ~rows.bad & (blocks > 0)
    size = block_tokens or _block_size(rows.report, input_tokens[known], blocks[known])
    rows.report.note(f"{size} tokens a hash id ({'as given' if block_tokens else 'found from the lengths'})")
    input_tokens = np.where(missing, blocks * size, input_tokens)

    def prefixes(kept: np.ndarray) -> dict[str, np.ndarray]:
        picked = concat_ranges(offsets[kept], blocks[kept])
        cuts = np.concatenate([[0], np.cumsum(blocks[kept])])
        values = ids.to_numpy(zero_copy_only=False)[picked]
        columns, in_blocks, in_segments = from_blocks(values, cuts, size, input_tokens[kept])
        total = int(input_tokens[kept].sum())
        text = f"a cache without limit would find {in_blocks / total:.1%} of the prompt tokens by hash_ids"
        if in_segments != in_blocks:
            text += f", {in_segments / total:.1%} as a template and a context a call (deeper nesting is lost)"
        rows.report.note(text)
        return columns

    return input_tokens, prefixes


def _block_size(report: Report, input_tokens: np.ndarray, blocks: np.ndarray) -> int:
    """The power of two that explains the most rows: a prompt fills all its blocks but the last; 512 if that is as good."""
    sizes = [BLOCK_TOKENS, *(2**k for k in range(17) if 2**k != BLOCK_TOKENS)]
    fits = [int((-(-input_tokens // size) == blocks).sum()) for size in sizes]
    best = int(np.argmax(fits))
    if fits[best] < len(blocks):
        rest = len(blocks) - fits[best]
        report.note(f"more or fewer hash_ids than blocks of {sizes[best]} tokens in {counted(rest, 'row')}")
    return sizes[best]
