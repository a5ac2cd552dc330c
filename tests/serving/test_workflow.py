"""Calls are released when what they wait for has finished, not before and not later."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hexrepro.errors import InputError
from hexrepro.serving import headers as names
from hexrepro.serving.workflow import Task, WorkflowRunner
from hexrepro.workload import generate
from tests.serving.scripted import Act, Server, ask, client, in_loop, running

DIAMOND = {
    "link": Task("link"),
    "a": Task("candidate", after=("link",)),
    "b": Task("candidate", after=("link",)),
    "pick": Task("pick", after=("a", "b"), tool_time_s=0.05),
}


@in_loop
async def test_a_diamond() -> None:
    log, delay = [], {"link": 0.01, "a": 0.05, "b": 0.01, "pick": 0.01}

    async def call(query, name, task, last, results):
        log.append((name, last, dict(results)))
        await asyncio.sleep(delay[name])
        return name.upper()

    run = await WorkflowRunner(DIAMOND, call).run("q")
    assert [(name, last) for name, last, _ in log] == [
        ("link", False),
        ("a", False),
        ("b", False),
        ("pick", True),
    ]
    assert log[3][2] == {"a": "A", "b": "B"}
    assert run.results["pick"] == "PICK"
    assert run.released_s["a"] >= run.ended_s["link"]
    assert run.released_s["pick"] - run.ended_s["a"] >= 0.05 - 1e-3
    assert run.finished_s >= run.ended_s["pick"]


@in_loop
async def test_a_failure_ends_the_query_and_cancels_its_siblings() -> None:
    cancelled = []

    async def call(query, name, task, last, results):
        if name == "a":
            await asyncio.sleep(0.01)
            raise ValueError("a failed")
        try:
            await asyncio.sleep(5 if name == "b" else 0)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    with pytest.raises(ValueError, match="a failed"):
        await WorkflowRunner(DIAMOND, call).run("q")
    assert cancelled == ["b"]


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ({}, "no tasks"),
        ({"a": Task("s", after=("z",))}, "waits for 'z'"),
        ({"a": Task("s", after=("b",)), "b": Task("s", after=("a",))}, "a, b wait for each other"),
        ({"a": Task("s", tool_time_s=-1)}, "tool_time_s=-1"),
    ],
)
def test_a_graph_that_cannot_be_run_is_refused(tasks, says) -> None:
    with pytest.raises(InputError, match=says):
        WorkflowRunner(tasks, None)


@in_loop
async def test_a_query_of_a_trace_keeps_its_order() -> None:
    workload = generate("trace1", n_queries=3)
    ended = []

    async def call(query, name, task, last, results):
        assert task.payload == (workload.input_tokens[int(name)], workload.output_tokens[int(name)])
        await asyncio.sleep(0)
        ended.append(int(name))

    runner = WorkflowRunner.of_query(workload, 0, call)
    run = await runner.run("0")
    n = int(workload.query_offsets[1])
    assert sorted(ended) == list(range(n))
    for before in range(n):
        for after in workload.successors[workload.succ_offsets[before] : workload.succ_offsets[before + 1]]:
            assert run.released_s[str(after)] >= run.ended_s[str(before)]
    assert np.isfinite(run.finished_s)


@in_loop
async def test_through_the_gateway_the_query_is_whole_and_ends() -> None:
    """Its steps are learned: after `link` come one step of candidates and one of pick."""
    async with running([Server(lambda body, number: Act(first_s=0.1))]) as gateway:  # siblings overlap
        api = client(gateway)

        async def call(query, name, task, last, results):
            where = {names.QUERY: query, names.STAGE: task.stage, names.FINAL: str(last).lower()}
            await api.chat.completions.create(**ask(), extra_headers=where)

        runner = WorkflowRunner(DIAMOND, call)
        await asyncio.gather(*(runner.run(f"q{i}") for i in range(5)))
        of = gateway.coordinator
        assert of.queries_under_way == 0
        stage = {s.name: s.index for s in of.stages.list}
        assert dict(of.plan.remaining(stage["link"], 0)) == {stage["candidate"]: 1.0, stage["pick"]: 1.0}
