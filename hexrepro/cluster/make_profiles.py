"""Makes the hardware profiles in data/profiles anew.

    python -m hexrepro.cluster.make_profiles --view silicon
    python -m hexrepro.cluster.make_profiles --view measured --latency-csv LLAMA.csv TRACE4.csv

`silicon` fits the kernel measurements of the package aiconfigurator-core (extra `profiles`). `measured` fits
the published single-request latencies and writes the views `measured` and `released`; the CSVs have the
columns input_tokens, output_tokens and, for each GPU, GPU_latency_s, or GPU_total_s, GPU_ttft_s and
GPU_per_output_token_s. The same input gives the same files, byte for byte.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from hexrepro.cluster import silicon
from hexrepro.cluster.profile_parts import Profile
from hexrepro.cluster.published import measured_profiles
from hexrepro.cluster.shapes import LLAMA_70B, QWEN3_30B
from hexrepro.cluster.silicon_profiles import silicon_profile
from hexrepro.errors import InputError
from hexrepro.paths import data_dir


class _Dumper(yaml.SafeDumper):
    """Notes as literal blocks, short lists and the small mappings of numbers on one line."""


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _represent_dict(dumper: yaml.SafeDumper, mapping: dict[str, Any]) -> yaml.Node:
    flat = len(mapping) <= 4 and all(isinstance(value, (int, float)) for value in mapping.values())
    return dumper.represent_mapping("tag:yaml.org,2002:map", mapping.items(), flow_style=flat)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    return dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=all(isinstance(x, float) for x in items)
    )


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(dict, _represent_dict)
_Dumper.add_representer(list, _represent_list)


def write_profile(profile: Profile, folder: Path) -> Path:
    """Writes MODEL_VIEW.yaml into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{profile['model']}_{profile['view']}.yaml"
    view = "silicon" if profile["view"] == "silicon" else "measured"
    head = (
        f"# Step times and KV capacity of {profile['model']}, view {profile['view']}. Made by\n"
        f"#   python -m hexrepro.cluster.make_profiles --view {view}\n"
        "# Change that program rather than this file. Seconds, tokens and bytes; latency is explained in\n"
        "# hexrepro/cluster/latency.py; mape and max of a fit are relative errors.\n"
    )
    body = yaml.dump(profile, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    path.write_text(head + body, encoding="utf-8")
    return path


def print_table(profile: Profile) -> None:
    """The fit and its errors, one GPU a line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{profile['model']}, view {profile['view']}; errors: mean / worst", box=box.SIMPLE_HEAD
    )
    kinds = ("all", *silicon.KINDS)
    units = ("base ms", "prefill µs", "context ns", "sequence µs", "KV ns")
    for name in ("GPU", *units, "KV tokens", *kinds):
        table.add_column(name, justify="left" if name == "GPU" else "right", no_wrap=True)
    for gpu, entry in profile["gpus"].items():
        scaled = zip(entry["latency"].values(), (1e3, 1e6, 1e9, 1e6, 1e9), strict=True)
        fit = entry.get("fit", {})
        errors = {"all": fit} if "mape" in fit else fit
        table.add_row(
            gpu,
            *(f"{value * unit:.2f}" for value, unit in scaled),
            str(entry["kv_blocks"] * profile["block_size"]),
            *(f"{errors[k]['mape']:.1%} / {errors[k]['max']:.0%}" if k in errors else "" for k in kinds),
        )
    Console(width=150).print(table)


def make_profiles(view: str, latency_csv: list[Path], out: Path) -> list[Path]:
    """Fits and writes the profiles of a view, printing each fit; returns the files."""
    if view == "silicon":
        profiles = [
            silicon_profile(LLAMA_70B, 4, variants=True),
            silicon_profile(QWEN3_30B, 2, variants=False),
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
        paths.append(write_profile(profile, out))
    return paths


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hexrepro.cluster.make_profiles", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--view", choices=("silicon", "measured"), required=True)
    parser.add_argument("--latency-csv", type=Path, nargs="+", default=[], help="for the view measured")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder of the YAML files (default: data/profiles)"
    )
    options = parser.parse_args(arguments)
    try:
        paths = make_profiles(options.view, options.latency_csv, options.out or data_dir() / "profiles")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    for path in paths:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
