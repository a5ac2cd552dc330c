"""The config of a validation as checked values: how often and at which loads, and the servers with what they are asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from hexrepro.cluster.profiles import load_cluster
from hexrepro.cluster.types import Cluster
from hexrepro.compiled import cache_root
from hexrepro.errors import InputError
from hexrepro.experiments.cache import fingerprint
from hexrepro.experiments.explain import suggest
from hexrepro.experiments.inputs import load_trace
from hexrepro.experiments.settings import Settings, number, section, whole
from hexrepro.validation.endpoint_design import Design
from hexrepro.validation.fidelity import shortened
from hexrepro.validation.lab import PROFILE, Fleet, names_of, profiled
from hexrepro.validation.launch import ServerSpec
from hexrepro.validation.tiny_model import TinyModel
from hexrepro.workload import Workload, generate

LONGEST = 8192  # tokens of a call that launched servers take


@dataclass(frozen=True)
class Options:
    """The part `validation` of the config, which explains it."""

    queue_mode: str
    loads: Mapping[str, tuple[str, float]]
    capacity_queries: int
    repeats: int
    simulations: int
    seed: int
    fixed_placement: bool
    call_timeout_s: float
    limit_s: float


@dataclass(frozen=True)
class Case:
    """One set of servers, and what they are asked."""

    fleet: Fleet
    workload: Workload
    many: Workload  # the same kind of queries, as many as the capacity is found with
    shared: str  # what their prompts share: off, template or full
    bars: Mapping[str, float]
    folder: Path

    @property
    def known(self) -> Cluster | None:
        """The instances as far as they are known beforehand: profiled earlier, or paced, for an estimate of the time."""
        if (self.folder / PROFILE).exists():
            return profiled(self.fleet, self.folder)
        if self.fleet.specs and all(spec.pace for spec in self.fleet.specs):
            return Cluster("configured", tuple(spec.instance() for spec in self.fleet.specs))
        return None


def options_of(cfg: DictConfig) -> Options:
    given = section(cfg, "validation", [f.name for f in fields(Options)], experiment="validation")
    loads = {}
    if not isinstance(given["loads"], Mapping) or not given["loads"]:
        raise InputError("validation.loads must map names to {of: least or most, times: NUMBER}")
    for name, load in given["loads"].items():
        place = f"validation.loads.{name}"
        if not isinstance(load, Mapping) or set(load) != {"of", "times"}:
            raise InputError(f"{place}={load} must be of the form {{of: least, times: 0.5}}")
        if load["of"] not in ("least", "most"):
            raise InputError(f"{place}.of={load['of']} must be least or most")
        loads[str(name)] = load["of"], number(load["times"], f"{place}.times", above=0.0)
    if given["queue_mode"] not in ("engine", "gateway"):
        raise InputError(f"validation.queue_mode={given['queue_mode']} must be engine or gateway")
    if not isinstance(given["fixed_placement"], bool):
        raise InputError(f"validation.fixed_placement={given['fixed_placement']} must be true or false")
    counts = ("capacity_queries", "repeats", "simulations")
    return Options(
        queue_mode=given["queue_mode"],
        loads=loads,
        fixed_placement=given["fixed_placement"],
        seed=whole(given["seed"], "validation.seed", least=0),
        **{name: whole(given[name], f"validation.{name}") for name in counts},
        **{
            name: number(given[name], f"validation.{name}", above=0.0, unit=" s")
            for name in ("call_timeout_s", "limit_s")
        },
    )


def flag(cfg: DictConfig, name: str) -> bool:
    if not isinstance(cfg.get(name), bool):
        raise InputError(f"{name}={cfg.get(name)} must be true or false")
    return cfg[name]


def cases_of(cfg: DictConfig, settings: Settings, options: Options) -> list[Case]:
    plain = OmegaConf.to_container(cfg, resolve=True)
    chosen, servers = plain.get("setting"), plain.get("servers")
    chosen = [chosen] if isinstance(chosen, str) else chosen
    if not isinstance(servers, Mapping) or not isinstance(chosen, list) or not chosen:
        raise InputError("run=validation needs `setting` and `servers`; experiment=validation has them")
    if len(settings.traffic.traces) != 1:
        raise InputError(f"workload.traces={list(settings.traffic.traces)} must be one trace here")
    cases = []
    for name in chosen:
        if name not in servers:
            raise InputError(f"setting={name} is unknown{suggest(str(name), servers)}")
        given = dict(servers[name])
        fleet = _fleet(str(name), given, plain, settings)
        cut = [
            whole(given.pop(key, 1), f"servers.{name}.{key}") for key in ("prompts", "outputs")
        ]  # fmt: skip
        workload = shortened(load_trace(settings.traffic.traces[0], settings.traffic), *cut)
        if given.get("queries") is not None:
            first = whole(given["queries"], f"servers.{name}.queries")
            workload = workload.take(np.arange(min(first, workload.n_queries)))
        many = _many(workload, cut, settings, options)
        # what each replay hangs on beyond this is checked replay by replay
        shared = settings.prefix_caching[settings.profiles[0]]
        key = fingerprint(repr(fleet), workload, options.queue_mode, shared)[:16]
        folder = cache_root().expanduser() / "validation" / f"{name}-{key}"
        cases.append(Case(fleet, workload, many, shared, _bars(given.get("bars"), name), folder.resolve()))
    return cases


def _many(workload: Workload, cut: Sequence[int], settings: Settings, options: Options) -> Workload:
    """Queries to find the capacity with: other ones of the trace, or the user's file over and over."""
    n, trace = options.capacity_queries, settings.traffic.traces[0]
    if trace == "file":
        return workload.take(np.arange(n) % workload.n_queries)
    return shortened(generate(trace, seed=settings.traffic.trace_seed + 1, n_queries=n), *cut)


def _bars(given: Any, name: str) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise InputError(f"servers.{name}.bars={given} must map metrics to numbers, {{query_mean_s: 0.03}}")
    return {str(k): number(v, f"servers.{name}.bars.{k}", above=0.0) for k, v in given.items()}


def _fleet(name: str, given: dict, plain: Mapping[str, Any], settings: Settings) -> Fleet:
    """The servers of one setting; takes out of `given` what it reads."""
    place, kind = f"servers.{name}", given.pop("kind", None)
    design = dict(given.pop("design", None) or {})
    known = [f.name for f in fields(Design)]
    for key in design:
        if key not in known:
            raise InputError(f"{place}.design.{key} is no option{suggest(str(key), known)}")
    design = Design(**{k: _tuples(v) for k, v in design.items() if v is not None})
    if kind == "endpoints":
        urls = plain.get("endpoints")
        if (
            not isinstance(urls, list)
            or not urls
            or not all(isinstance(u, str) and u.startswith(("http://", "https://")) for u in urls)
        ):
            raise InputError(
                f"endpoints={urls} must be a list of the servers' base URLs, endpoints=[http://10.0.0.1:8000]"
            )
        if len(set(urls)) < len(urls):
            raise InputError(f"endpoints={urls} names a server twice")
        sizes = {
            key: None if given.get(key) is None else whole(given[key], f"{place}.{key}")
            for key in ("kv_blocks", "block_size", "concurrency")
        }
        fleet = Fleet(
            name,
            tuple(f"server{i + 1}" for i in range(len(urls))),
            urls=tuple(u.rstrip("/").removesuffix("/v1") for u in urls),
            model=given.get("model"),
            api_key_env=given.get("api_key_env"),
            design=design,
            **sizes,
        )
        fleet.api_key  # noqa: B018 -- a missing variable shows now
        return fleet
    if kind not in ("paced", "compute"):
        raise InputError(f"{place}.kind={kind} must be paced, compute or endpoints")
    names = ("max_num_seqs", "max_num_batched_tokens", "block_size", "stream_interval")
    common = {key: whole(given.get(key), f"{place}.{key}") for key in names}
    if settings.prefix_caching[settings.profiles[0]] == "off":
        common["prefix_caching"] = False
    paced = kind == "paced"
    specs = _paced(place, given, plain, settings, common) if paced else _computing(place, given, common)
    return Fleet(name, tuple(spec.name for spec in specs), specs=specs, design=design)


def _paced(
    place: str, given: Mapping, plain: Mapping, settings: Settings, common: dict
) -> tuple[ServerSpec, ...]:
    """A server for each instance of the cluster config, with its step times, and its KV memory cut as the prompts are."""
    cluster = load_cluster(plain["cluster"], settings.profiles[0])
    scale = number(given.get("pace_scale"), f"{place}.pace_scale", above=0.0)
    cut = whole(given.get("prompts", 1), f"{place}.prompts")
    names = names_of([spec.gpu for spec in cluster.instances])
    return tuple(
        ServerSpec(
            name,
            pace=spec.latency,
            pace_scale=scale,
            kv_blocks=max(1, spec.kv_tokens // cut // common["block_size"]),
            **common,
        )
        for name, spec in zip(names, cluster.instances, strict=True)
    )


def _computing(place: str, given: Mapping, common: dict) -> tuple[ServerSpec, ...]:
    """A server for each number of layers, each on a core of its own if there are as many."""
    layers = given.get("layers")
    if not isinstance(layers, list) or not layers:
        raise InputError(f"{place}.layers={layers} must be a list of whole numbers, one a server")
    sizes = {key: whole(given.get(key), f"{place}.{key}") for key in ("hidden", "heads", "kv_blocks")}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = len(cores) >= len(layers) and shutil.which("taskset") is not None
    models = [
        TinyModel(
            layers=whole(n, f"{place}.layers"),
            hidden=sizes["hidden"],
            heads=sizes["heads"],
            kv_heads=sizes["heads"],
            max_tokens=LONGEST,
        )
        for n in layers
    ]
    names = names_of([f"layers{n}" for n in layers])
    return tuple(
        ServerSpec(
            name,
            model,
            kv_blocks=sizes["kv_blocks"],
            cores=(cores[i],) if pinned else (),
            **common,
        )
        for i, (name, model) in enumerate(zip(names, models, strict=True))
    )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
