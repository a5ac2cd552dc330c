"""The one exception that hexrepro raises for a user's mistake, and how every command ends."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

MISTAKE, INTERRUPTED, NOBODY_READS = 2, 130, 141  # exit codes, as shells and argparse have them


class InputError(ValueError):
    """A user's mistake (a file, a config, an argument). The message is one line that says what would be
    right."""


def command(interrupted: str = "interrupted") -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorates the `main` of a command, which returns an exit code: a user's mistake becomes one line and exit code 2 (with
    HEXREPRO_DEBUG=1 its traceback), Ctrl-C the line `interrupted` and 130, an output that nobody reads any more 141."""

    def decorate(main: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(main)
        def run(argv: list[str] | None = None) -> int:
            try:
                return main(sys.argv[1:] if argv is None else list(argv))
            except InputError as mistake:
                if os.environ.get("HEXREPRO_DEBUG") == "1":
                    raise
                print(f"hexrepro: {' '.join(str(mistake).split())}", file=sys.stderr)
                return MISTAKE
            except KeyboardInterrupt:
                start = "\n" if sys.stderr.isatty() else ""  # behind the terminal's ^C
                print(f"{start}hexrepro: {interrupted}", file=sys.stderr)
                return INTERRUPTED
            except BrokenPipeError:
                sys.stdout = None
                return NOBODY_READS

        return run

    return decorate
