"""The calls of a finished run as `perfetto.Span`s: from a run directory's `calls.parquet`, or from a live system's call log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from hexrepro.errors import InputError
from hexrepro.report.perfetto import Span

AXES = ("profile", "prefix_caching", "trace", "rate_qps", "policy", "seed")
"""What tells the runs of a run directory apart."""


class Chosen(NamedTuple):
    """A run's calls, the instances, and which run it is."""

    spans: list[Span]
    instances: list[str]
    name: str


def from_run(run_dir: Path, wanted: Mapping[str, str]) -> Chosen:
    """One run of a directory: `wanted` says which (policy=eft, rate_qps=1, seed=3, ...), the first where it leaves a choice.

    The file does not say what a call waited for. It is taken to be what had ended by its release and nothing else of its query
    had waited for: with the barriers of agentic workflows just that.
    """
    file = run_dir / "calls.parquet"
    if not file.is_file():
        runs = sorted(f.parent.name for f in run_dir.glob("*/calls.parquet"))
        if runs:
            raise InputError(f"{run_dir}: holds several runs; take one of them: {', '.join(runs)}")
        raise InputError(f"{file}: no such file; the run needs calls=true")
    for name in wanted:
        if name not in AXES:
            raise InputError(f"{name}={wanted[name]}: unknown (one of: {', '.join(AXES)})")
    try:
        frame, taken = _one_run(file, wanted)
    except (pa.ArrowInvalid, KeyError, OSError) as error:
        raise InputError(f"{file}: not the calls of a run: {' '.join(str(error).split())}") from error
    spans = []
    for query, calls in frame.groupby("query", sort=True):
        after = _inferred(calls["release_s"].tolist(), calls["finish_s"].tolist())
        for i, row in enumerate(calls.to_dict("records")):
            more = {
                "cached tokens": int(row["cached_tokens"]),
                "preemptions": int(row["preemptions"]),
                "budget s": round(float(row["budget_s"]), 3),
                "estimate s": round(float(row["estimate_s"]), 3),
            }
            spans.append(
                Span(
                    query=str(query),
                    call=int(row["call"]),
                    stage=str(row["stage"]),
                    instance=str(row["instance"]),
                    release_s=float(row["release_s"]),
                    start_s=float(row["admit_s"]),
                    first_token_s=float(row["first_token_s"]),
                    finish_s=float(row["finish_s"]),
                    input_tokens=int(row["input_tokens"]),
                    output_tokens=int(row["output_tokens"]),
                    after=tuple(int(calls["call"].iloc[j]) for j in after[i]),
                    more=more,
                )
            )
    instances = [str(x) for x in frame["instance"].cat.categories]
    return Chosen(spans, instances, ", ".join(f"{axis}={value}" for axis, value in taken.items()))


def _one_run(file: Path, wanted: Mapping[str, str]) -> tuple[pd.DataFrame, dict[str, str]]:
    """The rows of one run. Axes are narrowed one after the other, so what is taken is there."""
    filters: list[tuple[str, str, Any]] = []
    taken: dict[str, str] = {}
    for axis in AXES:
        column = pq.read_table(file, columns=[axis], filters=filters or None)[axis]
        values = pd.unique(column.to_pandas().dropna())
        if len(values) == 0:  # recorded arrivals have no rate
            continue
        named = {f"{v:g}" if isinstance(v, float) else str(v): v for v in values}
        if axis in wanted and wanted[axis] not in named:
            raise InputError(f"{axis}={wanted[axis]}: {file} holds {', '.join(named)}")
        key = wanted.get(axis, next(iter(named)))
        taken[axis] = key
        filters.append((axis, "=", named[key] if isinstance(named[key], str) else named[key].item()))
    return pq.read_table(file, filters=filters).to_pandas(), taken


def _inferred(release_s: list[float], finish_s: list[float]) -> list[list[int]]:
    """What each call of a query waited for (indices): what had ended by then, but for what an earlier call had waited for."""
    order = sorted(range(len(release_s)), key=lambda i: (release_s[i], i))
    after: list[list[int]] = [[] for _ in release_s]
    behind: dict[int, set[int]] = {}  # call -> all that must have ended before it
    for i in order:
        ended = [j for j in behind if finish_s[j] <= release_s[i]]
        covered = set().union(*(behind[j] for j in ended)) if ended else set()
        after[i] = [j for j in ended if j not in covered]
        behind[i] = set(ended)
    return after


def from_log(file: Path) -> Chosen:
    """The calls of a call log (`hexrepro.serving.call_log`), from the first of them on. Failed calls are shown as far as they
    came. A line that was cut off, when a gateway was killed, is left out; a restarted one has gone on behind it."""
    from hexrepro.serving.call_log import CallRecord  # the format alone: no server is imported

    known = {field.name for field in fields(CallRecord)}
    records: list[CallRecord] = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{file}: it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not a call log; of a simulated run give the directory") from error
    for number, line in enumerate(lines, 1):
        try:
            given = json.loads(line)
        except ValueError as error:
            if line.startswith('{"query":') and not line.endswith("}"):  # cut off
                continue
            raise InputError(f"{file}: line {number} is not a record of a call log ({error})") from error
        try:
            records.append(CallRecord(**{name: value for name, value in given.items() if name in known}))
        except (TypeError, AttributeError) as error:
            raise InputError(f"{file}: line {number} is not a record of a call log ({error})") from error
    if not records:
        raise InputError(f"{file}: holds no call")
    begin_s = min(r.issued_s for r in records)
    spans = []
    for r in records:
        more: dict[str, Any] = {"tenant": r.tenant, "model": r.model, "ended": r.ended}
        if r.cached_tokens is not None:
            more["cached tokens"] = r.cached_tokens
        first_s = None if r.first_token_s is None else max(r.first_token_s, r.issued_s) - begin_s
        spans.append(
            Span(
                query=f"{r.query} of {r.tenant}",
                call=r.call,
                stage=r.stage,
                instance=r.instance or "not dispatched",
                release_s=r.issued_s - begin_s,
                start_s=None,
                first_token_s=first_s,
                finish_s=max(r.finished_s, r.issued_s) - begin_s,
                input_tokens=r.input_tokens,
                output_tokens=r.output_tokens,
                after=tuple(r.after),
                more=more,
            )
        )
    return Chosen(spans, [], file.name)
