"""Profiles as files: how a profile is written, shown and added to; `profiles.read_profile` reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from hexrepro.cluster.profile_parts import MAX_NUM_SEQS, Profile
from hexrepro.cluster.profiles import check_profile
from hexrepro.errors import InputError

if TYPE_CHECKING:
    from hexrepro.workload.types import Workload


@dataclass(frozen=True, eq=False)
class Made:
    """One GPU's entry of a profile, and what is said of it.

    The fit's data: kinds str[n], seconds and predicted_s float[n]. reach: how far it was measured (context_tokens, sequences,
    kv_tokens, and prefill_chunk where that is known); source: where the times come from; odd: what its making noticed.
    """

    name: str
    entry: Profile
    kinds: NDArray[np.str_]
    seconds: NDArray[np.float64]
    predicted_s: NDArray[np.float64]
    reach: Mapping[str, int]
    source: str
    odd: tuple[str, ...] = ()

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool of an instance holds."""
        return self.entry["kv_blocks"] * self.entry.get("block_size", 16)

    def warnings(self) -> Iterator[str]:
        """What is odd, in what an engine goes beyond the measurements, and where the fit is poor."""
        yield from self.odd
        limits = (  # what was measured, what the engine takes, in words
            ("sequences", self.entry.get("max_num_seqs", MAX_NUM_SEQS), "sequences a step"),
            ("prefill_chunk", self.entry.get("max_num_batched_tokens", 2048), "prompt tokens a step"),
            # half as much again is let pass: the last few per cent of a pool are seldom full
            ("kv_tokens", self.kv_tokens / 1.5, "KV tokens read a step"),
        )
        for of, most, words in limits:
            if self.reach.get(of, most) < most:
                takes = self.kv_tokens if of == "kv_tokens" else most
                yield f"fitted up to {self.reach[of]} {words}, the engine takes {takes}: beyond it extrapolates"
        yield f"fitted to calls of up to {self.reach['context_tokens']} tokens: longer ones extrapolate"
        fits = {kind: of for kind, of in self.entry["fit"].items() if _is_error(of, kind)}
        for kind, of in fits.items():
            if of["mape"] > 0.1:
                yield (
                    f"{kind} times fit badly ({of['mape']:.0%} on average, {of['max']:.0%} at worst): results on it"
                    " are rough"
                )

    def beyond(self, workload: Workload) -> Iterator[str]:
        """In what a workload goes beyond what was measured, as far as that is known beforehand."""
        longest = int((workload.input_tokens.astype(np.int64) + workload.output_tokens).max())
        if longest > self.reach["context_tokens"]:
            yield (
                f"{workload.name} has calls of up to {longest} tokens, {self.name} was fitted up to"
                f" {self.reach['context_tokens']}: it extrapolates"
            )
        if longest > self.kv_tokens:
            yield (
                f"{workload.name} has calls of up to {longest} tokens, the KV pool of {self.name} holds"
                f" {self.kv_tokens}: they never fit"
            )


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


def write_profile(profile: Profile, path: Path, command: str) -> Path:
    """Writes the profile with the command that makes it, checked and in one step: what was there is kept if it is wrong, and a
    reader never sees half of it."""
    check_profile(profile, path)
    head = (
        f"# Step times and KV capacity of {profile['model']}, view {profile['view']}. Made by\n"
        f"#   {command}\n"
        "# Change that program rather than this file. Seconds, tokens and bytes; latency is explained in\n"
        "# hexrepro/cluster/latency.py; mape and max of a fit are relative errors.\n"
    )
    body = yaml.dump(profile, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(head + body, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def print_table(profile: Profile) -> None:
    """The fit and its errors, one GPU a line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{profile['model']}, view {profile['view']}; errors: mean / worst", box=box.SIMPLE_HEAD
    )
    fits = [entry.get("fit") or {} for entry in profile["gpus"].values()]
    kinds = ["all", *dict.fromkeys(kind for fit in fits for kind, of in fit.items() if _is_error(of, kind))]
    units = ("base ms", "prefill µs", "context ns", "sequence µs", "KV ns")
    for name in ("GPU", *units, "KV tokens", *kinds):
        table.add_column(name, justify="left" if name == "GPU" else "right", no_wrap=True)
    for gpu, entry in profile["gpus"].items():
        scaled = zip(entry["latency"].values(), (1e3, 1e6, 1e9, 1e6, 1e9), strict=True)
        fit = entry.get("fit", {})
        errors = {"all": fit} if "mape" in fit else {k: of for k, of in fit.items() if isinstance(of, dict)}
        table.add_row(
            gpu,
            *(f"{value * unit:.2f}" for value, unit in scaled),
            str(entry["kv_blocks"] * entry.get("block_size", profile.get("block_size", 16))),
            *(f"{errors[k]['mape']:.1%} / {errors[k]['max']:.0%}" if k in errors else "" for k in kinds),
        )
    Console(width=150).print(table)


def _is_error(of: Any, kind: str) -> bool:
    return isinstance(of, dict) and "mape" in of and kind != "all"
