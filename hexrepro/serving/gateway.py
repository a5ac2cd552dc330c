"""The gateway: OpenAI's HTTP interface in front of the instances, the coordinator's decisions behind it.

A call is checked, placed by the coordinator, waits its turn in its instance's lane, and is sent on. As long as nothing of
its answer has gone to the client, an instance that fails it is replaced by another; after that the client gets an error
event. Prompts and keys are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
from aiohttp import web

from hexrepro.errors import InputError
from hexrepro.scheduling.policy import Policy, load_policy
from hexrepro.serving import headers as names
from hexrepro.serving.config import Serving, Tenant
from hexrepro.serving.coordinator import Coordinator, NoInstance, Placement
from hexrepro.serving.metrics import CONTENT_TYPE, Metrics
from hexrepro.serving.protocol import (
    CHAT,
    COMPLETIONS,
    Asked,
    Events,
    Refused,
    error_event,
    read_request,
    usage_of,
    usage_tokens,
)
from hexrepro.serving.queueing import Lane, priority
from hexrepro.serving.tokens import PromptTokens
from hexrepro.serving.upstream import Failed, Health, Upstream

log = logging.getLogger("hexrepro.serving")

_KEEP_IDLE_S = 3.0  # vLLM closes idle connections after 5 s
_TICK_S = 1.0
_T = TypeVar("_T")
_BROKEN_CLIENT = (ConnectionResetError, aiohttp.ClientConnectionResetError)


@dataclass(slots=True, eq=False)
class _Live:
    """A call under way. `turn` is done when it may be sent to its instance."""

    asked: Asked
    tenant: str
    arrived_s: float
    placement: Placement
    turn: asyncio.Future = field(repr=False)
    tried: set[int] = field(default_factory=set)
    booked: bool = False  # the coordinator knows that it has ended
    answer: aiohttp.ClientResponse | None = None  # the stream that it is being answered with


class Gateway:
    """An HTTP server over the event loop. `async with Gateway(serving) as gateway:` listens at `gateway.url`."""

    def __init__(self, serving: Serving, policy: Policy | str | None = None) -> None:
        self.serving, self.settings = serving, serving.settings
        policy = load_policy(policy or serving.policy)
        s = self.settings
        if policy.queue_rule.fair:
            raise InputError(
                f"serving: policy {policy.name} needs virtual token counters at the instances, which the gateway has not;"
                " choose another"
            )
        tuner = None
        if s.tune:
            from hexrepro.tuning.online import OnlineTuner

            tuner = OnlineTuner(policy, serving.cluster)
        self.coordinator = Coordinator(
            serving.cluster, policy, s.coordinator, beliefs=serving.beliefs, tuner=tuner
        )
        self.metrics = Metrics(self.coordinator)
        self.draining = self._cut = False
        self.port = s.port
        self.now_s = time.monotonic
        self._calls: dict[int, _Live] = {}
        self._homeless = 0  # calls that wait for any instance
        self._under_way: dict[str, int] = {}
        self._tenants = {t.name: t for t in serving.tenants}
        self._keys: list[tuple[bytes, Tenant]] = [(t.key.encode(), t) for t in serving.tenants if t.key]
        engine = s.mode == "engine"
        self._lanes = [
            Lane(spec.max_num_seqs if engine else slots, spec.kv_tokens)
            for spec, slots in zip(serving.cluster.instances, serving.concurrency, strict=True)
        ]
        self._upstreams: list[Upstream] = []
        self._someone_up = asyncio.Event()
        self._down = [asyncio.Event() for _ in serving.urls]
        self._tasks: list[asyncio.Task] = []
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._tuner_thread = ThreadPoolExecutor(1, "tuner") if tuner else None
        self._tokens = PromptTokens(self._ask_tokens if s.tokenize == "upstream" else None)

    # ---- life ----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://{self.settings.host}:{self.port}"

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *_exception) -> None:
        await self.stop()

    async def start(self) -> None:
        s = self.settings
        self._warm_up()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S)
        self._session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )
        for spec, url, key in zip(
            self.serving.cluster.instances, self.serving.urls, self.serving.keys, strict=True
        ):
            health = Health(limit=s.failures, pause_s=s.pause_s, longest_s=s.longest_pause_s)
            self._upstreams.append(Upstream(spec.name, url, self._session, s.timeouts, health, key))
        self._someone_up.set()
        app = web.Application(client_max_size=s.max_body_bytes)
        app.router.add_post(CHAT, self._answer)
        app.router.add_post(COMPLETIONS, self._answer)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_delete("/hexrepro/queries/{query}", self._end_query)
        app.router.add_route("*", "/{anything:.*}", self._unknown)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,  # a client that goes away cancels its handler, and with it the call upstream
            max_line_size=s.max_header_bytes,
            max_field_size=s.max_header_bytes,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, s.host, s.port, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._tasks = [asyncio.create_task(self._watch(m)) for m in range(len(self._upstreams))]
        self._tasks.append(asyncio.create_task(self._tick()))

    async def drain(self) -> bool:
        """Take no new calls; wait for those under way. False if some were left after `drain_s`: their clients are told."""
        self.draining = True
        if await self._all_ended(self.settings.drain_s):
            return True
        self._cut = True
        for live in self._calls.values():
            if not live.turn.done():
                live.turn.set_exception(NoInstance("the gateway stops"))
            if live.answer is not None:
                live.answer.close()  # its stream ends with an error event
        await self._session.connector.close()  # the others fail
        await self._all_ended(1.0)
        return False

    async def _all_ended(self, limit_s: float) -> bool:
        deadline = self.now_s() + limit_s
        while self._calls and self.now_s() < deadline:
            await asyncio.sleep(0.02)
        return not self._calls

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        if self._tuner_thread is not None:
            self._tuner_thread.shutdown(cancel_futures=True)

    def _warm_up(self) -> None:
        """Compile or load what the first call would wait for."""
        c = self.serving
        trial = Coordinator(c.cluster, self.coordinator.policy, self.settings.coordinator, beliefs=c.beliefs)
        placement = trial.call_arrived(None, "call", 10, 0.0)
        trial.finished(placement.call, 1.0, 1)

    # ---- the small answers ---------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._authorise(request)
        except Refused as refused:
            return self._refusal(refused)
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "hexrepro"}
            for name in self.serving.models
        ]
        return web.json_response({"object": "list", "data": data})

    async def _health(self, request: web.Request) -> web.Response:
        up = {u.name: bool(self.coordinator.is_open[m]) for m, u in enumerate(self._upstreams)}
        status = (
            "draining"
            if self.draining
            else "ok"
            if all(up.values())
            else "degraded"
            if any(up.values())
            else "down"
        )
        return web.json_response(
            {"status": status, "instances": up}, status=200 if status in ("ok", "degraded") else 503
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _end_query(self, request: web.Request) -> web.Response:
        try:
            tenant = self._authorise(request)
            name = self._tenant_of(request.headers.get(names.TENANT, ""), tenant)
        except Refused as refused:
            return self._refusal(refused)
        query = request.match_info["query"]
        if not self.coordinator.query_finished((name, query), self.now_s()):
            return self._refusal(Refused(404, "There is no such query under way.", param="query"))
        return web.json_response({"ended": True})

    async def _unknown(self, request: web.Request) -> web.Response:
        paths = (CHAT, COMPLETIONS)
        if request.path in paths:
            return self._refusal(Refused(405, f"{request.path} takes POST.", code="method_not_allowed"))
        return self._refusal(Refused(404, "There is no such path.", code="not_found"))

    def _refusal(self, refused: Refused) -> web.Response:
        self.metrics.answers.labels(str(refused.status)).inc()
        return web.json_response(refused.body, status=refused.status, headers=refused.headers)

    # ---- a call --------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        arrived_s = self.now_s()
        try:
            tenant = self._authorise(request)
            if self.draining:
                raise _draining()
            asked = read_request(
                request.path, await self._body(request), request.headers, self.serving.models
            )
            name = self._tenant_of(asked.tenant, tenant)
            self._admit(name, tenant)
            tokens = await self._tokens.count(asked)
            live = await self._place_when_possible(asked, name, tokens, arrived_s)
        except Refused as refused:
            return self._refusal(refused)
        except Exception:  # a fault of ours or of a user's rule: the client is told so much and no more
            log.exception("a call could not be placed")
            return self._refusal(Refused(500, "The gateway failed.", code="internal_error"))
        ended = "cancelled"
        try:
            response = await (self._stream if asked.stream else self._whole)(request, live)
            ended = "done"
            return response
        except Refused as refused:
            ended = "failed"
            return self._refusal(refused)
        except _Ended as end:
            ended = end.how
            return end.response
        except _BROKEN_CLIENT:
            return web.Response(status=499)
        finally:
            self._leave(live, ended)

    async def _body(self, request: web.Request) -> bytes:
        most = self.settings.max_body_bytes
        too_large = Refused(
            413, f"The body is larger than {most} bytes.", code="body_too_large", kind="invalid_request_error"
        )
        if (request.content_length or 0) > most:
            raise too_large
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None

    def _authorise(self, request: web.Request) -> Tenant | None:
        """The tenant whose key the client brought; None where there are no keys. Every key is compared, in constant time."""
        if not self._keys:
            return None
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        found = None
        offered = given.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""
        for key, tenant in self._keys:
            if hmac.compare_digest(key, offered):
                found = tenant
        if found is None:
            raise Refused(401, "The API key is missing or not valid.", code="invalid_api_key")
        return found

    def _tenant_of(self, claimed: str, by_key: Tenant | None) -> str:
        if by_key is None:
            return claimed
        if claimed and claimed != by_key.name:
            raise Refused(403, "The API key is of another tenant.", param="tenant", code="wrong_tenant")
        return by_key.name

    def _admit(self, name: str, tenant: Tenant | None) -> None:
        tenant = tenant or self._tenants.get(name)
        most = (tenant.max_under_way if tenant else 0) or self.settings.max_under_way
        if most and self._under_way.get(name, 0) >= most:
            self.metrics.refused.labels("tenant").inc()
            raise Refused(
                429,
                f"The tenant has {most} calls under way, which is its limit.",
                code="rate_limit_exceeded",
                kind="rate_limit_error",
                retry_after_s=1,
            )
        full = self.coordinator.waiting() >= self.settings.max_waiting
        if full and not any(lane.has_room for lane in self._lanes):
            self.metrics.refused.labels("overload").inc()
            raise Refused(
                429,
                "All queues are full.",
                code="overloaded",
                kind="rate_limit_error",
                retry_after_s=self._until_room_s(),
            )

    def _until_room_s(self) -> float:
        """A guess: the least work at an instance, done by as many at a time as it runs now."""
        views = self.coordinator.views
        there = self.coordinator.is_open
        if not there.any():
            return 1.0
        least = (views["waiting_s"] / views["running"].clip(1))[there].min()
        return min(60.0, max(1.0, float(least)))

    async def _place_when_possible(self, asked: Asked, tenant: str, tokens: int, arrived_s: float) -> _Live:
        """Place the call; while all instances are out, wait for one, but not for ever."""
        deadline = arrived_s + self.settings.patience_s
        while True:
            try:
                return self._place(asked, tenant, tokens, arrived_s)
            except NoInstance:
                if self._homeless > self.settings.max_waiting or self.now_s() >= deadline:
                    self.metrics.refused.labels("no_instance").inc()
                    raise _nobody() from None
            self._homeless += 1
            try:
                await self._wait_for_someone(deadline)
            finally:
                self._homeless -= 1

    async def _wait_for_someone(self, deadline: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - self.now_s())):
                await self._someone_up.wait()

    def _place(self, asked: Asked, tenant: str, tokens: int, arrived_s: float) -> _Live:
        began, now_s = time.perf_counter(), self.now_s()
        placement = self.coordinator.call_arrived(
            None if asked.query is None else (tenant, asked.query),
            asked.stage,
            tokens,
            now_s,
            slo_s=asked.slo_s,
            tenant=tenant,
            output_tokens=asked.output_tokens,
            max_tokens=asked.max_tokens,
            final=asked.final,
        )
        self.metrics.decision_s.observe(time.perf_counter() - began)
        live = _Live(asked, tenant, arrived_s, placement, asyncio.get_running_loop().create_future())
        self._calls[placement.call] = live
        self._under_way[tenant] = self._under_way.get(tenant, 0) + 1
        self._queue(live)
        return live

    def _queue(self, live: _Live) -> None:
        """Into its instance's lane."""
        p = live.placement
        tokens = self._input_tokens(live) + p.output_tokens - p.cached_tokens
        self._lanes[p.instance].put(p.call, p.key, tokens)
        if self.settings.mode == "engine":
            live.turn.set_result(None)
        self._pump(p.instance)

    def _input_tokens(self, live: _Live) -> int:
        return self.coordinator.input_tokens(live.placement.call)

    def _pump(self, m: int) -> None:
        """Let those go whose turn it is at instance m."""
        if not self.coordinator.is_open[m]:
            return
        now_s = self.now_s()
        for call in self._lanes[m].admit():
            live = self._calls[call]
            self.coordinator.started(call, now_s)
            if not live.turn.done():
                live.turn.set_result(None)
                self.metrics.queue_s.observe(now_s - live.arrived_s)

    async def _turn(self, live: _Live) -> Upstream:
        """Wait until the call may be sent; where to. Raises Refused when there is nowhere for too long."""
        while True:
            try:
                await live.turn
                return self._upstreams[live.placement.instance]
            except NoInstance:
                await self._somewhere(live)

    async def _somewhere(self, live: _Live) -> None:
        """Place the call at another instance; wait for one if there is none."""
        deadline = self.now_s() + self.settings.patience_s
        while True:
            if self._cut:
                raise _draining()
            try:
                self._move(live)
                return
            except NoInstance:
                if self.now_s() >= deadline:
                    raise _nobody() from None
            await self._wait_for_someone(deadline)

    def _move(self, live: _Live) -> None:
        """To another instance than those that failed it, if there is one. Raises NoInstance."""
        old = live.placement
        placement = self.coordinator.moved(old.call, self.now_s(), avoid=live.tried)
        self._lanes[old.instance].remove(old.call)
        live.placement = placement
        if live.turn.done():  # otherwise somebody waits for it
            live.turn = asyncio.get_running_loop().create_future()
        self._queue(live)
        self._pump(old.instance)

    async def _try(
        self, live: _Live, send: Callable[[Upstream, str, bytes], Awaitable[_T]]
    ) -> tuple[Upstream, _T]:
        """Send the call when it is its turn, elsewhere if that fails: the instance that began to answer, and what it said."""
        attempt = 0
        while True:
            attempt += 1
            upstream = await self._turn(live)
            try:
                answer = await send(upstream, live.asked.path, self._upstream_body(live))
            except Failed as failure:
                await self._failed(live, failure, attempt)
            else:
                upstream.health.succeeded()
                return upstream, answer

    async def _failed(self, live: _Live, failure: Failed, attempt: int) -> None:
        """An attempt failed before anything went to the client: on to the next one, or give up."""
        m = live.placement.instance
        self._note_failure(m, failure.kind)
        live.tried.add(m)
        if attempt >= self.settings.attempts:
            if failure.kind == "busy":
                raise Refused(
                    429,
                    "The instances are busy.",
                    code="overloaded",
                    kind="rate_limit_error",
                    retry_after_s=1,
                ) from failure
            raise Refused(
                failure.status,
                f"{attempt} attempts failed, the last because {failure}.",
                code="upstream_timeout" if failure.kind == "timeout" else "upstream_failed",
            ) from failure
        await self._somewhere(live)

    def _note_failure(self, m: int, kind: str) -> None:
        upstream = self._upstreams[m]
        self.metrics.failures.labels(upstream.name, kind).inc()
        if kind != "busy" and upstream.health.failed(kind):
            self._take_out(m, kind)

    async def _whole(self, request: web.Request, live: _Live) -> web.Response:
        upstream, (status, content_type, content) = await self._try(live, Upstream.whole)
        response = web.Response(
            body=content,
            status=status,
            headers={"Content-Type": content_type, names.INSTANCE: upstream.name},
        )
        self.metrics.answers.labels(str(status)).inc()
        if status >= 400:
            raise _Ended("rejected", response)
        self._finish(live, usage_of(content), 0)
        return response

    async def _stream(self, request: web.Request, live: _Live) -> web.StreamResponse:
        upstream, (answer, chunk) = await self._try(live, Upstream.first_chunk)
        if answer.status >= 400:
            answer.close()
            response = web.Response(
                body=chunk,
                status=answer.status,
                headers={"Content-Type": answer.content_type, names.INSTANCE: upstream.name},
            )
            self.metrics.answers.labels(str(answer.status)).inc()
            raise _Ended("rejected", response)
        live.answer = answer
        self._first_token(live)
        events = Events(hide_usage=self.settings.ask_usage and not live.asked.wants_usage)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                names.INSTANCE: upstream.name,
            }
        )
        self.metrics.answers.labels("200").inc()
        try:
            await response.prepare(request)
            if forward := events.feed(chunk):
                await response.write(forward)
            if not events.done:
                async with contextlib.aclosing(upstream.chunks(answer)) as chunks:
                    async for chunk in chunks:
                        if forward := events.feed(chunk):
                            await response.write(forward)
                        if events.done:
                            break
            if not events.done and not events.error:
                raise Failed("broken", f"{upstream.name} ended its answer early")
            if events.done:
                await self._to_the_end(answer)
        except Failed as failure:
            self._note_failure(live.placement.instance, failure.kind)
            refused = Refused(
                failure.status,
                f"The answer broke off: {failure}.",
                code="upstream_timeout" if failure.kind == "timeout" else "upstream_broken",
            )
            await response.write(error_event(refused))
            await response.write_eof()
            raise _Ended("broken", response) from failure
        finally:
            answer.close()
        if events.error:
            await response.write_eof()
            raise _Ended("broken", response)
        self._finish(live, events.usage, events.events)
        await response.write_eof()
        return response

    async def _to_the_end(self, answer: aiohttp.ClientResponse) -> None:
        """Read the end of a stream that has said that it is done, so that its connection can be used again."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                while await answer.content.readany():
                    pass

    def _upstream_body(self, live: _Live) -> bytes:
        asked, extra = live.asked, {}
        if asked.stream and self.settings.ask_usage and not asked.wants_usage:
            extra["stream_options"] = {**(asked.body.get("stream_options") or {}), "include_usage": True}
        if self.settings.mode == "engine":
            extra["priority"] = priority(live.placement.key)
        return asked.upstream_body(**extra)

    def _first_token(self, live: _Live) -> None:
        now_s, p = self.now_s(), live.placement
        self.coordinator.first_token(p.call, now_s)
        if self._lanes[p.instance].start(p.call):
            self._pump(p.instance)
        self.metrics.first_token_s.observe(now_s - live.arrived_s)

    def _finish(self, live: _Live, usage: dict | None, events: int) -> None:
        """The whole answer is there: what was learned from it. Not yet off the books: see `_leave`."""
        prompt, cached, output = usage_tokens(usage)
        if prompt is not None:
            self._tokens.learn(live.asked, prompt)
        if output is None:
            output = events
        live.booked = True
        if output > 0:
            self.coordinator.finished(live.placement.call, self.now_s(), output, cached_tokens=cached)
        else:
            self.coordinator.failed(live.placement.call, self.now_s())  # it says nothing of lengths

    def _leave(self, live: _Live, ended: str) -> None:
        """Off the books, however it ended."""
        p = live.placement
        now_s = self.now_s()
        if self._calls.pop(p.call, None) is None:
            return
        if not live.booked:
            self.coordinator.failed(p.call, now_s)
        left = self._under_way[live.tenant] - 1
        if left:
            self._under_way[live.tenant] = left
        else:
            del self._under_way[live.tenant]
        self._lanes[p.instance].remove(p.call)
        self._pump(p.instance)
        self.metrics.calls.labels(self._upstreams[p.instance].name, ended).inc()
        self.metrics.call_s.observe(now_s - live.arrived_s)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "call %d stage=%r instance=%s %s after %.3f s",
                p.call, p.stage, self._upstreams[p.instance].name, ended, now_s - live.arrived_s,
            )  # fmt: skip

    # ---- health --------------------------------------------------------------------------------------------

    def _take_out(self, m: int, why: str) -> None:
        """Instance m takes no more calls; those in its lane go elsewhere. Those that it has run on until they fail."""
        upstream = self._upstreams[m]
        log.warning("%s is out (%s), next try in %.1f s", upstream.name, why, upstream.health.next_pause_s)
        self.coordinator.instance_down(m)
        if not self.coordinator.is_open.any():
            self._someone_up.clear()
        for call in self._lanes[m].waiting:
            live = self._calls[call]
            if live.turn.done():
                continue  # engine mode: it has been sent, and will fail or not
            try:
                self._move(live)
            except NoInstance:
                live.turn.set_exception(NoInstance("its instance is out"))
        self._down[m].set()

    def _bring_in(self, m: int) -> None:
        upstream = self._upstreams[m]
        log.info("%s is back", upstream.name)
        upstream.health.revived()
        self._down[m].clear()
        self.coordinator.instance_up(m)
        self._someone_up.set()
        self._pump(m)

    async def _watch(self, m: int) -> None:
        """Look after instance m: probe it now and then while it is in, and until it is back while it is out."""
        health, upstream = self._upstreams[m].health, self._upstreams[m]
        while True:
            if health.up:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.settings.probe_every_s):
                        await self._down[m].wait()
                if health.up:
                    kind = await upstream.probe()
                    if kind is None:
                        health.probe_failures = 0
                    elif health.up:
                        self._note_failure(m, kind)
                continue
            await asyncio.sleep(health.next_pause_s)
            if await upstream.probe() is None:
                self._bring_in(m)
            else:
                health.probe_failed()

    async def _tick(self) -> None:
        """What time brings: idle queries end, the tuner looks at the recent past."""
        loop, of = asyncio.get_running_loop(), self.coordinator
        while True:
            await asyncio.sleep(_TICK_S)
            of.expire(self.now_s())
            if of.tuner_log is None:
                continue
            try:
                alpha = await loop.run_in_executor(self._tuner_thread, of.tuner_log.catch_up, self.now_s())
            except Exception:  # serving goes on with the alpha that it has
                log.exception("the tuner failed")
                continue
            if alpha != of.alpha:
                log.info("alpha %.3f -> %.3f", of.alpha, alpha)
                of.alpha = alpha

    async def _ask_tokens(self, asked: Asked) -> int | None:
        """vLLM's own count of the prompt, from the first instance that is in."""
        for m, upstream in enumerate(self._upstreams):
            if self.coordinator.is_open[m]:
                wanted = {
                    k: asked.body[k] for k in ("model", "messages", "prompt", "tools") if k in asked.body
                }
                return await upstream.count_tokens(json.dumps(wanted).encode())
        return None


def _draining() -> Refused:
    return Refused(503, "The gateway is shutting down.", code="draining", retry_after_s=1)


def _nobody() -> Refused:
    return Refused(503, "No instance is available at present.", code="no_instance", retry_after_s=1)


class _Ended(Exception):
    """A call that ended otherwise than with its answer, but has been answered."""

    def __init__(self, how: str, response: web.StreamResponse) -> None:
        super().__init__(how)
        self.how, self.response = how, response
