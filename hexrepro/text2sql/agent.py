"""The workflow for one question, in the manner of CHESS; read it from `answer` down.

    keywords -> stored values that match -> retriever (tables) -> retriever (columns) per table, in parallel      schema linking
    candidate per style, in parallel; each run on the database and sent back with its error as long as it fails   candidates
    generate_unit_test -> evaluate per check, in parallel                                                         unit tests
    unit_tester, where these leave a tie                                                                          pick

How many calls there are comes out of the answers (tables, corrections, checks), so this is plain code over task groups rather
than a declared graph for `serving.workflow.WorkflowRunner`, which must know its tasks beforehand. Any answer will do: where one
cannot be read, the agent goes on with what it has.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hexrepro.text2sql import answers, prompts
from hexrepro.text2sql.database import Database, Result
from hexrepro.text2sql.model import Answer, Model, Query, Unanswered

LINKING, CANDIDATES, TESTS, PICK = "schema linking", "candidates", "unit tests", "pick"

_T = TypeVar("_T")
_CHARACTERS_A_TOKEN = 4


@dataclass(frozen=True)
class Options:
    """How hard the agent tries.

    candidates    statements that are written independently
    corrections   times that one which fails or finds nothing is sent back
    unit_tests    checks that are written, at most
    always_test   check the candidates even if all have the same rows
    temperature   of candidates behind the first of each style; all other calls have 0
    """

    candidates: int = 2
    corrections: int = 3
    unit_tests: int = 3
    always_test: bool = False
    temperature: float = 0.7


@dataclass
class Step:
    """One thing that the agent did; times in Unix seconds.

    lane    tells siblings apart
    stage   of an LLM call, else empty; answer: what came of it, None also when it was lost
    """

    part: str
    name: str
    began_s: float
    lane: int = 0
    stage: str = ""
    ended_s: float | None = None
    note: str = ""
    answer: Answer | None = None
    lost: bool = False


@dataclass
class Candidate:
    """One way to the answer: its best statement so far, and the call that the next one follows."""

    number: int
    sql: str = ""
    result: Result = field(default_factory=lambda: Result(error="nothing was written"))
    calls: tuple[int, ...] = ()
    corrections: int = 0
    passed: int = 0


@dataclass
class Run:
    """A question under way, as a watcher sees it. `picked` is None until the end, and where nothing could be run."""

    question: str
    query: Query
    began_s: float
    ended_s: float | None = None
    steps: list[Step] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    picked: Candidate | None = None
    why: str = ""

    @property
    def seconds(self) -> float:
        return (self.ended_s or time.time()) - self.began_s

    @property
    def calls(self) -> list[Step]:
        """The LLM calls that were answered."""
        return [step for step in self.steps if step.answer is not None]


async def answer(
    question: str,
    model: Model,
    database: Database,
    options: Options = Options(),
    *,
    slo_s: float | None = None,
    tenant: str = "",
    watch: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Answer a question about the database. `watch` gets the run before it starts, and may look at it at any time.

    Raises InputError where the endpoint cannot be used.
    """
    run = Run(question, Query(uuid.uuid4().hex[:12], slo_s, tenant), time.time())
    watch(run)
    worker = _Worker(run, model, database, options)
    try:
        await worker.work()
    except BaseExceptionGroup as group:  # from parallel calls; one reason is enough
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group
    finally:
        run.ended_s = time.time()
    return run


class _Worker:
    """One question. `about` is what all its later prompts begin with, `linked` the calls that it came from."""

    def __init__(self, run: Run, model: Model, database: Database, options: Options) -> None:
        self.run, self.model, self.database, self.options = run, model, database, options
        self.about, self.linked = "", ()

    async def work(self) -> None:
        run = self.run
        await self.link()
        run.candidates = [Candidate(i + 1) for i in range(self.options.candidates)]
        await _side_by_side(self.write(candidate) for candidate in run.candidates)
        run.picked, run.why = await self.pick([c for c in run.candidates if c.result.rank > 0])
        said = any(step.part == PICK for step in run.calls)  # that call was marked as the last
        if not said and any(step.answer.instance for step in run.calls):  # only the gateway names instances
            await self.model.end(run.query)

    # ---- schema linking ------------------------------------------------------------------------------------

    async def link(self) -> None:
        """Find the tables and columns that the question is about. Where none can be read, all are kept."""
        question, tables = self.run.question, self.database.tables
        whole = prompts.about(self.database.schema(), question)
        text, first = await self.ask(LINKING, "keywords", "", f"{whole}\n\n{prompts.keywords()}")
        words = answers.texts(text) or [word for word in re.findall(r"\w+", question) if len(word) > 3]
        search = asyncio.to_thread(self.database.find, words)
        found = await self.do(LINKING, "look up values", search, lambda found: _list(found, "column"))
        whole = prompts.about(self.database.schema(), question, found)
        text, second = await self.ask(
            LINKING, "retriever", "tables", f"{whole}\n\n{prompts.tables()}", first, note=lambda t: _names(t, tables)
        )  # fmt: skip
        linked: dict[str, Sequence[str]] = {}
        calls: list[int] = []

        async def choose_columns(table: str) -> None:
            known = [column.name for column in tables[table].columns]
            text, call = await self.ask(
                LINKING, "retriever", f"columns of {table}", f"{whole}\n\n{prompts.columns(table)}", second,
                note=lambda t: _names(t, known),
            )  # fmt: skip
            linked[table] = answers.names(text, known) or known
            calls.extend(call)

        await _side_by_side(choose_columns(table) for table in answers.names(text, list(tables)))
        self.about = prompts.about(self.database.schema(linked or None), question, found)
        self.linked = tuple(sorted(calls)) or second

    # ---- candidates ----------------------------------------------------------------------------------------

    async def write(self, candidate: Candidate) -> None:
        """Write a statement, run it, and have it corrected while it fails or finds nothing, a few times at most."""
        styles = len(prompts.STYLES)
        lane = candidate.number
        text, calls = await self.ask(
            CANDIDATES, "candidate", str(lane), f"{self.about}\n\n{prompts.candidate(lane - 1)}", self.linked,
            temperature=self.options.temperature if lane > styles else 0.0, note=_statement, lane=lane,
        )  # fmt: skip
        sql, result = await self.try_out(text, lane)
        candidate.sql, candidate.result, candidate.calls = sql, result, calls
        while result.rank < 2 and candidate.corrections < self.options.corrections:
            candidate.corrections += 1
            before = sql
            text, calls = await self.ask(
                CANDIDATES, "revise", str(lane), f"{self.about}\n\n{prompts.revise(sql, result)}", candidate.calls,
                # the one length that we know better than the gateway: the corrected statement is about as long
                output_tokens=len(sql) // _CHARACTERS_A_TOKEN or None, note=_statement, lane=lane,
            )  # fmt: skip
            candidate.calls = calls
            sql, result = await self.try_out(text, lane)
            if result.rank >= candidate.result.rank:
                candidate.sql, candidate.result = sql, result
            if sql == before and result.rank == 1:
                break  # it stands by it: there are no such rows

    async def try_out(self, text: str, lane: int) -> tuple[str, Result]:
        sql, problem = answers.sql(text)
        if problem:
            return sql, Result(error=problem)
        return sql, await self.do(CANDIDATES, f"run {lane}", self.database.execute(sql), _outcome, lane)

    # ---- unit tests and pick -------------------------------------------------------------------------------

    async def pick(self, running: list[Candidate]) -> tuple[Candidate | None, str]:
        """The candidate to answer with, and why. `running`: those whose statement ran."""
        judged = running or self.run.candidates
        same = bool(running) and all(c.result.same_rows(running[0].result) for c in running)
        if not self.options.always_test and (same or not running):
            if not running:
                return None, "no candidate could be run"
            many = len(running) > 1
            return running[0], f"all {len(running)} have the same rows" if many else "the only one that runs"
        shown = f"{self.about}\n\n{prompts.candidates([(c.sql, c.result) for c in judged])}"
        checks, calls = await self.evaluate(judged, shown)
        most = max(c.passed for c in judged)
        best = [c for c in judged if c.passed == most]
        why = f"passed {most} of {len(checks)} checks"
        if self.options.always_test or not all(c.result.same_rows(best[0].result) for c in best):
            chosen = await self.choose(judged, shown, calls)
            if len(best) > 1:
                best = [chosen] if chosen in best else best
                why += f", as did others; {'chosen among' if best == [chosen] else 'the first of'} them"
        return (best[0], why) if running else (None, "no candidate could be run")

    async def evaluate(self, judged: list[Candidate], shown: str) -> tuple[list[str], tuple[int, ...]]:
        """Have checks written, and each candidate judged by each."""
        after = tuple(sorted({call for c in judged for call in c.calls}))
        text, written = await self.ask(
            TESTS, "generate_unit_test", "", f"{shown}\n\n{prompts.unit_tests(self.options.unit_tests)}", after,
            note=lambda t: _list(answers.checks(t, self.options.unit_tests), "check"),
        )  # fmt: skip
        checks = answers.checks(text, self.options.unit_tests)
        calls: list[int] = []

        async def judge(check: str) -> None:
            text, call = await self.ask(
                TESTS, "evaluate", "", f"{shown}\n\n{prompts.evaluate(check)}", written,
                note=lambda t: f"{_verdicts(t, judged)}: {_short(check)}", lane=1,
            )  # fmt: skip
            calls.extend(call)
            for number, passed in answers.verdicts(text, len(judged)).items():
                judged[number - 1].passed += passed

        await _side_by_side(judge(check) for check in checks)
        return checks, tuple(sorted(calls)) or written

    async def choose(self, judged: list[Candidate], shown: str, after: tuple[int, ...]) -> Candidate | None:
        text, _ = await self.ask(
            PICK, "unit_tester", "", f"{shown}\n\n{prompts.choose()}", after, final=True,
            note=lambda t: f"candidate {judged[n - 1].number}" if (n := answers.number(t, len(judged))) else "",
        )  # fmt: skip
        number = answers.number(text, len(judged))
        return None if number is None else judged[number - 1]

    # ---- what a step is ------------------------------------------------------------------------------------

    async def ask(
        self,
        part: str,
        stage: str,
        about: str,
        prompt: str,
        after: Sequence[int] = (),
        *,
        note: Callable[[str], str] = lambda text: "",
        lane: int = 0,
        **more,
    ) -> tuple[str, tuple[int, ...]]:
        """An LLM call: (its text, what the next call waits for). Without an answer, the text is empty."""
        step = Step(part, f"{stage} {about}".rstrip(), time.time(), lane, stage)
        self.run.steps.append(step)
        try:
            step.answer = await self.model.ask(self.run.query, stage, prompt, after=after, **more)
        except Unanswered as failure:
            step.note, step.lost = f"no answer: {failure}", True
            return "", (failure.call,)
        finally:
            step.ended_s = time.time()
        text = step.answer.text
        step.note = note(text) or _short(answers.plain(text)) or "(empty answer)"
        return text, (step.answer.call,)

    async def do(
        self, part: str, name: str, work: Awaitable[_T], note: Callable[[_T], str], lane: int = 0
    ) -> _T:
        """A step without a model."""
        step = Step(part, name, time.time(), lane)
        self.run.steps.append(step)
        try:
            result = await work
        finally:
            step.ended_s = time.time()
        step.note = note(result)
        return result


async def _side_by_side(work) -> None:
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)


# ---- what a step's line says -----------------------------------------------------------------------------------


def _short(text: str, most: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def _list(items: Mapping | Sequence[str], what: str) -> str:
    return _short(f"{len(items)} {what}{'s' * (len(items) != 1)}" + f": {', '.join(items)}" * bool(items))


def _names(text: str, known) -> str:
    return ", ".join(answers.names(text, list(known))) or "none of them named: all are kept"


def _statement(text: str) -> str:
    sql, problem = answers.sql(text)
    return _short(problem or sql)


def _verdicts(text: str, judged: Sequence[Candidate]) -> str:
    found = answers.verdicts(text, len(judged))
    said = [
        f"{judged[n - 1].number} {'passes' if passed else 'fails'}" for n, passed in sorted(found.items())
    ]
    return ", ".join(said) or "no verdict"


def _outcome(result: Result) -> str:
    if result.error:
        return _short(result.error)
    if not result.rows:
        return "no rows"
    first = _short(", ".join(map(str, result.rows[0])), 60)
    more = "more than " * result.more
    return f"{more}{len(result.rows)} row{'s' * (len(result.rows) > 1)}: {first}"
