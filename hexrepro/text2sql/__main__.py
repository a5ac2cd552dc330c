"""Answer a question about a SQLite database with SQL, by a CHESS-like chain of LLM calls that one can watch.

  python -m hexrepro.text2sql "How many trains were cancelled?"         about the example database, a small railway
  python -m hexrepro.text2sql "..." --database FILE.sqlite              about your own; it is only ever read
  python -m hexrepro.text2sql --benchmark --concurrency 4               all example questions: accuracy and latency
  python -m hexrepro.text2sql --make-database FILE                      write the example database

The calls go to the hexrepro gateway, or to any other OpenAI-compatible server. OPENAI_API_KEY holds the API key, if it needs
one. The steps are shown on stderr; the SQL and its rows go to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hexrepro.errors import InputError, command


@command()
def main(argv: list[str]) -> int:
    """Returns the exit code: 0 answered, 1 no candidate could be run, and those of every command."""
    chosen = _parser().parse_args(argv or ["--help"])
    _check(chosen)
    if chosen.make_database:
        from hexrepro.text2sql.railway import make_railway

        make_railway(chosen.make_database)
        print(f"Wrote {chosen.make_database}")
        return 0
    try:
        import openai  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError("openai is missing: pip install 'hexrepro[text2sql]'") from error
    with _database(chosen) as database:
        return asyncio.run((_benchmark if chosen.benchmark else _answer)(chosen, database))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise InputError(f"{message}; --help lists the options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m hexrepro.text2sql",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    n, seconds = {"metavar": "N"}, {"metavar": "SECONDS", "type": _positive}
    # fmt: off
    add = parser.add_argument
    add("question", nargs="?", help="in plain words")
    add("--url", default="http://127.0.0.1:8080/v1", help="of the gateway or another server (default: %(default)s)")
    add("--model", help="name of the model (default: the only one that the server has)")
    add("--database", metavar="FILE", help="a SQLite file (default: the example database)")
    add("--slo", **seconds, help="that the whole question may take; the gateway plans with it")
    add("--tenant", default="", help="for whom; where the gateway has API keys, the key decides")
    add("--record", metavar="FILE", help="append a line for each call: a trace that the simulator reads")
    add("--make-database", metavar="FILE", help="write the example database, and no more")
    add = parser.add_argument_group("the workflow").add_argument
    add("--candidates", type=_whole(1), default=2, **n, help="SQL statements written independently (default: %(default)s)")
    add("--corrections", type=_whole(0), default=3, **n,
        help="times that one is sent back if it fails or finds nothing (default: %(default)s)")
    add("--unit-tests", type=_whole(1), default=3, **n, help="checks that candidates are judged by (default: %(default)s)")
    add("--always-test", action="store_true", help="judge the candidates even where all have the same rows")
    add("--max-tokens", type=_whole(1), default=1024, **n, help="of one answer (default: %(default)s)")
    add("--timeout", default=600.0, **seconds, help="without a sign of life from the server (default: %(default)g)")
    add("--sql-seconds", default=5.0, **seconds, help="that a statement may run (default: %(default)g)")
    add("--sql-rows", type=_whole(1), default=1000, **n, help="that are fetched of its result (default: %(default)s)")
    add = parser.add_argument_group("many questions").add_argument
    add("--benchmark", action="store_true", help="ask all questions of --questions")
    add("--questions", metavar="FILE", help="YAML of questions with their SQL (default: on the example database)")
    add("--concurrency", type=_whole(1), default=1, **n, help="questions at a time (default: %(default)s)")
    add("--rate", type=_positive, metavar="QPS", help="instead: Poisson arrivals, so many a second on average")
    add("--repeat", type=_whole(1), default=1, **n, help="times that all are asked (default: %(default)s)")
    add("--seed", type=_whole(0), default=0, **n, help="of arrivals and order (default: %(default)s)")
    # fmt: on
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def _whole(least: int):
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}")
        return value

    return parse


def _check(chosen: argparse.Namespace) -> None:
    modes = [bool(chosen.question), chosen.benchmark, bool(chosen.make_database)]
    if sum(modes) != 1:
        raise InputError("give one of: a question, --benchmark, --make-database FILE")
    if chosen.database and chosen.benchmark and not chosen.questions:
        raise InputError(
            "--benchmark with --database needs --questions FILE: the built-in ones are about the example database"
        )
    if chosen.questions and not chosen.database:
        raise InputError("--questions needs --database FILE, the database that they are about")


@contextlib.contextmanager
def _database(chosen: argparse.Namespace) -> Iterator:
    """The database that was named, or the example's in a temporary file."""
    from hexrepro.text2sql.database import Database
    from hexrepro.text2sql.railway import make_railway

    with tempfile.TemporaryDirectory(prefix="hexrepro-") as directory:
        path = Path(chosen.database or Path(directory) / "railway.sqlite")
        if not chosen.database:
            make_railway(path)
        yield Database(path, chosen.sql_seconds, chosen.sql_rows)


@contextlib.asynccontextmanager
async def _model(chosen: argparse.Namespace):
    from hexrepro.serving.call_log import CallLog
    from hexrepro.text2sql.model import Model

    with CallLog(chosen.record) if chosen.record else contextlib.nullcontext() as log:
        model = Model(
            chosen.url,
            key=os.environ.get("OPENAI_API_KEY") or "none",
            model=chosen.model,
            max_tokens=chosen.max_tokens,
            timeout_s=chosen.timeout,
            log=log,
        )
        async with model:
            yield model
        if model.uncounted:
            print(
                "hexrepro: the server gave no token counts; those shown and recorded are guesses from the texts' lengths",
                file=sys.stderr,
            )


def _options(chosen: argparse.Namespace):
    from hexrepro.text2sql.agent import Options

    return Options(chosen.candidates, chosen.corrections, chosen.unit_tests, chosen.always_test)


async def _answer(chosen: argparse.Namespace, database) -> int:
    from hexrepro.text2sql import watch
    from hexrepro.text2sql.agent import answer

    async with _model(chosen) as model:
        with watch.watching(watch.console(stderr=True)) as show:
            run = await answer(
                chosen.question,
                model,
                database,
                _options(chosen),
                slo_s=chosen.slo,
                tenant=chosen.tenant,
                watch=show,
            )
    if run.picked is None:
        print(f"hexrepro: {watch.verdict(run)}", file=sys.stderr)
        return 1
    print(watch.verdict(run), file=sys.stderr)
    print(run.picked.sql + ";", flush=True)
    watch.console(stderr=False).print(watch.rows(run.picked.result))
    return 0


async def _benchmark(chosen: argparse.Namespace, database) -> int:
    """Ctrl-C prints what there is by then."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from hexrepro.text2sql import benchmark, watch
    from hexrepro.text2sql.questions import example_questions, load_questions

    questions = load_questions(chosen.questions or example_questions())
    load = benchmark.Load(chosen.concurrency, chosen.rate, chosen.repeat, chosen.seed)
    scored: list[benchmark.Scored] = []
    errors = watch.console(stderr=True)
    columns = (
        TextColumn("questions"),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    async with _model(chosen) as model:
        try:
            with Progress(*columns, console=errors, transient=True) as progress:
                task = progress.add_task("", total=len(questions) * load.repeat)

                def done(one: benchmark.Scored) -> None:
                    scored.append(one)
                    right = sum(s.right for s in scored)
                    progress.update(task, advance=1, description=f"{right} right")
                    if not errors.is_terminal:
                        print(
                            f"{len(scored)}/{len(questions) * load.repeat} questions, {right} right",
                            file=sys.stderr,
                        )

                await benchmark.benchmark(
                    questions,
                    model,
                    database,
                    _options(chosen),
                    load,
                    slo_s=chosen.slo,
                    tenant=chosen.tenant,
                    done=done,
                )
        finally:
            if scored:
                watch.console(stderr=False).print(benchmark.report(scored, chosen.slo))
    return 0


if __name__ == "__main__":
    sys.exit(main())
