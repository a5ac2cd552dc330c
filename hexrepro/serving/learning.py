"""What the coordinator believes of stages, and how it learns: lengths from the last finished calls, what follows a place in
a query from the last finished queries.

Both by the simulator's definitions: the medians are those of its `history` estimator, a place and what remains after it those
of `estimates.make_plan`. Beliefs may start from a trace (`Beliefs.of`); without one they start from the calls themselves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from hexrepro.scheduling.estimates import cluster_mean_s, estimate
from hexrepro.workload.types import Workload

MIN_HISTORY = 5  # finished calls (or queries) before what was seen replaces a prior; as in the simulator


class Window:
    """The last `size` values and their median."""

    __slots__ = ("_ordered", "_recent", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        if len(self._recent) == self._size:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(value)
        insort(self._ordered, value)

    @property
    def median(self) -> float:
        n = len(self._ordered)
        return 0.5 * (self._ordered[(n - 1) // 2] + self._ordered[n // 2])

    def __len__(self) -> int:
        return len(self._recent)


@dataclass(slots=True)
class Stage:
    """A stage as believed at present: median lengths in tokens, and t_comp averaged over the cluster."""

    index: int
    name: str
    input_median: float
    output_median: float
    cached_median: float
    mean_s: float
    enough: int  # finished calls before the medians count
    inputs: Window
    outputs: Window
    cached: Window
    finished: int = 0


# where a query stands: (stage, how many steps of that stage came before)
Place = tuple[int, int]


@dataclass
class Beliefs:
    """Where a coordinator's beliefs start.

    stages     name -> median (input, output, cached) tokens
    remaining  place -> {stage: how many steps of it a query takes after that place, on average}; stages by their number in
               `stages`
    """

    stages: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    remaining: dict[Place, dict[int, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: Workload, instances: np.ndarray, *, prefix_caching: str = "template") -> Beliefs:
        """What a trace says: the simulator's own estimates of it. `instances`: INSTANCE[M]."""
        known = estimate(workload, instances, prefix_caching=prefix_caching)
        medians = zip(
            known.input_median.tolist(),
            known.output_median.tolist(),
            known.cached_median.tolist(),
            strict=True,
        )
        plan, seen, remaining = known.plan, {}, {}
        # places are numbered by stage, then by what came before, without gaps
        pairs = sorted({*zip(workload.stage.tolist(), plan.position.tolist(), strict=True)})
        for stage, row in pairs:
            occurrence = seen[stage] = seen.get(stage, -1) + 1
            steps = plan.remaining[row]
            remaining[stage, occurrence] = {int(s): float(steps[s]) for s in np.flatnonzero(steps)}
        return cls(dict(zip(workload.stage_names, medians, strict=True)), remaining)


class Stages:
    """The stages that the coordinator has met, by name; at most `most`, as their names come from clients."""

    OTHER = "other"  # all that exceeds `most`

    def __init__(
        self, beliefs: Beliefs, instances: np.ndarray, *, window: int, prior_output: float, most: int
    ) -> None:
        self.list: list[Stage] = []
        self._by_name: dict[str, Stage] = {}
        self._instances, self._window, self._prior_output, self._most = instances, window, prior_output, most
        for name, (inputs, outputs, cached) in beliefs.stages.items():
            self._add(name, inputs, outputs, cached, MIN_HISTORY)
        self.renew_means(instances)

    def get(self, name: str, input_tokens: int, cached_tokens: int = 0) -> Stage:
        """The stage of that name. A new one is believed to be like the call that brings it."""
        stage = self._by_name.get(name)
        if stage is not None:
            return stage
        if len(self.list) >= self._most:
            name = self.OTHER
            if name in self._by_name:
                return self._by_name[name]
        stage = self._add(name, float(input_tokens), self._prior_output, float(cached_tokens), 1)
        self._renew(stage)
        return stage

    def called(self, name: str) -> Stage | None:
        """The stage of that name if it has been met."""
        return self._by_name.get(name)

    def _add(self, name: str, inputs: float, outputs: float, cached: float, enough: int) -> Stage:
        w = max(self._window, 1)
        stage = Stage(
            len(self.list),
            name,
            inputs,
            outputs,
            cached,
            0.0,
            min(enough, w),
            Window(w),
            Window(w),
            Window(w),
        )
        self.list.append(stage)
        self._by_name[name] = stage
        return stage

    def finished(
        self, stage: Stage, input_tokens: int, output_tokens: int, cached_tokens: int | None = None
    ) -> None:
        """A call of the stage has finished. `cached_tokens`: of its prompt, as the server reported, if it did."""
        stage.finished += 1
        if self._window == 0:
            return
        stage.inputs.add(float(input_tokens))
        stage.outputs.add(float(output_tokens))
        if cached_tokens is not None:
            stage.cached.add(float(cached_tokens))
            if len(stage.cached) >= stage.enough:
                stage.cached_median = stage.cached.median
        if len(stage.inputs) >= stage.enough:
            stage.input_median, stage.output_median = stage.inputs.median, stage.outputs.median
            self._renew(stage)

    def renew_means(self, instances: np.ndarray) -> None:
        """The cluster is now these instances (INSTANCE[M])."""
        self._instances = instances
        for stage in self.list:
            self._renew(stage)

    def _renew(self, stage: Stage) -> None:
        cached = max(0.0, min(stage.cached_median, stage.input_median - 1.0))
        stage.mean_s = cluster_mean_s(self._instances, stage.input_median, cached, stage.output_median)


class Plan:
    """What is still to come at a place in a query: learned from the last `window` queries, before that as believed.

    A step is all calls of one stage at one depth of a query (its longest chain of prerequisites).
    """

    def __init__(self, prior: dict[Place, dict[int, float]], window: int) -> None:
        self._prior = {place: sorted(after.items()) for place, after in prior.items()}
        self._window = window
        self._recent: deque[list[tuple[Place, dict[int, int]]]] = deque()
        self._count: dict[Place, int] = {}
        self._steps: dict[Place, dict[int, int]] = {}  # steps of each stage after the place, over all queries

    def learn(self, steps: set[tuple[int, int]]) -> None:
        """A query has finished; `steps` are its (depth, stage)."""
        if self._window == 0 or not steps:
            return
        seen: dict[int, int] = {}
        places = []
        ordered = sorted(steps)
        for _, stage in ordered:
            places.append((stage, seen.get(stage, 0)))
            seen[stage] = seen.get(stage, 0) + 1
        left = dict(seen)
        query = []
        for place in places:
            left[place[0]] -= 1
            query.append((place, {s: n for s, n in left.items() if n}))
        self._recent.append(query)
        self._book(query, 1)
        if len(self._recent) > self._window:
            self._book(self._recent.popleft(), -1)

    def _book(self, query: list[tuple[Place, dict[int, int]]], sign: int) -> None:
        for place, after in query:
            self._count[place] = self._count.get(place, 0) + sign
            if self._count[place] == 0:
                del self._count[place]
                self._steps.pop(place, None)
                continue
            total = self._steps.setdefault(place, {})
            for stage, n in after.items():
                total[stage] = total.get(stage, 0) + sign * n
                if total[stage] == 0:
                    del total[stage]

    def remaining(self, stage: int, occurrence: int) -> list[tuple[int, float]]:
        """(stage, steps) expected after the place, by stage. Where nobody has been, as at the furthest place of that stage."""
        for before in range(occurrence, -1, -1):
            place = (stage, before)
            count = self._count.get(place, 0)
            if count >= MIN_HISTORY or (count and place not in self._prior):
                return sorted((s, n / count) for s, n in self._steps.get(place, {}).items())
            if place in self._prior:
                return self._prior[place]
        return []
