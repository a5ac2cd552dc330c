"""Runs one SELECT on a SQLite file, in a process of its own that can be killed: `python -I -S sandbox.py` (see database.py).

A model wrote the SQL, so nothing is taken on trust. The file is opened read-only; SQLite's authorizer lets nothing through but
reading and functions (no write, ATTACH, PRAGMA or extension); a progress handler ends it after `seconds`; the operating system
bounds memory and processor time, for the few functions of SQLite that the handler cannot interrupt, and the parent
kills what is left. Only Python's standard library is imported, so that it starts in some 20 ms.

stdin:  {"file": ..., "sql": ..., "seconds": ..., "rows": ...}
stdout: {"columns": [...], "rows": [[...]], "more": true if there were further rows} or {"error": "..."}
"""

import contextlib
import json
import math
import sqlite3
import sys
import time
from pathlib import Path

MEMORY_BYTES = 2**29
LARGEST_VALUE = 10**6  # bytes of one text or blob
LONGEST_CELL = 1000  # characters of it that are handed on
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
FORBIDDEN_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}


def run(file: str, sql: str, seconds: float, rows: int) -> dict:
    """The result as JSON's types; `error` where there is none."""
    _bound(seconds)
    denied = []

    def authorize(action, first, second, database, trigger):
        if action in ALLOWED and not (
            action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FORBIDDEN_FUNCTIONS
        ):
            return sqlite3.SQLITE_OK
        denied.append(action)
        return sqlite3.SQLITE_DENY

    until = time.monotonic() + seconds
    try:
        connection = sqlite3.connect(
            f"{Path(file).resolve().as_uri()}?mode=ro", uri=True, isolation_level=None
        )
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.execute(
            "PRAGMA temp_store = MEMORY"
        )  # a huge sort ends at the memory limit, not on a full disk
        connection.set_progress_handler(lambda: time.monotonic() > until, 1000)
        connection.set_authorizer(authorize)
        cursor = connection.execute(sql)
        found = cursor.fetchmany(rows + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError, OverflowError) as error:
        if denied:
            return {"error": "refused: only a SELECT that reads this database is allowed"}
        if "interrupted" in str(error):
            return {"error": f"cut off after {seconds:g} s"}
        return {"error": str(error) or "it needs too much memory"}
    if cursor.description is None:
        return {"error": "refused: it is not a SELECT"}
    return {
        "columns": [column[0] for column in cursor.description],
        "rows": [[_plain(cell) for cell in row] for row in found[:rows]],
        "more": len(found) > rows,
    }


def _plain(cell):
    if isinstance(cell, bytes):
        cell = f"x'{cell[: LONGEST_CELL // 2].hex()}'"
    if isinstance(cell, float) and not math.isfinite(cell):
        return str(cell)
    return cell[:LONGEST_CELL] if isinstance(cell, str) else cell


def _bound(seconds: float) -> None:
    try:
        import resource
    except ImportError:  # Windows: the parent's time limit remains
        return
    cpu = math.ceil(seconds) + 1
    for what, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CPU, cpu)):
        hard = resource.getrlimit(what)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS knows no bound on memory
            resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    json.dump(run(**json.load(sys.stdin)), sys.stdout)
