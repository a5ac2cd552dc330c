"""The checks of the test kit, one function each: it returns what it has seen, or raises `Failed`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hexrepro.compiled import njit
from hexrepro.errors import InputError
from hexrepro.scheduling.policy import Policy, load_policy, rule_at
from hexrepro.scheduling.rules import Rule
from hexrepro.testing import runs, starvation
from hexrepro.testing.decisions import (
    LATER,
    Decision,
    NoAnswer,
    ask,
    ask_python,
    decisions,
    describe,
    draw_decision,
    relabelled,
    rules_of,
    smallest,
)
from hexrepro.testing.runs import CASES, Case, cases

DECISIONS = 200
SIZES = (4, 256)  # instances at which a decision is timed
MOST_S = 5e-3  # the paper's bound on the scheduler's cost of a request, as a summary of it says
LABELS = 20  # crowds of equal instances that are relabelled
GRID = 12  # draws in each direction, with which each crowd is asked: whole shares for 2, 3 and 4 instances
PREFERS = 0.25  # share of them in which a label may decide: ties, and rules that draw at random


@dataclass(frozen=True)
class Finding:
    """One check's answer: whether it passed, and in a line what is wrong or what was seen."""

    check: str
    passed: bool
    text: str


# ---- a policy from what the user names -----------------------------------------------------------------------------------


def policy_from(spec: str | Path | Policy) -> Policy:
    """A policy by name, YAML file or `Policy`; or from one rule, with the plainest partner."""
    if isinstance(spec, Policy) or ":" not in str(spec):
        return load_policy(spec)
    kind, rule = rule_at(str(spec))
    pair = {"dispatch": "round_robin", "queue": "fcfs"} | {kind: str(spec)}
    return Policy(rule.name, **pair)


# ---- checks on single decisions ------------------------------------------------------------------------------------------


def values(policy: Policy, seed: int) -> str:
    """The rules answer with an instance that there is, and with a queue key that is a finite number."""
    for kind, rule, params in rules_of(policy):

        def bad(at: Decision, kind=kind, rule=rule, params=params) -> bool:
            answer = ask(rule, at.copy(), params.copy(), kind)
            return not (0 <= answer < len(at.instances) if kind == "dispatch" else np.isfinite(answer))

        for at in decisions(seed, DECISIONS):
            if bad(at):
                at = smallest(at, bad)
                answer = ask(rule, at.copy(), params.copy(), kind)
                wanted = f"0 to {len(at.instances) - 1}" if kind == "dispatch" else "a finite number"
                raise Failed(
                    f"{kind} rule {rule.name} answers {answer:g} instead of {wanted}: {describe(at)}"
                )
    return f"on {DECISIONS} drawn moments"


def agreement(policy: Policy, seed: int) -> str:
    """The compiled rules decide as their Python source does: no reading beyond an array, no overflow, no endless loop."""
    for _, rule, _ in rules_of(policy):
        rule.__wrapper_address__()  # compile both before Python tries them: what does not compile has that said first
    notes = []
    for kind, rule, params in rules_of(policy):
        differ: list[Decision] = []
        for at in decisions(seed, DECISIONS):
            try:
                expected = ask_python(rule, at.copy(), params.copy(), kind)
            except (IndexError, NoAnswer) as error:
                at = smallest(at, _raises(type(error), rule, params, kind))
                fault = "reads beyond the end of an array" if isinstance(error, IndexError) else str(error)
                raise Failed(f"{kind} rule {rule.name} {fault}: {describe(at)}") from None
            except Exception as error:  # what only compiled code can run, such as a division by zero
                notes.append(f"{rule.name} is not comparable in Python ({type(error).__name__})")
                break
            if not np.array_equal(ask(rule, at.copy(), params.copy(), kind), expected, equal_nan=True):
                differ.append(at)
        if len(differ) > 1:  # one may be a tie that rounding decides
            at = differ[0]
            raise Failed(
                f"{kind} rule {rule.name} answers {ask(rule, at.copy(), params.copy(), kind):g} compiled and"
                f" {ask_python(rule, at.copy(), params.copy(), kind):g} in Python, on {len(differ)} of {DECISIONS} moments"
            )
    return "; ".join(dict.fromkeys(notes)) or f"on {DECISIONS} drawn moments"


def _raises(kind_of_error: type, rule: Rule, params: np.ndarray, kind: str) -> Callable[[Decision], bool]:
    def raises(at: Decision) -> bool:
        try:
            ask_python(rule, at.copy(), params.copy(), kind)
        except Exception as error:  # a smaller example that fails in another way is another example
            return isinstance(error, kind_of_error)
        return False

    return raises


def determinism(policy: Policy, seed: int) -> str:
    """The same question has the same answer, asking changes nothing, and equal runs are equal to the bit."""
    for kind, rule, params in rules_of(policy):

        def answers(at: Decision, given: np.ndarray, kind=kind, rule=rule) -> set[float]:
            return {float(ask(rule, at, given, kind)) for _ in range(8)}

        def undecided(at: Decision, params=params, answers=answers) -> bool:
            return len(answers(at.copy(), params.copy())) > 1

        for at in decisions(seed, DECISIONS):
            asked, given = at.copy(), params.copy()
            if len(found := answers(asked, given)) > 1:
                at = smallest(at, undecided)
                raise Failed(
                    f"{kind} rule {rule.name} answers one question with {_or(found)}: {describe(at)}"
                )
            if not np.array_equal(given, params):
                raise Failed(
                    f"{kind} rule {rule.name} writes into its parameters, and so into later decisions"
                )
            if asked.bytes() != at.bytes():
                raise Failed(f"{kind} rule {rule.name} changes what it looks at: a call or an instance")
    for case in cases(seed, 12):
        if not runs.same(*_twice(policy, case)):
            case = runs.smallest(case, lambda c: not runs.same(*_twice(policy, c)))
            raise Failed(f"equal runs differ: {case.describe()}")
    return f"on {DECISIONS} drawn moments and in 12 runs, each eight times in two threads"


def _twice(policy: Policy, case: Case):
    return tuple(runs.run(policy, case, copies=4, workers=2) for _ in range(2))


def _or(answers: set[float]) -> str:
    return " or ".join(f"{a:g}" for a in sorted(answers)[:3])


def symmetry(policy: Policy, seed: int) -> str:
    """Equal instances with other labels are chosen as before, ties aside: no label is preferred.

    Each crowd of instances is asked with many sequence numbers and draws, so that a rule that goes by these (round robin, a
    random choice) is judged by how often it takes each instance.
    """
    rng, preferred = np.random.default_rng(seed), []
    rule, params = policy.dispatch_rule, policy.dispatch_vector
    for at in decisions(seed, LABELS, most=4, equal=True):
        count = len(at.instances)
        order = np.roll(np.arange(count), 1 + int(rng.integers(0, count - 1)))
        draws = (np.stack(np.meshgrid(*[np.arange(GRID)] * 2), -1).reshape(-1, 2) + 0.5) / GRID
        before, after = np.zeros(count), np.zeros(count)
        for sequence, draw in enumerate(draws):
            for one, counts, place in ((at, before, np.arange(count)), (relabelled(at, order), after, order)):
                asked = one.copy()
                asked.call["sequence"], asked.call["draw"] = sequence, draw
                counts[place[int(ask(rule, asked, params.copy(), "dispatch"))]] += 1
        if np.abs(before - after).max() > 0.1 * len(draws):
            preferred.append((order, before / len(draws), after / len(draws)))
    if len(preferred) > PREFERS * LABELS:
        order, before, after = preferred[0]
        raise Failed(
            f"in {len(preferred)} of {LABELS} crowds of equal instances it matters which is which, as in one of {len(order)}:"
            f" they are chosen in shares of {_shares(before)}, and of {_shares(after)} when instance {order[0]} is called 0"
        )
    return f"labels decide in {len(preferred)} of {LABELS} crowds of equal instances, at ties"


def _shares(counts: np.ndarray) -> str:
    return " : ".join(f"{share:.2g}" for share in counts)


# ---- checks on whole runs ------------------------------------------------------------------------------------------------


def oracle_boundary(policy: Policy, seed: int) -> str:
    """Decisions rest on what is known: not on fields that get their value later, nor on true lengths of unfinished calls."""
    rule, params = policy.dispatch_rule, policy.dispatch_vector
    for at in decisions(seed, DECISIONS):
        for name in LATER:
            other = at.copy()
            other.call[name] = (at.call[name] + 1) % max(len(at.instances), 2)
            if ask(rule, at.copy(), params.copy(), "dispatch") != ask(rule, other, params.copy(), "dispatch"):
                raise Failed(
                    f"dispatch rule {rule.name} reads call.{name}, which is set only after it has answered"
                )

    def looks(case: Case) -> bool:
        return runs.sees_the_future(policy, case, seed) is not None

    for case in cases(seed):
        if looks(case):
            case = runs.smallest(case, looks)
            raise Failed(f"{runs.sees_the_future(policy, case, seed)}: {case.describe()}")
    return f"in {CASES} drawn runs with other true lengths"


def _of_runs(wrong: Callable[[Case, object], str | None]) -> Callable[[Policy, int], str]:
    def check(policy: Policy, seed: int) -> str:
        def fails(case: Case) -> str | None:
            return wrong(case, runs.run(policy, case).run(0))

        for case in cases(seed):
            if fails(case):
                case = runs.smallest(case, lambda c: fails(c) is not None)
                raise Failed(f"{fails(case)}: {case.describe()}")
        return f"in {CASES} drawn runs"

    check.__doc__ = wrong.__doc__
    return check


def no_starvation(policy: Policy, seed: int) -> str:
    """Under a load that the cluster bears no call waits for ever; the longest wait against first come, first served."""
    fcfs = Policy("fcfs", "least_outstanding_work", "fcfs")
    wrong, worst = starvation.starved(policy, fcfs)
    if wrong:
        raise Failed(wrong)
    return f"longest wait at most {worst:.1f} × that of first come, first served"


def cost(policy: Policy, seed: int) -> str:
    """What a decision costs, dispatch and queue together, at 4 and 256 instances."""
    found = []
    for count in SIZES:
        at = draw_decision(np.random.default_rng(seed), count)
        seconds = sum(_time_s(rule, at, params.copy(), kind) for kind, rule, params in rules_of(policy))
        if seconds > MOST_S:
            raise Failed(
                f"a decision takes {1e3 * seconds:.3g} ms at {count} instances, more than {1e3 * MOST_S:g} ms"
            )
        found.append(f"{1e6 * seconds:.3g} µs at {count} instances")
    return ", ".join(found)


def _time_s(rule: Rule, at: Decision, params: np.ndarray, kind: str) -> float:
    """Seconds of one answer, of so many in a row that the least time of three tries can be trusted."""
    ask_often = _dispatch_often if kind == "dispatch" else _queue_often
    given = (at.call[0], at.t_comp_s, at.instances, params) if kind == "dispatch" else (at.call[0], params)
    ask_often(1, rule, *given)  # compiled
    for times in (4**n for n in range(1, 11)):
        tries = []
        for _ in range(3):
            start = time.perf_counter()
            ask_often(times, rule, *given)
            tries.append(time.perf_counter() - start)
        if min(tries) > 2e-3:
            break
    return min(tries) / times


@njit
def _dispatch_often(times, rule, call, t_comp_s, instances, params):
    total = 0
    for i in range(times):
        call.sequence = i
        total += rule(call, t_comp_s, instances, params)
    return total


@njit
def _queue_often(times, rule, call, params):
    total = 0.0
    for i in range(times):
        call.sequence = i
        total += rule(call, params)
    return total


# ---- the kit -------------------------------------------------------------------------------------------------------------


class Failed(AssertionError):
    """A policy does not hold to a check; the message says in which smallest example."""


CHECKS: dict[str, Callable[[Policy, int], str]] = {
    # first what could crash the process: Python looks at the rules before compiled code runs them
    "agreement": agreement,
    "values": values,
    "determinism": determinism,
    "oracle boundary": oracle_boundary,
    "symmetry": symmetry,
    "conservation": _of_runs(runs.lost_or_doubled),
    "work conservation": _of_runs(runs.idle_with_work),
    "no starvation": no_starvation,
    "cost": cost,
}


def check_policy(policy: str | Path | Policy, check: str, *, seed: int = 0) -> str:
    """Try one check on a policy. Raises `Failed`, which pytest shows as a failed assertion; returns what was seen."""
    if check not in CHECKS:
        raise InputError(f"check {check!r} is unknown (one of: {', '.join(CHECKS)})")
    try:
        return CHECKS[check](policy_from(policy), seed)
    except InputError as error:  # the simulator refuses the policy's answer
        raise Failed(str(error)) from None


def findings(policy: str | Path | Policy, *, seed: int = 0, only: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Every check (or those named), one after the other. After a failure of the first two, on which the others rest, these
    are left out."""
    policy = policy_from(policy)
    for name in only or CHECKS:
        try:
            yield Finding(name, True, check_policy(policy, name, seed=seed))
        except Failed as failure:
            yield Finding(name, False, str(failure))
            if name in ("agreement", "values"):
                return
