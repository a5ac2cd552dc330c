"""Every format that traces are read from and written to, and how a file's format is told.

One module a format. Each says where its format is described, what is taken from it and what is lost. A reader is
``read(path, report, block_tokens)``: it returns a `Workload` and notes in the report what it left out.
"""

from __future__ import annotations

import importlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hexrepro.errors import InputError
from hexrepro.workload.formats.mooncake import HasDependencies
from hexrepro.workload.formats.report import Report
from hexrepro.workload.formats.rows import BOM

if TYPE_CHECKING:
    from hexrepro.workload.types import Workload


@dataclass(frozen=True)
class Format:
    """A format: ``module`` reads it; ``writer`` is the function there that writes it, for files that end in ``suffixes``."""

    name: str
    about: str
    module: str
    writer: str | None = None
    suffixes: tuple[str, ...] = ()


FORMATS = {
    f.name: f
    for f in (
        Format(
            "parquet",
            "hexrepro's own: all of a workload, a row a call",
            "parquet",
            "write_parquet",
            (".parquet",),
        ),
        Format(
            "released_json",
            "the released simulator's JSON: steps and lengths",
            "released_json",
            "write_released_json",
            (".json", ".json.gz"),
        ),
        Format(
            "workflow_csv", "the authors' workflow CSV (Text2SQLRequest_id, step_name, ...)", "workflow_csv"
        ),
        Format(
            "agentic_mooncake",
            "DynoSim's JSON lines with wait_for, delay, tool_wait_ms, hash_ids",
            "agentic_mooncake",
            "write_agentic_mooncake",
            (".jsonl", ".jsonl.gz"),
        ),
        Format("mooncake", "Mooncake's JSON lines: timestamp, lengths, hash_ids, sessions", "mooncake"),
        Format("azure", "Azure LLM inference CSV (TIMESTAMP, ContextTokens, GeneratedTokens)", "azure"),
        Format("call_log", "the JSON lines that the gateway and agents write, a call a line", "call_log"),
    )
}


@dataclass(frozen=True)
class Loaded:
    """A workload, and what became of the rows of its file."""

    workload: Workload
    report: Report


def read(
    path: str | Path, format: str | None = None, strict: bool = False, block_tokens: int | None = None
) -> Loaded:
    """The workload in a file, with a report of what was left out.

    ``format``: a name in :data:`FORMATS`; None = look into the file. ``strict``: refuse a file with a row that cannot be
    used. ``block_tokens``: tokens that a hash id of a Mooncake trace stands for; None = find it from the lengths.
    """
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise InputError(f"format {format!r} is unknown; known are {', '.join(FORMATS)}")
    found = format or detect(path)
    report = Report(path)
    report.format = found
    module = importlib.import_module(f"hexrepro.workload.formats.{FORMATS[found].module}")
    try:
        workload = module.read(path, report, block_tokens)
    except HasDependencies:  # further down than `detect` looks
        if format is not None:
            raise
        return read(path, "agentic_mooncake", strict, block_tokens)
    except InputError as error:
        message = str(error)
        raise (error if str(path) in message else InputError(f"{path}: {message}")) from None
    if strict and not report.complete:
        raise InputError(report.first())
    return Loaded(workload, report)


def load(path: str | Path, format: str | None = None, block_tokens: int | None = None) -> Workload:
    """The workload in a file of any format; InputError when a row cannot be used (`read` leaves such rows out)."""
    return read(path, format, strict=True, block_tokens=block_tokens).workload


def write(
    workload: Workload, path: str | Path, format: str | None = None, block_tokens: int | None = None
) -> str:
    """Write a workload; the format is named, or told by the path's end. Returns the format's name."""
    path = Path(path)
    writers = {name: f for name, f in FORMATS.items() if f.writer}
    if format is None:
        ends = {suffix: name for name, f in writers.items() for suffix in f.suffixes}
        format = next((ends[end] for end in ends if path.name.endswith(end)), None)
        if format is None:
            raise InputError(f"{path}: no format is written to such a file; name one of {', '.join(ends)}")
    if format not in writers:
        raise InputError(f"format {format!r} is not written; those are {', '.join(writers)}")
    f = writers[format]
    module = importlib.import_module(f"hexrepro.workload.formats.{f.module}")
    options = {"block_tokens": block_tokens} if format == "agentic_mooncake" else {}
    # what is there stays until all is written: a file that lacks its end may read well. The name keeps its end (.gz).
    part = path if path.exists() and not path.is_file() else path.with_name(f".part-{path.name}")
    try:
        getattr(module, f.writer)(workload, part, **options)
        if part != path:
            os.replace(part, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        if part != path:
            part.unlink(missing_ok=True)
    return format


# ---- which format is it? -----------------------------------------------------------------------------------


def detect(path: Path) -> str:
    """The format of a file, by its first bytes, its header or the keys of its first object."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head)
        except zlib.error as error:
            raise InputError(f"{path}: a damaged gzip file ({error})") from None
    text = head.removeprefix(BOM).lstrip()
    if not text:
        raise InputError(f"{path}: the file is empty; it must hold a trace ({', '.join(FORMATS)})")
    if text[:1] == b"[":
        return "released_json"
    found = _by_keys(text) if text[:1] == b"{" else _by_header(text)
    if found is None:
        raise InputError(
            f"{path}: in none of the formats {', '.join(FORMATS)} (it starts with {text[:30].decode(errors='replace')!r})"
        )
    return found


_KEYS = {  # the first key that one of the objects has tells
    "Text2SQLRequest": "released_json",
    "issued_s": "call_log",
    "schema": "agentic_mooncake",
    "wait_for": "agentic_mooncake",
    "tool_wait_ms": "agentic_mooncake",
    "hash_ids": "mooncake",
    "input_length": "mooncake",
    "input_tokens": "mooncake",
}


def _by_keys(text: bytes) -> str | None:
    """The format of JSON lines, by the keys of the first objects; None = none that is known."""
    keys: set[str] = set()
    for line in text.split(b"\n")[:50]:
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):
            # a line that is wrong, or longer than what was looked at: go by the names in it
            row = [key for key in _KEYS if b'"' + key.encode() + b'"' in line]
        keys |= set(row) if isinstance(row, dict | list) and all(isinstance(k, str) for k in row) else set()
    return next((format for key, format in _KEYS.items() if key in keys), None)


def _by_header(text: bytes) -> str | None:
    header = {name.strip().strip('"') for name in text.split(b"\n", 1)[0].decode(errors="replace").split(",")}
    if header & {"Text2SQLRequest_id", "step_name"}:
        return "workflow_csv"
    return "azure" if header & {"ContextTokens", "GeneratedTokens"} else None
