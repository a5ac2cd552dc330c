"""What the model is asked, stage by stage.

What many calls share comes first, so that a server with prefix caching computes it once: the system text and the schema (the
whole one is common to all questions about a database, the linked one to all later calls of a query), then the question, then
the candidates where they are judged, and the task last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hexrepro.text2sql.database import Result

SYSTEM = (
    "You work on questions about a SQLite database. Do the task at the end of the message, in the form that it asks for,"
    " and nothing else."
)

# Two ways to the SQL, as in CHESS; further candidates take them in turn, at a higher temperature.
STYLES = (
    "Split the question into parts, solve each in one short sentence, then put them together.",
    "Plan in short steps as a database would: which tables are read, how they are joined, filtered, grouped and sorted.",
)


def about(schema: str, question: str, found: Mapping[str, Sequence[str]] | None = None) -> str:
    """The part of a prompt before the task."""
    text = f"Schema:\n{schema}\n\nQuestion: {question}"
    if found:
        lines = (f"- {place}: {', '.join(map(repr, values))}" for place, values in found.items())
        text += "\nStored values with words of the question in them:\n" + "\n".join(lines)
    return text


def keywords() -> str:
    return (
        "Task: keywords\nList the words of the question that may be stored in the database as values, such as names and codes."
        ' Answer with a JSON list of texts, such as ["Paris", "blue"].'
    )


def tables() -> str:
    return (
        "Task: tables\nWhich tables does a query for the question need, those for joins included?"
        " Answer with a JSON list of their names."
    )


def columns(table: str) -> str:
    return (
        f"Task: columns of {table}\nWhich columns of table {table} does a query for the question need?"
        " Answer with a JSON list of their names."
    )


def candidate(style: int) -> str:
    return (
        f"Task: SQL\n{STYLES[style % len(STYLES)]} End with one SQLite SELECT statement in a ```sql block,"
        " which gives the columns that are asked for, in their order, and no others."
    )


def revise(sql: str, result: Result) -> str:
    if not sql:
        return (
            f"Task: correct\nA first answer could not be used: {result.error}.\n"
            "Answer with one SELECT statement in a ```sql block."
        )
    if result.error:
        what = f"failed: {result.error}"
    else:
        what = "gave no rows; look for a wrong value or join (if no rows are right, repeat it)"
    return (
        f"Task: correct\nThis statement\n```sql\n{sql}\n```\n{what}.\n"
        "Answer with the corrected SELECT statement in a ```sql block."
    )


def candidates(found: Sequence[tuple[str, Result]]) -> str:
    """The candidates to be judged, numbered from 1."""
    return "\n\n".join(
        f"Candidate {i}:\n```sql\n{sql or '(none)'}\n```\nwhich gives\n{result.preview()}"
        for i, (sql, result) in enumerate(found, start=1)
    )


def unit_tests(most: int) -> str:
    return (
        f"Task: unit tests\nThe candidates differ. Write at most {most} short checks that a right answer to the question passes"
        " and a wrong one may fail. One check a line, each with '- ' before it."
    )


def evaluate(check: str) -> str:
    return (
        "Task: evaluate\nDoes each candidate pass the check below? Answer with one line for each candidate, such as"
        f" '1: pass' or '1: fail'.\nCheck: {check}"
    )


def choose() -> str:
    return "Task: choose\nWhich candidate answers the question best? Answer with its number only."
