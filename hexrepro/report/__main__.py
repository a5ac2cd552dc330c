"""`python -m hexrepro.report html RUN_DIR [-o FILE]`, and `timeline RUN_DIR [NAME=VALUE ...] [-o FILE]`, `timeline LOG.jsonl`.

html      a run, or a sweep, as one self-contained page: RUN_DIR/report.html
timeline  one run's calls (policy=eft rate_qps=1 seed=3 ...), or a gateway's call log, as a trace for ui.perfetto.dev and
          chrome://tracing: RUN_DIR/timeline.json, or beside the log. A FILE that ends in .gz is compressed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hexrepro.errors import InputError, command


@command()
def main(argv: list[str]) -> int:
    """Run one command line; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(__doc__.strip())
        return 0
    commands = {"html": _html, "timeline": _timeline}
    if argv[0] not in commands:
        raise InputError(f"{argv[0]}: write html RUN_DIR, or timeline RUN_DIR")
    commands[argv[0]](argv[1:])
    return 0


def _parsed(argv: list[str], command: str, **more) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m hexrepro.report {command}")
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    for name, options in more.items():
        parser.add_argument(name, **options)

    def refuse(message: str) -> None:
        raise InputError(f"{command}: {message}; python -m hexrepro.report --help shows how it is written")

    parser.error = refuse
    given = parser.parse_intermixed_args(argv)
    if not given.run.exists():
        raise InputError(f"{given.run}: no such file or directory")
    return given


def _html(argv: list[str]) -> None:
    given = _parsed(argv, "html")
    from hexrepro.report.html import write_report

    print(f"Report: {write_report(given.run, given.output)}")


def _timeline(argv: list[str]) -> None:
    given = _parsed(argv, "timeline", which={"nargs": "*"})
    wanted = {}
    for text in given.which:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"timeline: {text}: write NAME=VALUE, such as policy=eft")
        wanted[name] = value
    from hexrepro.report import perfetto, spans

    if given.run.is_dir():
        chosen, place = spans.from_run(given.run, wanted), given.run / "timeline.json"
    elif wanted:
        raise InputError(f"timeline: {given.which[0]}: a call log holds one run; leave it out")
    else:
        chosen, place = spans.from_log(given.run), given.run.with_suffix(".timeline.json")
    output = given.output or place
    perfetto.write(output, perfetto.trace_events(chosen.spans, chosen.instances, chosen.name))
    print(
        f"{len(chosen.spans)} calls of {chosen.name}\nTimeline: {output} (open it at https://ui.perfetto.dev)"
    )


if __name__ == "__main__":
    sys.exit(main())
