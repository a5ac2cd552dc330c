"""Instances and clusters, and how many KV blocks an instance has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hexrepro.cluster.latency import LatencyModel
from hexrepro.errors import InputError

GIB = 2**30


@dataclass(frozen=True)
class InstanceSpec:
    """One model instance: one engine that serves the whole model on `tensor_parallel` GPUs.

    `kv_blocks` are the usable blocks of `block_size` tokens (vLLM's null block is not among them).
    `load_weight` is k of the released dispatch score, which has no other use. `price_per_hour` is $ per GPU
    and hour, None if unknown.
    """

    name: str
    gpu: str
    model: str
    view: str
    tensor_parallel: int
    latency: LatencyModel
    kv_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    load_weight: float = 1.0
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for field in ("name", "gpu", "model", "view"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise InputError(f"instance {self.name!r}: {field} is {value!r}; it must be a name")
        if not isinstance(self.latency, LatencyModel):
            raise InputError(
                f"instance {self.name!r}: latency is {self.latency!r}; it must be a LatencyModel"
            )
        for field in ("tensor_parallel", "kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise InputError(
                    f"instance {self.name!r}: {field} is {value!r}; it must be a whole number of at least 1"
                )
        _positive(self.load_weight, f"instance {self.name!r}: load_weight")
        if self.price_per_hour is not None:
            _positive(self.price_per_hour, f"instance {self.name!r}: price_per_hour")

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.kv_blocks * self.block_size


@dataclass(frozen=True)
class Cluster:
    """The instances that one coordinator dispatches to. Their order is the order of round robin and of
    ties."""

    name: str
    instances: tuple[InstanceSpec, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "instances", tuple(self.instances))
        if not self.instances:
            raise InputError(f"cluster {self.name!r}: instances is empty; at least one is needed")
        seen: set[str] = set()
        for instance in self.instances:
            if not isinstance(instance, InstanceSpec):
                raise InputError(
                    f"cluster {self.name!r}: instances holds {instance!r}; it must hold InstanceSpec"
                )
            if instance.name in seen:
                raise InputError(
                    f"cluster {self.name!r}: two instances are named {instance.name!r}; names must differ"
                )
            seen.add(instance.name)

    def __len__(self) -> int:
        return len(self.instances)

    @property
    def price_per_hour(self) -> float | None:
        """$ an hour for all GPUs of all instances; None where one has no price."""
        prices = [i.price_per_hour for i in self.instances]
        if None in prices:
            return None
        return sum(i.price_per_hour * i.tensor_parallel for i in self.instances)


def kv_bytes_per_token(
    layers: int, kv_heads: int, head_dim: int, bytes_per_value: float, tensor_parallel: int = 1
) -> float:
    """Bytes of KV cache that one token takes on one GPU: a key and a value vector per KV head and layer.

    The heads are divided among the GPUs; with more GPUs than heads each GPU still keeps one (vLLM replicates
    them).
    """
    return 2 * layers * max(1, kv_heads // tensor_parallel) * head_dim * bytes_per_value


def kv_blocks(
    *,
    gpu_memory_bytes: float,
    weights_bytes: float,
    layers: int,
    kv_heads: int,
    head_dim: int,
    kv_bytes_per_value: float = 2.0,
    tensor_parallel: int = 1,
    gpu_memory_utilization: float = 0.92,
    reserve_bytes: float = 0.0,
    null_blocks: int = 1,
    block_size: int = 16,
) -> int:
    """Usable KV blocks of an instance, as vLLM works it out at start-up (Worker.determine_available_memory).

    Per GPU: gpu_memory_bytes * gpu_memory_utilization - weights_bytes / tensor_parallel - reserve_bytes is
    divided by the bytes of a block. `reserve_bytes` is what vLLM measures as it starts: peak activations of a
    full batch, CUDA context, NCCL buffers and CUDA graphs. One block of the pool is vLLM's null block, which
    no call can use. 0.92 is the default of vLLM 0.32. `gpu_memory_bytes` is what the driver reports, a little
    less than on the data sheet.
    """
    sizes = {
        "gpu_memory_bytes": gpu_memory_bytes,
        "weights_bytes": weights_bytes,
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "kv_bytes_per_value": kv_bytes_per_value,
        "tensor_parallel": tensor_parallel,
        "gpu_memory_utilization": gpu_memory_utilization,
        "block_size": block_size,
    }
    for field, value in sizes.items():
        _positive(value, f"KV capacity: {field}")
    if gpu_memory_utilization > 1:
        raise InputError(
            f"KV capacity: gpu_memory_utilization is {gpu_memory_utilization!r}; it must lie in (0, 1]"
        )
    if not math.isfinite(reserve_bytes) or reserve_bytes < 0:
        raise InputError(
            f"KV capacity: reserve_bytes is {reserve_bytes!r}; it must be finite and not negative"
        )
    free = gpu_memory_bytes * gpu_memory_utilization - weights_bytes / tensor_parallel - reserve_bytes
    per_token = kv_bytes_per_token(layers, kv_heads, head_dim, kv_bytes_per_value, tensor_parallel)
    blocks = math.floor(free / (per_token * block_size)) - null_blocks
    if blocks < 1:
        raise InputError(
            f"KV capacity: {free / GIB:.2f} GiB a GPU are left for the KV cache, less than a block;"
            f" the weights take {weights_bytes / tensor_parallel / GIB:.2f} GiB of"
            f" {gpu_memory_bytes / GIB:.2f} GiB: use more GPUs or fewer bits"
        )
    return blocks


def _positive(value: object, what: str) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value <= 0
    ):
        raise InputError(f"{what} is {value!r}; it must be finite and above 0")
