"""Single decisions to try a rule on: drawn at random, asked of the compiled rule and of its Python source, and made small.

A decision is what a rule sees at one moment: the call, its estimated time on each
instance, and the instances.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType

import numpy as np

from hexrepro.cluster.latency import LatencyModel
from hexrepro.scheduling.estimates import budget_s
from hexrepro.scheduling.policy import Policy
from hexrepro.scheduling.rules import Rule
from hexrepro.scheduling.views import CALL, INSTANCE
from hexrepro.testing.shrinking import shrunk

STEPS = (
    100_000  # lines of Python after which a rule is taken to loop for ever; built-in ones need some hundreds
)
LATER = ("instance", "t_comp_s")  # fields of a call that only its queue rule may read
_KINDS = (  # seconds of a step: base, a prompt token, prompt token × context, a sequence, a KV token
    LatencyModel(0.020, 1.0e-4, 1e-9, 1e-4, 4e-8),
    LatencyModel(0.035, 3.0e-4, 3e-9, 1e-4, 7e-8),
    LatencyModel(0.055, 1.2e-3, 9e-9, 3e-4, 1e-7),
)


@dataclass(frozen=True, eq=False)
class Decision:
    """call: CALL[1]; t_comp_s: float64[M]; instances: INSTANCE[M]."""

    call: np.ndarray
    t_comp_s: np.ndarray
    instances: np.ndarray

    def copy(self) -> Decision:
        return Decision(self.call.copy(), self.t_comp_s.copy(), self.instances.copy())

    def bytes(self) -> tuple[bytes, ...]:
        return self.call.tobytes(), self.t_comp_s.tobytes(), self.instances.tobytes()


def draw_decision(rng: np.random.Generator, instances: int, *, equal: bool = False) -> Decision:
    """A plausible moment: some instances idle, some drowned; calls short and long, early and late for their SLO.

    `equal`: all instances are of one kind, and no two hold the same.
    """
    views = np.zeros(instances, INSTANCE)
    call = np.zeros(1, CALL)
    c = call[0]
    c["sequence"], c["query"] = rng.integers(0, 10_000, 2)
    c["tenant"], c["stage"] = rng.integers(0, 4, 2)
    c["input_tokens"] = int(10 ** rng.uniform(0, 4.2))
    c["cached_tokens"] = int(rng.choice([0.0, 0.5, 1.0]) * (c["input_tokens"] - 1))
    c["output_tokens"] = max(1.0, 10 ** rng.uniform(0, 3))
    c["arrival_s"] = rng.uniform(0, 1000)
    c["now_s"] = c["arrival_s"] + rng.choice([0.0, rng.uniform(0, 300)])
    c["slo_s"] = rng.uniform(1, 400)
    c["draw"] = rng.uniform(size=2)
    t_comp_s = np.empty(instances)
    for m, at in enumerate(views):
        kind = 0 if equal else int(rng.integers(0, len(_KINDS)))
        speed = _KINDS[kind]
        at["base_s"], at["prefill_token_s"], at["prefill_context_s"], at["sequence_s"], at["kv_token_s"] = (
            speed.coefficients
        )
        at["kind"], at["load_weight"], at["block_size"] = kind, 1.0 if equal else rng.choice([0.5, 1.0]), 16
        at["max_num_seqs"] = 256 if equal else rng.choice([1, 8, 256])
        at["max_num_batched_tokens"] = 2048
        at["kv_capacity_tokens"] = 400_000 if equal else rng.choice([20_000, 400_000])
        if not equal and rng.uniform() < 0.3:  # idle, as all are in the beginning
            at["dispatched_s"] = rng.choice([0.0, rng.uniform(0, 1e4)])
        else:
            _load(at, rng)
        t_comp_s[m] = speed.solo_latency_s(
            int(c["input_tokens"]), int(c["cached_tokens"]), float(c["output_tokens"]), 2048
        )
    c["stage_mean_s"] = t_comp_s.mean()
    c["remaining_s"] = rng.choice([0.0, rng.uniform(0, 200)])
    c["budget_s"] = budget_s(c["slo_s"], c["now_s"] - c["arrival_s"], c["stage_mean_s"], c["remaining_s"])
    c["instance"] = int(rng.integers(0, instances))
    c["t_comp_s"] = t_comp_s[c["instance"]]
    return Decision(call, t_comp_s, views)


def _load(at: np.void, rng: np.random.Generator) -> None:
    """Calls in the batch and in the queue of one instance; seconds and tokens that fit their number."""
    at["running"] = rng.integers(1, 60)
    at["waiting"] = rng.choice([0, rng.integers(1, 60)])
    calls = at["running"] + at["waiting"]
    at["waiting_s"] = at["waiting"] * rng.uniform(0.5, 20)
    at["outstanding_s"] = at["waiting_s"] + at["running"] * rng.uniform(0.5, 20)
    at["dispatched_s"] = at["outstanding_s"] + rng.uniform(0, 1e4)
    at["prefill_tokens"] = rng.uniform(0, 3000) * calls
    at["output_tokens"] = rng.uniform(1, 500) * calls
    at["kv_tokens"] = at["output_tokens"] + rng.uniform(1, 6000) * calls


def decisions(seed: int, count: int, *, most: int = 8, equal: bool = False) -> Iterator[Decision]:
    """`count` decisions on 1, 2, ... `most` instances, the small ones first."""
    return (at.copy() for at in _drawn(seed, count, most, equal))


@cache  # drawing takes longer than asking, and most checks ask the same
def _drawn(seed: int, count: int, most: int, equal: bool) -> list[Decision]:
    rng, least = np.random.default_rng(seed), 2 if equal else 1
    return [draw_decision(rng, max(least, 1 + i * most // count), equal=equal) for i in range(count)]


# ---- asking ------------------------------------------------------------------------------------------------------------


def ask(rule: Rule, at: Decision, params: np.ndarray, kind: str) -> float:
    """What the compiled rule answers: an instance, or a queue key."""
    if kind == "dispatch":
        return rule(at.call[0], at.t_comp_s, at.instances, params)
    return rule(at.call[0], params)


def ask_python(rule: Rule, at: Decision, params: np.ndarray, kind: str) -> float:
    """What the rule's source answers when Python runs it: an index beyond an array raises IndexError here, and a loop that does
    not end NoAnswer; compiled code would read what is no instance, or could not be stopped."""
    call, source = at.call.view(np.recarray)[0], in_python(rule.function)
    with np.errstate(all="ignore"), _counted_steps():
        if kind == "dispatch":
            return source(call, at.t_comp_s, at.instances.view(np.recarray), params)
        return source(call, params)


class NoAnswer(Exception):
    """A rule has not answered after so many lines of Python."""


def in_python(function: Callable, known: dict[int, FunctionType] | None = None) -> Callable:
    """The function with its compiled helpers as plain Python, so that Python sees what happens in them too."""
    known, f = {} if known is None else known, getattr(function, "py_func", function)
    if id(f) not in known:
        names = dict(f.__globals__)
        known[id(f)] = FunctionType(f.__code__, names, f.__name__, f.__defaults__, f.__closure__)
        for name in set(f.__code__.co_names) & set(names):
            if hasattr(names[name], "py_func"):
                names[name] = in_python(names[name], known)
    return known[id(f)]


@contextlib.contextmanager
def _counted_steps() -> Iterator[None]:
    left, before = STEPS, sys.gettrace()

    def count(frame, event, arg):
        nonlocal left
        left -= 1
        if left < 0:
            raise NoAnswer(f"has not answered after {STEPS} lines of Python")
        return count

    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def rules_of(policy: Policy) -> tuple[tuple[str, Rule, np.ndarray], ...]:
    """(kind, rule, parameters) of both rules."""
    return (
        ("dispatch", policy.dispatch_rule, policy.dispatch_vector),
        ("queue", policy.queue_rule, policy.queue_vector),
    )


# ---- making an example small -------------------------------------------------------------------------------------------

_PLAIN_CALL = np.zeros(1, CALL)
for _name, _value in dict(
    input_tokens=10, output_tokens=10.0, slo_s=100.0, stage_mean_s=1.0, budget_s=100.0, t_comp_s=1.0
).items():
    _PLAIN_CALL[_name] = _value
_PLAIN = np.zeros(1, INSTANCE)
for _name, _value in dict(
    base_s=1.0, load_weight=1.0, block_size=16, max_num_seqs=256, max_num_batched_tokens=2048, kv_capacity_tokens=400_000
).items():  # fmt: skip
    _PLAIN[_name] = _value


def smallest(at: Decision, fails: Callable[[Decision], bool]) -> Decision:
    """The decision with fewer instances and plain values, as long as `fails` holds of it."""
    return shrunk(at, _simpler, fails)


def _simpler(at: Decision) -> Iterator[Decision]:
    count = len(at.instances)
    for m in range(count if count > 1 else 0):
        yield Decision(at.call.copy(), np.delete(at.t_comp_s, m), np.delete(at.instances, m))
    for name in CALL.names:
        if np.any(at.call[name] != _PLAIN_CALL[name]):
            changed = at.copy()
            changed.call[name] = _PLAIN_CALL[name]
            yield changed
    for m in range(count):
        if at.t_comp_s[m] != 1.0:
            changed = at.copy()
            changed.t_comp_s[m] = 1.0
            yield changed
        for name in INSTANCE.names:
            if at.instances[name][m] != _PLAIN[name][0]:
                changed = at.copy()
                changed.instances[name][m] = _PLAIN[name][0]
                yield changed


def describe(at: Decision) -> str:
    """A decision in words: what of it is not plain."""
    call = [f"{n}={_text(at.call[n][0])}" for n in CALL.names if np.any(at.call[n] != _PLAIN_CALL[n])]
    parts = [f"{len(at.instances)} instance{'s' if len(at.instances) > 1 else ''}"]
    if call:
        parts.append(f"a call with {', '.join(call)}")
    for m in range(len(at.instances)):
        fields = [f"t_comp_s={_text(at.t_comp_s[m])}"] if at.t_comp_s[m] != 1.0 else []
        for name in INSTANCE.names:
            if at.instances[name][m] != _PLAIN[name][0]:
                fields.append(f"{name}={_text(at.instances[name][m])}")
        if fields:
            parts.append(f"instance {m} with {', '.join(fields)}")
    return "; ".join(parts)


def _text(value) -> str:
    return str([float(f"{v:.3g}") for v in value]) if np.ndim(value) else f"{value:.4g}"


def relabelled(at: Decision, order: np.ndarray) -> Decision:
    """The same moment with the instances in another order."""
    return replace(at, t_comp_s=at.t_comp_s[order], instances=at.instances[order])
