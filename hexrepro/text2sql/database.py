"""The database as the agent sees it: its schema as text for prompts, its values searched for words, SQL executed safely."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hexrepro.errors import InputError

_SANDBOX = Path(__file__).with_name("sandbox.py")
_KILL_AFTER_S = 2.0  # behind the sandbox's own time limit: it has to start, and to hand on its rows
_EXAMPLES = 3  # values of a text column that the schema shows
_SEARCH_S = 2.0  # for words among the stored values; what has been found by then is used
_FOUND = 3  # values found for one word in one column


@dataclass(frozen=True)
class Column:
    name: str
    kind: str
    comment: str = ""
    key: bool = False
    references: str = ""  # TABLE.COLUMN
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    name: str
    comment: str
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Result:
    """What came of a statement: rows, or the error why there are none.

    more  there were more rows than the limit
    """

    columns: tuple[str, ...] = ()
    rows: tuple[tuple, ...] = ()
    more: bool = False
    error: str = ""

    @property
    def rank(self) -> int:
        """2 with rows, 1 empty, 0 an error."""
        return 0 if self.error else 1 + bool(self.rows)

    def same_rows(self, other: Result, ordered: bool = False) -> bool:
        """Equal rows, in any order unless `ordered`; fractions to 9 digits, column names aside."""
        if self.error or other.error or self.more != other.more:
            return False
        mine, theirs = ([tuple(map(_comparable, row)) for row in r.rows] for r in (self, other))
        return mine == theirs if ordered else Counter(mine) == Counter(theirs)

    def preview(self, rows: int = 5) -> str:
        """A few lines for a prompt."""
        if self.error:
            return f"error: {self.error}"
        if not self.rows:
            return "no rows"
        lines = [" | ".join(self.columns), "---"]
        lines += [" | ".join(_cell(cell) for cell in row) for row in self.rows[:rows]]
        if len(self.rows) > rows or self.more:
            lines.append(f"... {'more than ' * self.more}{len(self.rows)} rows in all")
        return "\n".join(lines)


@dataclass
class Database:
    """A SQLite file. `seconds` and `rows` bound each statement that a model wrote."""

    path: Path
    seconds: float = 5.0
    rows: int = 1000
    tables: dict[str, Table] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        if not self.path.is_file():
            raise InputError(f"database {self.path}: there is no such file; give a SQLite file")
        try:
            with contextlib.closing(self._connect()) as connection:
                self.tables = {table.name: table for table in _tables(connection)}
        except sqlite3.Error as error:
            raise InputError(f"database {self.path}: it cannot be read as SQLite ({error})") from None
        if not self.tables:
            raise InputError(f"database {self.path}: it has no tables; at least one is needed")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True)
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        return connection

    def schema(self, linked: Mapping[str, Iterable[str]] | None = None) -> str:
        """The tables as text; with `linked` (table -> columns) those only, and the keys that join them."""
        parts = []
        for table in self.tables.values():
            if linked is None:
                wanted = {column.name for column in table.columns}
            elif table.name in linked:
                wanted = set(linked[table.name])
            else:
                continue
            lines = [f"table {table.name}" + f"  -- {table.comment}" * bool(table.comment)]
            for column in table.columns:
                joins = linked is None or column.references.rpartition(".")[0] in linked
                if column.name in wanted or column.key or joins:
                    lines.append("  " + _described(column))
            parts.append("\n".join(lines))
        return "\n".join(parts)

    async def execute(self, sql: str) -> Result:
        """Run one SELECT in a process of its own; never raises for what the SQL does."""
        asked = {"file": str(self.path), "sql": sql, "seconds": self.seconds, "rows": self.rows}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(_SANDBOX),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us; this one is killed below
        )  # fmt: skip
        try:
            async with asyncio.timeout(self.seconds + _KILL_AFTER_S):
                out, _ = await process.communicate(json.dumps(asked).encode())
            answer = json.loads(out)
        except (TimeoutError, ValueError):  # killed, by us or by the bound on its processor time
            return Result(error=f"cut off after {self.seconds:g} s")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if "error" in answer:
            return Result(error=" ".join(answer["error"].split()))
        return Result(tuple(answer["columns"]), tuple(map(tuple, answer["rows"])), answer["more"])

    def find(self, words: Sequence[str]) -> dict[str, list[str]]:
        """TABLE.COLUMN -> stored texts that contain one of the words (no matter the case)."""
        until = time.monotonic() + _SEARCH_S
        found: dict[str, list[str]] = {}
        words = [word for word in words if len(word) > 1]
        places = [(t.name, c.name) for t in self.tables.values() for c in t.columns if _is_text(c.kind)]
        with contextlib.closing(self._connect()) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > until, 1000)
            for table, column in places:
                of = _quoted(column)
                statement = f"SELECT DISTINCT {of} FROM {_quoted(table)} WHERE instr(lower({of}), lower(?)) LIMIT {_FOUND}"
                values: dict[str, None] = {}
                for word in words:
                    try:
                        values |= {str(row[0])[:60]: None for row in connection.execute(statement, (word,))}
                    except sqlite3.Error:  # mostly: out of time
                        return found
                if values:
                    found[f"{table}.{column}"] = list(values)
        return found


def _tables(connection: sqlite3.Connection) -> Iterable[Table]:
    made = connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
    ).fetchall()
    for name, sql in made:
        comments = _comments(sql or "")
        quoted = _quoted(name)
        references = {
            row[3]: f"{row[2]}.{row[4] or row[3]}"
            for row in connection.execute(f"PRAGMA foreign_key_list({quoted})")
        }
        columns = []
        for _, column, kind, _, _, key in connection.execute(f"PRAGMA table_info({quoted})"):
            examples: tuple[str, ...] = ()
            if _is_text(kind):
                # among the first rows: the table may be huge
                rows = connection.execute(
                    f"SELECT DISTINCT c FROM (SELECT {_quoted(column)} AS c FROM {quoted} LIMIT 200)"
                    f" WHERE c IS NOT NULL LIMIT {_EXAMPLES}"
                )
                examples = tuple(str(row[0])[:30] for row in rows)
            columns.append(
                Column(
                    column,
                    kind,
                    comments.get(column.lower(), ""),
                    bool(key),
                    references.get(column, ""),
                    examples,
                )
            )
        yield Table(name, comments.get("", ""), tuple(columns))


def _comments(sql: str) -> dict[str, str]:
    """Column (lower case) -> the comment at the end of its line in a CREATE statement; "" -> that of the first line."""
    found = {}
    for number, line in enumerate(sql.splitlines()):
        code, dashes, comment = line.partition("--")
        name = re.match(r"""\s*["`\[]?(\w+)""", code)
        if dashes and name:
            found["" if number == 0 else name[1].lower()] = comment.strip()
    return found


def _described(column: Column) -> str:
    text = f"{column.name} {column.kind}".rstrip()
    text += " primary key" * column.key
    if column.references:
        text += f" references {column.references}"
    notes = [column.comment] if column.comment else []
    if column.examples:
        notes.append("e.g. " + ", ".join(repr(value) for value in column.examples))
    return text + (f"  -- {'; '.join(notes)}" if notes else "")


def _is_text(kind: str) -> bool:
    return "TEXT" in kind.upper() or "CHAR" in kind.upper()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _comparable(cell):
    if isinstance(cell, float):
        return int(cell) if cell.is_integer() else float(f"{cell:.9g}")
    return cell


def _cell(cell) -> str:
    text = "NULL" if cell is None else str(cell)
    return text if len(text) <= 60 else text[:57] + "..."
