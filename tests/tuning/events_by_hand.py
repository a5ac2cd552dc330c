"""Queries told to a `History` as a coordinator tells them, and clusters on which their times are known."""

from __future__ import annotations

from hexrepro.cluster.types import Cluster
from hexrepro.tuning.history import History
from tests.strategies import make_instance


def cluster_of(instances: int, step_s: float = 1.0, kv_blocks: int = 20_000, **sizes: int) -> Cluster:
    """Instances whose steps all take `step_s`."""
    specs = [
        make_instance(f"i{m}", (step_s, 0.0, 0.0, 0.0, 0.0), kv_blocks, **sizes) for m in range(instances)
    ]
    return Cluster("alike", tuple(specs))


def step(stage: str, release_s: float, finish_s: float | None = None, **more) -> dict:
    """A call for `tell`; without `finish_s` it is under way."""
    return dict(stage=stage, release_s=release_s, finish_s=finish_s, **more)


def tell(
    history: History,
    query: str,
    arrival_s: float,
    steps: list[dict],
    *,
    slo_s: float = 60.0,
    ends: bool = True,
) -> None:
    """All events of one query in order of time. If all its calls have finished so has it, unless it does not end with them."""
    history.query_arrived(query, arrival_s, slo_s=slo_s)
    events = []
    for i, s in enumerate(steps):
        events.append((s["release_s"], 2, i))
        if s["finish_s"] is not None:
            events.append((s["finish_s"], 1, i))
        if s.get("first_token_s") is not None:
            events.append((s["first_token_s"], 0, i))
    for time_s, kind, i in sorted(events):
        s = steps[i]
        if kind == 0:
            history.first_token(query, i, time_s)
        elif kind == 1:
            history.call_finished(query, i, time_s, s.get("output_tokens", 10))
        else:
            history.call_dispatched(
                query,
                i,
                time_s,
                stage=s["stage"],
                input_tokens=s.get("input_tokens", 100),
                instance=s.get("instance", 0),
                key=s.get("key", 0.0),
                estimate_s=s.get("estimate_s", 1.0),
            )
    if ends and steps and all(s["finish_s"] is not None for s in steps):
        history.query_finished(query, max(s["finish_s"] for s in steps))


def chain(
    history: History, query: str, arrival_s: float, *stages: str, step_s: float = 1.0, output_tokens: int = 10
) -> None:
    """A finished query of calls one after the other, `step_s` each."""
    steps = [
        step(stage, arrival_s + i * step_s, arrival_s + (i + 1) * step_s, output_tokens=output_tokens)
        for i, stage in enumerate(stages)
    ]
    tell(history, query, arrival_s, steps)
