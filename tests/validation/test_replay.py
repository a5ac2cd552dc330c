"""Replay against a stub server on a real socket: when calls are sent, what they hold, what is noted, and how it ends."""

from __future__ import annotations

import asyncio
import re
import time

import numpy as np
import pytest

from hexrepro.errors import InputError
from hexrepro.serving import headers as gateway
from hexrepro.validation.completion_stream import Streamed
from hexrepro.validation.prompts import Prompts
from hexrepro.validation.replay import call_frame, play, replay
from hexrepro.validation.through_gateway import gateway_headers, gateway_instance
from tests.strategies import make_workload
from tests.validation.paced_stub import PacedStub


def call(input_tokens=20, output_tokens=3, **more):
    return dict(input_tokens=input_tokens, output_tokens=output_tokens, **more)


def diamond():
    """One call, two that wait for it (one with a tool before it), and one that waits for both."""
    return [
        call(stage=0),
        call(after=[0], stage=1, output_tokens=2),
        call(after=[0], stage=1, output_tokens=8, tool_time_s=0.05),
        call(after=[1, 2], stage=2, output_tokens=1),
    ]


# ---- prompts -----------------------------------------------------------------------------------------------


def prompts_workload():
    shared = dict(template=0, template_tokens=40, context=0, context_tokens=16)
    return make_workload(
        [
            dict(arrival_s=0.0, calls=[call(100, **shared), call(90, **shared)]),
            dict(arrival_s=0.0, calls=[call(100, **shared | dict(context=1))]),
            dict(arrival_s=0.0, calls=[call(100, **shared | dict(template=1, template_tokens=24))]),
            dict(arrival_s=0.0, calls=[call(100)]),
        ]
    )


def common(a, b) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


@pytest.mark.parametrize(
    ("shared", "same_query", "same_template"), [("off", 0, 0), ("template", 40, 40), ("full", 56, 40)]
)
def test_prompts_share_what_they_should_and_nothing_else(shared, same_query, same_template):
    # a large vocabulary, so that no two drawn tokens are alike by chance
    prompts = Prompts(prompts_workload(), shared, vocabulary=(10, 10**9))
    a, b, other_context, other_template, nothing = (prompts.tokens(i) for i in range(5))
    assert [len(x) for x in (a, b, other_context)] == [100, 90, 100]
    assert common(a, b) == same_query
    assert common(a, other_context) == same_template
    # a context is shared behind one template only
    assert not np.intersect1d(a, other_template).size
    assert not np.intersect1d(a, nothing).size
    # the same in another process, and in any order
    assert np.array_equal(
        Prompts(prompts_workload(), shared, vocabulary=(10, 10**9)).tokens(3), other_template
    )


def test_salt_makes_other_prompts_and_ids_stay_in_the_vocabulary():
    workload = prompts_workload()
    one, two = (Prompts(workload, "full", salt, (10, 30)).tokens(0) for salt in (1, 2))
    assert common(one, two) < 8
    assert one.min() == 10
    assert one.max() == 30


# ---- when calls are sent, and what is noted ----------------------------------------------------------------


def test_order_times_and_lengths():
    workload = make_workload(
        [dict(arrival_s=0.1, calls=diamond()), dict(arrival_s=0.15, calls=diamond(), slo_scale=2.0)]
    )
    with PacedStub(base_s=0.01) as stub:
        run = replay(workload, stub.url, model="stub")
        asked = stub.requests
    assert run.errors == {}
    assert run.stopped is None
    assert sorted((len(r["prompt"]), r["max_tokens"]) for r in asked) == sorted(
        [(20, 1), (20, 2), (20, 3), (20, 8)] * 2
    )
    assert all(
        r["min_tokens"] == r["max_tokens"] and r["ignore_eos"] and r["temperature"] == 0 for r in asked
    )
    for first, arrival in ((0, 0.1), (4, 0.15)):
        end = run.call_finish_s[first : first + 4]
        # released when what they wait for has ended, to the bit
        assert run.release_s[first : first + 4] == pytest.approx(
            [arrival, end[0], end[0] + 0.05, max(end[1], end[2])], abs=1e-12
        )
    assert np.all(run.lateness_s >= 0)
    assert np.all(run.sent_s <= run.first_token_s)
    assert np.all(run.first_token_s <= run.call_finish_s)
    # 10 ms a step, one a token; a step of the stub may catch up with the clock
    assert np.all(run.call_finish_s - run.release_s >= 0.010 * workload.output_tokens - 0.010)
    assert run.finish_s == pytest.approx([run.call_finish_s[:4].max(), run.call_finish_s[4:].max()])
    frame = call_frame(workload, run)
    assert list(frame["stage"][:4]) == ["stage 0", "stage 1", "stage 1", "stage 2"]
    assert np.allclose(frame["latency_s"], run.call_finish_s - run.release_s)
    assert np.all(frame["instance"] == 0)
    asked_qps, real_qps = run.rates_qps(workload)
    assert asked_qps == pytest.approx(20.0)
    assert real_qps == pytest.approx(20.0, rel=0.5)
    assert "8 of 8 calls finished, 0 failed" in run.report(workload)


def test_open_loop_a_slow_server_does_not_delay_arrivals():
    workload = make_workload([dict(arrival_s=0.05 * i, calls=[call(output_tokens=2)]) for i in range(6)])
    with PacedStub(base_s=0.1, max_num_seqs=1) as stub:
        run = replay(workload, stub.url, model="stub")
    assert run.release_s == pytest.approx(workload.arrival_s)
    # the last is sent at 0.25 s, while all six take 1.2 s
    assert run.sent_s.max() < 0.6
    assert run.call_finish_s.max() > 1.1


def test_priorities_placement_and_turns():
    workload = make_workload([dict(arrival_s=0.02 * i, calls=[call()]) for i in range(4)])
    with PacedStub(base_s=0.002) as one, PacedStub(base_s=0.002) as two:
        urls = [one.url, two.url]
        run = replay(workload, urls, model="stub", priority=np.array([3, 1, 4, 1]))
        assert list(run.instance) == [0, 1, 0, 1]
        assert [r["priority"] for r in one.requests] == [3, 4]
        run = replay(workload, urls, model="stub", placement=np.array([1, 1, 1, 0]))
        assert list(run.instance) == [1, 1, 1, 0]
        assert "priority" not in one.requests[-1]


def test_headers_for_the_gateway():
    workload = make_workload(
        [dict(arrival_s=0.0, calls=diamond(), slo_scale=2.0), dict(arrival_s=0.0, calls=[call(), call()])]
    )
    with PacedStub(base_s=0.002) as stub:
        replay(
            workload, stub.url, model="stub", headers=gateway_headers(workload, "run7", 3.0),
            more=lambda call: {"user": f"call {call}"},
        )  # fmt: skip
        told = {r["user"]: h for r, h in zip(stub.requests, stub.headers, strict=True)}
    last = told["call 3"]
    assert (last[gateway.QUERY], last[gateway.STAGE], last[gateway.SLO]) == ("run7-0", "stage 2", "6")
    assert last[gateway.FINAL] == "true"
    assert gateway.FINAL not in told["call 0"]
    assert gateway.FINAL not in told["call 5"]  # two calls end that query, none is its last
    assert told["call 5"][gateway.SLO] == "3"
    answer = Streamed(0, 0, 0, 1, 1, None, {gateway.INSTANCE: "b"})
    assert gateway_instance(["a", "b"])(answer) == 1
    assert gateway_instance(["a"])(answer) == -1


# ---- faults, bounds, cancellation --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("500", "HTTP 500: no room"),
        ("429", "HTTP 429: no room"),
        ("break", "ClientPayloadError|broke off|ClientConnection|ServerDisconnected"),
        ("short", "20 prompt and 2 output tokens where 20 and 3 were asked"),
        ("error", "error in the stream: engine died"),
        ("hang", "no end after 1 s"),
    ],
)
def test_a_failed_call_ends_its_query_and_no_other(fault, says):
    workload = make_workload([dict(arrival_s=0.0, calls=diamond()), dict(arrival_s=0.1, calls=diamond())])
    with PacedStub(base_s=0.002, faults={0: fault}) as stub:
        run = replay(workload, stub.url, model="stub", call_timeout_s=1.0)
        assert len(stub.requests) == 5
    assert list(run.errors) == [0]
    assert re.search(says, run.errors[0]), run.errors[0]
    assert np.isinf(run.finish_s[0])
    assert np.isfinite(run.finish_s[1])
    assert np.isnan(run.release_s[1:4]).all()
    assert np.isinf(run.call_finish_s[:4]).all()
    assert "1 failed" in run.report(workload)


def test_nobody_there():
    workload = make_workload([dict(arrival_s=0.0, calls=diamond())])
    run = replay(workload, "http://127.0.0.1:9", model="stub")
    assert "ClientConnectorError" in run.errors[0]
    assert np.isinf(run.finish_s).all()


def test_it_ends_after_its_time_and_cancels_what_runs():
    workload = make_workload(
        [dict(arrival_s=0.0, calls=[call(output_tokens=1000)]), dict(arrival_s=9.0, calls=[call()])]
    )
    with PacedStub(base_s=0.01) as stub:
        begin = time.monotonic()
        run = replay(workload, stub.url, model="stub", limit_s=0.3)
        assert time.monotonic() - begin < 2
        until = time.monotonic() + 2
        while stub.disconnects == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert stub.disconnects == 1
    assert run.stopped == "it ran for 0.3 s"
    assert np.isinf(run.finish_s).all()
    assert len(stub.requests) == 1


def test_too_many_calls_under_way():
    workload = make_workload([dict(arrival_s=0.01 * i, calls=[call(output_tokens=100)]) for i in range(6)])
    with PacedStub(base_s=0.01) as stub:
        run = replay(workload, stub.url, model="stub", max_in_flight=4)
        assert len(stub.requests) == 4
    assert "4 calls were under way" in run.stopped


def test_cancelling_closes_the_connections():
    workload = make_workload([dict(arrival_s=0.0, calls=[call(output_tokens=1000)])] * 3)

    async def cancelled(url):
        task = asyncio.create_task(play(workload, url, model="stub"))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with PacedStub(base_s=0.01) as stub:
        asyncio.run(cancelled(stub.url))
        until = time.monotonic() + 2
        while stub.disconnects < 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert stub.disconnects == 3


def test_progress_counts_calls_that_can_no_longer_come():
    workload = make_workload([dict(arrival_s=0.0, calls=diamond()), dict(arrival_s=0.0, calls=[call()])])
    counts = []
    with PacedStub(base_s=0.002, faults={0: "500"}) as stub:
        replay(workload, stub.url, model="stub", progress=counts.append)
    assert counts[-1] == 5
    assert counts == sorted(counts)


def test_a_callers_mistake_is_told_and_ends_the_replay():
    workload = make_workload([dict(arrival_s=0.0, calls=[call()])])
    with PacedStub() as stub:
        run = replay(workload, stub.url, model="stub", more=lambda call: {}[call])
    assert run.stopped == "KeyError: 0"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(placement=np.array([0, 2])), "placement must name one of the 1 urls"),
        (dict(priority=np.array([0.5, 1.0])), "priority must be 2 whole numbers"),
        (dict(placement=np.array([0])), "placement must be 2 whole numbers"),
    ],
)
def test_refuses(options, says):
    workload = make_workload([dict(arrival_s=0.0, calls=[call()]), dict(arrival_s=0.0, calls=[call()])])
    with pytest.raises(InputError, match=says):
        replay(workload, "http://127.0.0.1:9", model="stub", **options)


def test_refuses_a_workload_without_arrivals():
    workload = make_workload([dict(arrival_s=float("nan"), calls=[call()])])
    with pytest.raises(InputError, match="holds no arrival times"):
        replay(workload, "http://127.0.0.1:9", model="stub")
