"""Progress on stderr: a bar at a terminal, a plain line for each finished setting elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Cells:
    """Counts finished cells (or what `unit` says). Use as a context manager; `advance` after each cell, `setting_done` after
    each setting."""

    def __init__(self, total: int, console: Console, unit: str = "cells") -> None:
        self._unit = unit
        self._total, self._done, self._cached, self._start = total, 0, 0, time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn(unit),
                TimeRemainingColumn(),
                console=console if console.is_terminal else Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("simulating", total=total)

    def __enter__(self) -> Cells:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def begin(self, what: str) -> None:
        """Say what is being computed."""
        if self._bar:
            self._bar.update(self._task, description=what)

    def advance(self, cached: bool) -> None:
        """One cell is there."""
        self._done += 1
        self._cached += cached
        if self._bar:
            self._bar.advance(self._task)

    def setting_done(self, what: str) -> None:
        """All policies of one setting are there."""
        if not self._bar:
            seconds = time.monotonic() - self._start
            note = f", {self._cached} of them cached" if self._cached else ""
            print(
                f"{what}: {self._done}/{self._total} {self._unit} done in {seconds:.1f} s{note}",
                file=sys.stderr,
                flush=True,
            )
