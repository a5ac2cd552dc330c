"""What is made of answers: as models give them, and worse."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexrepro.text2sql import answers

GOOD = {
    "fence": "```sql\nSELECT 1\n```",
    "prose around": "Sure!\n```sql\nSELECT 1;\n```\nI hope it helps; tell me.",
    "no label": "```\nSELECT 1\n```",
    "not closed": "```sql\nSELECT 1",
    "the last of several": "```sql\nSELECT 0\n```\nNo, better:\n```SQL\nSELECT 1\n```",
    "no fence": "SELECT 1",
    "no fence, prose after": "SQL: SELECT 1; which gives one row.",
    "no fence, prose before and after": "The query is:\n\nSELECT 1\n\nIt gives one.",
    "thought aloud": "<think>maybe ```sql\nSELECT 2\n```</think>SELECT 1;",
    "semicolons and a comment": "```sql\nSELECT 1;; -- done; really\n```",
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_the_statement_is_found(text) -> None:
    assert answers.sql(text) == ("SELECT 1", "")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT ';' AS a, \"b;c\" FROM t",
        "WITH a AS (SELECT 1) SELECT * FROM a",
        "SELECT 'it''s; so' FROM t WHERE a = 'x'",
        "-- first\nSELECT 1",
        "select count(*) from t /* ; */ where a = 'WTH'",
    ],
)
def test_a_statement_is_left_as_it_is(sql) -> None:
    assert answers.sql(f"```sql\n{sql};\n```") == (sql, "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no SELECT"),
        ("I cannot answer that.", "no SELECT"),
        ("<think>SELECT 1", "no SELECT"),
        ("```sql\n```", "no SELECT"),
        ("```sql\nSELECT 1; DROP TABLE t\n```", "several statements"),
        ("SELECT 1; DELETE FROM t", "several statements"),
        ("SELECT 1; SELECT 2;", "several statements"),
        ("```sql\nDELETE FROM t\n```", "only one SELECT"),
        ("```sql\nPRAGMA query_only = 0\n```", "only one SELECT"),
        ("```sql\nEXPLAIN SELECT 1\n```", "only one SELECT"),
        ("SELECT " + "1," * 9999, "longer than"),
    ],
)
def test_what_cannot_be_used_says_why(text, says) -> None:
    assert says in answers.sql(text)[1]


def test_names() -> None:
    known = ["STN", "LN", "LN_STP"]
    assert answers.names('["LN_STP", "stn"]', known) == ["STN", "LN_STP"]
    assert answers.names('```json\n["T.LN"]\n```', known) == ["LN"]
    assert answers.names("Tables stn and LN_STP are needed.", known) == ["STN", "LN_STP"]
    assert answers.names("[STN, LN", known) == ["STN", "LN"]
    assert answers.names('["nothing"]', known) == answers.names("", known) == []


def test_texts() -> None:
    assert answers.texts('Here: ["Coast Express", "IC", "IC", 3]') == ["Coast Express", "IC", "3"]
    assert answers.texts("- Coast Express\n- IC") == ["Coast Express", "IC"]
    assert answers.texts("[]") == answers.texts("") == []


def test_checks() -> None:
    listed = "Here they are:\n1. One row.\n2) No more than one column.\n- Not empty."
    assert answers.checks(listed, 5) == ["One row.", "No more than one column.", "Not empty."]
    assert answers.checks(listed, 2) == ["One row.", "No more than one column."]
    assert answers.checks("just a line\n\n---", 5) == ["just a line"]
    assert answers.checks("\n", 5) == []


def test_verdicts() -> None:
    assert answers.verdicts("1: pass\n2: fail", 2) == {1: True, 2: False}
    assert answers.verdicts("**Candidate #1**: Passed\nCandidate 2 has FAILED", 2) == {1: True, 2: False}
    assert answers.verdicts("3: pass\nnothing else", 2) == {}
    assert answers.verdicts("1: surpass", 1) == {}


def test_number() -> None:
    assert answers.number("Candidate 2.", 2) == 2
    assert answers.number("7 or 1", 2) == 1
    assert answers.number("none", 2) is answers.number("", 2) is None


@settings(max_examples=60)
@given(
    st.text(alphabet=st.sampled_from("`sqlSELECT with1;'\"-/*[]{}<think>\n\\, :pasfi#é\x00"), max_size=200)
)
def test_any_text_is_survived(text) -> None:
    statement, problem = answers.sql(text)
    assert statement or problem
    assert set(answers.names(text, ["a", "S"])) <= {"a", "S"}
    assert all(isinstance(word, str) for word in answers.texts(text))
    assert len(answers.checks(text, 3)) <= 3
    assert set(answers.verdicts(text, 2)) <= {1, 2}
    assert answers.number(text, 2) in (1, 2, None)
