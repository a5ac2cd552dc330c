"""Hardware profiles (data/profiles) and cluster configs (conf/cluster), read into a `Cluster`.

A profile file holds one model in one view, and its GPUs. A cluster config names a model and lists GPUs with
their count; it may set engine limits for all or for one entry, and may name a profile file of the user's own:

    name: ours
    model: llama-3.1-70b
    profile: our_profile.yaml      # optional, relative to this file (as cluster=NAME of --config-dir: to where you run it);
                                   # else data/profiles/MODEL_VIEW.yaml
    max_num_seqs: 128              # optional, for all instances
    instances:
      - {gpu: a100, count: 2}
      - {gpu: l40s, max_num_batched_tokens: 4096, kv_blocks: 3000}
      - {gpu: h100, price_per_hour: 2.2}   # $ per GPU and hour, instead of the profile's

`python -m hexrepro.cluster profile` makes profile files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from hexrepro.cluster.latency import LatencyModel
from hexrepro.cluster.types import Cluster, InstanceSpec
from hexrepro.errors import InputError
from hexrepro.paths import conf_dir, data_dir

# of an instance, settable in the profile (for all GPUs or one) and in the cluster config (for all entries or
# one)
ENGINE_FIELDS = ("tensor_parallel", "block_size", "max_num_seqs", "max_num_batched_tokens")
GPU_FIELDS = ("kv_blocks", "load_weight", "price_per_hour", *ENGINE_FIELDS)
COEFFICIENTS = tuple(field.name for field in fields(LatencyModel))
# what a profile says of its making; nothing reads it
PROVENANCE = (
    "about", "notes", "source", "fit", "kv_capacity", "made_by", "derivation", "check", "price_source", "reach",
)  # fmt: skip


def load_cluster(
    spec: str | os.PathLike[str] | Mapping[str, Any],
    view: str,
    *,
    model: str | None = None,
    scale_out: int = 1,
) -> Cluster:
    """The cluster that `spec` describes: the name of a config in conf/cluster, a YAML file, or the config as
    a mapping.

    `view` chooses the profile (silicon, measured, released); `model` replaces the model that the config
    names. `scale_out` takes the list of instances that many times over, one after the other. Instances are named
    after their GPU: a100-0, a100-1, a6000-0.
    """
    if isinstance(spec, Mapping):
        where, folder, config = "cluster config", Path.cwd(), spec
    else:
        path = _cluster_path(spec)
        where, folder, config = str(path), path.parent, _read_yaml(path)
    allowed = ("name", "model", "profile", "instances", *ENGINE_FIELDS)
    _check_keys(config, allowed, ("name", "instances"), where)
    entries = config["instances"]
    if isinstance(entries, str) or not isinstance(entries, Sequence) or not entries:
        raise InputError(
            f"{where}: instances is {entries!r}; it must be a list such as [{{gpu: a100, count: 2}}]"
        )

    model = model if model is not None else config.get("model")
    if config.get("profile") is not None:
        profile = read_profile(folder / str(config["profile"]))
        if model is not None and model != profile["model"]:
            raise InputError(
                f"{where}: model is {model!r}, but the profile {config['profile']} is of {profile['model']!r}"
            )
        if view != profile["view"]:
            raise InputError(
                f"{where}: view {view!r} is asked for, but profile {config['profile']} is {profile['view']!r}"
            )
    elif model is None:
        raise InputError(
            f"{where}: model is missing; name one of {', '.join(sorted({m for m, _ in shipped_profiles()}))}"
        )
    else:
        profile = load_profile(model, view)

    common = {key: config[key] for key in ENGINE_FIELDS if key in config}
    instances: list[InstanceSpec] = []
    counts: dict[str, int] = {}
    if isinstance(scale_out, bool) or not isinstance(scale_out, int) or scale_out < 1:
        raise InputError(f"scale_out is {scale_out!r}; it must be a whole number of at least 1")
    for number, entry in list(enumerate(entries)) * scale_out:
        place = f"{where}: instances[{number}]"
        if not isinstance(entry, Mapping):
            raise InputError(f"{place} is {entry!r}; it must be a mapping such as {{gpu: a100, count: 2}}")
        _check_keys(entry, ("gpu", "count", *GPU_FIELDS), ("gpu",), place)
        count = entry.get("count", 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"{place}: count is {count!r}; it must be a whole number of at least 1")
        own = {key: entry[key] for key in GPU_FIELDS if key in entry}
        for _ in range(count):
            gpu = str(entry["gpu"])
            index = counts.get(gpu, 0)
            counts[gpu] = index + 1
            instances.append(_instance(profile, gpu, f"{gpu}-{index}", common | own, place))
    return Cluster(str(config["name"]), tuple(instances))


def load_profile(model: str, view: str) -> dict[str, Any]:
    """The shipped profile of a model in a view, checked."""
    path = data_dir() / "profiles" / f"{model}_{view}.yaml"
    if not path.is_file():
        known = ", ".join(f"{m} ({v})" for m, v in sorted(shipped_profiles()))
        raise InputError(
            f"hardware profile: there is none of model {model!r} in view {view!r}; there are {known}"
        )
    return read_profile(path)


def shipped_profiles() -> list[tuple[str, str]]:
    """(model, view) of every profile in data/profiles."""
    stems = [path.stem for path in sorted((data_dir() / "profiles").glob("*_*.yaml"))]
    return [(model, view) for model, _, view in (stem.rpartition("_") for stem in stems)]


def read_profile(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A profile file as a mapping: model, view, file, and gpus; each GPU has `latency` (LatencyModel) and
    `GPU_FIELDS`.

    Engine fields at the top of the file hold for every GPU that does not set its own.
    """
    path = Path(path)
    return check_profile(_read_yaml(path), path)


def check_profile(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The content of a profile file, checked, as `read_profile` returns it; `path` is for messages."""
    _check_keys(
        content, ("model", "view", "gpus", *ENGINE_FIELDS, *PROVENANCE), ("model", "view", "gpus"), str(path)
    )
    if not isinstance(content["gpus"], Mapping) or not content["gpus"]:
        raise InputError(
            f"{path}: gpus is {content['gpus']!r}; it must map the name of a GPU to its latency and kv_blocks"
        )
    gpus = {}
    common = {key: content[key] for key in ENGINE_FIELDS if key in content}
    for name, entry in content["gpus"].items():
        place = f"{path}: gpus.{name}"
        if not isinstance(entry, Mapping):
            raise InputError(f"{place} is {entry!r}; it must be a mapping with latency and kv_blocks")
        _check_keys(entry, ("latency", *GPU_FIELDS, *PROVENANCE), ("latency", "kv_blocks"), place)
        if not isinstance(entry["latency"], Mapping):
            raise InputError(
                f"{place}.latency is {entry['latency']!r}; it must map {', '.join(COEFFICIENTS)} to seconds"
            )
        _check_keys(entry["latency"], COEFFICIENTS, COEFFICIENTS, f"{place}.latency")
        with _at(place):
            latency = LatencyModel(**{key: _number(value) for key, value in entry["latency"].items()})
        gpu = common | {key: entry[key] for key in GPU_FIELDS if key in entry} | {"latency": latency}
        gpus[str(name)] = gpu
        # an instance made of it checks the values
        _instance({"model": "-", "view": "-", "gpus": gpus}, str(name), "-", {}, place)
    return {"model": str(content["model"]), "view": str(content["view"]), "file": str(path), "gpus": gpus}


def _instance(
    profile: Mapping[str, Any], gpu: str, name: str, own: Mapping[str, Any], place: str
) -> InstanceSpec:
    if gpu not in profile["gpus"]:
        raise InputError(f"{place}: gpu is {gpu!r}; {profile['file']} knows {', '.join(profile['gpus'])}")
    values = {"tensor_parallel": 1} | profile["gpus"][gpu] | own
    with _at(place):
        return InstanceSpec(name=name, gpu=gpu, model=profile["model"], view=profile["view"], **values)


def _number(value: Any) -> Any:
    """YAML reads 1e-5 (no point) as text; it is meant as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# the compiled loader where PyYAML has it, ten times faster; both are safe
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _at:
    """Puts the place in front of the message of an InputError."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InputError):
            raise InputError(f"{self.place}: {error}") from None


def _cluster_path(spec: str | os.PathLike[str]) -> Path:
    text = os.fspath(spec)
    if not isinstance(spec, str) or os.sep in text or "/" in text or text.endswith((".yaml", ".yml")):
        return Path(text)
    path = conf_dir() / "cluster" / f"{text}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (conf_dir() / "cluster").glob("*.yaml")))
        raise InputError(f"cluster: {text!r} is not known; give one of {known}, or the path of a YAML file")
    return path


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); a YAML file is needed"
        ) from None
    except yaml.YAMLError as error:
        line = f" near line {error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""
        raise InputError(
            f"{path}: is not valid YAML{line} ({getattr(error, 'problem', None) or 'cannot be parsed'})"
        ) from None
    if not isinstance(content, Mapping):
        raise InputError(
            f"{path}: holds {type(content).__name__}; it must be a mapping of field names to values"
        )
    return content


def _check_keys(
    content: Mapping[str, Any], allowed: Sequence[str], needed: Sequence[str], where: str
) -> None:
    for key in content:
        if key not in allowed:
            raise InputError(f"{where}: field {key!r} is not known; the fields are {', '.join(allowed)}")
    for key in needed:
        if content.get(key) is None:
            raise InputError(f"{where}: field {key!r} is missing; needed are {', '.join(needed)}")
