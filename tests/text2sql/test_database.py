"""The schema, the search for values, and a model's SQL, which must not do any harm."""

from __future__ import annotations

import asyncio
import sqlite3
import time

import pytest

from hexrepro.errors import InputError
from hexrepro.text2sql import database as module
from hexrepro.text2sql.database import Database, Result
from hexrepro.text2sql.questions import example_questions, load_questions
from hexrepro.text2sql.railway import make_railway


@pytest.fixture(scope="module")
def railway(tmp_path_factory):
    path = tmp_path_factory.mktemp("railway") / "railway.sqlite"
    make_railway(path)
    return Database(path, seconds=1.0, rows=50)


def run(database: Database, sql: str) -> Result:
    return asyncio.run(database.execute(sql))


# ---- the example database ----------------------------------------------------------------------------------------


def test_the_railway_is_the_same_every_time_and_its_keys_hold(railway, tmp_path) -> None:
    make_railway(tmp_path / "again.sqlite")
    with sqlite3.connect(railway.path) as one, sqlite3.connect(tmp_path / "again.sqlite") as other:
        assert list(one.iterdump()) == list(other.iterdump())
        assert one.execute("PRAGMA foreign_key_check").fetchall() == []
        assert one.execute("SELECT COUNT(*) FROM TRN").fetchone() == (
            28 * 8,
        )  # 28 days: 2 × 2 and 4 × 1 trains
    with pytest.raises(InputError, match="exists already"):
        make_railway(tmp_path / "again.sqlite")


def test_every_question_has_an_answer_that_ties_do_not_decide(railway) -> None:
    questions = load_questions(example_questions())
    assert len(questions) == 12
    for question in questions:
        result = run(railway, question.sql)
        assert result.rank == 2, question
        assert not result.more
        if "LIMIT 1" in question.sql:
            two = run(railway, question.sql.replace("LIMIT 1", "LIMIT 2"))
            assert two.rows[0][1] > two.rows[1][1], question


def test_a_file_of_questions_that_is_wrong_says_where(tmp_path) -> None:
    file = tmp_path / "q.yaml"
    for text, says in (
        ("[1", "not valid YAML"),
        ("questions: []", "must be a list"),
        ("questions: [{question: a}]", r"questions\[0\].sql"),
        ("questions: [{question: a, sql: b, extra: c}]", r"questions\[0\]"),
        ("questions: [{question: a, sql: b, ordered: 1}]", "ordered is 1"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=says):
            load_questions(file)


# ---- schema and values -------------------------------------------------------------------------------------------


def test_the_schema_shows_comments_keys_and_values(railway) -> None:
    text = railway.schema()
    assert "table TRN  -- trains that ran, one row a run" in text
    assert "  CNCL INTEGER  -- 1 if it was cancelled" in text
    assert "  RGN TEXT  -- region; e.g. 'North', 'South', 'East'" in text
    assert "  VEH_ID INTEGER references VEH.VEH_ID" in text
    assert len(text.splitlines()) == 7 + sum(len(table.columns) for table in railway.tables.values())


def test_the_linked_schema_has_what_was_chosen_and_the_keys(railway) -> None:
    lines = [line.split("  -- ")[0].strip() for line in railway.schema({"DLY": ["CAUSE"]}).splitlines()]
    assert lines == [
        "table DLY",
        "TRN_ID INTEGER primary key references TRN.TRN_ID",
        "STN_CD TEXT primary key references STN.STN_CD",
        "CAUSE TEXT",
    ]
    linked = railway.schema({"TRN": ["PAX"], "LN": []})
    assert "LN_NO INTEGER references LN.LN_NO" in linked
    assert "VEH_ID" not in linked


def test_words_are_found_among_the_stored_values(railway) -> None:
    assert railway.find(["coast", "Quarry"]) == {"STN.STN_NM": ["Quarry Hill"], "LN.LN_NM": ["Coast Express"]}
    assert railway.find(["' OR 1=1 --", "%"]) == {}


def test_rows_are_compared_as_they_should_be() -> None:
    a, b = Result(("x",), ((1,), (2.0,), (2,))), Result(("y",), ((2,), (1.0,), (2 + 1e-12,)))
    assert a.same_rows(b)
    assert not a.same_rows(b, ordered=True)
    assert not a.same_rows(Result(("x",), ((1,), (2,))))  # how often counts
    assert not Result(("x",), ((12345678901,),)).same_rows(Result(("x",), ((12345678902,),)))
    assert not Result(error="e").same_rows(Result(error="e"))


def test_what_a_prompt_shows_of_a_result() -> None:
    many = Result(("a", "b"), tuple((i, None) for i in range(7)), more=True)
    assert many.preview(2) == "a | b\n---\n0 | NULL\n1 | NULL\n... more than 7 rows in all"
    assert Result(("a",), (("x" * 99,),)).preview() == "a\n---\n" + "x" * 57 + "..."
    assert Result(("a",)).preview() == "no rows"
    assert Result(error="no such table: t").preview() == "error: no such table: t"


def test_files_that_are_no_database(tmp_path) -> None:
    (tmp_path / "text").write_text("no database, but long enough to be taken for one " * 20)
    sqlite3.connect(tmp_path / "empty").close()
    for name, says in (
        ("none", "no such file"),
        ("text", "cannot be read as SQLite"),
        ("empty", "no tables"),
    ):
        with pytest.raises(InputError, match=says):
            Database(tmp_path / name)


# ---- a model's SQL -----------------------------------------------------------------------------------------------


def test_rows_up_to_the_limit(railway) -> None:
    result = run(railway, "SELECT TRN_ID FROM TRN ORDER BY 1")
    assert result.rows == tuple((i,) for i in range(1, 51))
    assert result.more
    assert run(railway, "SELECT 1 AS a, NULL, x'00ff', 'é', 9e999").rows == (
        (1, None, "x'00ff'", "é", "inf"),
    )


WRITES = (
    "DELETE FROM STN",
    "UPDATE STN SET RGN = 'x'",
    "INSERT INTO LN VALUES (1, 'a', 'b') RETURNING LN_NO",
    "DROP TABLE DLY",
    "CREATE TEMP TABLE a (b)",
    "ATTACH '{other}' AS other",
    "VACUUM INTO '{other}'",
    "PRAGMA query_only = 0",
    "PRAGMA writable_schema = 1",
    "SELECT * FROM pragma_database_list",
    "SELECT load_extension('{other}')",
    "BEGIN EXCLUSIVE",
)


@pytest.mark.parametrize("sql", WRITES)
def test_nothing_but_reading_is_let_through(railway, tmp_path, sql) -> None:
    before, other = railway.path.read_bytes(), tmp_path / "other.sqlite"
    result = run(railway, sql.format(other=other))
    assert result.error.startswith("refused"), result
    assert railway.path.read_bytes() == before
    assert not other.exists()
    assert sorted(p.name for p in railway.path.parent.iterdir()) == ["railway.sqlite"]


def test_two_statements_are_an_error(railway) -> None:
    assert "one statement" in run(railway, "SELECT 1; SELECT 2").error


FOREVER = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"


def test_a_loop_without_end_is_cut(railway) -> None:
    began = time.monotonic()
    hasty = Database(railway.path, seconds=0.2)
    assert run(hasty, FOREVER).error == "cut off after 0.2 s"
    assert time.monotonic() - began < 2.0


def test_what_sqlite_cannot_interrupt_is_killed(railway, monkeypatch) -> None:
    """One call of instr over half a megabyte: SQLite looks at its time limit only between its own steps."""
    monkeypatch.setattr(module, "_KILL_AFTER_S", 0.3)
    hasty = Database(railway.path, seconds=0.2)
    began = time.monotonic()
    sql = "SELECT instr(hex(zeroblob(499999)), hex(zeroblob(250000)) || '1')"
    assert run(hasty, sql).error == "cut off after 0.2 s"
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT zeroblob(900000000)",
        "SELECT group_concat(a.STN_NM) FROM STN a, STN b, STN c, STN d, STN e",
        "WITH RECURSIVE n (i, b) AS (SELECT 1, zeroblob(900000) UNION ALL SELECT i + 1, zeroblob(900000) FROM n LIMIT 2000)"
        " SELECT i FROM n ORDER BY b, i",
    ],
)
def test_memory_is_bounded(railway, sql) -> None:
    assert run(railway, sql).error


def test_a_cancelled_statement_leaves_no_process(railway) -> None:
    async def check() -> None:
        task = asyncio.create_task(Database(railway.path, seconds=30.0).execute(FOREVER))
        await asyncio.sleep(0.15)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    began = time.monotonic()
    asyncio.run(check())  # waits for the processes that it started
    assert time.monotonic() - began < 5.0
