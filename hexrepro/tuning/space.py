"""What a search may vary, read from a config and checked against the policy and the workload.

A dimension is a range, `{low: 0.0, high: 1.0, step: 0.001}` or `{low: 0.1, high: 10.0, log: true}`, or a list of choices.
Its name says what it changes:

  alpha, beta, ...   a parameter of the policy's dispatch or queue rule
  queue              the queue rule, by name
  policy             the policy, by name
  window             finished calls of a stage that the `history` estimator looks back on
  weights            tenant -> range: the scheduler sees that tenant's SLO times this; results are scored against the SLO
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hexrepro.errors import InputError
from hexrepro.scheduling import Policy, load_policy

RESERVED = ("queue", "policy", "window", "weights")
WEIGHT = "weight."
MOST_GRID_POINTS = 20_000
MANY_STEPS = 50
_RANGE = ("low", "high", "step", "log")

Candidate = dict[str, Any]


@dataclass(frozen=True)
class Dimension:
    """One thing that is varied: a range from low to high, or `choices`."""

    name: str
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False
    choices: tuple = ()

    @property
    def numeric(self) -> bool:
        return not self.choices or all(not isinstance(c, str | bool) for c in self.choices)

    def at(self, u: float):
        """The value at u in [0, 1] of the way: spread evenly over the range, or over its logarithm."""
        if self.choices:
            return self.choices[min(int(u * len(self.choices)), len(self.choices) - 1)]
        if self.log:
            return self.clean(self.low * (self.high / self.low) ** u)
        return self.clean(self.low + u * (self.high - self.low))

    def clean(self, value):
        """On the dimension's grid and inside its range, without the dust of binary fractions."""
        if self.choices:
            return value
        if self.step is not None:
            steps = math.floor((self.high - self.low) / self.step + 1e-9)
            value = self.low + min(round((value - self.low) / self.step), steps) * self.step
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else float(f"{value:.9g}")

    def points(self, n: int) -> list:
        """All choices, or at most n points from end to end, each on a step."""
        if self.choices:
            return list(self.choices)
        return list(dict.fromkeys(self.at(u) for u in np.linspace(0.0, 1.0, n)))

    def near(self, value: float, n: int) -> list:
        """`points(n)`, and around `value` points that are five times as dense and, next to it, 25 times."""
        if self.choices:
            return list(self.choices)
        place = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        if self.log and self.high > self.low:
            place = math.log(value / self.low) / math.log(self.high / self.low)
        around = np.concatenate([np.arange(-5, 6) / 5, np.arange(-4, 5) / 25])
        fine = place + around / max(n - 1, 1)
        found = [*self.points(n), value, *(self.at(float(u)) for u in np.clip(fine, 0.0, 1.0))]
        return sorted(set(found))

    def distribution(self):
        """As Optuna has it. Where there are many steps the sampler sees none, and `clean` puts its values on them: TPE takes
        three times as long over steps as over a continuum."""
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution(self.choices)
        step = self.step or (1.0 if self.whole else None)
        if step is not None and (self.high - self.low) / step > MANY_STEPS:
            return distributions.FloatDistribution(self.low, self.high, log=self.log)
        if self.whole:
            return distributions.IntDistribution(int(self.low), int(self.high), log=self.log, step=int(step))
        return distributions.FloatDistribution(self.low, self.high, log=self.log, step=step)


@dataclass(frozen=True, eq=False)
class Space:
    """Everything that is varied, and the policies that it is varied on: by name, where `policy` is a dimension."""

    dimensions: tuple[Dimension, ...]
    policies: Mapping[str, Policy]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(d.name for d in self.dimensions)

    def __getitem__(self, name: str) -> Dimension:
        return next(d for d in self.dimensions if d.name == name)

    def clean(self, params: Mapping[str, Any]) -> Candidate:
        """A candidate in the order of the dimensions."""
        return {d.name: d.clean(params[d.name]) for d in self.dimensions}

    def grid(self, points: int = 21) -> list[Candidate]:
        """Every combination, of at most `points` values for each range."""
        axes = [d.points(points) for d in self.dimensions]
        size = math.prod(len(a) for a in axes)
        if size > MOST_GRID_POINTS:
            raise InputError(
                f"tuning.space: the whole grid has {size} points (more than {MOST_GRID_POINTS});"
                " lower tuning.sampler.points, or take tuning/sampler=tpe"
            )
        return [dict(zip(self.names, values, strict=True)) for values in itertools.product(*axes)]

    def slice(self, around: Mapping[str, Any], name: str, points: int) -> list[Candidate]:
        """Candidates along one dimension, denser near `around`, which is one of them; the other dimensions as there."""
        return [{**around, name: value} for value in self[name].near(around[name], points)]

    def order(self, candidate: Mapping[str, Any]) -> tuple:
        """Sorts candidates: by their numbers, and by the place of their choices."""
        return tuple(
            d.choices.index(candidate[d.name]) if d.choices else candidate[d.name] for d in self.dimensions
        )

    def policy(self, candidate: Mapping[str, Any]) -> Policy:
        """The policy that a candidate stands for."""
        chosen = next(iter(self.policies.values()))
        if "policy" in candidate:
            chosen = self.policies[candidate["policy"]]
        if "queue" in candidate and candidate["queue"] != chosen.queue:
            chosen = replace(chosen, queue=candidate["queue"], queue_params={})
        numbers = {k: v for k, v in candidate.items() if k not in RESERVED and not k.startswith(WEIGHT)}
        return chosen.with_params(**numbers) if numbers else chosen


def read_space(
    config: Mapping[str, Any], policy: Policy, *, tenants: Sequence[str] = (), estimator: str = "median"
) -> Space:
    """A space from a config. `policy` is what is tuned, `tenants` are the workload's."""
    if not config:
        raise InputError(
            "tuning.space is empty; name at least one parameter, such as alpha: {low: 0, high: 1}"
        )
    dimensions: list[Dimension] = []
    for name, spec in config.items():
        if name == "weights":
            dimensions += _weights(spec, tenants)
        else:
            dimensions.append(_dimension(str(name), spec, f"tuning.space.{name}"))
    by_name = {d.name: d for d in dimensions}
    for name in ("queue", "policy"):
        if name in by_name and not all(isinstance(c, str) for c in by_name[name].choices or (1,)):
            raise InputError(f"tuning.space.{name} must be a list of names, got {config[name]!r}")
    if "window" in by_name:
        _check_window(by_name["window"], estimator)
    policies = {policy.name: policy}
    if "policy" in by_name:
        policies = {
            name: policy if name == policy.name else load_policy(name) for name in by_name["policy"].choices
        }
    space = Space(tuple(dimensions), policies)
    _check_parameters(space, by_name)
    return space


def _dimension(name: str, spec: Any, where: str) -> Dimension:
    whole = name == "window"
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        if not spec or not all(isinstance(c, str | int | float) and not isinstance(c, bool) for c in spec):
            raise InputError(f"{where} must list at least one name or number, got {list(spec)!r}")
        if len(set(spec)) < len(spec):
            raise InputError(f"{where}={list(spec)!r} names something twice")
        return Dimension(name, choices=tuple(spec), whole=whole)
    if not isinstance(spec, Mapping):
        raise InputError(f"{where}={spec!r} must be a range, {{low: 0.0, high: 1.0}}, or a list of choices")
    for key in spec:
        if key not in _RANGE:
            raise InputError(f"{where}.{key} is unknown (a range has: {', '.join(_RANGE)})")
    numbers = {}
    for key in ("low", "high", "step"):
        value = spec.get(key)
        if value is None and key == "step":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{where}.{key}={value} must be a finite number")
        if whole and value != int(value):
            raise InputError(f"{where}.{key}={value} must be a whole number")
        numbers[key] = float(value)
    log = spec.get("log", False)
    if not isinstance(log, bool):
        raise InputError(f"{where}.log={log} must be true or false")
    if numbers["low"] > numbers["high"]:
        raise InputError(f"{where}: low={numbers['low']:g} is above high={numbers['high']:g}")
    if "step" in numbers and not numbers["step"] > 0:
        raise InputError(f"{where}.step={numbers['step']:g} must be above 0")
    if log and "step" in numbers:
        raise InputError(f"{where} has both step and log; give one of the two")
    if log and not numbers["low"] > 0:
        raise InputError(f"{where}.low={numbers['low']:g} must be above 0 on a logarithmic scale")
    return Dimension(name, numbers["low"], numbers["high"], numbers.get("step"), log, whole)


def _weights(spec: Any, tenants: Sequence[str]) -> list[Dimension]:
    if not isinstance(spec, Mapping) or not spec:
        raise InputError(f"tuning.space.weights={spec!r} must map tenants to ranges")
    found = []
    for tenant, range_ in spec.items():
        where = f"tuning.space.weights.{tenant}"
        if tenant not in tenants:
            raise InputError(f"{where}: the workload has no such tenant (its tenants: {', '.join(tenants)})")
        dimension = _dimension(WEIGHT + str(tenant), range_, where)
        if not dimension.numeric or min(dimension.choices or (dimension.low,)) <= 0:
            raise InputError(f"{where} must hold numbers above 0")
        found.append(dimension)
    return found


def _check_window(window: Dimension, estimator: str) -> None:
    smallest = min(window.choices or (window.low,), key=lambda c: c if not isinstance(c, str) else -1)
    if not window.numeric or smallest < 1:
        raise InputError("tuning.space.window must hold whole numbers of at least 1 call")
    if estimator != "history":
        raise InputError(
            f"tuning.space.window needs estimator=history (it is {estimator}: that one looks at no window)"
        )


def _check_parameters(space: Space, by_name: Mapping[str, Dimension]) -> None:
    """Every combination of policy and queue must take every parameter that is varied."""
    parameters = [n for n in by_name if n not in RESERVED and not n.startswith(WEIGHT)]
    for name in parameters:
        if not by_name[name].numeric:
            raise InputError(f"tuning.space.{name} must hold numbers")
    queues = by_name["queue"].choices if "queue" in by_name else (None,)
    for choice in space.policies:
        for queue in queues:
            chosen = {"policy": choice} if "policy" in by_name else {}
            tried = space.policy(chosen | ({"queue": queue} if queue else {}))
            takes = [*tried.dispatch_rule.defaults, *tried.queue_rule.defaults]
            for name in parameters:
                if name not in takes:
                    raise InputError(
                        f"tuning.space.{name}: {tried.dispatch} + {tried.queue} of policy {tried.name} takes no such"
                        f" parameter (it takes: {', '.join(takes) or 'none'}; besides: {', '.join(RESERVED)})"
                    )
