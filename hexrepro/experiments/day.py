"""A day whose load and cluster change: phases of a rate and a trace, and what happens to the instances meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.experiments.explain import suggest
from hexrepro.simulator.session import Simulation
from hexrepro.workload import Workload, arrival_times, concat, generate, trace_names

EVENTS = ("slow", "leave", "join")


@dataclass(frozen=True)
class Phase:
    """`duration_s` seconds of Poisson arrivals at `rate_qps`, queries of `trace` in random order."""

    duration_s: float
    rate_qps: float
    trace: str


@dataclass(frozen=True)
class Change:
    """Something happens to an instance. slow: from now on it takes `factor` times as long (1 = as at first), which the
    coordinator learns `learned_after_s` later. leave: it gets no new calls. join: it gets calls (again)."""

    at_s: float
    event: str
    instance: str
    factor: float = 1.0
    learned_after_s: float = 60.0

    @property
    def label(self) -> str:
        if self.event != "slow":
            return f"{self.instance} {'leaves' if self.event == 'leave' else 'joins'}"
        return f"{self.instance} {f'{self.factor:g} × slower' if self.factor != 1 else 'recovers'}"


@dataclass(frozen=True)
class Day:
    """Phases one after the other; `away` names the instances that are not there at first."""

    phases: tuple[Phase, ...]
    changes: tuple[Change, ...]
    away: tuple[str, ...]

    @property
    def length_s(self) -> float:
        return sum(phase.duration_s for phase in self.phases)

    def starts_s(self) -> list[float]:
        """When each phase begins."""
        return np.cumsum([0.0, *(phase.duration_s for phase in self.phases[:-1])]).tolist()

    def phase(self, time_s: float) -> Phase | None:
        """The phase at a time; None once the day is over."""
        for start_s, phase in zip(self.starts_s(), self.phases, strict=True):
            if start_s <= time_s < start_s + phase.duration_s:
                return phase
        return None

    def rate_qps(self, time_s: float) -> float:
        """The mean rate at a time; 0 once the day is over."""
        phase = self.phase(time_s)
        return 0.0 if phase is None else phase.rate_qps


def read_day(spec: Mapping, cluster: Cluster) -> Day:
    """A day from its config. Raises InputError for what cannot be."""
    names = [instance.name for instance in cluster.instances]
    phases = tuple(_read(Phase, "phases", i, item) for i, item in enumerate(spec.get("phases") or []))
    changes = tuple(_read(Change, "changes", i, item) for i, item in enumerate(spec.get("changes") or []))
    away = tuple(spec.get("away") or ())
    if not phases:
        raise InputError("day.phases is empty; at least one phase is needed")
    for i, phase in enumerate(phases):
        if phase.trace not in trace_names():
            raise InputError(
                f"day.phases[{i}].trace={phase.trace} is unknown{suggest(phase.trace, trace_names())}"
            )
        for field in ("duration_s", "rate_qps"):
            _positive(f"day.phases[{i}].{field}", getattr(phase, field))
    for i, change in enumerate(changes):
        if change.event not in EVENTS:
            raise InputError(
                f"day.changes[{i}].event={change.event} is unknown{suggest(change.event, EVENTS)}"
            )
        _positive(f"day.changes[{i}].factor", change.factor)
        for field in ("at_s", "learned_after_s"):
            value = getattr(change, field)
            if not (isinstance(value, int | float) and value >= 0):
                raise InputError(f"day.changes[{i}].{field}={value!r} must be 0 or more seconds")
    for what, given in [("day.away", name) for name in away] + [
        (f"day.changes[{i}].instance", change.instance) for i, change in enumerate(changes)
    ]:
        if given not in names:
            raise InputError(f"{what}: cluster {cluster.name} has no instance {given}{suggest(given, names)}")
    return Day(phases, tuple(sorted(changes, key=lambda change: change.at_s)), away)


def _read(kind: type, what: str, index: int, item: object):
    known = list(kind.__dataclass_fields__)
    if not isinstance(item, Mapping):
        raise InputError(f"day.{what}[{index}]={item!r} must hold the fields {', '.join(known)}")
    for name in item:
        if name not in known:
            raise InputError(f"day.{what}[{index}].{name} is no field{suggest(str(name), known)}")
    try:
        return kind(**item)
    except TypeError as error:
        raise InputError(f"day.{what}[{index}]: {str(error).split(') ')[-1]}") from error


def _positive(what: str, value: object) -> None:
    if not isinstance(value, int | float) or not 0 < value < np.inf:
        raise InputError(f"{what}={value!r} must be a positive number")


def day_workload(day: Day, seed: int, trace_seed: int = 0) -> Workload:
    """The day's queries with their arrivals; `seed` decides the arrivals and the order of the queries."""
    rng = np.random.default_rng([seed, 4])
    parts = []
    for index, (start_s, phase) in enumerate(zip(day.starts_s(), day.phases, strict=True)):
        expected = phase.rate_qps * phase.duration_s
        n = int(expected + 8 * np.sqrt(expected) + 20)
        times_s = arrival_times("poisson", n, phase.rate_qps, seed=seed * len(day.phases) + index)
        times_s = times_s[times_s < phase.duration_s]
        trace = _trace(phase.trace, trace_seed)
        if len(times_s):
            order = np.concatenate(
                [rng.permutation(trace.n_queries) for _ in range(-(-len(times_s) // trace.n_queries))]
            )
            parts.append(trace.take(order[: len(times_s)]).with_arrivals(start_s + times_s))
    if not parts:
        raise InputError("day.phases: no query arrives in the whole day; raise a rate or a duration")
    return concat(parts, name="day", same_templates=True)


@cache
def _trace(name: str, seed: int) -> Workload:
    return generate(name, seed=seed)


class ClusterClock:
    """The cluster through the day: carries out its changes on a simulation, and says what the coordinator believes."""

    def __init__(self, day: Day, cluster: Cluster) -> None:
        self._cluster, self._index = cluster, {spec.name: m for m, spec in enumerate(cluster.instances)}
        steps: list[tuple[float, int, Callable[[Simulation], None]]] = []
        for change in day.changes:
            m = self._index[change.instance]
            if change.event == "slow":
                factor = change.factor
                steps.append((change.at_s, m, lambda sim, m=m, f=factor: sim.slow_down(m, f)))
                learned_s = change.at_s + change.learned_after_s
                steps.append((learned_s, m, lambda sim, m=m, f=factor: sim.believe(m, f)))
            elif change.event == "leave":
                steps.append((change.at_s, m, lambda sim, m=m: sim.close_instance(m)))
            else:
                steps.append((change.at_s, m, lambda sim, m=m: sim.open_instance(m)))
        self._steps = sorted(steps, key=lambda step: step[0])
        self._away = [self._index[name] for name in day.away]
        self._next = 0

    def begin(self, simulation: Simulation) -> None:
        for m in self._away:
            simulation.close_instance(m)

    def copy(self) -> ClusterClock:
        other = object.__new__(ClusterClock)
        other.__dict__ |= self.__dict__
        return other

    def advance(self, simulation: Simulation, until_s: float) -> bool:
        """Let the simulation go on to `until_s`, changes included. Whether the coordinator's picture has changed."""
        changed = False
        while self._next < len(self._steps) and self._steps[self._next][0] <= until_s:
            at_s, _, change = self._steps[self._next]
            simulation.advance(max(at_s, simulation.now_s))
            change(simulation)
            self._next += 1
            changed = True
        simulation.advance(until_s)
        return changed


def believed_cluster(cluster: Cluster, simulation: Simulation) -> Cluster:
    """The cluster with the step times that the simulation's scheduler believes in."""
    instances = []
    for spec, view in zip(cluster.instances, simulation.instances, strict=True):
        speeds = {term.name: float(view[term.name]) for term in fields(spec.latency)}
        instances.append(replace(spec, latency=replace(spec.latency, **speeds)))
    return Cluster(cluster.name, tuple(instances))


def sliding(
    times_s: np.ndarray, finish_s: np.ndarray, latency_s: np.ndarray, window_s: float, p: float = 0.95
) -> np.ndarray:
    """The p-quantile of the latencies of queries that finished in the window before each time; NaN for fewer than 5."""
    order = np.argsort(finish_s, kind="stable")
    ends, latencies = finish_s[order], latency_s[order]
    first, last = np.searchsorted(ends, times_s - window_s), np.searchsorted(ends, times_s, side="right")
    return np.array(
        [np.quantile(latencies[a:b], p) if b - a >= 5 else np.nan for a, b in zip(first, last, strict=True)]
    )


def traces_of(day: Day) -> Sequence[str]:
    """The traces that occur, each once."""
    return list(dict.fromkeys(phase.trace for phase in day.phases))
