"""`python -m hexrepro.scheduling list`, and `check POLICY [CHECK ...] [--seed N]`.

list   the policies that can be given by name, and where each comes from
check  try a policy of your own: a name, a YAML file, or a rule (path/to/file.py:function, package.module:function)
"""

from __future__ import annotations

import argparse
import sys

from hexrepro.errors import InputError, command


@command()
def main(argv: list[str]) -> int:
    """Returns the exit code: 0 fine, 1 a check failed, and those of every command."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(__doc__.strip())
        return 0
    if argv[0] == "list" and len(argv) == 1:
        return _list()
    if argv[0] == "check":
        return _check(argv[1:])
    raise InputError(f"{' '.join(argv)}: write list, or check POLICY")


def _list() -> int:
    from hexrepro.cli import describe
    from hexrepro.paths import conf_dir
    from hexrepro.scheduling.policy import policy_sources

    sources = policy_sources()
    names, places = (max(map(len, texts)) for texts in (sources, sources.values()))
    for name, source in sources.items():
        file = conf_dir() / "policy" / f"{name}.yaml"
        print(f"{name:<{names}}  {source:<{places}}  {describe(file) if file.is_file() else ''}".rstrip())
    return 0


def _check(argv: list[str]) -> int:
    from hexrepro.testing import CHECKS, findings

    parser = argparse.ArgumentParser(prog="python -m hexrepro.scheduling check")
    parser.add_argument("policy")
    parser.add_argument("checks", nargs="*", help=", ".join(CHECKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.error = _refuse
    given = parser.parse_intermixed_args(argv)
    wanted = given.checks or list(CHECKS)
    failed = seen = 0
    for finding in findings(given.policy, seed=given.seed, only=tuple(given.checks)):
        failed, seen = failed + (not finding.passed), seen + 1
        print(f"{'ok  ' if finding.passed else 'FAIL'}  {finding.check:<17}  {finding.text}", flush=True)
    if seen < len(wanted):
        print(f"not tried, as they rest on that: {', '.join(wanted[seen:])}")
    return 1 if failed else 0


def _refuse(message: str) -> None:
    raise InputError(f"check: {message}; write check POLICY [CHECK ...] [--seed N]")


if __name__ == "__main__":
    sys.exit(main())
