"""What an experiment prints: on stdout as it comes, and once more as plain text for the run directory."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console, RenderableType

WIDTH = 150  # of the printed tables where there is no terminal to ask


class Printed:
    """Tables on stdout, and once more as plain text for the run directory."""

    def __init__(self) -> None:
        self.out = Console()
        self._same = not self.out.is_terminal
        if self._same:
            self.out = Console(width=WIDTH)
        self._parts: list[str] = []

    def add(self, table: RenderableType) -> None:
        plain = io.StringIO()
        console = Console(width=WIDTH, file=plain)
        console.print(table)
        console.print()
        self._parts.append(plain.getvalue())
        if self._same:  # rendering takes longer than simulating
            print(self._parts[-1], end="", flush=True)
        else:
            self.out.print(table)
            self.out.print()

    def text(self) -> str:
        return "".join(self._parts)

    def results(self, run_dir: Path) -> None:
        """Say where the results lie."""
        self.out.print(f"Results: {run_dir}", soft_wrap=True, highlight=False)
