"""The gateway before a real vLLM server (CPU build) at half of an A100's step times, of which it believes that it runs one call
at a time.

HEXREPRO_VLLM_PYTHON=path/to/python pytest -m vllm tests/serving/test_gateway_vllm.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace

import aiohttp
import pytest
from openai import AsyncOpenAI

from hexrepro.cluster.types import Cluster
from hexrepro.serving import headers as names
from hexrepro.serving.config import Serving
from hexrepro.serving.gateway import Gateway
from hexrepro.serving.upstream import Timeouts
from tests.real_vllm import PACED
from tests.serving.scripted import QUICK, client, in_loop, settled

pytestmark = pytest.mark.vllm

SPEC = replace(PACED, max_num_seqs=1)
PROMPT = list(range(10, 40))


@pytest.fixture
def server(vllm_servers):
    return vllm_servers["paced"]


@asynccontextmanager
async def one_slot_left(server) -> AsyncIterator[None]:
    """Long calls of somebody else run at the server, in all places of its batch but one."""
    direct = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
    async with direct, AsyncExitStack() as streams:
        for _ in range(PACED.max_num_seqs - 1):
            stream = await direct.completions.create(**call(4000, stream=True))
            streams.push_async_callback(stream.close)
            await anext(aiter(stream))
        assert await running_there(server) == PACED.max_num_seqs - 1
        yield


def before(server, mode: str) -> Gateway:
    settings = replace(QUICK, mode=mode, timeouts=Timeouts(first_byte_s=60.0), probe_every_s=5.0)
    return Gateway(
        Serving(
            Cluster("one", (SPEC.instance(),)), (server.url,), models=(SPEC.served_name,), settings=settings
        )
    )


def call(n: int, **more) -> dict:
    exact = {"min_tokens": n, "ignore_eos": True}
    body = dict(model=SPEC.served_name, prompt=PROMPT, max_tokens=n, temperature=0, extra_body=exact)
    return body | more


async def running_there(server) -> float:
    async with aiohttp.ClientSession() as session, session.get(server.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


@pytest.mark.parametrize("mode", ["gateway", "engine"])
def test_urgent_calls_go_first_in_either_mode(server, mode: str) -> None:
    @in_loop
    async def check() -> None:
        full = one_slot_left(server) if mode == "engine" else nullcontext()
        async with full, before(server, mode) as gateway:
            api, ended = client(gateway), []

            async def one(slo: int) -> None:
                where = {names.SLO: str(slo), names.STAGE: "s"}
                parts = [
                    p
                    async for p in await api.completions.create(**call(16, stream=True), extra_headers=where)
                ]
                assert parts[-1].choices
                ended.append(slo)

            tasks = [asyncio.create_task(one(1000))]
            while not gateway.coordinator.views["running"][0]:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)
            for slo in (900, 300, 600):
                tasks.append(asyncio.create_task(one(slo)))
                await asyncio.sleep(0.01)
            await asyncio.gather(*tasks)
            assert ended == [1000, 300, 600, 900]
            stage = gateway.coordinator.stages.called("s")
            assert stage.output_median == 16.0  # as the server counted
            assert stage.input_median == len(PROMPT)
            await settled(gateway)

    check()


@in_loop
async def test_a_client_that_goes_away_frees_the_server(server) -> None:
    async with before(server, "gateway") as gateway:
        stream = await client(gateway).completions.create(**call(400, stream=True))
        async for _ in stream:
            break
        assert await running_there(server) == 1
        await stream.close()
        for _ in range(100):
            if await running_there(server) == 0:
                break
            await asyncio.sleep(0.05)
        assert await running_there(server) == 0
        whole = await client(gateway).completions.create(**call(4))
        assert whole.usage.completion_tokens == 4
        await settled(gateway)
