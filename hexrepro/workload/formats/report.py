"""What a reader left out of a file, and why: rows are counted and named, never dropped in silence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

EXAMPLES = 3  # rows named for each reason


@dataclass
class Reason:
    """Rows that cannot be used for one reason. ``examples``: (row, value as shown), the first few."""

    field: str
    right: str
    rows: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)


class Report:
    """What became of a file's rows.

    ``rows``: how many the file holds. ``left_rows``: those that cannot be used, by `reasons`. ``left_queries`` and
    ``left_calls``: queries that lack such a row, and their other calls: a query with a hole would be another query.
    ``notes``: what was assumed or lost although every row could be used.
    """

    def __init__(self, path: Path, unit: str = "row") -> None:
        self.path = path
        self.format = ""
        self.unit = unit
        self.rows = 0
        self.left_rows = 0
        self.left_queries = 0
        self.left_calls = 0
        self.cut_off = False  # a zipped file without its end
        self.notes: list[str] = []
        self.reasons: list[Reason] = []

    @property
    def complete(self) -> bool:
        """Whether the file is whole and every row was used."""
        return self.left_rows == 0 and self.left_queries == 0 and not self.cut_off

    def refuse(self, field: str, right: str, examples: Iterable[tuple[int, object]], rows: int) -> None:
        """``rows`` rows cannot be used; ``examples`` are some of them as (row, value). ``right``: what would be right."""
        if rows == 0:
            return
        reason = next((r for r in self.reasons if (r.field, r.right) == (field, right)), None)
        if reason is None:
            reason = Reason(field, right)
            self.reasons.append(reason)
        reason.rows += rows
        self.left_rows += rows
        for row, value in examples:
            if len(reason.examples) < EXAMPLES:
                reason.examples.append((int(row), shown(value)))

    def note(self, text: str) -> None:
        """Something that the user should know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def _named(self, reason: Reason) -> list[str]:
        found = []
        for row, value in reason.examples:
            what = f"{reason.field} is {value}" if reason.field else value
            found.append(f"{self.unit} {row}: {what}")
        return found

    def first(self) -> str:
        """The first reason as one line, with how many rows besides."""
        if not self.reasons:
            return f"{self.path}: {'the gzip file is cut off' if self.cut_off else 'no row can be used'}"
        reason = self.reasons[0]
        more = self.left_rows - 1
        text = f"{self.path}: {self._named(reason)[0]}; it must be {reason.right}"
        return text + (f" ({more:,} more cannot be used)" if more else "")

    def lines(self) -> list[str]:
        """The whole report, a line each; empty when there is nothing to say."""
        lines = []
        if self.left_rows:
            lines.append(
                f"{self.path}: left out, {self.left_rows:,} of {counted(self.rows, self.unit)} that cannot be used:"
            )
            for reason in self.reasons:
                named = self._named(reason)
                more = reason.rows - len(named)
                rest = f" and {more:,} more" if more else ""
                lines.append(f"  {'; '.join(named)}{rest}: it must be {reason.right}")
        if self.left_queries:
            lines.append(
                f"{self.path}: left out with them, {counted(self.left_queries, 'query', 'queries')} that lost a call, "
                f"with {counted(self.left_calls, 'other call')}"
            )
        return lines + [f"{self.path}: {note}" for note in self.notes]


def shown(value: object) -> str:
    """A value as it is shown in a message; `Words` are shown as they are."""
    text = value if isinstance(value, Words) else "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def counted(number: int, one: str, more: str | None = None) -> str:
    """'1 query', '1,234 queries'."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


class Words(str):
    """Words that stand in a message without quotes."""
