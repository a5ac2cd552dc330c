"""The way of a call: it is let in, placed, waits its turn in its instance's lane, is sent, sent elsewhere where that fails, and
leaves. No HTTP here; what it raises is told to the client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hexrepro.serving.config import Serving
from hexrepro.serving.coordinator import Coordinator, NoInstance, Placement
from hexrepro.serving.events import usage_tokens
from hexrepro.serving.health import Watch
from hexrepro.serving.metrics import Metrics
from hexrepro.serving.protocol import Asked
from hexrepro.serving.queueing import Lane, priority
from hexrepro.serving.recorder import Recorder
from hexrepro.serving.refusals import draining, given_up, nobody, queues_full, tenants_limit
from hexrepro.serving.retries import RetryBudget
from hexrepro.serving.tokens import PromptTokens
from hexrepro.serving.upstream import Failed, Stream, Upstream, Whole

log = logging.getLogger("hexrepro.serving")

_USAGE = {"include_usage": True}

Send = Callable[[Upstream, str, bytes, bytes], Awaitable[Whole | Stream]]


@dataclass(slots=True, eq=False)
class Live:
    """A call under way. `turn` is done when it may be sent to its instance. Lengths are estimates until a server has said."""

    asked: Asked
    tenant: str
    arrived_s: float
    placement: Placement
    input_tokens: int
    turn: asyncio.Future = field(repr=False)
    tried: set[int] = field(default_factory=set)
    booked: bool = False  # the coordinator knows that it has ended
    instance: str | None = None  # the one that it was sent to last
    first_token_s: float | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0


class Dispatcher:
    """Brings calls to the instances. Made inside the event loop; `start` begins to look after the instances."""

    def __init__(
        self, serving: Serving, coordinator: Coordinator, metrics: Metrics, recorder: Recorder | None = None
    ) -> None:
        self.settings, self.coordinator, self.metrics = serving.settings, coordinator, metrics
        self._recorder = recorder
        self.stopping = False  # what cannot be sent at once is turned away
        self.calls: dict[int, Live] = {}
        self.under_way: dict[str, int] = {}  # calls that were let in, by tenant
        self._in = 0  # calls that were let in
        self._reading = 0  # calls of which the body is on its way
        self.now_s = time.monotonic
        engine = self.settings.mode == "engine"
        specs = serving.cluster.instances
        self.lanes = [
            Lane(spec.max_num_seqs if engine else slots, spec.kv_tokens)
            for spec, slots in zip(specs, serving.concurrency, strict=True)
        ]
        self.upstreams = [
            Upstream(spec.name, url, self.settings.timeouts, key)
            for spec, url, key in zip(specs, serving.urls, serving.keys, strict=True)
        ]
        self.retries = RetryBudget(self.settings.retry_share, sum(lane.slots for lane in self.lanes))
        self.watch = Watch(self.upstreams, self.settings, coordinator, metrics, self._lane_closed, self._pump)
        self.tokens = PromptTokens(self._ask_tokens if self.settings.tokenize == "upstream" else None)

    # ---- in ------------------------------------------------------------------------------------------------

    def check_load(self) -> None:
        """Refuse what would only wait behind full queues. Raises Refused."""
        sent = len(self.calls) - self.coordinator.calls_waiting
        waiting = self._reading + self._in - sent  # those on their way to a lane included
        if waiting < self.settings.max_waiting:
            return
        is_open = self.coordinator.is_open
        free = sum(lane.free for m, lane in enumerate(self.lanes) if is_open[m])
        if waiting >= self.settings.max_waiting + free:
            raise queues_full(self._until_room_s())

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While the body of a call comes, it counts as a call that waits: bodies take memory."""
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1

    def let_in(self, tenant: str, most: int) -> None:
        """Count the call from here on; `let_out` must follow. `most`: of this tenant, 0 = any. Raises Refused."""
        here = self.under_way.get(tenant, 0)
        if most and here >= most:
            raise tenants_limit(most)
        self.check_load()
        self.under_way[tenant] = here + 1
        self._in += 1
        self.retries.add()

    def let_out(self, tenant: str) -> None:
        self._in -= 1
        left = self.under_way[tenant] - 1
        if left:
            self.under_way[tenant] = left
        else:
            del self.under_way[tenant]

    def _until_room_s(self) -> float:
        """A guess: the least work at an instance, done by as many at a time as it runs now."""
        views = self.coordinator.views
        there = self.coordinator.is_open
        if not there.any():
            return 1.0
        least = (views["waiting_s"] / views["running"].clip(1))[there].min()
        return min(60.0, max(1.0, float(least)))

    # ---- placed --------------------------------------------------------------------------------------------

    async def place(self, asked: Asked, tenant: str, arrived_s: float) -> Live:
        """Choose the call's instance; while all are out, wait for one, not for ever. `leave` must follow. Raises Refused."""
        tokens = self.tokens.known(asked)
        if tokens is None:
            tokens = await self.tokens.ask(asked)
        deadline = arrived_s + self.settings.patience_s
        while True:
            try:
                return self._place(asked, tenant, tokens, arrived_s)
            except NoInstance:
                if self.stopping:
                    raise draining() from None
                if self.now_s() >= deadline:
                    raise nobody() from None
            await self.watch.somebody(deadline - self.now_s())

    def _place(self, asked: Asked, tenant: str, tokens: int, arrived_s: float) -> Live:
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
            sequences=asked.sequences,
            final=asked.final,
        )
        self.metrics.decision_s.observe(time.perf_counter() - began)
        turn = asyncio.get_running_loop().create_future()
        live = Live(asked, tenant, arrived_s, placement, tokens, turn)
        self.calls[placement.call] = live
        self._queue(live)
        return live

    def _queue(self, live: Live) -> None:
        """Into its instance's lane."""
        p = live.placement
        self.lanes[p.instance].put(p.call, p.key, live.input_tokens + p.output_tokens - p.cached_tokens)
        if self.settings.mode == "engine":
            live.turn.set_result(None)
        self._pump(p.instance)

    def _pump(self, m: int) -> None:
        """Let those go whose turn it is at instance m."""
        if not self.coordinator.is_open[m]:
            return
        now_s = self.now_s()
        for call in self.lanes[m].admit():
            live = self.calls[call]
            self.coordinator.started(call, now_s)
            if not live.turn.done():
                live.turn.set_result(None)
                self.metrics.queue_s.observe(now_s - live.arrived_s)

    # ---- sent ----------------------------------------------------------------------------------------------

    async def send(self, live: Live, send: Send) -> tuple[Upstream, Whole | Stream]:
        """Send the call when it is its turn, elsewhere if that fails: the instance that began to answer, and what it said.
        Nothing of that has gone to the client yet. Raises Refused."""
        attempt = 0
        while True:
            attempt += 1
            upstream = await self._turn(live)
            live.instance = upstream.name
            try:
                answer = await send(upstream, live.asked.path, self._upstream_body(live), live.asked.trace)
            except Failed as failure:
                if (said := await self._failed(live, failure, attempt)) is not None:
                    return upstream, said
            else:
                self.watch.health[live.placement.instance].succeeded()
                return upstream, answer

    async def _turn(self, live: Live) -> Upstream:
        """Wait until the call may be sent; where to."""
        while True:
            try:
                await live.turn
                return self.upstreams[live.placement.instance]
            except NoInstance:
                await self._elsewhere(live)

    async def _failed(self, live: Live, failure: Failed, attempt: int) -> Whole | None:
        """An attempt failed: on to the next one (None), or what the client is told: an answer, or Refused is raised."""
        m = live.placement.instance
        self.note_failure(live, failure)
        live.tried.add(m)
        untried = [
            k for k in range(len(self.upstreams)) if self.coordinator.is_open[k] and k not in live.tried
        ]
        if self.stopping:
            raise draining() from failure
        if failure.kind == "missing" and (not untried or attempt >= self.settings.attempts):
            return failure.answer
        # a server that refuses the connection, or does not know the model, has had no work with it
        free = failure.kind in ("refused", "missing")
        if attempt >= self.settings.attempts or not (free or self.retries.take()):
            raise given_up(failure, attempt) from failure
        if not untried and self.coordinator.is_open.any():  # the same again: not at once
            pause_s = self.settings.pause_s * 2.0 ** (attempt - 1)
            await asyncio.sleep(min(failure.retry_after_s or pause_s, self.settings.longest_pause_s))
        await self._elsewhere(live)
        return None

    def note_failure(self, live: Live, failure: Failed) -> None:
        """The call's instance has failed it."""
        m = live.placement.instance
        self.metrics.failures.labels(self.upstreams[m].name, failure.kind).inc()
        if failure.is_sick:
            self.watch.failed(m, failure.kind)

    async def _elsewhere(self, live: Live) -> None:
        """Place the call at another instance; wait for one if there is none. Raises Refused."""
        deadline = self.now_s() + self.settings.patience_s
        while True:
            if self.stopping:
                raise draining()
            try:
                self._move(live)
                return
            except NoInstance:
                if self.now_s() >= deadline:
                    raise nobody() from None
            await self.watch.somebody(deadline - self.now_s())

    def _move(self, live: Live) -> None:
        """To another instance than those that failed it, if there is one. Raises NoInstance."""
        old = live.placement
        placement = self.coordinator.moved(old.call, self.now_s(), avoid=live.tried)
        self.lanes[old.instance].remove(old.call)
        live.placement = placement
        if live.turn.done():  # otherwise somebody waits for it
            live.turn = asyncio.get_running_loop().create_future()
        self._queue(live)
        self._pump(old.instance)

    def _lane_closed(self, m: int) -> None:
        """Instance m takes no more calls; those in its lane go elsewhere. Those that it has run on until they fail."""
        for call in self.lanes[m].waiting:
            live = self.calls[call]
            if live.turn.done():
                continue  # engine mode: it has been sent, and will fail or not
            try:
                self._move(live)
            except NoInstance:
                live.turn.set_exception(NoInstance("its instance is out"))

    def _upstream_body(self, live: Live) -> bytes:
        asked, extra = live.asked, {}
        if asked.stream and self.settings.ask_usage and not asked.wants_usage:
            # with vLLM's continuous_usage_stats, every event would carry what the client did not ask for
            options = asked.body.get("stream_options") or {}
            extra["stream_options"] = {
                k: v for k, v in options.items() if k != "continuous_usage_stats"
            } | _USAGE
        if self.settings.mode == "engine":
            extra["priority"] = priority(live.placement.key)
        return asked.upstream_body(**extra)

    # ---- out -----------------------------------------------------------------------------------------------

    def first_token(self, live: Live) -> None:
        """The first of its answer has come."""
        live.first_token_s, p = self.now_s(), live.placement
        self.coordinator.first_token(p.call, live.first_token_s)
        if self.lanes[p.instance].start(p.call):
            self._pump(p.instance)
        self.metrics.first_token_s.observe(live.first_token_s - live.arrived_s)

    def finished(self, live: Live, usage: dict | None, events: int) -> None:
        """The whole answer is there: what was learned from it. Not yet off the books: see `leave`."""
        prompt = self.heard(live, usage, events)
        if prompt is not None:
            self.tokens.learn(live.asked, prompt)
        live.booked = True
        if live.output_tokens > 0:
            self.coordinator.finished(
                live.placement.call, self.now_s(), live.output_tokens, cached_tokens=live.cached_tokens
            )
        else:
            self.coordinator.failed(live.placement.call, self.now_s(), answered=True)

    def heard(self, live: Live, usage: dict | None, events: int) -> int | None:
        """Note the call's lengths, as the server counted or by the events of its stream; prompt tokens if it counted them."""
        prompt, live.cached_tokens, output = usage_tokens(usage)
        live.output_tokens = events if output is None else output
        if prompt is not None:
            live.input_tokens = prompt
        return prompt

    def leave(self, live: Live, ended: str) -> None:
        """Off the books, however it ended."""
        p = live.placement
        now_s = self.now_s()
        del self.calls[p.call]
        if not live.booked:
            self.coordinator.failed(p.call, now_s)
        self.lanes[p.instance].remove(p.call)
        self._pump(p.instance)
        self.metrics.calls.labels(self.upstreams[p.instance].name, ended).inc()
        self.metrics.call_s.observe(now_s - live.arrived_s)
        if self._recorder is not None:
            self._recorder.ended(live, ended, now_s)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "call %d stage=%r instance=%s %s after %.3f s",
                p.call, p.stage, self.upstreams[p.instance].name, ended, now_s - live.arrived_s,
            )  # fmt: skip

    def stop(self) -> None:
        """Cut off what is under way: calls that wait are turned away, those that are sent fail."""
        self.stopping = True
        for live in self.calls.values():
            if not live.turn.done():
                live.turn.set_exception(NoInstance("the gateway stops"))
        self.watch.wake()
        for upstream in self.upstreams:
            upstream.pool.close()

    async def _ask_tokens(self, asked: Asked) -> int | None:
        """vLLM's own count of the prompt, from the first instance that is in."""
        for m, upstream in enumerate(self.upstreams):
            if self.coordinator.is_open[m]:
                names = ("model", "messages", "prompt", "tools")
                return await upstream.count_tokens(
                    json.dumps({k: asked.body[k] for k in names if k in asked.body}).encode()
                )
        return None
