"""A model server that costs next to nothing: `python -m hexrepro.benchmarks.stub_server COUNT [PORT]` listens at COUNT ports
(from PORT on, or any that are free), which it prints, and answers every call with 8 tokens, as model `m`. In a stream the first
comes at once, the others every 2 ms."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

TOKENS = 8
GAP_S = 0.002

_USAGE = {"prompt_tokens": 500, "completion_tokens": TOKENS, "total_tokens": 500 + TOKENS}
_HEAD = {"id": "stub", "created": 1, "model": "m"}


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def _event(content: dict) -> bytes:
    return _chunk(
        b"data: " + json.dumps(_HEAD | {"object": "chat.completion.chunk"} | content).encode() + b"\n\n"
    )


def _plain(status: bytes, content: bytes) -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(content)) + content


_TOKEN = _event({"choices": [{"index": 0, "delta": {"content": " token"}, "finish_reason": None}]})
_FIRST = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + _TOKEN
_LAST_WITH_USAGE = _event({"choices": [], "usage": _USAGE}) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_LAST = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_WHOLE = _plain(
    b"200 OK",
    json.dumps(
        _HEAD
        | {
            "object": "chat.completion",
            "usage": _USAGE,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": " token" * TOKENS},
                    "finish_reason": "length",
                }
            ],
        }
    ).encode(),
)
_OK = _plain(b"200 OK", b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')


class _Connection(asyncio.Protocol):
    """One call at a time, as HTTP clients without pipelining send them."""

    def connection_made(self, transport) -> None:
        self._transport, self._received = transport, b""
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = 0
        lower = head.lower()
        if (at := lower.find(b"content-length:")) >= 0:
            length = int(lower[at + 15 :].split(b"\r\n", 1)[0])
        if len(body) < length:
            return
        self._received = b""
        if not head.startswith(b"POST"):
            self._transport.write(_OK)
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._transport.write(_FIRST)
            last = _LAST_WITH_USAGE if b"include_usage" in body else _LAST
            self._loop.call_later(GAP_S, self._more, TOKENS - 1, last)
        else:
            self._transport.write(_WHOLE)

    def _more(self, left: int, last: bytes) -> None:
        if left == 1:
            self._transport.write(_TOKEN + last)
        else:
            self._transport.write(_TOKEN)
            self._loop.call_later(GAP_S, self._more, left - 1, last)


async def serve(count: int, port: int = 0) -> None:
    """Listen until killed. `port`: the first of them, 0 = any that are free."""
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(_Connection, "127.0.0.1", port and port + i, backlog=1024)
        for i in range(count)
    ]
    print(*(s.sockets[0].getsockname()[1] for s in servers), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        from uvloop import run
    except ModuleNotFoundError:
        run = asyncio.run
    with contextlib.suppress(KeyboardInterrupt):
        run(serve(*map(int, sys.argv[1:3])))
