"""Plays a workload against a server or a gateway, in real time, and notes when each call was released, answered and finished.

Open loop: queries come at their arrival times, however slowly they are answered, and a call is released when its prerequisites
have finished and its tool time is over. Lengths are forced, and the prompts share exactly what the workload says that they
share. What comes back has the columns of a simulation's result, so that the two can be held against each other call by call.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from hexrepro.errors import InputError
from hexrepro.simulator.results import Result
from hexrepro.validation.completion_stream import CallFailed, Streamed, body, session, stream
from hexrepro.validation.prompts import Prompts
from hexrepro.workload.types import Workload

LEAD_S = 0.2  # from the start of a replay to its time 0: connections are made, nothing is late at once
SPIN_S = 0.002  # the event loop wakes to the millisecond: so long before a send it stops sleeping


@dataclass(frozen=True, eq=False)
class Replay:
    """One replay (q queries, n calls): the fields of the simulator's `Result` that a client can see, and what else it knows.

    Times in seconds from the start of the replay. What did not finish has a finish of `inf`; what was not reached is NaN.
    """

    arrival_s: np.ndarray  # float64[q], as asked
    finish_s: np.ndarray  # float64[q]
    release_s: np.ndarray  # float64[n], when the call should be sent: prerequisites finished, tool time over
    sent_s: np.ndarray  # float64[n], when it was
    first_token_s: np.ndarray  # float64[n]
    call_finish_s: np.ndarray  # float64[n]
    instance: np.ndarray  # int32[n]; -1: the gateway did not say
    call_cached_tokens: np.ndarray  # int32[n], as the server tells; -1: it does not
    errors: dict[int, str]  # call -> what went wrong
    stopped: str | None  # why it ended before its time; None: it did not

    @property
    def latency_s(self) -> np.ndarray:
        """float64[q]: from the query's arrival to the end of its last call."""
        return self.finish_s - self.arrival_s

    @property
    def lateness_s(self) -> np.ndarray:
        """float64[sent calls]: how much later than released the calls were sent."""
        late = self.sent_s - self.release_s
        return late[np.isfinite(late)]

    def rates_qps(self, workload: Workload) -> tuple[float, float]:
        """Queries/s that were asked for, and that came about: from the first query to the last one that was sent.

        NaN when fewer than two were sent.
        """
        roots = np.flatnonzero(workload.n_predecessors == 0)
        begun = np.full(workload.n_queries, np.inf)
        # of each query the first root that was sent, less its tool time, which is no lateness
        np.fmin.at(begun, workload.query[roots], self.sent_s[roots] - workload.tool_time_s[roots])
        sent = np.isfinite(begun)
        if sent.sum() < 2:
            return float("nan"), float("nan")
        asked, real = self.arrival_s[sent], begun[sent]
        spans = asked.max() - asked.min(), real.max() - real.min()
        return tuple(float((sent.sum() - 1) / span) if span > 0 else float("inf") for span in spans)

    def report(self, workload: Workload) -> str:
        """What to know before one trusts the numbers: rate, lateness, failures; one line."""
        asked, real = self.rates_qps(workload)
        late_ms = self.lateness_s * 1e3
        lateness = (
            f"calls sent {np.median(late_ms):.1f} ms late (median), {np.percentile(late_ms, 99):.1f} ms (P99)"
            if len(late_ms)
            else "no call sent"
        )
        done = int(np.isfinite(self.call_finish_s).sum())
        text = (
            f"{done} of {workload.n_calls} calls finished, {len(self.errors)} failed;"
            f" {real:.3g} queries/s realised of {asked:.3g} asked; {lateness}"
        )
        return text if self.stopped is None else f"{text}; stopped: {self.stopped}"


def replay(workload: Workload, urls: str | Sequence[str], **options: Any) -> Replay:
    """`play`, for callers without an event loop. Ctrl-C ends it and closes its connections, so that servers stop working."""
    # collecting garbage among all that is imported would hold up calls for 100 ms
    gc.collect()
    gc.disable()
    try:
        return asyncio.run(play(workload, urls, **options))
    finally:
        gc.enable()


async def play(
    workload: Workload,
    urls: str | Sequence[str],
    *,
    model: str,
    placement: np.ndarray | None = None,
    priority: np.ndarray | None = None,
    headers: Callable[[int], Mapping[str, str]] | None = None,
    more: Callable[[int], Mapping[str, Any]] | None = None,
    instance_of: Callable[[Streamed], int] | None = None,
    prompts: Prompts | None = None,
    call_timeout_s: float = 600.0,
    limit_s: float = 3600.0,
    max_in_flight: int = 4096,
    api_key: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Replay:
    """Play a workload that has arrivals.

    urls           a server's or gateway's base URL, or several servers'
    model          the served model's name
    placement      int[n], which of the URLs each call goes to; None: in turn, in the order in which they are released
    priority       int[n], vLLM's `priority` of each call (the least first); None: not sent
    headers, more  further headers, and further fields of the request, of a call (its index is given)
    instance_of    which instance served a call, from its answer (a gateway's headers); None: the URL's place
    prompts        None: `Prompts(workload)`
    call_timeout_s, limit_s, max_in_flight
                   a call fails after so long; the replay ends after so long, or with so many calls under way, and says so
    api_key        sent as a bearer token
    progress       called with the number of calls that have ended

    A failed call ends its query: what waits for it is not sent.
    """
    urls = [urls] if isinstance(urls, str) else list(urls)
    n = workload.n_calls
    if not workload.has_arrivals:
        raise InputError(
            f"workload {workload.name!r} holds no arrival times: give it some with with_arrivals()"
        )
    if not urls:
        raise InputError(
            "replay: urls is empty; give the base URL of a server, such as http://127.0.0.1:8000"
        )
    for name, values in {"placement": placement, "priority": priority}.items():
        if values is not None and (np.shape(values) != (n,) or np.asarray(values).dtype.kind not in "iu"):
            raise InputError(f"replay: {name} must be {n} whole numbers, one a call")
    if placement is not None and not (np.min(placement) >= 0 and np.max(placement) < len(urls)):
        raise InputError(f"replay: placement must name one of the {len(urls)} urls, 0 to {len(urls) - 1}")
    run = _Run(
        workload, urls, model, placement, priority, headers, more, instance_of, prompts or Prompts(workload)
    )
    run.call_timeout_s, run.max_in_flight, run.progress = call_timeout_s, max_in_flight, progress
    run.api_key = api_key
    return await run.play(limit_s)


class _Run:
    """The state of one replay."""

    def __init__(
        self, workload, urls, model, placement, priority, headers, more, instance_of, prompts
    ) -> None:
        self.workload, self.urls, self.model = workload, urls, model
        self.placement, self.priority = placement, priority
        self.headers, self.more, self.instance_of, self.prompts = headers, more, instance_of, prompts
        n = workload.n_calls
        self.release_s, self.sent_s, self.first_s = (np.full(n, np.nan) for _ in range(3))
        self.end_s = np.full(n, np.inf)
        self.instance, self.cached = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
        self.errors: dict[int, str] = {}
        self.waits_for = workload.n_predecessors.copy()
        self.ready_s = np.repeat(workload.arrival_s, np.diff(workload.query_offsets))
        self.left = n  # calls that can still come
        self.dispatched = self.under_way = 0
        self.stopped: str | None = None
        self.tasks: set[asyncio.Task] = set()

    async def play(self, limit_s: float) -> Replay:
        self.over = asyncio.Event()
        self.zero = time.perf_counter() + LEAD_S
        async with session(api_key=self.api_key) as self.client:
            try:
                for call in np.flatnonzero(self.waits_for == 0):
                    self._release(int(call))
                await asyncio.wait_for(self.over.wait(), LEAD_S + limit_s)
            except TimeoutError:
                self.stopped = f"it ran for {limit_s:g} s"
            finally:
                for task in self.tasks:
                    task.cancel()
                await asyncio.gather(*self.tasks, return_exceptions=True)
        return self._result()

    def _now(self) -> float:
        return time.perf_counter() - self.zero

    def _release(self, call: int) -> None:
        """All that a call waits for has ended: send it when its tool time is over."""
        self.release_s[call] = self.ready_s[call] + self.workload.tool_time_s[call]
        task = asyncio.create_task(self._call(call))
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        # a mistake in here, not in a call
        if not task.cancelled() and task.exception() is not None and not self.over.is_set():
            self.stopped = f"{type(task.exception()).__name__}: {task.exception()}"
            self.over.set()

    async def _call(self, call: int) -> None:
        # what takes time is made ready while there is time; a root call's prompt shortly before it is due
        ahead = self.release_s[call] - self._now()
        if ahead > 0.05:
            await asyncio.sleep(ahead - 0.05)
        request = self._request(call)
        while (ahead := self.release_s[call] - self._now()) > 0:
            await asyncio.sleep(max(0.0, ahead - SPIN_S))
        if self.under_way >= self.max_in_flight:
            self.stopped = f"{self.max_in_flight} calls were under way at {self._now():.1f} s"
            self.over.set()
            return
        target = self.dispatched % len(self.urls) if self.placement is None else int(self.placement[call])
        self.dispatched += 1
        self.under_way += 1
        self.sent_s[call] = self._now()
        try:
            answer = await stream(
                self.client,
                self.urls[target],
                request,
                headers=self.headers(call) if self.headers else None,
                timeout_s=self.call_timeout_s,
            )
        except CallFailed as error:
            self.under_way -= 1
            self._failed(call, str(error))
        else:
            self.under_way -= 1
            self.sent_s[call] = answer.sent_s - self.zero
            self.first_s[call] = answer.first_token_s - self.zero
            self.cached[call] = -1 if answer.cached_tokens is None else answer.cached_tokens
            self.instance[call] = self.instance_of(answer) if self.instance_of else target
            self._finished(call, answer.finish_s - self.zero)

    def _request(self, call: int) -> dict[str, Any]:
        more = dict(self.more(call)) if self.more else {}
        if self.priority is not None:
            more["priority"] = int(self.priority[call])
        tokens = self.prompts.tokens(call).tolist()
        return body(self.model, tokens, int(self.workload.output_tokens[call]), **more)

    def _finished(self, call: int, at_s: float) -> None:
        w = self.workload
        self.end_s[call] = at_s
        self._count(1)
        for successor in w.successors[w.succ_offsets[call] : w.succ_offsets[call + 1]].tolist():
            self.waits_for[successor] -= 1
            self.ready_s[successor] = max(self.ready_s[successor], at_s)
            if self.waits_for[successor] == 0:
                self._release(successor)

    def _failed(self, call: int, why: str) -> None:
        """The call ends, and with it all that waits for it."""
        w = self.workload
        self.errors[call] = why
        lost, front = 1, [call]
        while front:
            one = front.pop()
            for successor in w.successors[w.succ_offsets[one] : w.succ_offsets[one + 1]].tolist():
                if self.waits_for[successor] >= 0:
                    self.waits_for[successor] = -1 - w.n_calls  # never 0 again
                    lost += 1
                    front.append(successor)
        self._count(lost)

    def _count(self, ended: int) -> None:
        self.left -= ended
        if self.progress:
            self.progress(self.workload.n_calls - self.left)
        if self.left == 0:
            self.over.set()

    def _result(self) -> Replay:
        w = self.workload
        query_end = np.maximum.reduceat(self.end_s, w.query_offsets[:-1])
        return Replay(
            arrival_s=w.arrival_s,
            finish_s=query_end,
            release_s=self.release_s,
            sent_s=self.sent_s,
            first_token_s=self.first_s,
            call_finish_s=self.end_s,
            instance=self.instance,
            call_cached_tokens=self.cached,
            errors=self.errors,
            stopped=self.stopped,
        )


def call_frame(workload: Workload, run: Replay | Result) -> pd.DataFrame:
    """One row a call, the same columns for a replay and for a simulation.

    query, call (its place in the query), stage, instance, input_tokens, output_tokens, cached_tokens, release_s,
    first_token_s, call_finish_s, ttft_s, latency_s. Latencies run from the release.
    """
    w = workload
    return pd.DataFrame(
        dict(
            query=w.query,
            call=np.arange(w.n_calls) - w.query_offsets[w.query],
            stage=np.array(w.stage_names)[w.stage],
            instance=run.instance,
            input_tokens=w.input_tokens,
            output_tokens=w.output_tokens,
            cached_tokens=run.call_cached_tokens,
            release_s=run.release_s,
            first_token_s=run.first_token_s,
            call_finish_s=run.call_finish_s,
            ttft_s=run.first_token_s - run.release_s,
            latency_s=run.call_finish_s - run.release_s,
        )
    )
