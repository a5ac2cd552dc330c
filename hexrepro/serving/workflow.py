"""A declared workflow: a graph of calls that are released as what they wait for finishes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hexrepro.errors import InputError
from hexrepro.workload.types import Workload


@dataclass(frozen=True)
class Task:
    """One call of a workflow.

    after        the tasks that it waits for
    tool_time_s  from their end to its release
    payload      what the `call` function needs to know of it
    """

    stage: str
    after: tuple[str, ...] = ()
    tool_time_s: float = 0.0
    payload: Any = None


@dataclass
class Run:
    """How one query went; times in seconds on the loop's clock, by task."""

    query: str
    started_s: float
    finished_s: float = float("nan")
    released_s: dict[str, float] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)


# call(query, name, task, last, results) -> anything; `last` on the calls after which no other comes, `results` of the tasks
# that it waited for
CallFunction = Callable[[str, str, Task, bool, Mapping[str, Any]], Awaitable[Any]]


class WorkflowRunner:
    """Owns the graph of one kind of query, checked once; `run` performs it for one query.

    tasks  name -> Task
    call   performs one call; any async function: a client of the gateway, or a model in the same process
    """

    def __init__(self, tasks: Mapping[str, Task], call: CallFunction) -> None:
        if not tasks:
            raise InputError("workflow: it has no tasks; at least one is needed")
        self._tasks, self._call = dict(tasks), call
        self._successors: dict[str, list[str]] = {name: [] for name in tasks}
        for name, task in self._tasks.items():
            for before in task.after:
                if before not in self._tasks:
                    raise InputError(
                        f"workflow: task {name!r} waits for {before!r}, which does not exist; there are {', '.join(tasks)}"
                    )
                self._successors[before].append(name)
            if len(set(task.after)) < len(task.after):
                raise InputError(f"workflow: task {name!r} names a task twice in after={task.after}")
            if not task.tool_time_s >= 0:
                raise InputError(
                    f"workflow: task {name!r}: tool_time_s={task.tool_time_s!r} must be 0 or more"
                )
        self._refuse_cycle()

    @classmethod
    def of_query(cls, workload: Workload, query: int, call: CallFunction) -> WorkflowRunner:
        """A query of a workload. Tasks are named 0, 1, ... in the workload's order; payload: (input, output) tokens."""
        begin, end = int(workload.query_offsets[query]), int(workload.query_offsets[query + 1])
        after: list[list[str]] = [[] for _ in range(end - begin)]
        for c in range(begin, end):
            for e in range(workload.succ_offsets[c], workload.succ_offsets[c + 1]):
                after[int(workload.successors[e]) - begin].append(str(c - begin))
        return cls(
            {
                str(c - begin): Task(
                    workload.stage_names[workload.stage[c]],
                    tuple(after[c - begin]),
                    float(workload.tool_time_s[c]),
                    (int(workload.input_tokens[c]), int(workload.output_tokens[c])),
                )
                for c in range(begin, end)
            },
            call,
        )

    def _refuse_cycle(self) -> None:
        missing = {name: len(task.after) for name, task in self._tasks.items()}
        free = [name for name, n in missing.items() if n == 0]
        while free:
            for name in self._successors[free.pop()]:
                missing[name] -= 1
                if missing[name] == 0:
                    free.append(name)
        stuck = [name for name, n in missing.items() if n]
        if stuck:
            raise InputError(
                f"workflow: tasks {', '.join(stuck)} wait for each other in a cycle or behind one; they must form a graph"
                " without cycles"
            )

    async def run(self, query: str) -> Run:
        """Perform all calls. The first that fails cancels those under way, and its exception is raised."""
        loop = asyncio.get_running_loop()
        run = Run(query, loop.time())
        missing = {name: len(task.after) for name, task in self._tasks.items()}
        ends = _ends(self._successors)

        async def perform(name: str, group: asyncio.TaskGroup) -> None:
            task = self._tasks[name]
            if task.tool_time_s > 0:
                await asyncio.sleep(task.tool_time_s)
            run.released_s[name] = loop.time()
            seen = {before: run.results[before] for before in task.after}
            run.results[name] = await self._call(query, name, task, name in ends, seen)
            run.ended_s[name] = loop.time()
            for successor in self._successors[name]:
                missing[successor] -= 1
                if missing[successor] == 0:
                    group.create_task(perform(successor, group))

        try:
            async with asyncio.TaskGroup() as group:
                for name, n in missing.items():
                    if n == 0:
                        group.create_task(perform(name, group))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        run.finished_s = loop.time()
        return run


def _ends(successors: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """The only task without successors. With several of them, none is known to be the last."""
    ends = [name for name, after in successors.items() if not after]
    return frozenset(ends) if len(ends) == 1 else frozenset()
