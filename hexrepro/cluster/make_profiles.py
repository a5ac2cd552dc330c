"""Makes the hardware profiles in data/profiles anew.

    python -m hexrepro.cluster.make_profiles --view silicon
    python -m hexrepro.cluster.make_profiles --view measured --latency-csv LLAMA.csv TRACE4.csv

`silicon` fits the kernel measurements of the package aiconfigurator-core (extra `profiles`). `measured` fits
the published single-request latencies and writes the views `measured` and `released`; the CSVs have the
columns input_tokens, output_tokens and, for each GPU, GPU_latency_s, or GPU_total_s, GPU_ttft_s and
GPU_per_output_token_s. The same input gives the same files, byte for byte. Profiles of other models and GPUs, and of
your own hardware: `python -m hexrepro.cluster profile`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hexrepro.cluster.profile_files import print_table, write_profile
from hexrepro.cluster.published import measured_profiles
from hexrepro.cluster.shapes import LLAMA_70B, QWEN3_30B
from hexrepro.cluster.silicon_profiles import silicon_profile
from hexrepro.errors import InputError, command
from hexrepro.paths import data_dir

NEW_GPUS = ("h100", "h200", "b200", "rtx-pro-6000")


def make_profiles(view: str, latency_csv: list[Path], out: Path) -> list[Path]:
    """Fits and writes the profiles of a view, printing each fit; returns the files."""
    if view == "silicon":
        profiles = [
            silicon_profile(LLAMA_70B, 4, variants=True, more=[(gpu, None) for gpu in NEW_GPUS]),
            silicon_profile(
                QWEN3_30B, 2, variants=False, more=[("a100", 1), *((gpu, None) for gpu in NEW_GPUS)]
            ),
        ]
    else:
        if not latency_csv:
            raise InputError(
                "view measured: --latency-csv is missing; give the CSV files of single-request latencies"
            )
        profiles = [profile for csv in latency_csv for profile in measured_profiles(csv)]
    paths = []
    for profile in profiles:
        print_table(profile)
        command = f"python -m hexrepro.cluster.make_profiles --view {view}"
        path = out / f"{profile['model']}_{profile['view']}.yaml"
        paths.append(write_profile(profile, path, command))
    return paths


@command()
def main(arguments: list[str]) -> int:
    """Run one command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hexrepro.cluster.make_profiles", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--view", choices=("silicon", "measured"), required=True)
    parser.add_argument("--latency-csv", type=Path, nargs="+", default=[], help="for the view measured")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder of the YAML files (default: data/profiles)"
    )
    options = parser.parse_args(arguments)
    paths = make_profiles(options.view, options.latency_csv, options.out or data_dir() / "profiles")
    for path in paths:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
