"""Questions with SQL that answers them, from a YAML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from hexrepro.errors import InputError
from hexrepro.paths import data_dir


@dataclass(frozen=True)
class Question:
    """`ordered`: the rows must come in the order that `sql` gives."""

    question: str
    sql: str
    ordered: bool = False


def example_questions() -> Path:
    """Those about the example database."""
    return data_dir() / "text2sql" / "railway.yaml"


def load_questions(path: str | Path) -> list[Question]:
    """`questions:` of the file, a list of {question, sql, ordered}."""
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: it is not valid YAML ({' '.join(str(error).split())})") from None
    entries = content.get("questions") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: questions must be a list such as [{{question: How many?, sql: SELECT 1}}]")
    found = []
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict) or set(entry) - {"question", "sql", "ordered"}:
            raise InputError(
                f"{path}: questions[{i}] must be a mapping with question, sql and, optionally, ordered"
            )
        for name in ("question", "sql"):
            if not isinstance(entry.get(name), str) or not entry[name].strip():
                raise InputError(f"{path}: questions[{i}].{name} is {entry.get(name)!r}; it must be text")
        if not isinstance(entry.get("ordered", False), bool):
            raise InputError(
                f"{path}: questions[{i}].ordered is {entry['ordered']!r}; it must be true or false"
            )
        found.append(Question(entry["question"], entry["sql"], entry.get("ordered", False)))
    return found
