"""What aiconfigurator-core knows: models, GPUs, quantisations; and profiles of any of them.

GPUs go by our short names (h100 is the package's h100_sxm); models by their name on Hugging Face, by ours, or by a
config.json. The package's list of models is taken as it is: nothing is downloaded.
"""

from __future__ import annotations

import csv
import difflib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from hexrepro.cluster import silicon
from hexrepro.cluster.profile_files import Made
from hexrepro.cluster.profile_parts import (
    MAX_NUM_SEQS,
    Profile,
    rounded,
    rounded_coefficients,
    rounded_errors,
)
from hexrepro.cluster.shapes import LLAMA_70B, QWEN3_30B, ModelShape
from hexrepro.cluster.silicon import DATASHEETS, Kernels, Silicon, SiliconFit, Step
from hexrepro.cluster.types import kv_blocks
from hexrepro.errors import InputError

UTILIZATION = 0.92  # vLLM 0.32's default
BUDGET = 2048  # tokens a step, vLLM's default on these cards
BLOCK_SIZE = 16
LEAST_KV_TOKENS = 50_000  # four of CHESS's longest prompts: an instance with less can hardly batch
PARALLEL = (1, 2, 4, 8)
SHIPPED = (LLAMA_70B, QWEN3_30B)


@dataclass(frozen=True)
class Gpu:
    """A GPU of the package: our name and the package's, memory in bytes and bytes/s, and the vLLM whose kernels were timed
    (None: none)."""

    name: str
    system: str
    memory_bytes: int
    bandwidth: float
    vllm: str | None


@cache
def gpus() -> dict[str, Gpu]:
    """Every GPU in the package, by our name."""
    silicon.require_package()
    systems = files("aiconfigurator_core") / "systems"
    found = {}
    for entry in sorted(systems.iterdir(), key=lambda e: e.name):
        system, _, ending = entry.name.rpartition(".")
        spec = yaml.safe_load(entry.read_text()) if ending == "yaml" else None
        if not isinstance(spec, dict) or "gpu" not in spec:
            continue  # not of a GPU
        timed = (systems / spec["data_dir"] / "gemm" / "vllm").is_dir()
        version = silicon.vllm_version(system) if timed else None
        name = gpu_name(system)
        memory, bandwidth = int(spec["gpu"]["mem_capacity"]), float(spec["gpu"]["mem_bw"])
        found[name] = Gpu(name, system, memory, bandwidth, version)
    return found


def gpu_name(system: str) -> str:
    """Our name of the package's system: h100_sxm is h100, rtx_pro_6000_server is rtx-pro-6000."""
    return system.removesuffix("_sxm").removesuffix("_server").replace("_", "-")


def gpu(name: str) -> Gpu:
    """A GPU by our name or the package's; InputError where the package has no vLLM kernels of it."""
    known = gpus()
    found = known.get(name) or next((g for g in known.values() if g.system == name), None)
    timed = [g.name for g in known.values() if g.vllm]
    if found is None:
        near = difflib.get_close_matches(name, timed, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if name in DATASHEETS:
            hint = ", but a shipped profile has it: name it in a cluster config"
        raise InputError(f"gpu {name!r} is not in {silicon.PACKAGE}{hint} (it has: {', '.join(timed)})")
    if found.vllm is None:
        raise InputError(
            f"gpu {name!r}: {silicon.PACKAGE} has no vLLM kernels of it, only of {', '.join(timed)}"
        )
    return found


def model_names() -> list[str]:
    """The models of the package, by their names on Hugging Face."""
    silicon.require_package()
    from aiconfigurator_core.sdk.common import DefaultHFModels

    return sorted(DefaultHFModels)


def model(name: str) -> ModelShape:
    """A model by our name, its name on Hugging Face, or the path of a config.json (or of the folder that holds one)."""
    for shape in SHIPPED:
        if name.lower() in (shape.name, shape.package_name.lower()):
            return shape
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return _model_of_file(path)
    by_lower = {known.lower(): known for known in model_names()}
    short = {known.rpartition("/")[2].lower(): known for known in by_lower.values()}
    found = by_lower.get(name.lower()) or short.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower().rpartition("/")[2], short, 2, 0.4)
        hint = f"; did you mean {' or '.join(short[n] for n in near)}?" if near else "."
        raise InputError(
            f"model {name!r} is not in {silicon.PACKAGE}{hint} Give a name that `python -m hexrepro.cluster list`"
            " shows, or a config.json"
        )
    return _shape(found, found.rpartition("/")[2].lower())


def _model_of_file(path: Path) -> ModelShape:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{file}: is not valid JSON (line {error.lineno}: {error.msg})") from None
    if not isinstance(content, dict) or not content.get("architectures"):
        raise InputError(f"{file}: field 'architectures' is missing; a model's config.json is needed")
    folder = file.parent
    if file.name != "config.json":  # the package takes folders only
        folder = Path(tempfile.mkdtemp(prefix="hexrepro-model-"))
        (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    name = content.get("_name_or_path") or (
        file.parent.resolve().name if file.name == "config.json" else file.stem
    )
    return _shape(str(folder), str(name).rstrip("/").rpartition("/")[2].lower(), where=str(file))


def _shape(package_name: str, name: str, where: str | None = None) -> ModelShape:
    from aiconfigurator_core.sdk.utils import get_model_config_from_model_path

    silicon.require_package()
    try:
        told = get_model_config_from_model_path(package_name)
        return ModelShape(
            name=name,
            package_name=package_name,
            layers=told["layers"],
            hidden=told["hidden_size"],
            heads=told["n"],
            kv_heads=told["n_kv"],
            head_dim=told["d"],
            intermediate=told["moe_inter_size"] if told["num_experts"] else told["inter_size"],
            vocabulary=told["vocab"],
            parameters=0,  # the package counts the bytes of the weights itself
            experts=told["num_experts"] or 0,
            experts_per_token=told["topk"] or 0,
        )
    except Exception as error:  # the package raises whatever a config that it does not understand leads to
        what = f"field {error} is missing" if isinstance(error, KeyError) else _one_line(error)
        raise InputError(
            f"{where or package_name}: {silicon.PACKAGE} cannot read this model: {what}"
        ) from None


@cache
def supported(system: str) -> dict[str, str]:
    """Model -> what the package's own test of it on this GPU with vLLM gave (PASS, FAIL, HW_INCOMPATIBLE, ...)."""
    matrix = files("aiconfigurator_core") / "systems" / "support_matrix" / f"{system}.csv"
    if not matrix.is_file():
        return {}
    csv.field_size_limit(10_000_000)
    rows = csv.DictReader(matrix.read_text(encoding="utf-8").splitlines())
    version = silicon.vllm_version(system)
    return {
        row["HuggingFaceID"]: row["Status"]
        for row in rows
        if (row["Backend"], row["Mode"], row["Version"]) == ("vllm", "agg", version)
    }


def timed_in(name: str, kernels: str = "gemm") -> list[str]:
    """Formats in which the package has timed these kernels of a GPU under vLLM: weights (gemm) or KV (generation_attention)."""
    found = gpu(name)
    silicon.require_package()
    from aiconfigurator_core.sdk import perf_database

    database = perf_database.get_database(found.system, "vllm", "current")
    return sorted(str(mode) for mode in database.supported_quant_mode.get(kernels, []))


def make(
    shape: ModelShape,
    gpu_: Gpu,
    tensor_parallel: int | None = None,
    quantisation: str | None = None,
    kv_dtype: str | None = None,
    name: str | None = None,
) -> Made:
    """The entry of one GPU in a profile of view silicon. Without `tensor_parallel` the fewest GPUs that hold the weights and
    LEAST_KV_TOKENS of KV."""
    modes = [mode for mode in (quantisation, kv_dtype and f"kv-{kv_dtype}") if mode]
    parallel = [f"tp{tensor_parallel}"] if tensor_parallel else []
    name = name or "-".join([gpu_.name, *parallel, *modes])
    for what, asked, kernels in (
        ("quantisation", quantisation, "gemm"),
        ("kv-dtype", kv_dtype, "generation_attention"),
    ):
        if asked and asked not in (known := timed_in(gpu_.name, kernels)):
            raise InputError(
                f"--{what} {asked}: {silicon.PACKAGE} has no such vLLM kernels of {gpu_.name}, only {', '.join(known)}"
            )
    engine, cache_ = _engine(shape, gpu_, tensor_parallel, quantisation, kv_dtype)
    tokens = int(cache_["total_kv_size_tokens"])
    blocks = tokens // BLOCK_SIZE - 1  # one is vLLM's null block
    try:
        fitted = silicon.fit_silicon(engine.kernels, shape, blocks * BLOCK_SIZE)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{shape.name} on {gpu_.name}: {_one_line(error)}") from None
    capacity = _capacity(engine, gpu_, cache_, blocks)
    entry = {"tensor_parallel": engine.tensor_parallel} | fitted_entry(
        engine.kernels, fitted, blocks, capacity
    )
    reach = {
        "prefill_chunk": max(s.n for s in fitted.steps),
        "context_tokens": max(s.c + s.k + s.n for s in fitted.steps),
        "sequences": max(s.b for s in fitted.steps),
        "kv_tokens": max(s.b * s.c for s in fitted.steps),
    }
    source = silicon.data_versions(gpu_.system)
    return Made(
        name,
        entry,
        fitted.kinds,
        fitted.seconds,
        fitted.predicted_s,
        reach,
        source,
    )


def _engine(
    shape: ModelShape, gpu_: Gpu, tensor_parallel: int | None, quantisation: str | None, kv_dtype: str | None
) -> tuple[Silicon, dict[str, Any]]:
    """The engine and its KV cache, on as many GPUs as asked for or needed."""
    why = "no number of GPUs was tried"
    for cards in (tensor_parallel,) if tensor_parallel else PARALLEL:
        try:
            engine = Silicon(shape, gpu_.system, cards, quantisation, kv_dtype)
            cache_ = engine.kv_cache(UTILIZATION, BUDGET, MAX_NUM_SEQS)
            engine.kernels(Step("decode", 0, 0, 1, 512))
        except InputError:
            raise
        except Exception as error:
            why = _one_line(error)
            if "no KV budget" in why:
                continue  # more GPUs may do
            break
        if tensor_parallel or cache_["total_kv_size_tokens"] >= LEAST_KV_TOKENS:
            return engine, cache_
        why = f"{cache_['total_kv_size_tokens']} tokens of KV are left beside the weights on {cards} GPUs"
    asked = f" with quantisation {quantisation}" if quantisation else ""
    raise InputError(f"{shape.name} on {gpu_.name}{asked}: {why}")


def fitted_entry(
    kernels: Callable[[Step], Kernels], fitted: SiliconFit, blocks: int, capacity: Profile
) -> Profile:
    """What stands in a profile of a fit. check: seconds that the package gives, and the fit; prompt_12288 is in chunks of
    BUDGET tokens, as an engine computes it, the others are one step."""
    shown = {f"prefill_{n}": [Step("prefill", n, 0, 0, 0)] for n in (1024, 4096, 12288)}
    for b, c in ((1, 512), (64, 512), (64, 12288)):
        shown[f"decode_{b}x{c}"] = [Step("decode", 0, 0, b, c)]
    shown["prompt_12288"] = [Step("prefill", BUDGET, k, 0, 0) for k in range(0, 12288, BUDGET)]
    model = fitted.fit.model
    return {
        "latency": rounded_coefficients(model),
        "fit": {"all": rounded_errors(fitted.fit.errors)}
        | {kind: rounded_errors(errors) for kind, errors in fitted.by_kind.items()},
        "kv_blocks": blocks,
        "kv_capacity": capacity,
        "check": {
            name: [
                rounded(sum(sum(kernels(step).values()) for step in steps)),
                rounded(sum(model.step_s(*step.features) for step in steps)),
            ]
            for name, steps in shown.items()
        },
    }


def _capacity(engine: Silicon, gpu_: Gpu, cache_: dict[str, Any], blocks: int) -> Profile:
    """What `kv_blocks` follows from: layers and heads where each layer keeps all KV heads, else the package's count."""
    shape, cards = engine.shape, engine.tensor_parallel
    reserved = dict(cache_["memory_breakdown"])
    memory = {"gpu_memory_bytes": gpu_.memory_bytes, "weights_bytes": reserved.pop("weights_bytes") * cards}
    heads = {
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "kv_bytes_per_value": 1.0 if engine.quantised.get("kvcache_quant_mode") == "fp8" else 2.0,
    }
    rest = {
        "tensor_parallel": cards,
        "gpu_memory_utilization": UTILIZATION,
        "reserve_bytes": sum(reserved.values()),
    }
    plain = memory | heads | rest
    try:
        if kv_blocks(**plain) == blocks:
            return plain
    except InputError:
        pass  # latent attention: by its heads it would not fit
    return memory | rest | {"kv_tokens": int(cache_["total_kv_size_tokens"])}


def _one_line(error: BaseException) -> str:
    """The package's message without its paths."""
    text = " ".join(str(error).split()) or type(error).__name__
    where = str(files("aiconfigurator_core"))
    return text.replace(f"{where}/", "")[:240]
