"""What goes wrong with instances and clients. No call is lost, none is answered twice, every failure reaches its client."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import time

import aiohttp
import openai
import pytest

from tests.serving.scripted import (
    HASTY,
    Act,
    RawServer,
    Server,
    ask,
    client,
    in_loop,
    plain,
    post,
    read_call,
    running,
    settled,
)


async def until(condition, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


BEFORE_THE_FIRST_BYTE = {
    "5xx": Act(status=500),
    "busy": Act(status=429),
    "torn": Act(fault="abort"),
    "hangs": Act(fault="hang"),
    "torn before its first event": Act(fault="abort", after=0),
    "hangs before its first event": Act(fault="hang", after=0),
    "ends before its first event": Act(fault="end", after=0),
    "begins with an error": Act(fault="error", after=0),
}


@pytest.mark.parametrize(
    ("name", "stream"),
    [
        (name, stream)
        for name, act in BEFORE_THE_FIRST_BYTE.items()
        for stream in (True, False)[: 2 - (act.after == 0)]
    ],
)
def test_what_fails_before_the_first_byte_is_done_elsewhere(name: str, stream: bool) -> None:
    """The client notices nothing. (An answer in one piece has no events.)"""

    @in_loop
    async def check() -> None:
        fault = BEFORE_THE_FIRST_BYTE[name]
        bad, good = Server(lambda body, number: fault), Server()
        async with running([bad, good], policy="vllm", timeouts=HASTY) as gateway:
            answer = await client(gateway).chat.completions.create(**ask(stream=stream))
            text = (
                "".join([c.choices[0].delta.content async for c in answer])
                if stream
                else answer.choices[0].message.content
            )
            assert text == "t0 t1 t2 "
            assert (len(bad.bodies), len(good.bodies)) == (1, 1)
            await settled(gateway)

    check()


@in_loop
async def test_an_instance_that_refuses_is_out_at_once_and_comes_back() -> None:
    dead, good = Server(), Server()
    async with running([dead, good], policy="vllm") as gateway:
        of = gateway.coordinator
        await dead.stop()
        answers = await asyncio.gather(*(post(gateway, ask()) for _ in range(6)))
        assert [status for status, _, _ in answers] == [200] * 6
        assert of.is_open.tolist() == [False, True]
        before = len(good.bodies)
        await post(gateway, ask())
        assert len(good.bodies) == before + 1
        await dead.start()
        await until(lambda: of.is_open.all())
        await asyncio.gather(*(post(gateway, ask()) for _ in range(4)))
        assert dead.finished > 0
        await settled(gateway)


@in_loop
async def test_a_probe_notices_what_no_call_has_met() -> None:
    sick, good = Server(), Server()
    async with running([sick, good]) as gateway:
        sick.healthy = False
        await until(lambda: not gateway.coordinator.is_open[0])
        assert (await post(gateway, ask()))[0] == 200
        assert sick.bodies == []
        sick.healthy = True
        await until(lambda: gateway.coordinator.is_open.all())


@in_loop
async def test_errors_in_a_row_take_an_instance_out_a_success_between_them_does_not() -> None:
    script = [500, 500, 200, 500, 500, 500]
    bad, good = Server(lambda body, number: Act(status=script[number])), Server()
    async with running([bad, good], policy="vllm", failures=3, probe_every_s=60.0, pause_s=60.0) as gateway:
        of = gateway.coordinator
        for _ in range(40):
            assert (await post(gateway, ask()))[0] == 200
            if not of.is_open[0]:
                break
        assert len(bad.bodies) == 6
        assert of.is_open.tolist() == [False, True]


@in_loop
async def test_an_instance_whose_calls_keep_failing_is_tried_less_and_less_often() -> None:
    """Its probes succeed, its calls do not: the pauses double."""
    bad, good = Server(lambda body, number: Act(status=500)), Server()
    async with running([bad, good], policy="vllm", failures=1, pause_s=0.02, longest_pause_s=60.0) as gateway:
        pauses = []
        for _ in range(4):
            while gateway.coordinator.is_open[0]:
                assert (await post(gateway, ask()))[0] == 200
            pauses.append(gateway.dispatcher.watch.health[0].next_pause_s)
            await until(lambda: gateway.coordinator.is_open[0])
        assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16])


@in_loop
async def test_attempts_are_bounded_and_the_client_is_told() -> None:
    servers = [Server(lambda body, number: Act(status=503)) for _ in range(4)]
    async with running(servers, attempts=3) as gateway:
        for stream in (True, False):
            before = sum(len(s.bodies) for s in servers)
            with pytest.raises(openai.InternalServerError, match="3 attempts failed") as error:
                await client(gateway).chat.completions.create(**ask(stream=stream))
            assert error.value.status_code == 502
            assert error.value.code == "upstream_failed"
            assert sum(len(s.bodies) for s in servers) == before + 3
        tried = [len(s.bodies) for s in servers]
        assert max(tried) <= 2  # never the same instance twice for one call
        await settled(gateway)


@in_loop
async def test_a_timeout_at_all_attempts_is_a_504() -> None:
    servers = [Server(lambda body, number: Act(fault="hang")) for _ in range(2)]
    async with running(servers, attempts=2, timeouts=HASTY) as gateway:
        status, _, answer = await post(gateway, ask(stream=True))
        assert (status, json.loads(answer)["error"]["code"]) == (504, "upstream_timeout")
        await until(lambda: all(s.cancelled == 1 for s in servers))
        await settled(gateway)


@in_loop
async def test_an_instance_without_the_model_or_with_a_wrong_key_is_passed_over() -> None:
    """404 and 401 there say nothing of the call. Were they passed on, the instance that is always free would get all calls."""
    for status in (404, 401):
        odd, good = Server(lambda body, number, status=status: Act(status=status)), Server()
        async with running([odd, good], policy="vllm", probe_every_s=60.0) as gateway:
            for stream in (False, True):
                for _ in range(2):
                    assert (await post(gateway, ask(stream=stream)))[0] == 200
            assert len(good.bodies) == 4
            assert len(odd.bodies) >= 1
            await settled(gateway)


@in_loop
async def test_what_no_instance_has_is_the_clients_mistake_and_takes_no_instance_out() -> None:
    servers = [Server(lambda body, number: Act(status=404)) for _ in range(2)]
    async with running(servers, failures=1, probe_every_s=60.0) as gateway:
        for stream in (False, True):
            with pytest.raises(openai.NotFoundError, match="scripted"):
                await client(gateway).chat.completions.create(**ask(stream=stream))
        assert [len(s.bodies) for s in servers] == [2, 2]
        assert gateway.coordinator.is_open.all()
        await settled(gateway)


@in_loop
async def test_the_same_instance_is_not_asked_again_at_once() -> None:
    """There is no other: pauses of 50 and 100 ms between three attempts."""
    loop = asyncio.get_running_loop()
    at_s = []

    def act(body: dict, number: int) -> Act:
        at_s.append(loop.time())
        return Act(status=500)

    async with running([Server(act)], failures=9, pause_s=0.05, longest_pause_s=1.0) as gateway:
        assert (await post(gateway, ask()))[0] == 502
        pauses = [b - a for a, b in itertools.pairwise(at_s)]
        assert len(pauses) == 2
        assert 0.05 <= pauses[0] < 0.1 <= pauses[1]
        await settled(gateway)


@in_loop
async def test_a_busy_server_says_when_to_come_back() -> None:
    async def busy(reader, writer, number) -> None:
        while True:
            await read_call(reader)
            writer.write(plain(b"{}", "429 Too Many Requests", "Retry-After: 7\r\n"))

    async with running([RawServer(busy)], attempts=1, probe_every_s=60.0) as gateway:
        status, headers, answer = await post(gateway, ask())
        assert (status, headers["Retry-After"], json.loads(answer)["error"]["code"]) == (
            429,
            "7",
            "overloaded",
        )
        assert gateway.coordinator.is_open.all()
        await settled(gateway)


@pytest.mark.parametrize(
    ("fault", "code"),
    [("abort", "upstream_broken"), ("hang", "upstream_timeout"), ("end", "upstream_broken"), ("error", None)],
)
def test_a_stream_that_breaks_ends_with_an_error_event_and_is_not_begun_again(fault: str, code) -> None:
    @in_loop
    async def check() -> None:
        bad, good = Server(lambda body, number: Act(fault=fault, after=2)), Server()
        async with running([bad, good], policy="vllm", timeouts=HASTY) as gateway:
            got = []

            async def read() -> None:
                async for part in await client(gateway).chat.completions.create(**ask(5, stream=True)):
                    got.append(part.choices[0].delta.content)

            with pytest.raises(openai.APIError) as error:
                await read()
            assert got == ["t0 ", "t1 "]
            if code:
                assert error.value.body["code"] == code
            assert good.bodies == []
            await settled(gateway)
            assert gateway.coordinator.stages.called("call").finished == 0  # nothing is learned from it
            kind = {"hang": "timeout", "error": "status"}.get(fault, "broken")
            assert f'failures_total{{instance="a100-0",kind="{kind}"}} 1.0' in gateway.metrics.text().decode()

    check()


@in_loop
async def test_an_answer_in_one_piece_that_breaks_is_asked_elsewhere() -> None:
    """Nothing of it has gone to the client yet."""

    async def broken(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.close()

    bad, good = Server(), Server()
    async with running([bad, good], policy="vllm", probe_every_s=60.0) as gateway:
        await bad.stop()
        async with await asyncio.start_server(broken, "127.0.0.1", bad.port):
            status, _, answer = await post(gateway, ask())
        assert status == 200
        assert json.loads(answer)["choices"][0]["message"]["content"] == "t0 t1 t2 "
        await settled(gateway)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_call_upstream(stream: bool) -> None:
    @in_loop
    async def check() -> None:
        server = Server(lambda body, number: Act(first_s=0.05, token_s=0.05))
        async with running([server], concurrency=1) as gateway:
            task = asyncio.create_task(post(gateway, ask(100, stream=stream)))
            await until(lambda: server.running == 1)
            if stream:
                await until(lambda: gateway.coordinator.views["prefill_tokens"][0] == 0)
            task.cancel()
            await until(lambda: server.cancelled == 1)
            await settled(gateway)
            assert gateway.coordinator.is_open.all()  # it was not the server's fault
            server.act = lambda body, number: Act()
            assert (await post(gateway, ask()))[0] == 200

    check()


@in_loop
async def test_a_client_that_goes_away_while_its_call_waits_is_never_sent() -> None:
    server = Server(lambda body, number: Act(first_s=0.2))
    async with running([server], concurrency=1) as gateway:
        running_call = asyncio.create_task(post(gateway, ask()))
        await until(lambda: server.running == 1)
        gone = asyncio.create_task(post(gateway, ask(user="gone")))
        last = asyncio.create_task(post(gateway, ask(user="last")))
        await until(lambda: gateway.coordinator.calls_waiting == 2)
        gone.cancel()
        await until(lambda: gateway.coordinator.calls_waiting == 1)
        assert (await running_call)[0] == (await last)[0] == 200
        assert [b.get("user") for b in server.bodies] == [None, "last"]
        await settled(gateway)


@in_loop
async def test_calls_that_wait_at_an_instance_that_dies_go_elsewhere() -> None:
    dying = Server(lambda body, number: Act(first_s=0.2))
    good = Server(lambda body, number: Act(first_s=0.02))
    async with running([dying, good], policy="vllm", concurrency=1) as gateway:
        calls = [asyncio.create_task(post(gateway, ask())) for _ in range(8)]
        await until(lambda: gateway.coordinator.calls_waiting == 6)
        await dying.stop()
        answers = await asyncio.gather(*calls)
        assert [status for status, _, _ in answers] == [200] * 8
        assert good.finished == 8
        await settled(gateway)


@in_loop
async def test_with_all_instances_out_calls_wait_for_one_to_come_back() -> None:
    servers = [Server(lambda body, number: Act(first_s=0.1)) for _ in range(2)]
    async with running(servers, patience_s=5.0, concurrency=1) as gateway:
        calls = [asyncio.create_task(post(gateway, ask())) for _ in range(5)]
        await until(lambda: gateway.coordinator.calls_waiting == 3)
        for server in servers:
            await server.stop()
        await until(lambda: not gateway.coordinator.is_open.any())
        calls.append(asyncio.create_task(post(gateway, ask())))
        async with aiohttp.ClientSession() as session, session.get(gateway.url + "/health") as health:
            assert health.status == 503
        await servers[1].start()
        answers = await asyncio.gather(*calls)
        assert [status for status, _, _ in answers] == [200] * 6
        await settled(gateway)


@in_loop
async def test_their_patience_is_bounded() -> None:
    server = Server()
    async with running([server], patience_s=0.1) as gateway:
        await server.stop()
        for _ in range(2):  # the first finds out, the second knows
            status, headers, answer = await post(gateway, ask())
            assert (status, json.loads(answer)["error"]["code"]) == (503, "no_instance")
            assert headers["Retry-After"] == "1"
        await settled(gateway)


@in_loop
async def test_draining_ends_what_is_under_way_and_takes_nothing_new() -> None:
    server = Server(lambda body, number: Act(first_s=0.2))
    async with running([server]) as gateway:
        call = asyncio.create_task(post(gateway, ask()))
        await until(lambda: server.running == 1)
        drained = asyncio.create_task(gateway.drain())
        await until(lambda: gateway.draining)
        status, headers, answer = await post(gateway, ask())
        assert (status, json.loads(answer)["error"]["code"]) == (503, "draining")
        assert "Retry-After" in headers
        async with aiohttp.ClientSession() as session, session.get(gateway.url + "/health") as health:
            assert (await health.json())["status"] == "draining"
        assert await drained
        assert (await call)[0] == 200


@in_loop
async def test_what_does_not_end_in_time_is_told_so() -> None:
    server = Server(lambda body, number: Act(token_s=0.02))
    async with running([server], concurrency=1, drain_s=0.3) as gateway:
        stream = asyncio.create_task(post(gateway, ask(50, stream=True)))
        await until(lambda: server.running == 1)
        waits = asyncio.create_task(post(gateway, ask()))
        await until(lambda: gateway.coordinator.calls_waiting == 1)
        began_s = time.monotonic()
        assert not await gateway.drain()
        assert 0.3 <= time.monotonic() - began_s < 1.0
        status, _, answer = await stream
        last = answer.split(b"\n\n")[-2]
        assert status == 200
        assert json.loads(last[6:])["error"]["code"] == "draining"
        status, _, answer = await waits
        assert (status, json.loads(answer)["error"]["code"]) == (503, "draining")
        await settled(gateway)


@in_loop
async def test_calls_without_an_instance_are_told_when_the_gateway_goes() -> None:
    """They wait for any instance, and have not been placed yet: draining waits for them too."""
    server = Server()
    async with running([server], drain_s=0.1, patience_s=60.0) as gateway:
        await server.stop()
        calls = [asyncio.create_task(post(gateway, ask())) for _ in range(2)]
        await until(lambda: not gateway.coordinator.is_open[0])
        calls.append(asyncio.create_task(post(gateway, ask())))
        await until(lambda: gateway._requests == 3)
        assert not await gateway.drain()
        for status, headers, answer in await asyncio.gather(*calls):
            assert (status, json.loads(answer)["error"]["code"]) == (503, "draining")
            assert headers["Connection"] == "close"
        await settled(gateway)


@in_loop
async def test_a_fault_of_ours_is_an_error_without_details_and_leaves_nothing_behind(caplog) -> None:
    server = Server()
    async with running([server]) as gateway:
        for broken in ("_upstream_body", "finished"):
            original = getattr(gateway.dispatcher, broken)
            setattr(gateway.dispatcher, broken, lambda *_: 1 / 0)
            status, _, answer = await post(gateway, ask())
            assert (status, json.loads(answer)["error"]["code"]) == (500, "internal_error")
            assert b"division" not in answer
            setattr(gateway.dispatcher, broken, original)
        gateway.dispatcher.first_token, original = lambda live: 1 / 0, gateway.dispatcher.first_token
        with pytest.raises(
            aiohttp.ClientPayloadError
        ):  # the stream has begun: it is torn, never answered twice
            await post(gateway, ask(stream=True))
        gateway.dispatcher.first_token = original
        assert (await post(gateway, ask(stream=True)))[0] == 200
        await settled(gateway)


@in_loop
async def test_running_out_of_files_here_takes_no_instance_out(monkeypatch) -> None:
    async with running([Server()], failures=1, attempts=2) as gateway:
        pool = gateway.dispatcher.upstreams[0].pool

        async def exhausted(**_options) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(pool, "get", exhausted)
        status, headers, _ = await post(gateway, ask())
        assert (status, headers["Retry-After"]) == (429, "1")
        await asyncio.sleep(0.1)  # probes fail in the same way
        assert gateway.coordinator.is_open.all()
        monkeypatch.undo()
        assert (await post(gateway, ask()))[0] == 200
        await settled(gateway)


@in_loop
async def test_engine_mode_sends_a_failed_call_elsewhere_too() -> None:
    bad, good = Server(lambda body, number: Act(status=500)), Server()
    async with running([bad, good], policy="vllm", mode="engine") as gateway:
        for _ in range(6):
            assert (await post(gateway, ask()))[0] == 200
        await bad.stop()
        assert (await post(gateway, ask()))[0] == 200
        await settled(gateway)


@in_loop
async def test_a_connection_that_the_server_has_closed_meanwhile_costs_no_answer() -> None:
    """vLLM closes idle connections; the gateway's pool notices, or sends the call again."""
    server = Server()
    async with running([server]) as gateway:
        for _ in range(5):
            assert (await post(gateway, ask()))[0] == 200
            for connection in list(server._runner.server.connections):
                connection.transport.abort()
        assert gateway.coordinator.is_open.all()
        await settled(gateway)
