"""A scripted OpenAI-compatible server on a loopback socket, and gateways before several of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import aiohttp
import openai
from aiohttp import web

from hexrepro.cluster import load_cluster
from hexrepro.cluster.types import Cluster
from hexrepro.serving.config import Serving, Settings
from hexrepro.serving.coordinator import Coordinator
from hexrepro.serving.gateway import Gateway
from hexrepro.serving.upstream import Timeouts

MODEL = "m"


@dataclass(frozen=True)
class Act:
    """What the server does with a call.

    status    other than 200: an error of that status
    tokens    length of the answer; `max_tokens` of the request if None
    first_s   before anything is sent; token_s: between tokens
    after     with `fault`: after so many tokens (-1: before the status line)
    fault     hang (silence), abort (the connection is torn), end (an orderly end without [DONE]), error (an error event)
    """

    status: int = 200
    tokens: int | None = None
    first_s: float = 0.0
    token_s: float = 0.0
    after: int = -1
    fault: str = ""


class Server:
    """`act(body, number)` says what happens to each call; all is recorded."""

    def __init__(
        self, act: Callable[[dict, int], Act] | None = None, models: tuple[str, ...] = (MODEL,)
    ) -> None:
        self.models = models
        self.act = act or (lambda body, number: Act())
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.finished = self.cancelled = self.running = self.most_running = 0
        self.healthy = True
        self.probes = self.tokenized = 0
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._call)
        app.router.add_post("/v1/completions", self._call)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Refuse connections and tear those there are; `start` brings it back at the same port."""
        if self._runner is not None:
            for connection in list(self._runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _health(self, request: web.Request) -> web.Response:
        self.probes += 1
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": m, "object": "model"} for m in self.models]}
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.tokenized += 1
        return web.json_response({"count": len(json.dumps(body.get("messages") or body["prompt"]).split())})

    async def _call(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            answer = await self._answer(request, body, self.act(body, len(self.bodies) - 1))
            self.finished += 1
            return answer
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict, act: Act) -> web.StreamResponse:
        if act.fault and act.after < 0:
            await self._fail(request, None, act)
        await asyncio.sleep(act.first_s)
        if act.status != 200:
            error = {"message": "scripted", "type": "scripted", "param": None, "code": act.status}
            return web.json_response({"error": error}, status=act.status)
        n = act.tokens or body.get("max_tokens") or body.get("max_completion_tokens") or 5
        chat = request.path.endswith("chat/completions")
        usage = {"prompt_tokens": 7, "completion_tokens": n, "total_tokens": 7 + n}
        kind = "chat.completion" if chat else "text_completion"
        whole = {"id": "x", "object": kind, "created": 1, "model": body["model"]}
        if not body.get("stream"):
            if act.token_s:
                await asyncio.sleep(act.token_s * n)
            text = "".join(f"t{i} " for i in range(n))
            choice = {"index": 0, "finish_reason": "length"}
            choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            return web.json_response(whole | {"choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(n):
            if act.fault and i == act.after:
                return await self._fail(request, response, act)
            choice = {"index": 0, "finish_reason": "length" if i == n - 1 else None}
            choice |= {"delta": {"content": f"t{i} "}} if chat else {"text": f"t{i} "}
            await self._event(response, whole | {"object": kind + ".chunk" * chat, "choices": [choice]})
            if act.token_s:
                await asyncio.sleep(act.token_s)
        if (body.get("stream_options") or {}).get("include_usage"):
            await self._event(response, whole | {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _fail(self, request: web.Request, response: web.StreamResponse | None, act: Act):
        if act.fault == "hang":
            await asyncio.sleep(3600)
        if act.fault == "abort":
            request.transport.abort()
            raise ConnectionResetError
        if act.fault == "error":
            await self._event(response, {"error": {"message": "engine died", "code": 500}})
        await response.write_eof()
        return response

    async def _event(self, response: web.StreamResponse, content: dict) -> None:
        await response.write(b"data: " + json.dumps(content).encode() + b"\n\n")


# pauses as short as they get; time limits long enough for a busy machine
QUICK = Settings(
    port=0,
    patience_s=0.3,
    pause_s=0.02,
    longest_pause_s=0.1,
    probe_every_s=0.05,
    drain_s=5.0,
    timeouts=Timeouts(connect_s=5.0, first_byte_s=5.0, chunk_s=5.0, total_s=5.0, probe_s=5.0),
)
HASTY = Timeouts(
    connect_s=1.0, first_byte_s=0.3, chunk_s=0.3, total_s=0.5, probe_s=1.0
)  # where a server hangs


@functools.cache
def small_cluster(instances: int) -> Cluster:
    """Hetero-2, its first instances, or as many of it over and over."""
    whole = load_cluster("hetero2", "silicon", scale_out=-(-instances // 4))
    return Cluster("test", whole.instances[:instances])


@contextlib.asynccontextmanager
async def running(servers: list[Server], *, policy: str = "hexgen_flow", concurrency: int = 0, **changes):
    """The servers, and a gateway before them; `changes` are of its `Serving` or its `Settings`."""
    for server in servers:
        await server.start()
    parts = {k: changes.pop(k) for k in list(changes) if k in Serving.__dataclass_fields__}
    parts = {"models": (MODEL,)} | parts
    if concurrency:
        parts["concurrency"] = (concurrency,) * len(servers)
    serving = Serving(
        cluster=small_cluster(len(servers)),
        urls=tuple(s.url for s in servers),
        policy=policy,
        settings=replace(QUICK, **changes),
        **parts,
    )
    try:
        async with Gateway(serving) as gateway:
            yield gateway
    finally:
        for server in servers:
            await server.stop()


# ------------------------------------------------------------------------------------------ clients

_CLIENTS: list[openai.AsyncOpenAI] = []


def in_loop(test):
    """Run an async test, and fail rather than hang."""

    @functools.wraps(test)
    def wrapped(*args, **values):
        async def bounded():
            async with asyncio.timeout(120):  # a gateway with a tuner may have to compile it first
                await test(*args, **values)
                while _CLIENTS:
                    await _CLIENTS.pop().close()

        asyncio.run(bounded())

    return wrapped


def client(gateway: Gateway, key: str = "none", **more) -> openai.AsyncOpenAI:
    """OpenAI's own, without its retries."""
    _CLIENTS.append(openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key=key, max_retries=0, **more))
    return _CLIENTS[-1]


def ask(n: int = 3, **more) -> dict:
    """A chat call of n tokens."""
    messages = [{"role": "user", "content": "How many singers are there?"}]
    return dict(model=MODEL, messages=messages, max_tokens=n) | more


async def post(gateway: Gateway, body, path: str = "/v1/chat/completions", **headers: str):
    """(status, headers, body) of a plain POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(gateway.url + path, data=data, headers=headers) as answer,
    ):
        return answer.status, answer.headers, await answer.read()


def nothing_on_any_account(of: Coordinator) -> None:
    """No instance holds anything, as the coordinator sees it."""
    for column in (
        "running",
        "waiting",
        "waiting_s",
        "outstanding_s",
        "prefill_tokens",
        "output_tokens",
        "kv_tokens",
    ):
        assert not of.views[column].any(), column


async def settled(gateway: Gateway) -> None:
    """Wait until nothing is under way; then nothing may be left on any account."""
    of = gateway.coordinator
    for _ in range(200):
        if of.calls_under_way == 0:
            break
        await asyncio.sleep(0.01)
    assert of.calls_under_way == 0
    nothing_on_any_account(of)
    assert all(lane.running == 0 and len(lane) == 0 for lane in gateway.dispatcher.lanes)
    for _ in range(50):  # the handlers end a little later than their calls
        if not gateway.dispatcher.under_way:
            break
        await asyncio.sleep(0.01)
    assert gateway.dispatcher.under_way == gateway.dispatcher.calls == {}
    assert gateway.dispatcher._in == gateway._requests == 0


class RawServer:
    """Speaks HTTP byte by byte: `handle(reader, writer, number)` gets each connection with its number."""

    def __init__(self, handle) -> None:
        self._handle, self.connections, self.port = handle, 0, 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._handle(reader, writer, number)
        writer.close()


async def read_call(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """(head, body) of a request as it came; a probe is answered by whoever calls."""
    head = await reader.readuntil(b"\r\n\r\n")
    at = head.lower().find(b"content-length:")
    length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
    return head, await reader.readexactly(length)


WHOLE = json.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "é"}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
    }
).encode()


def plain(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """An answer with a length, as bytes."""
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body
