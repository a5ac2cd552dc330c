"""The rows of a text file as columns, and which of them cannot be used.

Text may be gzipped, and may begin with a byte-order mark.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hexrepro.errors import InputError
from hexrepro.workload.formats.report import EXAMPLES, Report

BOM = b"\xef\xbb\xbf"
BLOCK = 1 << 24  # bytes that pyarrow parses at a time: a line must be shorter


@dataclass(frozen=True)
class Field:
    """A column that a reader wants. ``kind``: int, float, text, time, ints or texts. ``right``: what its values must be.

    A time is a date and time of day in the file, and becomes seconds from the file's earliest.
    """

    kind: str
    right: str


def read_bytes(path: Path, report: Report | None = None) -> bytes:
    """The file's content, unzipped, without byte-order mark. A gzip file that was cut off gives what there is."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if data.startswith(b"\x1f\x8b"):
        data = _unzipped(path, data, report)
    return data.removeprefix(BOM)


def _unzipped(path: Path, data: bytes, report: Report | None) -> bytes:
    parts = []
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        try:
            while part := file.read1(BLOCK):  # a plain read() would lose what stands in front of an error
                parts.append(part)
        except EOFError:
            if report is not None:
                report.cut_off = True
                report.note("the gzip file is cut off; what it holds up to there is used")
        except (zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{path}: a damaged gzip file ({error})") from None
    return b"".join(parts)


class Rows:
    """The rows of a file as columns, and which of them cannot be used.

    ``place``: int64[n], where each row stands in the file (lines count from 1). ``bad``: bool[n], rows refused so far.
    Rows that could not be read at all are in the report only.
    """

    def __init__(self, report: Report, fields: dict[str, Field], columns: dict, place: np.ndarray) -> None:
        self.report = report
        self.fields = fields
        self.columns = columns  # name -> pyarrow array of n entries, null = not given
        self.place = place
        self.bad = np.zeros(len(place), bool)

    def __len__(self) -> int:
        return len(self.place)

    def refuse(
        self, wrong: np.ndarray, field: str, right: str, value: Callable[[int], object] | None = None
    ) -> None:
        """Mark rows as unusable, those of bool[n] ``wrong`` that are not so already. ``value(row)``: what to show."""
        new = np.flatnonzero(wrong & ~self.bad)
        if len(new) == 0:
            return
        self.bad[new] = True
        value = value or (lambda i: self.columns[field][i].as_py())
        self.report.refuse(field, right, [(self.place[i], value(i)) for i in new[:EXAMPLES]], len(new))

    def append_unusable(self, field: str, cells: list[tuple[int, str | None]]) -> None:
        """Add rows of which only (place, ``field``) is known, and which are in the report already."""
        import pyarrow as pa

        for name, column in self.columns.items():
            known = [cell if name == field else None for _, cell in cells]
            self.columns[name] = pa.concat_arrays([column, pa.array(known, column.type)])
        self.place = np.append(self.place, np.array([place for place, _ in cells], np.int64))
        self.bad = np.append(self.bad, np.ones(len(cells), bool))

    def missing(self, field: str) -> np.ndarray:
        """bool[n]: where a column gives nothing."""
        return self.columns[field].is_null().to_numpy(zero_copy_only=False)

    def blank(self, field: str) -> np.ndarray:
        """bool[n]: where a text column gives nothing, or only spaces."""
        import pyarrow.compute as pc

        blank = pc.equal(pc.utf8_trim_whitespace(self.columns[field]), "")
        return pc.fill_null(blank, True).to_numpy(zero_copy_only=False)

    def given(self, field: str) -> bool:
        """Whether any row gives the column."""
        return self.columns[field].null_count < len(self)

    def whole(
        self, field: str, least: int = 1, default: int | None = None, where: np.ndarray | None = None
    ) -> np.ndarray:
        """Whole numbers int64[n] from ``least`` to 2^31 - 1; ``default`` where missing, or else the row is refused.

        ``where``: bool[n], the rows that need one; the others may hold anything.
        """
        values = self.columns[field].fill_null(least if default is None else default)
        values = values.to_numpy(zero_copy_only=False).astype(np.int64)
        wrong = (values < least) | (values >= 2**31)
        wrong = self.missing(field) | wrong if default is None else ~self.missing(field) & wrong
        self.refuse(wrong if where is None else wrong & where, field, self.fields[field].right)
        return np.where(wrong, least, values)

    def number(self, field: str, default: float | None = None) -> np.ndarray:
        """Finite numbers from 0, float64[n]; ``default`` where missing (NaN = leave it so), or else the row is refused."""
        values = self.columns[field].to_numpy(zero_copy_only=False).astype(np.float64)
        missing = self.missing(field)
        right = self.fields[field].right
        if default is None:
            self.refuse(missing, field, right)
        self.refuse(~missing & ~(np.isfinite(values) & (values >= 0)), field, right)
        values = np.where(missing, np.nan if default is None else default, values)
        return np.where(self.bad, 0.0, values)

    def words(self, field: str, default: str | None = None) -> tuple[tuple[str, ...], np.ndarray]:
        """``(names, int64[n])`` of a text column, names in order of appearance; ``default`` where missing or empty, or
        else the row is refused."""
        import pyarrow.compute as pc

        blank = self.blank(field)
        if default is None:
            self.refuse(blank, field, self.fields[field].right)
        filled = pc.if_else(blank, default or "?", self.columns[field])
        encoded = filled.dictionary_encode()
        names = tuple(encoded.dictionary.to_pylist())
        return names, encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)

    def lists(self, field: str) -> tuple[object, np.ndarray]:
        """``(values, int64[n + 1])`` of a column of lists: row i has values[offsets[i]:offsets[i + 1]]; none where missing."""
        import pyarrow as pa
        import pyarrow.compute as pc

        column = self.columns[field]
        sizes = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        values = column.flatten()  # without what may lie behind nulls
        if values.null_count:
            owner = np.repeat(np.arange(len(self)), np.diff(offsets))
            hole = np.zeros(len(self), bool)
            hole[owner[values.is_null().to_numpy(zero_copy_only=False)]] = True
            self.refuse(hole, field, self.fields[field].right)
            values = values.fill_null(pa.scalar(0 if pa.types.is_integer(values.type) else "", values.type))
        return values, offsets


def arrow_type(kind: str):
    """The pyarrow type of a column of this kind."""
    import pyarrow as pa

    kinds = {"int": pa.int64(), "float": pa.float64(), "time": pa.float64(), "text": pa.string()}
    return kinds.get(kind) or pa.list_(pa.uint64() if kind == "ints" else pa.string())


def one_chunk(column):
    """A column of a pyarrow table as one array."""
    import pyarrow as pa

    column = column.combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def trace_name(path: Path) -> str:
    """What a trace is called that has no name of its own: its file, without .gz, without the last suffix, and without what
    tables take for markup and figures for a formula."""
    return re.sub(r"[$\[\]\\]", "_", Path(path.name.removesuffix(".gz")).stem) or "trace"
