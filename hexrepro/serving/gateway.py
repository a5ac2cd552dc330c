"""The gateway: OpenAI's HTTP interface in front of the instances, and its life from start to drain.

A request is checked here; what happens to its call is the dispatcher's business. As long as nothing of its answer has gone to
the client, an instance that fails it is replaced by another; after that the client gets an error event. Prompts and keys are
never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import aiohttp
from aiohttp import web

from hexrepro.errors import InputError
from hexrepro.scheduling.policy import Policy, load_policy
from hexrepro.serving import headers as names
from hexrepro.serving.about import About
from hexrepro.serving.access import Access
from hexrepro.serving.config import Serving
from hexrepro.serving.connections import Lost
from hexrepro.serving.coordinator import Coordinator
from hexrepro.serving.dispatcher import Dispatcher, Live
from hexrepro.serving.events import Events, error_event, usage_of
from hexrepro.serving.http_log import http_log
from hexrepro.serving.metrics import Metrics
from hexrepro.serving.protocol import CHAT, COMPLETIONS, Asked, Refused, place_of, read_request
from hexrepro.serving.recorder import Recorder
from hexrepro.serving.refusals import draining
from hexrepro.serving.relay import Relay
from hexrepro.serving.request_body import read_body
from hexrepro.serving.upstream import Stream, Upstream, Whole

log = logging.getLogger("hexrepro.serving")

_TICK_S = 1.0
_KEEP_CLIENT_S = 75.0  # an idle client's connection is closed after so long
_LINGER_S = 2.0  # for the rest of a body that was refused, so that its client reads the refusal

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BROKEN_CLIENT = (ConnectionResetError, aiohttp.ClientConnectionResetError)


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
        self.draining = False
        self.port = s.port
        self.dispatcher: Dispatcher | None = None
        self._requests = 0  # that are being answered
        self._access = Access(serving.tenants, s.max_under_way)
        self._tasks: list[asyncio.Task] = []
        self._runner: web.AppRunner | None = None
        self._recorder: Recorder | None = None
        self._tuner_thread = ThreadPoolExecutor(1, "tuner") if tuner else None

    # ---- life ----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        host = self.settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def __aenter__(self) -> Gateway:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_exception) -> None:
        await self.stop()

    async def start(self) -> None:
        s = self.settings
        self._recorder = Recorder(s.call_log) if s.call_log else None
        self._warm_up()
        self.dispatcher = Dispatcher(self.serving, self.coordinator, self.metrics, self._recorder)
        app = web.Application(client_max_size=s.max_body_bytes)
        app.router.add_post(CHAT, self._answer)
        app.router.add_post(COMPLETIONS, self._answer)
        about = About(
            self.serving.models, self.coordinator, self.metrics, self._access, lambda: self.draining
        )
        for method, path, handler in about.routes():
            app.router.add_route(method, path, self._or_refusal(handler))
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,  # a client that goes away cancels its handler, and with it the call upstream
            keepalive_timeout=_KEEP_CLIENT_S,
            lingering_time=_LINGER_S,
            max_line_size=s.max_header_bytes,
            max_field_size=s.max_header_bytes,
            shutdown_timeout=1.0,
            logger=http_log(),
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, s.host, s.port, backlog=1024).start()
        except OSError as error:
            raise InputError(
                f"serving: cannot listen at host={s.host} port={s.port} ({error.strerror or error}); choose another port"
            ) from None
        self.port = self._runner.addresses[0][1]
        self._tasks = [*self.dispatcher.watch.start(), asyncio.create_task(_every_second(self._tick))]
        if (
            self.coordinator.tuner_log is not None
        ):  # it takes its time: what is due every second does not wait for it
            self._tasks.append(asyncio.create_task(_every_second(self._tune)))

    async def drain(self) -> bool:
        """Take no new calls; wait for those under way. False if some were left after `drain_s`: their clients are told."""
        self.draining = True
        if await self._all_ended(self.settings.drain_s):
            return True
        self.dispatcher.stop()
        await self._all_ended(1.0)
        return False

    async def _all_ended(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while self._requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._requests

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        if self.dispatcher is not None:
            self.dispatcher.stop()
        if self._recorder is not None:
            self._recorder.close()
        if self._tuner_thread is not None:
            self._tuner_thread.shutdown(cancel_futures=True)

    def _warm_up(self) -> None:
        """Compile or load what the first call would wait for."""
        c, policy = self.serving, self.coordinator.policy
        tuner = None
        if self.coordinator.tuner_log is not None:
            from hexrepro.tuning.online import OnlineTuner

            tuner = OnlineTuner(policy, c.cluster)
            log.info("preparing the tuner (half a minute at the very first start)")
        trial = Coordinator(c.cluster, policy, self.settings.coordinator, beliefs=c.beliefs, tuner=tuner)
        for second in range(3):
            placement = trial.call_arrived(None, "call", 10, float(second))
            trial.finished(placement.call, second + 0.5, 2)
        if tuner is not None:
            trial.tuner_log.catch_up(3.0)
            tuner.decide(3.0)

    async def _tick(self) -> None:
        """What time brings: idle queries and connections end, the log is written."""
        self.coordinator.expire(time.monotonic())
        for upstream in self.dispatcher.upstreams:
            upstream.pool.prune()
        if self._recorder is not None:
            await self._recorder.flush()

    async def _tune(self) -> None:
        """The tuner looks at the recent past."""
        of, loop = self.coordinator, asyncio.get_running_loop()
        alpha = await loop.run_in_executor(self._tuner_thread, of.tuner_log.catch_up, time.monotonic())
        if alpha != of.alpha:
            log.info("alpha %.3f -> %.3f", of.alpha, alpha)
            of.alpha = alpha

    # ---- a call --------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        arrived_s = time.monotonic()
        live = entered = asked = None
        ended = "cancelled"
        self._requests += 1
        try:
            tenant = self._access.authorise(request.headers)
            if self.draining:
                raise draining()
            self.dispatcher.check_load()  # before reading what would be refused
            s = self.settings
            with self.dispatcher.reading():
                body = await read_body(request, s.max_body_bytes, s.timeouts.body_s)
            asked = read_request(request.path, body, request.headers, self.serving.models)
            name = self._access.tenant_name(asked.tenant, tenant)
            self.dispatcher.let_in(name, self._access.limit(name))
            entered = name
            live = await self.dispatcher.place(asked, name, arrived_s)
            response = await (self._stream if asked.stream else self._whole)(request, live)
            ended = "done"
            return response
        except Refused as refused:
            ended = "failed"
            if live is None and refused.turned:
                self._turned_away(refused.turned, request, asked, arrived_s)
            return self._refusal(refused)
        except _Ended as end:
            ended = end.how
            return end.response
        except _BROKEN_CLIENT:
            return web.Response(status=499)
        except Exception:  # a fault of ours or of a user's rule: the client is told so much and no more
            ended = "failed"
            log.exception("a call failed in the gateway")
            return self._refusal(Refused(500, "The gateway failed.", code="internal_error"))
        finally:
            self._requests -= 1
            if live is not None:
                self.dispatcher.leave(live, ended)
            if entered is not None:
                self.dispatcher.let_out(entered)

    async def _whole(self, request: web.Request, live: Live) -> web.Response:
        upstream, answer = await self.dispatcher.send(live, Upstream.whole)
        response = self._one_piece(upstream, answer)
        if answer.status >= 400:
            raise _Ended("rejected", response)
        self.dispatcher.finished(live, usage_of(answer.content), 0)
        return response

    async def _stream(self, request: web.Request, live: Live) -> web.StreamResponse:
        upstream, stream = await self.dispatcher.send(live, Upstream.stream)
        if isinstance(stream, Whole):
            raise _Ended("rejected", self._one_piece(upstream, stream))
        events = Events(hide_usage=self.settings.ask_usage and not live.asked.wants_usage)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                names.INSTANCE: upstream.name,
            }
        )
        self._count(response)
        relay = Relay(request, response, events, self.settings.timeouts)
        try:
            await self._relay(relay, upstream, stream, live, events)
        except (_Ended, *_BROKEN_CLIENT, asyncio.CancelledError):
            raise
        except Exception as error:  # the head has gone: no other answer is possible
            log.exception("a stream failed in the gateway")
            if request.transport is not None:
                request.transport.abort()
            raise _Ended("broken", response) from error
        finally:
            if events.done:
                stream.connection.release()
            else:
                self.dispatcher.heard(live, events.usage, events.events)
                stream.connection.close()
        if events.error:
            raise _Ended("broken", response)
        return response

    async def _relay(
        self, relay: Relay, upstream: Upstream, stream: Stream, live: Live, events: Events
    ) -> None:
        try:
            await relay.begin(stream)
            self.dispatcher.first_token(live)
            await relay.rest(stream)
        except (Lost, TimeoutError) as error:
            failure = upstream.broke(error)
            if self.dispatcher.stopping:
                refused = draining()
            else:
                self.dispatcher.note_failure(live, failure)
                code = "upstream_timeout" if failure.kind == "timeout" else "upstream_broken"
                refused = Refused(failure.status, f"The answer broke off: {failure}.", code=code)
            await relay.end(error_event(refused))
            raise _Ended("broken", relay.response) from error
        if events.done and not events.error:
            self.dispatcher.finished(live, events.usage, events.events)
        else:
            self.dispatcher.note_failure(live, upstream.said_error())
        await relay.end()

    def _one_piece(self, upstream: Upstream, answer: Whole) -> web.Response:
        response = web.Response(
            body=answer.content,
            status=answer.status,
            headers={"Content-Type": answer.content_type, names.INSTANCE: upstream.name},
        )
        self._count(response)
        return response

    def _count(self, response: web.StreamResponse) -> None:
        self.metrics.answers.labels(str(response.status)).inc()
        if self.draining:
            response.force_close()  # the client's next call is for somebody else

    # ---- refusals ------------------------------------------------------------------------------------------

    def _turned_away(self, why: str, request: web.Request, asked: Asked | None, arrived_s: float) -> None:
        """Note a call that has not been placed, for a reason that lies with the load."""
        self.metrics.refused.labels(why).inc()
        if self._recorder is not None:
            with contextlib.suppress(Refused):  # what would have been refused anyway
                place = place_of(asked.body if asked else {}, request.headers)
                place["tenant"] = self._access.tenant_name(
                    place["tenant"], self._access.authorise(request.headers)
                )
                tokens = self.dispatcher.tokens.known(asked) if asked else None
                self._recorder.turned_away(
                    why, place, asked.model if asked else None, tokens, arrived_s, time.monotonic()
                )

    def _or_refusal(self, handler: Handler) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except Refused as refused:
                return self._refusal(refused)

        return answer

    def _refusal(self, refused: Refused) -> web.Response:
        response = web.json_response(refused.body, status=refused.status, headers=refused.headers)
        self._count(response)
        return response


async def _every_second(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        try:
            await work()
        except Exception:  # serving goes on without it
            log.exception("the once-a-second work failed")


class _Ended(Exception):
    """A call that ended otherwise than with its answer, but has been answered."""

    def __init__(self, how: str, response: web.StreamResponse) -> None:
        super().__init__(how)
        self.how, self.response = how, response
