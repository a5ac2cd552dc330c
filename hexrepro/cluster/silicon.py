"""Step times from kernel measurements: the package aiconfigurator-core (Apache-2.0), vLLM backend.

The package has timings of every kernel of a step (GEMMs, attention, all-reduce) on a dozen GPUs, and adds
them up for a batch. We sample a grid of steps, kernel by kernel, and fit the five coefficients of
`LatencyModel` to their sums. It has no A6000, which is derived from the L40S kernel by kernel
(`scale_by_datasheet`). What the package knows stands in `catalogue.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from hexrepro.cluster.latency import Fit, FitErrors, fit_errors, fit_steps
from hexrepro.cluster.shapes import ModelShape
from hexrepro.errors import InputError

PACKAGE = "aiconfigurator-core"
KINDS = ("decode", "prefill", "mixed")


class Datasheet(NamedTuple):
    """Dense 16-bit tensor FLOP/s (without sparsity), memory bytes/s, and memory bytes as the driver reports
    them."""

    flops: float
    bandwidth: float
    memory_bytes: int


DATASHEETS = {
    "a100": Datasheet(312e12, 2039e9, 80 * 2**30),  # SXM, 80 GB
    "l40s": Datasheet(362.05e12, 864e9, 46068 * 2**20),  # 48 GB GDDR6 with ECC, PCIe 4.0, no NVLink
    "a6000": Datasheet(154.8e12, 768e9, 49140 * 2**20),  # 48 GB GDDR6, PCIe 4.0
}


class Step(NamedTuple):
    """A step to be timed: one prefill chunk of n tokens behind k computed ones, and b decodes, each with c
    tokens computed."""

    kind: str
    n: int
    k: int
    b: int
    c: int

    @property
    def features(self) -> tuple[float, float, float, float]:
        """P, A, S, K of the latency model."""
        return self.n, self.n * self.k + self.n**2 / 2, self.b + (self.n > 0), self.b * self.c


def steps_grid() -> Iterator[Step]:
    """Pure decode, pure prefill chunks, and mixed steps within a budget of 2048 tokens."""
    for b in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for c in (512, 1024, 2048, 4096, 8192, 12288, 16384):
            yield Step("decode", 0, 0, b, c)
    for n in (1, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 4096, 8192):
        for k in (0, 1024, 2048, 4096, 8192, 12288, 14336):
            yield Step("prefill", n, k, 0, 0)
    for n in (64, 256, 512, 1024, 1792, 2040):
        for k in (0, 4096, 8192):
            for b in (1, 4, 8, 16, 64, 128):
                for c in (512, 2048, 8192, 12288):
                    if n + b <= 2048:
                        yield Step("mixed", n, k, b, c)


Kernels = dict[str, float]  # seconds in a step by kernel


def require_package() -> None:
    """InputError where the package is not installed; its warnings are silenced where it is."""
    if find_spec("aiconfigurator_core") is None:
        raise InputError(f"view silicon: needs the package {PACKAGE}; install hexrepro[profiles]")
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)


class Silicon:
    """The package's engine for one model on one GPU type.

    `quantisation` and `kv_dtype` are the package's names (fp8, nvfp4, ...); None: as the checkpoint says.
    """

    def __init__(
        self,
        shape: ModelShape,
        system: str,
        tensor_parallel: int,
        quantisation: str | None = None,
        kv_dtype: str | None = None,
    ) -> None:
        require_package()
        from aiconfigurator_core.sdk import EngineHandle

        self.shape, self.system, self.tensor_parallel = shape, system, tensor_parallel
        self._known: dict[Step, Kernels] = {}
        self._whole = None
        moe = {"moe_tp_size": tensor_parallel, "moe_ep_size": 1} if shape.experts else {}
        self.parallelism: dict[str, int] = {"tp_size": tensor_parallel, **moe}
        modes = {"gemm_quant_mode": quantisation, "kvcache_quant_mode": kv_dtype}
        if shape.experts:
            modes["moe_quant_mode"] = quantisation
        self.quantised = {name: mode for name, mode in modes.items() if mode is not None}
        self.engine = EngineHandle.compile(
            shape.package_name,
            system,
            "vllm",
            backend_version="current",
            **self.parallelism,
            **self.quantised,
        )

    def kernels(self, step: Step) -> Kernels:
        """Seconds of each kernel in a step; remembered, since derived GPUs ask for the same steps again."""
        if step not in self._known:
            self._known[step] = self._kernels(step)
        return dict(self._known[step])

    def _kernels(self, step: Step) -> Kernels:
        """A mixed step is composed as the package does it: all but attention on all its tokens together,
        the attention of the chunk, and the attention of the decodes.
        """
        engine = self.engine
        if step.n == 0:
            return _by_kernel(
                engine.decode_step_per_op(gen_tokens=step.b, isl=step.c, osl=2), attention="attention_decode"
            )
        prompt, _ = engine.run_static_per_op(
            batch_size=1, isl=step.n + step.k, osl=2, prefix=step.k, mode="static_ctx"
        )
        prefill = _by_kernel(prompt, attention="attention_prefill")
        if step.b == 0:
            return prefill
        if "attention_prefill" not in prefill:
            return {"whole step": self._whole_step_s(step)}
        rest, *_ = engine.mixed_step_breakdown_per_op(ctx_tokens=step.n, gen_tokens=step.b, isl=step.n, osl=2)
        decode = self.kernels(Step("decode", 0, 0, step.b, step.c))
        attention = {
            "attention_prefill": prefill["attention_prefill"],
            "attention_decode": decode["attention_decode"],
        }
        return _by_kernel(rest, attention="") | attention

    def _whole_step_s(self, step: Step) -> float:
        """A mixed step as the package estimates it whole: for models whose attention is no kernel of its own (MLA)."""
        from aiconfigurator_core.sdk import RustForwardPassPerfModel

        if (
            self.quantised
        ):  # this estimate does not take the formats: it would mix those asked for with the checkpoint's
            raise InputError(
                f"{self.shape.name}: {PACKAGE} computes its mixed steps only in the checkpoint's own formats; leave out"
                " --quantisation and --kv-dtype"
            )
        if self._whole is None:
            self._whole = RustForwardPassPerfModel.from_native(
                {
                    "schema_version": 1,
                    "model_name": self.shape.package_name,
                    "system_name": self.system,
                    "backend": "vllm",
                    "backend_version": "current",
                    "pp_size": 1,
                    **self.parallelism,
                }
            )
        scheduled = {
            "num_prefill_requests": 1,
            "sum_prefill_tokens": step.n,
            "sum_prefill_kv_tokens": step.k,
            "num_decode_requests": step.b,
            "sum_decode_kv_tokens": step.b * step.c,
        }
        return self._whole.estimate_forward_pass_time_ms({"scheduled_requests": scheduled}) / 1e3

    def memory(
        self, gpu_memory_utilization: float, max_num_batched_tokens: int, max_num_seqs: int
    ) -> dict[str, int]:
        """Bytes a GPU: weights, activations, and what the package sets aside for the runtime and for
        communication."""
        return self.kv_cache(gpu_memory_utilization, max_num_batched_tokens, max_num_seqs)["memory_breakdown"]

    def kv_cache(
        self, gpu_memory_utilization: float, max_num_batched_tokens: int, max_num_seqs: int
    ) -> dict[str, Any]:
        """The package's estimate of the KV cache: total_kv_size_tokens of the instance, and what takes the
        rest."""
        from aiconfigurator_core.sdk import estimate_kv_cache

        return estimate_kv_cache(
            self.shape.package_name,
            self.system,
            "vllm",
            "current",
            max_num_tokens=max_num_batched_tokens,
            max_batch_size=max_num_seqs,
            memory_fraction_kind="of_total",
            memory_fraction_value=gpu_memory_utilization,
            **self.parallelism,
            **self.quantised,
        )


def _by_kernel(ops: list[tuple[Any, ...]], attention: str) -> Kernels:
    """The package's per-op tuples (name, ms, ...) as seconds by kernel, without the phase in front of the
    name."""
    seconds: Kernels = {}
    for name, milliseconds, *_ in ops:
        kernel = name.split("_", 1)[1]
        kernel = attention if kernel == "attention" else kernel
        seconds[kernel] = seconds.get(kernel, 0.0) + milliseconds / 1e3
    return seconds


def is_communication(kernel: str) -> bool:
    """Moves data between GPUs, so that its time hangs on the interconnect and not on the GPU."""
    return kernel in ("embedding_ar", "ar_1", "ar_2", "p2p", "moe_pre_dispatch", "moe_post_dispatch")


def work_of(kernel: str, step: Step, shape: ModelShape, tensor_parallel: int) -> tuple[float, float]:
    """FLOPs and memory bytes of one call of a kernel in 16-bit, for its place on the roofline."""
    tokens = step.n + step.b
    sequences = step.b + (step.n > 0)
    heads, kv_heads = shape.heads / tensor_parallel, max(1, shape.kv_heads / tensor_parallel)
    inner = shape.intermediate / tensor_parallel
    gemms = {  # rows, columns out, columns in
        "qkv_gemm": (tokens, (heads + 2 * kv_heads) * shape.head_dim, shape.hidden),
        "proj_gemm": (tokens, shape.hidden, heads * shape.head_dim),
        "gate_ffn1_gemm": (tokens, 2 * inner, shape.hidden),
        "ffn2_gemm": (tokens, shape.hidden, inner),
        "router_gemm": (tokens, shape.experts, shape.hidden),
        "logits_gemm": (sequences, shape.vocabulary / tensor_parallel, shape.hidden),
    }
    if kernel in gemms:
        m, n, k = gemms[kernel]
        return 2 * m * n * k, 2 * (m * n + n * k + m * k)
    if kernel == "attention_prefill":
        flops = 4 * heads * shape.head_dim * (step.n * step.k + step.n**2 / 2)
        return flops, 2 * shape.head_dim * (2 * kv_heads * (step.n + step.k) + 2 * heads * step.n)
    if kernel == "moe":
        share = shape.experts_per_token / shape.experts
        touched = shape.experts * (1 - (1 - share) ** tokens)
        weights = 3 * shape.hidden * inner
        return 2 * tokens * shape.experts_per_token * weights, 2 * (
            touched * weights + 2 * tokens * shape.hidden
        )
    return 0.0, 1.0  # decode attention, norms, activations: bound by memory at any size


def scale_by_datasheet(
    kernels: Kernels, step: Step, shape: ModelShape, tensor_parallel: int, old: Datasheet, new: Datasheet
) -> Kernels:
    """A step's kernels on another GPU that sits on the same interconnect.

    Each kernel's time changes as its roofline does: max(FLOPs / peak FLOP/s, bytes / peak bytes/s). So the
    new GPU is taken to reach the same fraction of its peak. Communication keeps its time.
    """
    scaled = {}
    for kernel, seconds in kernels.items():
        if is_communication(kernel):
            scaled[kernel] = seconds
            continue
        flops, bytes_moved = work_of(kernel, step, shape, tensor_parallel)
        scaled[kernel] = seconds * (
            max(flops / new.flops, bytes_moved / new.bandwidth)
            / max(flops / old.flops, bytes_moved / old.bandwidth)
        )
    return scaled


class SiliconFit(NamedTuple):
    """The fit, its errors by kind of step, and its data: kind str[n], seconds and predicted_s float[n]."""

    fit: Fit
    by_kind: dict[str, FitErrors]
    kinds: NDArray[np.str_]
    seconds: NDArray[np.float64]
    predicted_s: NDArray[np.float64]
    steps: list[Step]


def fit_silicon(step_kernels: Callable[[Step], Kernels], shape: ModelShape, kv_tokens: int) -> SiliconFit:
    """Fit the five coefficients to the steps of the grid whose KV fits in `kv_tokens`.

    Each kind of step weighs the same. A mixture of experts reads more experts with every token until all are
    read, so that its step time is far from linear; it is fitted where a loaded server works: batches up to
    64, chunks from 256 tokens.
    """
    steps = [step for step in steps_grid() if step.b * step.c + step.n + step.k <= kv_tokens]
    if shape.experts:
        steps = [step for step in steps if step.b <= 64 and (step.n == 0 or step.n >= 256)]
    seconds = np.array([math.fsum(step_kernels(step).values()) for step in steps])
    features = np.array([step.features for step in steps], dtype=np.float64)
    kinds = np.array([step.kind for step in steps])
    weights = np.empty_like(seconds)
    for kind in KINDS:
        weights[kinds == kind] = 1 / np.count_nonzero(kinds == kind)
    fit = fit_steps(*features.T, seconds, weights=weights)
    predicted: NDArray[np.float64] = fit.model.step_s(*features.T)
    by_kind = {k: fit_errors(predicted[kinds == k], seconds[kinds == k]) for k in KINDS}
    return SiliconFit(fit, by_kind, kinds, seconds, predicted, steps)


def vllm_version(system: str) -> str:
    """The version of vLLM whose kernels the package timed on this GPU."""
    slots = yaml.safe_load((files("aiconfigurator_core") / "systems" / "query_versions.yaml").read_text())
    return (slots["overrides"].get(system) or {}).get("vllm", slots["defaults"]["vllm"])["current"]


def data_versions(system: str) -> str:
    """The package's version and that of the vLLM whose kernels were timed on this GPU."""
    return f"{PACKAGE} {version(PACKAGE)}, system {system}, backend vllm {vllm_version(system)}"
