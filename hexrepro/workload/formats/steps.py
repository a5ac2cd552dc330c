"""Traces that name steps and lengths only: the rest comes from the workflow whose step names they use.

Dependencies, templates and contexts are the workflow's (``data/workloads/workflows/*.yaml``). Queries with the same text
share their contexts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hexrepro.workload.dag import barrier_edges, csr
from hexrepro.workload.types import Workload
from hexrepro.workload.workflow import Workflow, load_workflow, shared_prefixes, workflow_names


def plain(name: str) -> str:
    """A step name without regard to case and to spaces or underscores."""
    return name.strip().lower().replace(" ", "_")


def workflow_of(names: Iterable[str]) -> tuple[Workflow, dict[str, int]]:
    """The workflow that knows the most of these plain step names, and its stages by plain step name."""
    names = list(names)
    choices = []
    for workflow in map(load_workflow, workflow_names()):
        stage_of = {plain(name): s for s, name in enumerate(workflow.released_names.values())}
        stage_of |= {plain(stage): s for s, stage in enumerate(workflow.stages)}
        choices.append((sum(name in stage_of for name in names), workflow, stage_of))
    _, workflow, stage_of = max(choices, key=lambda choice: choice[0])
    return workflow, stage_of


def workload_of_steps(
    name: str,
    workflow: Workflow,
    stage: np.ndarray,
    input_tokens: np.ndarray,
    output_tokens: np.ndarray,
    calls_each: np.ndarray,
    prompt: np.ndarray | int = 0,
) -> Workload:
    """A workload without arrivals from the calls of its queries one after the other.

    ``stage``, ``input_tokens``, ``output_tokens``: int[n]. ``calls_each``: int[q]. ``prompt``: int[n], equal for equal
    prompts, where these are known. Queries in which all of these are equal ask the same text.
    """
    columns = np.stack([stage, input_tokens, output_tokens, np.broadcast_to(prompt, len(stage))], axis=1)
    texts: dict[bytes, int] = {}
    same_text = np.array(
        [
            texts.setdefault(columns[end - size : end].tobytes(), len(texts))
            for end, size in zip(np.cumsum(calls_each).tolist(), calls_each.tolist(), strict=True)
        ]
    )
    query = np.repeat(np.arange(len(calls_each)), calls_each)
    before, after = barrier_edges(_barrier_groups(workflow, stage, query), query)
    succ_offsets, successors = csr(len(stage), before, after)
    template = _templates(workflow, stage, input_tokens, query)
    return Workload(
        name=name,
        stage_names=workflow.stages,
        stage=stage,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        **shared_prefixes(workflow, template, input_tokens, same_text[query]),
        tool_time_s=np.zeros(len(stage)),
        succ_offsets=succ_offsets,
        successors=successors,
        query_offsets=np.concatenate([[0], np.cumsum(calls_each)]),
        arrival_s=np.full(len(calls_each), np.nan),
        tenant=np.zeros(len(calls_each), np.int32),
        tenant_names=("default",),
        slo_scale=np.ones(len(calls_each)),
    )


def _barrier_groups(workflow: Workflow, stage: np.ndarray, query: np.ndarray) -> np.ndarray:
    """The number of each call's barrier group in its query: neighbours of a parallel stage are in one
    group."""
    parallel = np.array([workflow.runs_parallel(name) for name in workflow.stages])[stage]
    together = np.zeros(len(stage), bool)
    together[1:] = parallel[1:] & (stage[1:] == stage[:-1]) & (query[1:] == query[:-1])
    return np.cumsum(~together)


def _templates(
    workflow: Workflow, stage: np.ndarray, input_tokens: np.ndarray, query: np.ndarray
) -> np.ndarray:
    """Template ids (int64[n]). Where a stage has several, a query's longest prompt has the longest template,
    and so on; further calls have the shortest."""
    template = np.full(len(stage), -1, np.int64)
    for s, name in enumerate(workflow.stages):
        calls = np.flatnonzero(stage == s)
        ids = np.array(workflow.templates_of(name), np.int64)
        order = np.lexsort((calls, -input_tokens[calls], query[calls]))
        owner = query[calls][order]
        first = np.searchsorted(owner, owner, side="left")
        rank = np.arange(len(calls)) - first
        template[calls[order]] = ids[np.minimum(rank, len(ids) - 1)]
    return template
