"""JSON lines as columns: an object a line.

A whole file is read by pyarrow, a million rows in a few seconds. It refuses a file for one wrong value; then the lines
are read one by one in Python, which is slower and finds every line that is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hexrepro.errors import InputError
from hexrepro.workload.formats.report import Report, Words
from hexrepro.workload.formats.rows import BLOCK, Field, Rows, arrow_type, one_chunk, read_bytes


def read_jsonl(path: Path, report: Report, fields: dict[str, Field], cut_off_is_fine: bool = False) -> Rows:
    """A JSON object a line. ``cut_off_is_fine``: a last line without its end is said in a note, not counted as wrong."""
    report.unit = "line"
    data = read_bytes(path, report)
    if not data or data.isspace():
        raise InputError(f"{path}: the file is empty; it must hold a JSON object a line")
    columns = _arrow_json(data, fields)
    if columns is not None:
        report.rows = len(next(iter(columns.values())))
        return Rows(report, fields, columns, np.arange(1, report.rows + 1))
    return _one_by_one(report, data, fields, cut_off_is_fine and not data.endswith((b"\n", b"\r")))


def _arrow_json(data: bytes, fields: dict[str, Field]) -> dict | None:
    """The columns as pyarrow reads them; None when it does not take every line for a row."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    schema = pa.schema([(name, arrow_type(field.kind)) for name, field in fields.items()])
    try:
        table = arrow_json.read_json(
            pa.BufferReader(data),
            arrow_json.ReadOptions(block_size=BLOCK),
            arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
        tail = data[-100:]
        lines = data.count(b"\n", 0, len(data) - len(tail) + len(tail.rstrip())) + 1
        if table.num_rows != lines:  # blank lines, or objects over several lines
            return None
        table.validate(full=True)  # text that is not UTF-8
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return None
    return {name: one_chunk(table.column(name)) for name in fields}


def _one_by_one(report: Report, data: bytes, fields: dict[str, Field], last_is_cut: bool) -> Rows:
    import pyarrow as pa

    values: dict[str, list] = {name: [] for name in fields}
    place: list[int] = []
    wrong_rows: list[tuple[int, str, object]] = []
    lines = data.rstrip().split(b"\n")
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        report.rows += 1
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):
            if last_is_cut and i == len(lines):
                report.rows -= 1
                report.note(f"the last line, {i}, is cut off; it is left out")
                continue
            what = "not valid JSON" if i < len(lines) else "not valid JSON (is the file cut off?)"
            report.refuse("", "a JSON object", [(i, Words(f"it is {what}"))], 1)
            continue
        if not isinstance(row, dict):
            report.refuse("", "a JSON object", [(i, Words(f"it is {type(row).__name__}"))], 1)
            continue
        for name, field in fields.items():
            value, right = _checked(field.kind, row.get(name))
            values[name].append(value)
            if not right:
                wrong_rows.append((len(place), name, row[name]))
        place.append(i)
    columns = {name: pa.array(v, arrow_type(fields[name].kind)) for name, v in values.items()}
    rows = Rows(report, fields, columns, np.array(place, np.int64))
    for at, name, value in wrong_rows:
        if not rows.bad[at]:
            rows.bad[at] = True
            report.refuse(name, fields[name].right, [(place[at], value)], 1)
    return rows


def _checked(kind: str, value: object) -> tuple[object, bool]:
    """``(value, True)`` as the kind wants it, or ``(None, False)``; None stays None."""
    if value is None:
        return None, True
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "int" and number:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and abs(value) < 2**63:
            return value, True
    elif kind == "float" and number:
        try:
            return float(value), True
        except OverflowError:
            return None, False
    elif kind == "text" and (isinstance(value, str) or (number and isinstance(value, int))):
        return str(value), True
    elif kind in ("ints", "texts") and isinstance(value, list):
        checked = [_checked(kind[:-1], item) for item in value]
        fine = all(right and v is not None for v, right in checked)
        items = [v for v, _ in checked]
        if fine and (kind == "texts" or all(0 <= v < 2**64 for v in items)):
            return items, True
    return None, False
