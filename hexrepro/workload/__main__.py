"""`python -m hexrepro.workload inspect | convert | list`: look into a trace, translate it, name the formats."""

from __future__ import annotations

import argparse
import sys

from hexrepro.errors import InputError, command
from hexrepro.workload.formats import FORMATS, Loaded, read, write
from hexrepro.workload.formats.report import counted

WIDTH = 150  # of tables where there is no terminal to ask


@command()
def main(argv: list[str]) -> int:
    """Run one command line; returns the exit code."""
    options = _parser().parse_args(argv)
    options.run(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m hexrepro.workload",
        description=f"Look into a trace of LLM calls, or translate it.\n\n{formats_text()}",
        formatter_class=raw,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    inspect = commands.add_parser("inspect", help="say what a file holds, and draw it")
    inspect.add_argument("files", nargs="+", metavar="FILE")
    inspect.add_argument("--figure", metavar="FILE", help="draw it to a .png, .pdf or .svg file")
    inspect.add_argument(
        "--format", metavar="NAME", help="the files' format, where it is not told by looking"
    )
    inspect.set_defaults(run=_inspect)

    convert = commands.add_parser("convert", help="write a trace in another format")
    convert.add_argument("source", metavar="IN")
    convert.add_argument("target", metavar="OUT")
    convert.add_argument("--from", dest="source_format", metavar="NAME", help="the format of IN")
    convert.add_argument("--format", metavar="NAME", help="the format of OUT, where its name does not tell")
    convert.add_argument(
        "--write-block-tokens",
        type=_positive,
        metavar="N",
        help="tokens that a hash id of OUT stands for (agentic_mooncake; 64)",
    )
    convert.set_defaults(run=_convert)

    listing = commands.add_parser("list", help="name the formats")
    listing.set_defaults(run=lambda _: print(formats_text()))
    for each in (inspect, convert):
        each.add_argument(
            "--strict", action="store_true", help="refuse a file with a row that cannot be used"
        )
        each.add_argument(
            "--block-tokens",
            type=_positive,
            metavar="N",
            help="tokens that a hash id stands for (found if not given)",
        )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1")
    return int(text)


def formats_text() -> str:
    """The formats, a line each."""
    width = max(map(len, FORMATS))
    lines = [
        f"  {f.name:<{width}}  {f.about}" + (f"; also written ({', '.join(f.suffixes)})" if f.writer else "")
        for f in FORMATS.values()
    ]
    return "\n".join(["formats (told by looking into the file; text may be gzipped):", *lines])


def _inspect(options: argparse.Namespace) -> None:
    if options.figure and len(options.files) > 1:
        raise InputError("--figure is for one FILE at a time")
    from rich.console import Console

    from hexrepro.workload.show import tables
    from hexrepro.workload.survey import survey

    console = Console(markup=False)  # a stage may be called [/b]
    if not console.is_terminal:
        console = Console(width=WIDTH, markup=False)
    for number, file in enumerate(options.files):
        if number:
            console.print()
        loaded = read(file, options.format, options.strict, options.block_tokens)
        found = survey(loaded.workload)
        for part in tables(loaded, found):
            console.print(part, highlight=False)
        if options.figure:
            from hexrepro.workload.draw import draw

            draw(loaded.workload, found, options.figure)
            console.print(f"Figure: {options.figure}", highlight=False, soft_wrap=True)


def _convert(options: argparse.Namespace) -> None:
    loaded = read(options.source, options.source_format, options.strict, options.block_tokens)
    written = write(loaded.workload, options.target, options.format, options.write_block_tokens)
    _say(loaded)
    w = loaded.workload
    print(
        f"{options.target}: {counted(w.n_queries, 'query', 'queries')}, {counted(w.n_calls, 'call')}, as {written}"
    )


def _say(loaded: Loaded) -> None:
    for line in loaded.report.lines():
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
