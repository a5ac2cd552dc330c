"""CSV with a header as columns. Values are read as text and converted, so that one wrong value costs one row."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np

from hexrepro.errors import InputError
from hexrepro.workload.formats.report import Report, Words
from hexrepro.workload.formats.rows import BLOCK, Field, Rows, arrow_type, one_chunk, read_bytes


def read_csv(
    path: Path,
    report: Report,
    fields: dict[str, Field],
    optional: tuple[str, ...] = (),
    group: str | None = None,
) -> Rows:
    """A CSV file with a header. Rows count from 1, the header; lines that are empty do not count.

    ``group``: the column that says which rows belong together. A row with too few or too many cells is kept with this cell,
    as an unusable one, so that the others of its group are known to lack it. None = rows stand alone, a line each.
    """
    import pyarrow as pa

    report.unit = "row"
    data = read_bytes(path, report).lstrip()
    if not data:
        raise InputError(f"{path}: the file is empty; it must hold a header and rows")
    try:
        data.decode()
    except UnicodeDecodeError:  # the rows that hold other text are shown, not choked on
        data = data.decode(errors="replace").encode()
    table, wrong = _parsed(path, data)
    if group is None and b'"' in data:
        lines = sum(bool(line.strip()) for line in data.splitlines())
        if 1 + table.num_rows + len(wrong) < lines:  # a quote that is not closed has taken lines for its text
            table, wrong = _parsed(path, data, quotes=False)
    names = [name.strip() for name in table.column_names]
    for name in fields:
        if name not in names and name not in optional:
            raise InputError(
                f"{path}: column {name} is missing; the header has {', '.join(names)}; "
                f"needed are {', '.join(n for n in fields if n not in optional)}"
            )
        if names.count(name) > 1:
            raise InputError(f"{path}: column {name} is there twice; name it once")
    report.rows = table.num_rows + len(wrong)
    named = [(number, Words(_size(cells, text))) for number, cells, text in wrong]
    report.refuse("", f"{len(names)} columns, as in the header", named, len(named))

    columns, masks = {}, {}
    for name, field in fields.items():
        if name in names:
            raw = one_chunk(table.column(names.index(name)).cast(pa.string()))
            columns[name], masks[name] = _converted(field.kind, raw)
        else:
            columns[name] = pa.nulls(table.num_rows, arrow_type(field.kind))
    taken = np.zeros(report.rows + 2, bool)
    taken[:2] = True  # rows count from 1, and row 1 is the header
    taken[[number for number, *_ in wrong]] = True
    rows = Rows(report, fields, columns, np.flatnonzero(~taken))
    for name, (mask, raw) in masks.items():
        rows.refuse(mask, name, fields[name].right, lambda i, raw=raw: raw[i].as_py())
    if group is not None:
        at = names.index(group)
        rows.append_unusable(group, [(number, _cell(text, at)) for number, _, text in wrong])
    return rows


def _parsed(path: Path, data: bytes, quotes: bool = True) -> tuple:
    """``(table, wrong)``: the rows of as many cells as the header, as text, and the others as (row, cells, text)."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    wrong: list[tuple[int, int, str]] = []

    def skip(row) -> str:
        wrong.append((row.number, row.actual_columns, row.text or ""))
        return "skip"

    header = re.split(rb"[\r\n]", data[: 1 << 20], maxsplit=1)[0].decode(errors="replace")
    try:
        table = arrow_csv.read_csv(
            io.BytesIO(data),
            arrow_csv.ReadOptions(block_size=BLOCK, use_threads=False),  # so that bad rows have a number
            arrow_csv.ParseOptions(
                quote_char='"' if quotes else False,
                newlines_in_values=quotes,
                invalid_row_handler=skip,
            ),
            arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(next(csv.reader([header])), pa.string()),
                strings_can_be_null=False,
                check_utf8=False,
            ),
        )
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: not a readable CSV file ({' '.join(str(error).split())[:120]})") from None
    return table, wrong


def _size(cells: int, text: str) -> str:
    lines = text.strip().count("\n") + 1
    over = f" over {lines:,} lines, a quote open?" if lines > 1 else ""
    return f"it has {cells} columns{over} ({text[:30].strip()!r})"


def _cell(text: str, at: int) -> str | None:
    cells = next(csv.reader(io.StringIO(text)), [])
    return cells[at] if at < len(cells) else None


def _converted(kind: str, raw):
    """``(column, (bool[n] wrong, raw))``: text as numbers or seconds; null where empty or wrong."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind == "text":
        return raw, (np.zeros(len(raw), bool), raw)
    trimmed = pc.utf8_trim_whitespace(raw)
    trimmed = pc.if_else(pc.equal(trimmed, ""), None, trimmed)
    if kind == "int":
        try:
            return trimmed.cast(pa.int64()), (np.zeros(len(raw), bool), raw)
        except pa.ArrowInvalid:  # find the wrong ones
            pass
    texts = trimmed.to_pandas()
    if kind == "time":
        # ISO 8601 with any number of decimals and any zone; without one it is UTC. Seconds from the earliest, because
        # a float that counts from 1970 is only good to 0.2 microseconds.
        dates = texts.where(pc.match_substring(raw, ":").to_numpy(zero_copy_only=False))  # 2023 is a number
        times = pd.to_datetime(dates, format="ISO8601", utc=True, errors="coerce")
        first, last = (limit.tz_localize("UTC") for limit in (pd.Timestamp.min, pd.Timestamp.max))
        times = times.where(times.between(first, last))  # further off, nanoseconds do not fit in 64 bits
        times = times.astype("datetime64[ns, UTC]")
        found = times.notna().to_numpy()
        nanoseconds = times.astype("int64").to_numpy()
        values = (nanoseconds - nanoseconds.min(where=found, initial=2**63 - 1)) / 1e9
    else:
        values = pd.to_numeric(texts, errors="coerce").to_numpy(np.float64, na_value=np.nan)
        found = np.isfinite(values)
    given = texts.notna().to_numpy()
    if kind == "int":
        found &= (values == np.floor(values)) & (np.abs(values) < 2**62)
        values = np.where(found, values, 0).astype(np.int64)
    column = pa.array(values, arrow_type(kind), mask=~found)
    return column, (given & ~found, raw)
