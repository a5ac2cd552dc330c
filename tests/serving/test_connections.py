"""The connections to servers, byte by byte: what servers may do with HTTP, and what they do when they close."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from hexrepro.serving import connections
from hexrepro.serving.connections import retry_after_s
from tests.serving.scripted import (
    MODEL,
    QUICK,
    WHOLE,
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

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    content = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    content |= {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


QUIET = dict(probe_every_s=60.0)  # these servers do not answer probes


@in_loop
async def test_a_kept_connection_that_the_server_closes_just_then_costs_no_attempt() -> None:
    """It answers the first call, and closes when the second comes, as a server that has just found the connection idle."""

    async def handle(reader, writer, number) -> None:
        await read_call(reader)
        writer.write(plain(WHOLE))
        await writer.drain()
        if number == 0:
            await reader.readuntil(b"\r\n\r\n")
            return
        await reader.read()

    server = RawServer(handle)
    async with running([server], attempts=1, **QUIET) as gateway:
        for _ in range(2):
            assert (await post(gateway, ask()))[0] == 200
        assert server.connections == 2
        assert b"hexrepro_upstream_failures_total{" not in gateway.metrics.text()
        await settled(gateway)


@in_loop
async def test_a_fresh_connection_that_is_closed_is_a_failure() -> None:
    async def handle(reader, writer, number) -> None:
        await read_call(reader)

    server = RawServer(handle)
    async with running([server], attempts=2, **QUIET) as gateway:
        status, _, answer = await post(gateway, ask())
        assert (status, json.loads(answer)["error"]["code"]) == (502, "upstream_failed")
        assert server.connections == 2
        await settled(gateway)


@in_loop
async def test_connections_are_kept_for_the_next_call_but_not_for_long(monkeypatch) -> None:
    server = Server()
    async with running([server], **QUIET) as gateway:
        pool = gateway.dispatcher.upstreams[0].pool
        for i in range(4):
            await post(gateway, ask(stream=i % 2 == 1))
        assert len(pool.open) == len(pool.idle) == 1
        await asyncio.gather(*(post(gateway, ask()) for _ in range(3)))
        assert 1 < len(pool.open) == len(pool.idle) <= 4
        monkeypatch.setattr(connections, "KEEP_IDLE_S", 0.0)
        before = set(pool.open)
        assert (await post(gateway, ask()))[0] == 200
        pool.prune()
        await asyncio.sleep(0.02)
        assert not pool.idle
        assert not pool.open & before


@in_loop
async def test_a_stream_that_comes_byte_by_byte_is_the_same_stream() -> None:
    """Events and chunks are cut anywhere, inside a letter of two bytes too, and lines may end in CR LF."""
    texts = ["é", "ü\\n", "data: [DONE]", "x"]

    async def handle(reader, writer, number) -> None:
        await read_call(reader)
        events = b": ping\n\n" + b"".join(event(t) for t in texts) + b"data: [DONE]\n\n"
        events = events.replace(b"\n", b"\r\n") if number else events
        answer = STREAM_HEAD + b"".join(chunk(events[i : i + 7]) for i in range(0, len(events), 7))
        for i in range(len(answer)):
            writer.write(answer[i : i + 1])
            if i % 11 == 0:
                await asyncio.sleep(0)
        writer.write(chunk(b"") if number == 0 else b"0\r\nX-Trailer: 1\r\n\r\n")
        await writer.drain()

    async with running([RawServer(handle)], **QUIET) as gateway:
        for _ in range(2):
            parts = await client(gateway).chat.completions.create(**ask(stream=True))
            assert [p.choices[0].delta.content async for p in parts] == texts
        await settled(gateway)


@in_loop
async def test_answers_may_be_chunked_or_end_with_the_connection_and_be_announced() -> None:
    """100 Continue before the answer, chunks, and no length at all (HTTP/1.0)."""
    answers = [
        b"HTTP/1.1 100 Continue\r\n\r\n" + plain(WHOLE),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(WHOLE[:5]) + chunk(WHOLE[5:]) + chunk(b""),
        b"HTTP/1.0 200 OK\r\n\r\n" + WHOLE,
    ]  # fmt: skip

    async def handle(reader, writer, number) -> None:
        await read_call(reader)
        writer.write(answers[number])
        await writer.drain()

    async with running([RawServer(handle)], attempts=1, **QUIET) as gateway:
        for _ in answers:
            status, _, answer = await post(gateway, ask())
            assert (status, answer) == (200, WHOLE)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("nonsense", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"])
def test_what_is_not_http_is_a_failure(nonsense: bytes) -> None:
    @in_loop
    async def check() -> None:
        async def handle(reader, writer, number) -> None:
            await read_call(reader)
            writer.write(nonsense)
            await writer.drain()
            await reader.read()

        good = Server()
        async with running([RawServer(handle), good], policy="vllm", **QUIET) as gateway:
            assert (await post(gateway, ask()))[0] == 200
            assert len(good.bodies) == 1
            await settled(gateway)

    check()


@in_loop
async def test_a_connection_is_kept_although_the_end_of_the_stream_comes_late() -> None:
    """The client has its [DONE] at once; the last chunk of HTTP comes 50 ms later."""

    async def handle(reader, writer, number) -> None:
        while True:
            await read_call(reader)
            writer.write(STREAM_HEAD + chunk(event("a")) + chunk(b"data: [DONE]\n\n"))
            await asyncio.sleep(0.05)
            writer.write(chunk(b""))

    server = RawServer(handle)
    async with running([server], **QUIET) as gateway:
        loop = asyncio.get_running_loop()
        for _ in range(2):
            began_s = loop.time()
            assert (await post(gateway, ask(stream=True)))[2].endswith(b"data: [DONE]\n\n")
            assert loop.time() - began_s < 0.045
            await asyncio.sleep(0.06)
        assert server.connections == 1


@in_loop
async def test_a_large_prompt_arrives_whole() -> None:
    server = Server()
    async with running([server]) as gateway:
        prompt = "é" * 400_000
        assert (await post(gateway, ask(messages=[{"role": "user", "content": prompt}])))[0] == 200
        assert server.bodies[0]["messages"][0]["content"] == prompt


@in_loop
async def test_a_client_that_does_not_read_is_cut_off_and_its_instance_is_not_blamed() -> None:
    """60 MB of stream against a client that reads none of it: the server is told to wait, then the call ends."""
    big = chunk(event("x" * 60_000)) * 50
    torn = asyncio.Event()

    async def handle(reader, writer, number) -> None:
        await read_call(reader)
        writer.write(STREAM_HEAD)
        try:
            for _ in range(20):
                writer.write(big)
                await writer.drain()
        except ConnectionError:
            torn.set()
            raise

    hasty = replace(QUICK.timeouts, client_s=0.2, chunk_s=0.1)
    async with running([RawServer(handle)], failures=1, timeouts=hasty, **QUIET) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        body = json.dumps(ask(stream=True)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        async with asyncio.timeout(5):
            await torn.wait()
        await settled(gateway)
        assert gateway.coordinator.is_open.all()
        text = gateway.metrics.text()
        assert b'hexrepro_calls_total{end="cancelled",instance="a100-0"} 1.0' in text
        assert b"hexrepro_upstream_failures_total{" not in text
        writer.close()


@in_loop
async def test_a_client_that_reads_slowly_gets_all_of_it() -> None:
    """12 MB, read with pauses that are longer than an instance may be silent."""
    big = event("x" * 60_000)

    async def handle(reader, writer, number) -> None:
        await read_call(reader)
        writer.write(STREAM_HEAD)
        for _ in range(200):
            writer.write(chunk(big))
            await writer.drain()
        writer.write(chunk(b"data: [DONE]\n\n") + chunk(b""))
        await writer.drain()

    async with running([RawServer(handle)], **QUIET) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        body = json.dumps(ask(stream=True)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            % len(body)
        )
        writer.write(body)
        got = b""
        while data := await reader.read(2**20):
            got += data
            if len(got) % 3 == 0:
                await asyncio.sleep(0.002)
        assert got.count(b"data: {") == 200
        assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
        await settled(gateway)


def test_retry_after() -> None:
    assert retry_after_s("7") == 7.0
    assert retry_after_s("") is None
    assert retry_after_s("-1") is None
    assert retry_after_s("Wed, 21 Oct 2026 07:28:00 GMT") is None


@in_loop
async def test_an_event_without_end_is_cut_off(monkeypatch) -> None:
    from hexrepro.serving import events

    monkeypatch.setattr(events, "_MAX_EVENT", 1000)

    async def handle(reader, writer, number) -> None:
        await read_call(reader)
        writer.write(STREAM_HEAD + chunk(event("a")))
        for _ in range(20):
            writer.write(chunk(b"data: " + b"x" * 100))
        await writer.drain()
        await reader.read()

    async with running(
        [RawServer(handle), Server(lambda body, number: Act())], policy="vllm", **QUIET
    ) as gateway:
        _, _, answer = await post(gateway, ask(stream=True))
        assert json.loads(answer.split(b"\n\n")[-2][6:])["error"]["code"] == "upstream_broken"
        await settled(gateway)
