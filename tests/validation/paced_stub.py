"""A small OpenAI-compatible server for tests: a real socket, continuous batching on a clock, and faults on demand.

It batches like vLLM in the plain cases (decodes first, then prompts in chunks within the token budget, FCFS or by priority) and
sleeps step times of a formula of its own, so it is a known truth to profile and to replay against. It has no KV memory and no
prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Sequence:
    prompt: int
    output: int
    priority: int
    number: int
    events: asyncio.Queue
    computed: int = 0
    generated: int = 0


@dataclass
class PacedStub:
    """Use as a context manager; `url` is its base.

    faults: number of the call (in order of arrival, from 0) -> "500", "429", "break" (mid-stream), "hang", "short", "error"
    """

    base_s: float = 0.010
    prefill_token_s: float = 0.0
    prefill_context_s: float = 0.0
    sequence_s: float = 0.0
    kv_token_s: float = 0.0
    overhead_s: float = 0.0
    max_num_seqs: int = 64
    budget: int = 2048
    model: str = "stub"
    with_metrics: bool = True
    max_model_len: int | None = 32768
    faults: dict[int, str] = field(default_factory=dict)
    requests: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    disconnects: int = 0

    def __enter__(self) -> PacedStub:
        started = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self.thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_) -> None:
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join(10)

    def _run(self, started: threading.Event) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self.loop, self.over, self.work = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.finished = 0
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        engine = asyncio.create_task(self._engine())
        started.set()
        await self.over.wait()
        engine.cancel()
        await runner.cleanup()

    async def _engine(self) -> None:
        due = 0.0
        while True:
            if not self.running and not self.waiting:
                self.work.clear()
                await self.work.wait()
                due = time.perf_counter()
            decodes = [s for s in self.running if s.computed >= s.prompt]
            room = self.budget - len(decodes)
            kv = sum(s.computed for s in decodes)
            prefill, context, chunks = 0, 0.0, []
            self.waiting.sort(key=lambda s: (s.priority, s.number))
            for s in [s for s in self.running if s.computed < s.prompt] + self.waiting:
                if room == 0 or (s not in self.running and len(self.running) >= self.max_num_seqs):
                    break
                n = min(room, s.prompt - s.computed)
                room -= n
                prefill += n
                context += n * s.computed + n * n / 2
                chunks.append((s, n))
                if s not in self.running:
                    self.waiting.remove(s)
                    self.running.append(s)
            due += (
                self.base_s
                + self.prefill_token_s * prefill
                + self.prefill_context_s * context
                + self.sequence_s * (len(decodes) + len(chunks))
                + self.kv_token_s * kv
            )
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            for s in decodes:
                s.computed += 1
            for s, n in chunks:
                s.computed += n
            for s in decodes + [s for s, _ in chunks if s.computed >= s.prompt]:
                s.generated += 1
                s.events.put_nowait(s.generated)
            self.finished += sum(s.generated >= s.output for s in self.running)
            self.running = [s for s in self.running if s.generated < s.output]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self.model, "object": "model"}
        if self.max_model_len:
            entry["max_model_len"] = self.max_model_len
        return web.json_response({"object": "list", "data": [entry]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.with_metrics:
            return web.Response(status=404)
        name = f'{{engine="0",model_name="{self.model}"}}'
        return web.Response(
            text="# HELP vllm:num_requests_running x\n"
            f"vllm:num_requests_running{name} {float(len(self.running))}\n"
            f"vllm:num_requests_waiting{name} {float(len(self.waiting))}\n"
            f'vllm:request_success_total{{finished_reason="length"}} {float(self.finished)}\n'
            'vllm:request_success_total{finished_reason="stop"} 0.0\n'
            'vllm:cache_config_info{block_size="16",enable_prefix_caching="False",num_gpu_blocks="1025"} 1.0\n'
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        content = await request.json()
        number = len(self.requests)
        self.requests.append(content)
        self.headers.append(dict(request.headers))
        fault = self.faults.get(number)
        if fault in ("500", "429"):
            return web.json_response({"error": {"message": "no room", "code": int(fault)}}, status=int(fault))
        await asyncio.sleep(self.overhead_s)
        output = content["max_tokens"] - (fault == "short")
        s = Sequence(len(content["prompt"]), output, content.get("priority", 0), number, asyncio.Queue())
        self.waiting.append(s)
        self.work.set()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        each = content.get("stream_options", {}).get("continuous_usage_stats", False)
        try:
            for token in range(1, output + 1):
                assert await s.events.get() == token
                if fault == "hang":
                    await asyncio.sleep(3600)
                if token == 2 and fault == "break":
                    request.transport.close()
                    return response
                if token == 2 and fault == "error":
                    await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
                    return response
                event = {"choices": [{"text": " t7", "index": 0}]}
                if each:
                    event["usage"] = self._usage(s, token)
                await response.write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")
            last = {"choices": [], "usage": self._usage(s, output)}
            await response.write(b"data: " + json.dumps(last, separators=(",", ":")).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.disconnects += 1
            s.output = 0
            raise
        return response

    def _usage(self, s: Sequence, output: int) -> dict:
        return {"prompt_tokens": s.prompt, "completion_tokens": output, "total_tokens": s.prompt + output}
