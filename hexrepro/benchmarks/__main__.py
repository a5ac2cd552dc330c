"""`python -m hexrepro.benchmarks NAME [--json FILE]`."""

import argparse
import importlib
import json
import sys
from pathlib import Path

from hexrepro.errors import InputError, command

NAMES = {
    "simulator": "speed, start-up and memory of the simulator through its public API",
    "tuning": "the offline search: the samplers' share of the wall time, and agreement with the dense grid",
    "online": "the online tuner: what one decision costs, by the load",
    "traces": "a million calls: how long they take to load, in each format, and to simulate",
    "gateway": "the gateway: what it adds to a call, by the rate, and what one decision costs",
}


@command()
def main(argv: list[str]) -> int:
    """Run one benchmark; returns the exit code."""
    listing = "\n".join(f"  {name:12} {text}" for name, text in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="python -m hexrepro.benchmarks",
        description=f"Measure hexrepro on this machine.\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args(argv)
    if options.json and not options.json.resolve().parent.is_dir():
        raise InputError(f"--json {options.json}: no such directory: {options.json.resolve().parent}")
    figures = importlib.import_module(f"hexrepro.benchmarks.{options.name}").run()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
