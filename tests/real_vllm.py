"""The real vLLM servers (CPU build) of all tests that need some: starting one takes ten seconds of a core and more.

One is paced: it sleeps half of an A100's step times under Llama-3.1-70B, and all else of it is vLLM's. One computes a tiny
model. `tests/conftest.py` starts them at the first test that asks for `vllm_servers`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hexrepro.cluster.latency import LatencyModel
from hexrepro.errors import InputError
from hexrepro.validation.launch import PYTHON_VARIABLE, Server, ServerSpec, launch, vllm_python
from hexrepro.validation.tiny_model import TinyModel

PACED = ServerSpec(
    "paced",
    pace=LatencyModel(0.0264, 1.45e-4, 3.6e-9, 1.04e-4, 6.2e-8),
    pace_scale=0.5,
    kv_blocks=2048,
    max_num_seqs=6,
    max_num_batched_tokens=1024,
)
COMPUTING = ServerSpec("computing", TinyModel(layers=2, hidden=64, heads=2, kv_heads=2), kv_blocks=512)


def need_vllm() -> None:
    """Skip where there is no vLLM; fail where HEXREPRO_VLLM_PYTHON promises one that is not there."""
    try:
        vllm_python()
    except InputError as error:
        if os.environ.get(PYTHON_VARIABLE):
            raise
        pytest.skip(str(error))


@contextmanager
def servers(directory: Path) -> Iterator[dict[str, Server]]:
    need_vllm()
    with launch([PACED, COMPUTING], directory) as running:
        yield {server.spec.name: server for server in running}
