"""What is made of a model's answer. Any text will do: nothing here raises, and what cannot be read comes back empty."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_LONGEST_SQL = 10_000
# what may hold a semicolon that ends nothing
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|$)""", re.S)
_FENCE = re.compile(r"```[ \t]*(\w*)[ \t]*\n?(.*?)(?:```|$)", re.S)
_SELECT = re.compile(r"\s*(?:SELECT|WITH)\b", re.I)


def plain(text: str) -> str:
    """Without what a reasoning model thinks aloud."""
    text = re.sub(r"<think>.*?(?:</think>|$)", "", text, flags=re.S)
    return text.rpartition("</think>")[2].strip()


def sql(text: str) -> tuple[str, str]:
    """(statement, why it cannot be used); one of them may be empty.

    From the last ```sql block, or the last block of another kind that begins like a query, or the first line that does.
    """
    text = plain(text)
    fences = [(kind.lower(), body.strip()) for kind, body in _FENCE.findall(text)]
    labelled = [body for kind, body in fences if kind in ("sql", "sqlite") and body]
    queries = [body for _, body in fences if _begins_like_a_query(body)]
    if labelled or queries:
        found = (labelled or queries)[-1]
    else:
        start = re.search(r"^\s*(?:SQL:\s*)?(SELECT|WITH)\b", text, re.I | re.M)
        if start is None:
            return "", "it held no SELECT statement"
        found = re.split(r"\n\s*\n", text[start.start(1) :])[0]
        found = _first_statement_before_prose(found)
    found = found.strip()
    if len(found) > _LONGEST_SQL:
        return "", f"its statement is longer than {_LONGEST_SQL} characters"
    masked = _masked(found)
    end = len(masked.rstrip("; \t\r\n"))
    if ";" in masked[:end]:
        return found, "refused: there are several statements, and only one is allowed"
    found = found[:end]
    if not _begins_like_a_query(found):
        return found, "refused: only one SELECT statement is allowed"
    return found, ""


def _begins_like_a_query(text: str) -> bool:
    return bool(_SELECT.match(re.sub(r"^(?:\s*--[^\n]*\n|\s*/\*.*?\*/)+", "", text, flags=re.S)))


def _first_statement_before_prose(text: str) -> str:
    """Without a fence, what follows the semicolon is more of the answer unless it begins like SQL."""
    end = _masked(text).find(";")
    if end < 0:
        return text
    rest = text[end + 1 :].strip()
    more = re.match(
        r"(?:SELECT|WITH|INSERT|UPDATE|DELETE|DROP|CREATE|ALTER|ATTACH|PRAGMA|REPLACE|VACUUM)\b", rest, re.I
    )
    return text if more else text[:end]


def _masked(text: str) -> str:
    """The same length: literals and quoted names as x, comments as blanks."""
    return _QUOTED.sub(lambda match: (" " if match[0][:2] in ("--", "/*") else "x") * len(match[0]), text)


def texts(text: str, most: int = 20) -> list[str]:
    """A JSON list of texts, wherever it stands in the answer; else the lines and what commas part."""
    text = plain(text)
    items = _json_list(text)
    if items is None:
        items = re.split(r"[\n,]", text)
    found = [
        str(item).strip().strip("-*•\"'` ")[:80] for item in items if isinstance(item, str | int | float)
    ]
    return list(dict.fromkeys(item for item in found if item))[:most]


def names(text: str, known: Sequence[str]) -> list[str]:
    """Those of the known names that the answer has, TABLE. before a column's name aside; no matter the case."""
    text = plain(text)
    items = _json_list(text)
    if items is not None:
        said = {str(item).rpartition(".")[2].strip("\"'`[] ").lower() for item in items}
    else:
        said = {word.lower() for word in re.findall(r"\w+", text)}
    return [name for name in known if name.lower() in said]


def _json_list(text: str) -> list | None:
    for pattern in (r"\[.*\]", r"\[.*?\]"):
        found = re.search(pattern, text, re.S)
        if found:
            try:
                items = json.loads(found[0])
            except (ValueError, RecursionError):
                continue
            if isinstance(items, list):
                return items
    return None


def checks(text: str, most: int) -> list[str]:
    """One check a line: the lines with a bullet or a number, or all if there are none of these."""
    lines = [line.strip() for line in plain(text).splitlines() if re.search(r"\w", line)]
    listed = [line for line in lines if re.match(r"(?:[-*•]|\d+[.):])\s*\S", line)]
    found = [re.sub(r"^(?:[-*•]|\d+[.):])\s*", "", line)[:300] for line in listed or lines]
    return list(dict.fromkeys(found))[:most]


def verdicts(text: str, candidates: int) -> dict[int, bool]:
    """Candidate (from 1) -> whether it passed; those of which nothing is said are left out."""
    found = {}
    for number, verdict in re.findall(r"(\d+)[^\d\n]*?\b(pass|fail)(?:ed|s)?\b", plain(text), re.I):
        if len(number) < 4 and 1 <= int(number) <= candidates:
            found[int(number)] = verdict.lower() == "pass"
    return found


def number(text: str, most: int) -> int | None:
    """The first number from 1 to `most`."""
    for digits in re.findall(r"\b\d{1,4}\b", plain(text)):
        if 1 <= int(digits) <= most:
            return int(digits)
    return None
