"""`python -m hexrepro.cluster`: what hardware is known, and profiles of more of it.

python -m hexrepro.cluster list                  # the GPUs, models and quantisations of aiconfigurator-core
python -m hexrepro.cluster profile --help        # a profile of a GPU: computed, measured, or from your table
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hexrepro.errors import command

PROFILE = """\
Makes a hardware profile, prints its fit and errors, draws it, and warns where it extrapolates. A cluster config
uses the file by `profile: FILE`. One of three sources:

  --model NAME --gpu GPU          kernel measurements of aiconfigurator-core (pip install 'hexrepro[profiles]'), for any
                                  model and GPU that `list` shows; NAME may be a Hugging Face config.json. View silicon
  --endpoint URL --gpu NAME       a running OpenAI-compatible server, measured through its API. It must be idle, and
                                  takes a few minutes. View measured
  --csv FILE --model M --gpu NAME a table with the columns input, output, batch, latency: so many equal calls sent at once,
                                  and the seconds until the last has ended (what `vllm bench latency` prints). View measured
"""


@command(interrupted="interrupted; nothing was written")
def main(argv: list[str]) -> int:
    """Run one command line; returns the exit code."""
    options = _parser().parse_args(argv)
    from hexrepro.cluster import own_profiles

    if options.command == "list":
        own_profiles.show(options.gpu)
    else:
        own_profiles.profile(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hexrepro.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    known = commands.add_parser(
        "list", help="GPUs, models and quantisations that can be computed; shipped profiles"
    )
    known.add_argument("--gpu", help="what of the models runs on this GPU, by the package's own tests")
    make = commands.add_parser(
        "profile",
        help="make a profile: computed, measured, or from a table",
        description=PROFILE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = make.add_argument_group("source")
    source.add_argument(
        "--model", help="name, or config.json; of an endpoint: the served model (default: its first)"
    )
    source.add_argument(
        "--gpu", required=True, help="GPU, or several: h100,h200; of your own measurements: any name"
    )
    source.add_argument("--endpoint", metavar="URL")
    source.add_argument("--csv", type=Path, metavar="FILE")
    engine = make.add_argument_group("engine")
    engine.add_argument(
        "--tensor-parallel",
        type=_count,
        metavar="N",
        help="GPUs an instance (default: as few as hold the model)",
    )
    engine.add_argument(
        "--quantisation", metavar="Q", help="weights: bfloat16, fp8, fp8_block, nvfp4 (as `list` shows)"
    )
    engine.add_argument("--kv-dtype", metavar="Q", help="KV cache: bfloat16, fp8")
    engine.add_argument(
        "--kv-tokens", type=_count, metavar="N", help="size of the KV cache, as the server logs it"
    )
    engine.add_argument("--max-num-seqs", type=_count, default=None, metavar="N", help="default 256")
    engine.add_argument(
        "--max-num-batched-tokens", type=_count, default=None, metavar="N", help="default 2048"
    )
    out = make.add_argument_group("result")
    out.add_argument(
        "--name", help="of the GPU's entry (default: GPU, with -tpN and -QUANTISATION where given)"
    )
    out.add_argument("--price", type=float, metavar="USD", help="per GPU and hour")
    out.add_argument("--price-source", metavar="TEXT", help="whose price, of which day")
    out.add_argument("--trace", help="a trace by name, or a file: say where it goes beyond what was measured")
    out.add_argument(
        "--out", type=Path, metavar="FILE", help="default: MODEL_VIEW.yaml; the figure goes beside it"
    )
    out.add_argument(
        "--add", action="store_true", help="add to FILE, or put in place of the entry of that name"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
