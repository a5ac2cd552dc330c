"""Dimensions of the models that the shipped profiles are of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A transformer's dimensions. With `experts` above 0, `intermediate` is that of one expert."""

    name: str  # ours
    package_name: str  # in aiconfigurator-core
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    parameters: float
    experts: int = 0
    experts_per_token: int = 0


LLAMA_70B = ModelShape(
    name="llama-3.1-70b",
    package_name="meta-llama/Meta-Llama-3.1-70B",
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    intermediate=28672,
    vocabulary=128256,
    parameters=70_552_387_584,
)
QWEN3_30B = ModelShape(
    name="qwen3-30b-a3b",
    package_name="Qwen/Qwen3-30B-A3B",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=768,
    vocabulary=151936,
    parameters=30.53e9,
    experts=128,
    experts_per_token=8,
)
