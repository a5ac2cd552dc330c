"""Instances, clusters and KV capacity."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest

from hexrepro.cluster import Cluster, InstanceSpec, LatencyModel, kv_blocks, kv_bytes_per_token
from hexrepro.errors import InputError

INSTANCE = InstanceSpec("a100-0", "a100", "llama-3.1-70b", "silicon", 4, LatencyModel(0.03), kv_blocks=100)

# Llama-3.1-70B in 16 bit on four cards of 80 GiB
FOUR_A100 = {
    "gpu_memory_bytes": 80 * 2**30, "weights_bytes": 141e9, "layers": 80, "kv_heads": 8, "head_dim": 128,
    "tensor_parallel": 4, "gpu_memory_utilization": 0.9, "reserve_bytes": 4e9,
}  # fmt: skip


def test_kv_bytes_by_hand():
    # key and value, 80 layers, 8 heads of 128, 2 bytes: 320 KiB a token; a quarter of it on each of 4 cards
    assert kv_bytes_per_token(80, 8, 128, 2) == 320 * 1024
    assert kv_bytes_per_token(80, 8, 128, 2, tensor_parallel=4) == 80 * 1024
    # more cards than heads: each keeps one head
    assert kv_bytes_per_token(80, 8, 128, 2, tensor_parallel=16) == 40 * 1024


def test_kv_blocks_by_hand():
    # 0.9 * 80 GiB = 77 309 411 328, less 35 250 000 000 and 4 000 000 000: 38 059 411 328 bytes
    # a block of 16 tokens takes 1 310 720 bytes, so 29 037 blocks fit; one is the null block
    assert kv_blocks(**FOUR_A100) == 29_036
    assert kv_blocks(**FOUR_A100, null_blocks=0) == 29_037
    assert kv_blocks(**FOUR_A100, block_size=32) == 14_517


@pytest.mark.parametrize(("gigabytes", "tokens"), [(40, 58_000), (48, 155_000)])
def test_the_released_simulators_capacity(gigabytes, tokens):
    # 4-bit weights and KV on one card with nothing reserved; published as "about" these tokens
    blocks = kv_blocks(
        gpu_memory_bytes=gigabytes * 1e9, weights_bytes=70.55e9 / 2, layers=80, kv_heads=8, head_dim=128,
        kv_bytes_per_value=0.5, gpu_memory_utilization=1.0, null_blocks=0,
    )  # fmt: skip
    assert blocks * 16 == pytest.approx(tokens, rel=0.01)


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="use more GPUs or fewer bits"):
        kv_blocks(**FOUR_A100 | {"tensor_parallel": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu_memory_bytes", 0), ("weights_bytes", -1), ("layers", math.nan), ("tensor_parallel", 0),
        ("gpu_memory_utilization", 1.5), ("reserve_bytes", -1), ("kv_heads", "eight"), ("block_size", 0),
    ],
)  # fmt: skip
def test_bad_capacity_inputs_are_named(field, value):
    with pytest.raises(InputError, match=field):
        kv_blocks(**FOUR_A100 | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""), ("gpu", 3), ("latency", 0.03), ("tensor_parallel", 0), ("kv_blocks", 0),
        ("kv_blocks", 1.5),
        ("block_size", True), ("max_num_seqs", -1), ("max_num_batched_tokens", 2**31), ("load_weight", 0),
        ("load_weight", math.nan), ("price_per_hour", -1),
    ],
)  # fmt: skip
def test_bad_instances_are_named(field, value):
    with pytest.raises(InputError, match=field):
        replace(INSTANCE, **{field: value})


def test_instances_and_clusters_do_not_change():
    assert INSTANCE.kv_tokens == 1600
    with pytest.raises(FrozenInstanceError):
        INSTANCE.kv_blocks = 3
    cluster = Cluster("two", [INSTANCE, replace(INSTANCE, name="a100-1")])
    assert len(cluster) == 2
    assert isinstance(cluster.instances, tuple)


def test_bad_clusters_are_refused():
    with pytest.raises(InputError, match="at least one"):
        Cluster("none", ())
    with pytest.raises(InputError, match="'a100-0'"):
        Cluster("twins", (INSTANCE, INSTANCE))
    with pytest.raises(InputError, match="InstanceSpec"):
        Cluster("text", ("a100",))
