"""The agent before a real vLLM server (CPU build) with a tiny random model: its answers are gibberish, all else is real.

HEXREPRO_VLLM_PYTHON=path/to/python pytest -m vllm tests/text2sql
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from hexrepro.cluster.latency import LatencyModel
from hexrepro.cluster.types import Cluster
from hexrepro.serving.call_log import CallLog
from hexrepro.serving.config import Serving
from hexrepro.serving.gateway import Gateway
from hexrepro.serving.upstream import Timeouts
from hexrepro.text2sql.agent import Options, answer
from hexrepro.text2sql.database import Database
from hexrepro.text2sql.model import Model
from hexrepro.text2sql.railway import make_railway
from tests.real_vllm import COMPUTING
from tests.serving.scripted import QUICK, in_loop, settled

pytestmark = pytest.mark.vllm

QUESTION = "How many trains of intercity lines were cancelled?"
# the server computes; the pace is what the gateway believes of it
BELIEVED = replace(COMPUTING, name="tiny", pace=LatencyModel(0.003, 3e-5, 0.0, 1e-4, 0.0)).instance()


@pytest.fixture
def server(vllm_servers):
    return vllm_servers["computing"]


@in_loop
async def test_every_stage_and_the_correction_loop(server, tmp_path) -> None:
    make_railway(tmp_path / "railway.sqlite")
    settings = replace(QUICK, timeouts=Timeouts(first_byte_s=60.0), probe_every_s=5.0)
    serving = Serving(
        Cluster("one", (BELIEVED,)), (server.url,), models=(COMPUTING.served_name,), settings=settings
    )
    with CallLog(tmp_path / "calls.jsonl") as log:
        async with Gateway(serving) as gateway:
            async with Model(f"{gateway.url}/v1", max_tokens=24, log=log) as model:
                options = Options(corrections=2, always_test=True)
                run = await answer(
                    QUESTION, model, Database(tmp_path / "railway.sqlite"), options, slo_s=60.0
                )
            await settled(gateway)
            assert gateway.coordinator.queries_under_way == 0
            believed = gateway.coordinator.stages.called("chess/candidate")
            assert believed.output_median == 24.0
    assert run.picked is None
    assert [c.corrections for c in run.candidates] == [2, 2]
    records = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    # no table is named: all are kept, and none is asked for its columns
    assert Counter(r["stage"].removeprefix("chess/") for r in records) == {
        "keywords": 1, "retriever": 1, "candidate": 2, "revise": 4, "generate_unit_test": 1, "evaluate": 1, "unit_tester": 1,
    }  # fmt: skip
    assert {r["ended"] for r in records} == {"done"}
    assert {r["instance"] for r in records} == {"tiny"}
    # the schema at the beginning of each prompt was in vLLM's prefix cache, but for the very first
    first, *others = sorted(records, key=lambda r: r["issued_s"])
    assert first["cached_tokens"] == 0
    assert all(r["cached_tokens"] >= 0.6 * r["input_tokens"] for r in others)
    assert all(r["output_tokens"] > 0 and r["first_token_s"] is not None for r in records)


@in_loop
async def test_without_the_gateway(server, tmp_path) -> None:
    make_railway(tmp_path / "railway.sqlite")
    async with Model(f"{server.url}/v1", max_tokens=8) as model:
        assert model.model == COMPUTING.served_name
        run = await answer(QUESTION, model, Database(tmp_path / "railway.sqlite"), Options(corrections=0))
    assert run.picked is None
    assert all(step.answer.instance is None for step in run.calls)
