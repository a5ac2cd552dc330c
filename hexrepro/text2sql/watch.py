"""The picture of a question under way: each step with where it ran, when, how long, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hexrepro.text2sql.agent import Run, Step
from hexrepro.text2sql.database import Result

_BAR = 24  # characters of the time line; half of it on a narrow terminal, which shows no tokens either
_NARROW = 120
_WIDTH = 150  # where there is no terminal to ask
_PARTS_OF_A_CELL = "▏▎▍▌▋▊▉█"


def console(stderr: bool) -> Console:
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=_WIDTH)


@contextmanager
def watching(out: Console) -> Iterator:
    """Yields the function that takes the run to be shown: live at a terminal, once at the end elsewhere."""
    shown: list[Run] = []

    def now() -> RenderableType:
        return picture(shown[-1], out.width) if shown else Text("")

    with Live(get_renderable=now, console=out, refresh_per_second=8, transient=not out.is_terminal):
        yield shown.append
    if not out.is_terminal:
        out.print(now())


def picture(run: Run, width: int = _WIDTH) -> RenderableType:
    """The steps in order, siblings one after the other, with their time line."""
    wide = width >= _NARROW
    cells = _BAR if wide else _BAR // 2
    table = Table(
        title=f"{run.question}\nquery {run.query.id}: {_summary(run)}",
        title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False, expand=True,
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    table.add_column("instance", no_wrap=True)
    table.add_column(f"0 … {run.seconds:.1f} s", width=cells, no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    if wide:
        table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("what came of it", ratio=1, overflow="ellipsis", no_wrap=True)
    parts = dict.fromkeys(step.part for step in run.steps)
    for part in parts:
        steps = sorted((s for s in run.steps if s.part == part), key=lambda s: (s.lane, s.began_s))
        table.add_row(Text(part, style="bold"))
        for step in steps:
            table.add_row(*_row(step, run, cells, wide))
    return table


def _row(step: Step, run: Run, cells: int, wide: bool) -> tuple:
    answer = step.answer
    now_s = step.ended_s or time.time()
    tokens = ""
    if answer is not None and answer.input_tokens is not None:
        cached = f" ({answer.cached_tokens} cached)" if answer.cached_tokens else ""
        tokens = f"{answer.input_tokens}{cached} → {answer.output_tokens}"
    at = (answer.instance or "endpoint") if answer else ""
    style = "" if step.ended_s else "yellow"
    return (
        f"  {step.name}",
        at,
        Text(bar(step.began_s - run.began_s, now_s - run.began_s, run.seconds, cells), style=style or "cyan"),
        Text(f"{now_s - step.began_s:.2f}", style=style),
        *[tokens] * wide,
        Text(step.note or "…", style=style),
    )


def bar(begin_s: float, end_s: float, whole_s: float, cells: int = _BAR) -> str:
    """`cells` characters of the time line: blank until `begin_s`, filled to `end_s`, at least one mark."""
    scale = cells / max(whole_s, 1e-9)
    first = min(int(begin_s * scale), cells - 1)
    eighths = round((end_s * scale - first) * 8)
    whole, rest = divmod(min(max(eighths, 1), 8 * (cells - first)), 8)
    return " " * first + "█" * whole + (_PARTS_OF_A_CELL[rest - 1] if rest else "")


def _summary(run: Run) -> str:
    calls = run.calls
    text = f"{len(calls)} LLM calls, {run.seconds:.1f} s"
    if run.query.slo_s is not None:
        text += f" of {run.query.slo_s:g} s" + (" (SLO missed)" if run.seconds > run.query.slo_s else "")
    corrections = sum(candidate.corrections for candidate in run.candidates)
    if corrections:
        text += f", {corrections} correction{'s' * (corrections > 1)}"
    where = {step.answer.instance for step in calls} - {None}
    if len(where) > 1:
        text += f", on {len(where)} instances"
    return text


def verdict(run: Run) -> str:
    """Which candidate was taken, and why."""
    if run.picked is None:
        tried = "; ".join(f"{c.number}: {c.result.error}" for c in run.candidates)
        return f"No answer: {run.why} ({tried})"
    return f"Candidate {run.picked.number} of {len(run.candidates)}: {run.why}"


def rows(result: Result, most: int = 20) -> RenderableType:
    """The first rows of the answer."""
    if not result.rows:
        return Text("no rows")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in result.columns:
        table.add_column(Text(name), overflow="fold")
    for row in result.rows[:most]:
        table.add_row(*(Text("NULL" if cell is None else str(cell)) for cell in row))
    if len(result.rows) > most or result.more:
        table.caption = f"{most} of {'more than ' * result.more}{len(result.rows)} rows"
    return table
