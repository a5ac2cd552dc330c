"""Further attempts are bounded in the long run, bodies on their way count as load, and trace context goes on to the servers."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from hexrepro.serving.retries import RetryBudget
from tests.serving.scripted import Act, Server, ask, in_loop, post, running


def test_a_share_of_the_calls_and_a_reserve() -> None:
    budget = RetryBudget(share=0.25, reserve=3)
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    for _ in range(8):
        budget.add()
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(100):
        budget.add()
    assert budget.left == 3


@in_loop
async def test_failing_servers_get_little_more_than_the_calls() -> None:
    servers = [Server(lambda body, number: Act(status=500)) for _ in range(3)]
    calls, share = 40, 0.2
    async with running(servers, concurrency=2, failures=10_000, attempts=3, retry_share=share) as gateway:
        for _ in range(calls):
            status, _, body = await post(gateway, ask())
            assert status == 502
        assert b"The call failed: " in body  # one attempt, and no budget for another
        sent = sum(len(server.bodies) for server in servers)
        reserve = 3 * 2
        assert calls + reserve <= sent <= calls + reserve + share * calls


@in_loop
async def test_calls_of_an_instance_that_dies_all_go_elsewhere() -> None:
    """More of them at once than the share allows: that is what the reserve is for."""
    servers = [Server(lambda body, number: Act(first_s=30.0)), Server()]
    async with running(servers, concurrency=8, retry_share=0.0) as gateway:
        tasks = [asyncio.create_task(post(gateway, ask())) for _ in range(8)]
        while servers[0].running + servers[1].finished < 8:
            await asyncio.sleep(0.01)
        assert servers[0].running > 1
        await servers[0].stop()
        answers = await asyncio.gather(*tasks)
        assert [status for status, _, _ in answers] == [200] * 8


@in_loop
async def test_refused_connections_cost_no_budget() -> None:
    servers = [Server(), Server()]
    async with running(servers, concurrency=1, retry_share=0.0) as gateway:
        await servers[0].stop()
        for _ in range(4):
            assert (await post(gateway, ask()))[0] == 200
        assert gateway.dispatcher.retries.left == 2


@in_loop
async def test_bodies_on_their_way_count_as_load() -> None:
    async with running([Server()], concurrency=1, max_waiting=1) as gateway:
        slow = []
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: 1000\r\n\r\n{")
            await writer.drain()
            slow.append(writer)
        for _ in range(200):
            status, headers, _ = await post(gateway, ask())
            if status == 429:
                break
            await asyncio.sleep(0.01)
        assert status == 429
        assert int(headers["Retry-After"]) >= 1
        for writer in slow:
            writer.close()
        for _ in range(200):
            if (status := (await post(gateway, ask()))[0]) == 200:
                break
            await asyncio.sleep(0.01)
        assert status == 200


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_trace_context_goes_on_to_the_server(stream: bool) -> None:
    server = Server()
    trace = {
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate": "a=1,b=2",
    }
    async with running([server]) as gateway:
        headers = trace | {"X-Request-Id": "one", "Cookie": "secret=1"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{gateway.url}/v1/chat/completions", json=ask(stream=stream), headers=headers
            ) as answer,
        ):
            assert answer.status == 200
            await answer.read()
    (got,) = server.headers
    assert {name: value for name, value in got.items() if name in trace} == trace
    assert {name.lower() for name in got}.isdisjoint({"x-request-id", "cookie"})
