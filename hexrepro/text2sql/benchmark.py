"""Many questions: how many are answered right, how long they take, and each stage's part in it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hexrepro.errors import InputError
from hexrepro.text2sql.agent import Options, Run, answer
from hexrepro.text2sql.database import Database, Result
from hexrepro.text2sql.model import Model
from hexrepro.text2sql.questions import Question


@dataclass(frozen=True)
class Load:
    """How questions come: `rate_qps` a second with Poisson arrivals, or, without one, `concurrency` at a time.

    repeat  times that all questions are asked; seed of their order (from the second time on) and of the arrivals
    """

    concurrency: int = 1
    rate_qps: float | None = None
    repeat: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Scored:
    question: Question
    run: Run
    right: bool


async def benchmark(
    questions: Sequence[Question],
    model: Model,
    database: Database,
    options: Options = Options(),  # noqa: B008 -- frozen
    load: Load = Load(),
    *,
    slo_s: float | None = None,
    tenant: str = "",
    done: Callable[[Scored], None] = lambda scored: None,
) -> None:
    """Ask all questions; `done` is told of each as it ends. Questions whose own SQL fails are an InputError."""
    gold = await _gold_results(questions, database)
    rng = random.Random(load.seed)
    order = list(range(len(questions)))
    asked = list(order)
    for _ in range(load.repeat - 1):
        rng.shuffle(order)
        asked += order
    free = asyncio.Semaphore(load.concurrency)

    async def one(i: int) -> None:
        run = await answer(questions[i].question, model, database, options, slo_s=slo_s, tenant=tenant)
        right = run.picked is not None and run.picked.result.same_rows(gold[i], questions[i].ordered)
        done(Scored(questions[i], run, right))

    async def one_in_turn(i: int) -> None:
        try:
            await one(i)
        finally:
            free.release()

    try:
        async with asyncio.TaskGroup() as group:
            due_s = time.monotonic()
            for i in asked:
                if load.rate_qps is None:
                    await free.acquire()
                    group.create_task(one_in_turn(i))
                else:
                    due_s += rng.expovariate(load.rate_qps)  # times of arrival, whatever came before
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                    group.create_task(one(i))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors


async def _gold_results(questions: Sequence[Question], database: Database) -> list[Result]:
    results = []
    for question in questions:
        results.append(await database.execute(question.sql))
        if results[-1].error:
            raise InputError(
                f"question {question.question!r}: its own SQL fails on {database.path} ({results[-1].error})"
            )
    return results


def report(scored: Sequence[Scored], slo_s: float | None = None) -> RenderableType:
    """The result: each question, then accuracy and latency, then the stages."""
    runs = [s.run for s in scored]
    n, right = len(scored), sum(s.right for s in scored)
    seconds = np.array([run.seconds for run in runs])
    p50, p95 = np.quantile(seconds, (0.5, 0.95))
    span_s = max(run.ended_s for run in runs) - min(run.began_s for run in runs)
    said = [
        f"Execution accuracy: {_share(right, n)}",
        f"Latency of a question: mean {_mean(seconds)}, P50 {p50:.2f}, P95 {p95:.2f} s",
        f"Throughput: {n / max(span_s, 1e-9):.2f} questions/s over {span_s:.1f} s",
    ]
    if slo_s is not None:
        said.insert(2, f"SLO of {slo_s:g} s met: {_share(int((seconds <= slo_s).sum()), n)}")
    if lost := sum(step.lost for run in runs for step in run.steps):
        said.append(f"Calls without an answer: {lost}")
    return Group(_questions(scored), Text("\n".join(said)), _stages(runs))


def _questions(scored: Sequence[Scored]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("question")
    table.add_column("right")
    for name in ("s", "calls", "corrections"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("picked")
    for s in scored:
        corrections = sum(candidate.corrections for candidate in s.run.candidates)
        numbers = (f"{s.run.seconds:.2f}", str(len(s.run.calls)), str(corrections))
        table.add_row(Text(s.run.question), "yes" if s.right else "no", *numbers, Text(s.run.why))
    return table


def _stages(runs: Sequence[Run]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    for name in ("calls", "a question", "mean s", "P50 s", "P95 s", "tokens in", "cached", "out"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("instances")
    steps = [step for run in runs for step in run.calls]
    for stage in dict.fromkeys(step.stage for step in steps):
        mine = [step for step in steps if step.stage == stage]
        answers = [step.answer for step in mine]
        seconds = np.array([step.ended_s - step.began_s for step in mine])
        tokens = [(a.input_tokens, a.cached_tokens or 0, a.output_tokens) for a in answers]
        table.add_row(
            stage,
            str(len(mine)),
            f"{len(mine) / len(runs):.1f}",
            _mean(seconds),
            *(f"{q:.2f}" for q in np.quantile(seconds, (0.5, 0.95))),
            *(f"{mean:.0f}" for mean in np.mean(tokens, axis=0)),
            ", ".join(sorted({a.instance or "endpoint" for a in answers})),
        )
    return table


def _share(part: int, of: int) -> str:
    """With Wilson's 95 % interval."""
    from scipy.stats import binomtest

    interval = binomtest(part, of).proportion_ci(0.95, method="wilson")
    return f"{part} of {of}, {part / of:.0%} (95 % interval {interval.low:.0%} to {interval.high:.0%})"


def _mean(values: np.ndarray) -> str:
    """With half of the 95 % interval (Student's t); values of one question are not independent, so it is a rough one."""
    if len(values) < 2:
        return f"{values.mean():.2f}"
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.2f} ±{half:.2f}"
