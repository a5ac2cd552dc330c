"""A run as a trace for Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing), in the Trace Event Format's JSON.

Every instance is a process. Its calls are slices that lie beside each other in as many tracks as the instance holds calls at
once: a call's wait from its release to its start, and its run with the prompt up to the first token and the decoding after it.
A live client does not see the start, so there the prompt's slice holds the wait too. Arrows lead from a call to those that
waited for it. Counters show how many calls wait and run, and how many KV tokens these need if they share none. Queries are
slices in a process of their own, above the instances.

A trace is made of `Span`s, which come from a simulation's `calls.parquet` or from a live system's call log.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hexrepro.errors import InputError
from hexrepro.report.timeline import lanes

US = 1e6  # the format counts in microseconds
QUERIES = 1  # the process that shows the queries; instances come behind it
COLOURS = {
    "wait": "grey",
    "prefill": "rail_animation",
    "decode": "thread_state_running",
}  # Chrome's; Perfetto has its own


@dataclass(frozen=True)
class Span:
    """One call on an instance. Times in seconds from the trace's start; None where they are not known.

    call       its number within the query; `after` are those that it waited for
    start_s    when the engine first scheduled it; first_token_s and finish_s as in the simulator
    """

    query: str
    call: int
    stage: str
    instance: str
    release_s: float
    start_s: float | None
    first_token_s: float | None
    finish_s: float
    input_tokens: int
    output_tokens: int
    after: tuple[int, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


def trace_events(
    spans: Sequence[Span], instances: Iterable[str] = (), name: str = "hexrepro"
) -> dict[str, Any]:
    """The JSON object of a trace. `instances`: their names in order; those that served no call have a track too."""
    names = list(dict.fromkeys([*instances, *(s.instance for s in spans)]))
    events: list[dict[str, Any]] = []
    _name_process(events, QUERIES, f"queries of {name}", 0)
    _queries(events, spans)
    where: dict[tuple[str, int], tuple[int, int, Span]] = {}
    for order, instance in enumerate(names, 1):
        pid = QUERIES + order
        _name_process(events, pid, instance, order)
        mine = [s for s in spans if s.instance == instance]
        lane = lanes([s.release_s for s in mine], [s.finish_s for s in mine])
        for tid in range(1, int(lane.max(initial=-1)) + 2):
            events.append(_meta("thread_name", pid, tid, name=f"call {tid}"))
            events.append(_meta("thread_sort_index", pid, tid, sort_index=tid))
        for span, tid in zip(mine, (lane + 1).tolist(), strict=True):
            _slices(events, span, pid, tid)
            where[span.query, span.call] = pid, tid, span
        _counters(events, mine, pid)
    _arrows(events, spans, where)
    return {"displayTimeUnit": "ms", "otherData": {"made by": "hexrepro"}, "traceEvents": events}


def write(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace; a name that ends in .gz is compressed, which Perfetto reads as it is."""
    text = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text, 6) if path.suffix == ".gz" else text)
    except OSError as error:
        raise InputError(f"{path}: it cannot be written ({error.strerror})") from error


# ---- the events ----------------------------------------------------------------------------------------------------------


def _meta(kind: str, pid: int, tid: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _name_process(events: list, pid: int, name: str, order: int) -> None:
    events += [_meta("process_name", pid, name=name), _meta("process_sort_index", pid, sort_index=order)]


def _slice(
    name: str, category: str, pid: int, tid: int, begin_s: float, end_s: float, **args: Any
) -> dict[str, Any]:
    begin, end = round(begin_s * US), round(end_s * US)  # whole microseconds: what touches does not overlap
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def _slices(events: list, s: Span, pid: int, tid: int) -> None:
    """The wait, and the run with its two parts inside."""
    about = {
        "query": s.query,
        "call": s.call,
        "input tokens": s.input_tokens,
        "output tokens": s.output_tokens,
        **s.more,
    }
    start_s = s.release_s if s.start_s is None else s.start_s
    if start_s > s.release_s:
        events.append(
            {**_slice("wait", "wait", pid, tid, s.release_s, start_s, **about), "cname": COLOURS["wait"]}
        )
    events.append(_slice(s.stage, "run", pid, tid, start_s, s.finish_s, **about))
    if s.first_token_s is not None:
        first = "wait and prefill" if s.start_s is None else "prefill"
        for name, begin_s, end_s in (
            (first, start_s, s.first_token_s),
            ("decode", s.first_token_s, s.finish_s),
        ):
            if end_s > begin_s:
                colour = COLOURS["decode" if name == "decode" else "prefill"]
                events.append({**_slice(name, name, pid, tid, begin_s, end_s), "cname": colour})


def _queries(events: list, spans: Sequence[Span]) -> None:
    """From each query's first release to its last finish, beside each other."""
    begin: dict[str, float] = {}
    end: dict[str, float] = {}
    calls: dict[str, int] = {}
    for s in spans:
        begin[s.query] = min(begin.get(s.query, np.inf), s.release_s)
        end[s.query] = max(end.get(s.query, -np.inf), s.finish_s)
        calls[s.query] = calls.get(s.query, 0) + 1
    lane = lanes(list(begin.values()), [end[q] for q in begin])
    for query, tid in zip(begin, (lane + 1).tolist(), strict=True):
        events.append(
            _slice(f"query {query}", "query", QUERIES, tid, begin[query], end[query], calls=calls[query])
        )


def _counters(events: list, spans: Sequence[Span], pid: int) -> None:
    """How many calls wait and run, and the KV tokens that the running ones need, whenever one of them changes.

    A running call needs its prompt from its start on, and its output as it is generated, evenly from the first token to the
    last, in four steps: that is what times of calls can tell. With shared prefixes less memory is in use.
    """
    changes: list[tuple[float, int, int, float]] = []  # time, waiting, running, KV tokens
    for s in spans:
        start_s = s.release_s if s.start_s is None else s.start_s
        changes += [(s.release_s, 1, 0, 0.0), (start_s, -1, 1, float(s.input_tokens))]
        first_s = start_s if s.first_token_s is None else s.first_token_s
        for quarter in range(4):
            at = first_s + (s.finish_s - first_s) * quarter / 4
            changes.append((at, 0, 0, s.output_tokens / 4))
        changes.append((s.finish_s, 0, -1, -float(s.input_tokens + s.output_tokens)))
    if not changes:
        return
    table = np.array(changes)
    table = table[np.argsort(table[:, 0], kind="stable")]
    moments = np.round(table[:, 0] * US).astype(np.int64)
    last = np.flatnonzero(np.diff(moments, append=moments[-1] + 1))  # the state after all changes of a moment
    waiting, running, kv = np.round(np.cumsum(table[:, 1:], axis=0)[last].T, 3) + 0.0
    for at, w, r, tokens in zip(
        moments[last].tolist(), waiting.tolist(), running.tolist(), kv.tolist(), strict=True
    ):
        events.append(
            {"ph": "C", "name": "calls", "pid": pid, "ts": at, "args": {"waiting": int(w), "running": int(r)}}
        )
        events.append(
            {
                "ph": "C",
                "name": "KV tokens",
                "pid": pid,
                "ts": at,
                "args": {"tokens": round(max(tokens, 0.0))},
            }
        )


def _arrows(
    events: list, spans: Sequence[Span], where: Mapping[tuple[str, int], tuple[int, int, Span]]
) -> None:
    """From the end of a call to the run of each that waited for it. An arrow is bound to the slice it lies in, so it leaves a
    microsecond before the end of its own."""
    number = 0
    for s in spans:
        for before in s.after:
            if (s.query, before) not in where:
                continue
            number += 1
            pid, tid, ended = where[s.query, before]
            begin = ended.release_s if ended.start_s is None else ended.start_s
            leaves = max(round(ended.finish_s * US) - 1, round(begin * US))
            same = {"name": "then", "cat": "dependency", "id": number}
            events.append({"ph": "s", **same, "pid": pid, "tid": tid, "ts": leaves})
            pid, tid, _ = where[s.query, s.call]
            arrives = round((s.release_s if s.start_s is None else s.start_s) * US)
            events.append({"ph": "f", "bp": "e", **same, "pid": pid, "tid": tid, "ts": max(arrives, leaves)})
