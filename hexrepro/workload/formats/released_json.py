"""The released simulator's JSON: ``[{"Text2SQLRequest": [{"step", "input_length", "output_length"}, ...]}, ...]``.

One entry a query; step names and lengths only (see `steps`). Queries with the same steps and lengths are taken to be the
same text. Source: the traces that the authors released with their simulator (github.com/Relaxed-System-Lab/Hexgen-Flow).
A file with a wrong entry is refused, with the query, the call, the field and what would be right: a program wrote it.
"""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from hexrepro.errors import InputError
from hexrepro.workload.formats.report import Report, shown
from hexrepro.workload.formats.rows import read_bytes, trace_name
from hexrepro.workload.formats.steps import plain, workflow_of, workload_of_steps
from hexrepro.workload.types import Workload
from hexrepro.workload.workflow import Workflow, load_workflow, workflow_names


def read(path: Path, report: Report, block_tokens: int | None = None) -> Workload:
    """The reader of the registry."""
    workload = read_released_json(path)
    report.rows = workload.n_calls
    report.unit = "call"
    return workload


def read_released_json(path: str | Path) -> Workload:
    """A trace in the released simulator's form."""
    path = Path(path)
    try:
        entries = json.loads(read_bytes(path).decode())
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}: not valid JSON: {error.msg} at line {error.lineno} column {error.colno}; "
            "is the file cut off?"
        ) from None
    except (RecursionError, ValueError):  # ValueError: Python refuses numbers of thousands of digits
        raise InputError(
            f"{path}: not a trace: its JSON is nested too deeply, or a number is too long"
        ) from None
    if not isinstance(entries, list):
        raise InputError(f"{path}: holds a JSON {_json_kind(entries)}; it must be a list of queries")
    if not entries:
        raise InputError(f"{path}: holds no queries; it must list at least one")

    workflow, stage_of = _workflow_of(path, entries)
    calls = [call for entry in entries for call in entry["Text2SQLRequest"]]
    calls_each = np.array([len(entry["Text2SQLRequest"]) for entry in entries])
    stage = np.array([stage_of[call["step"]] for call in calls], np.int64)
    lengths = [_lengths(path, calls, calls_each, field) for field in ("input_length", "output_length")]
    return workload_of_steps(trace_name(path), workflow, stage, *lengths, calls_each)


def write_released_json(workload: Workload, path: str | Path) -> None:
    """Steps and lengths in the released simulator's form. Everything else is lost; Parquet keeps it."""
    names = dict(zip(workload.stage_names, workload.stage_names, strict=True))
    for known in map(load_workflow, workflow_names()):
        if set(workload.stage_names) <= set(known.stages):
            names = known.released_names
    step = [names[stage] for stage in workload.stage_names]
    calls = [
        {"step": step[s], "input_length": i, "output_length": o}
        for s, i, o in zip(
            workload.stage.tolist(),
            workload.input_tokens.tolist(),
            workload.output_tokens.tolist(),
            strict=True,
        )
    ]
    offsets = workload.query_offsets.tolist()
    entries = [{"Text2SQLRequest": calls[a:b]} for a, b in pairwise(offsets)]
    data = (json.dumps(entries, indent=1) + "\n").encode()
    Path(path).write_bytes(gzip.compress(data) if str(path).endswith(".gz") else data)


def _json_kind(value: object) -> str:
    kinds = {dict: "object", list: "list", str: "string", bool: "true/false", int: "number", float: "number"}
    return kinds.get(type(value), "null")


def _workflow_of(path: Path, entries: list) -> tuple[Workflow, dict[str, int]]:
    """The workflow whose step names the file uses, and its stages by step name as the file has it; checks the file's
    shape."""
    first_seen: dict[str, tuple[int, int]] = {}
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise InputError(
                f"{path}: query {i} is a {_json_kind(entry)}; it must be an object with Text2SQLRequest"
            )
        if "Text2SQLRequest" not in entry:
            raise InputError(
                f"{path}: query {i}: the field Text2SQLRequest is missing; it must list the query's calls"
            )
        calls = entry["Text2SQLRequest"]
        if not isinstance(calls, list) or not calls:
            found = "empty" if calls == [] else f"a {_json_kind(calls)}"
            raise InputError(f"{path}: query {i}: Text2SQLRequest is {found}; it must list at least one call")
        for j, call in enumerate(calls):
            if not isinstance(call, dict):
                raise InputError(f"{path}: query {i} call {j} is a {_json_kind(call)}; it must be an object")
            if "step" not in call:
                raise InputError(
                    f"{path}: query {i} call {j}: the field step is missing; it must name the step"
                )
            if not isinstance(call["step"], str):
                raise InputError(f"{path}: query {i} call {j}: step is {call['step']!r}; it must be a name")
            first_seen.setdefault(call["step"], (i, j))
    workflow, stage_of = workflow_of(dict.fromkeys(map(plain, first_seen)))
    for name, (i, j) in first_seen.items():
        if plain(name) not in stage_of:
            known = ", ".join(workflow.released_names.values())
            raise InputError(
                f"{path}: query {i} call {j}: step is {name!r}; the steps of {workflow.name} are {known}"
            )
    return workflow, {name: stage_of[plain(name)] for name in first_seen}


def _lengths(path: Path, calls: list[dict], calls_each: np.ndarray, field: str) -> np.ndarray:
    """Lengths int64[n] in tokens; InputError for the first that is none."""
    values = [call.get(field) for call in calls]
    if set(map(type, values)) != {int} or not 1 <= min(values) <= max(values) < 2**31:
        wrong = next((k for k, value in enumerate(values) if not _is_length(value)), None)
        if wrong is not None:
            query = int(np.searchsorted(np.cumsum(calls_each), wrong, side="right"))
            call = wrong - int(calls_each[:query].sum())
            raise InputError(
                f"{path}: query {query} call {call}: {field} is {shown(values[wrong])}; "
                "it must be a whole number of tokens from 1"
            )
    return np.array(values, np.int64)


def _is_length(value: object) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and 1 <= value < 2**31
