"""Long runs under a bounded load, to see whether a policy lets a call wait for ever.

Two kinds of load, which every fair policy bears:

- one instance with one slot and a small backlog that never gets longer, since calls come exactly as fast as they are served.
  The calls that come are all of one kind, and one call of each other kind is there from the start. A queue that prefers the
  newcomers for ever never serves it.
- several equal instances that are busy for 70 % of the time, if the calls are spread. A dispatch rule that does not spread
  them drowns an instance.

Whoever starves waits the longer the longer the load lasts. So each load is run for some time and for twice that: a longest
wait that grows with it, and lies far above first come, first served, is starvation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hexrepro.scheduling.policy import Policy
from hexrepro.testing.runs import Call, Case, Query, instance, run

STEP_S = 1 / 16  # of one token; so a call takes STEP_S * its output tokens
LASTS_S = 128.0
BACKLOG = 3
SHARE = 0.7
GROWS, ABOVE_FCFS, OF_THE_TIME = 1.5, 3.0, 0.2
KINDS = {  # name -> (stage, output tokens, tenant, SLO scale)
    "a short call with a tight SLO": (0, 2, 0, 0.5),
    "a short call with a loose SLO": (0, 2, 1, 2.0),
    "a long call with a tight SLO": (1, 16, 0, 0.5),
    "a long call with a loose SLO": (1, 16, 1, 2.0),
}


@dataclass(frozen=True)
class Load:
    """A load by name, the case that puts it on for `lasts_s` seconds, and the kind of each of its queries."""

    name: str
    lasts_s: float
    case: Case
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """The longest wait of a call (s), from its release to its start: whose it was, and how many later calls went first."""

    seconds: float
    kind: str
    released_s: float
    overtaken_by: int


def loads(lasts_s: float = LASTS_S) -> Iterator[Load]:
    """Every load, lasting so long."""
    for kind, (_, output, _, _) in KINDS.items():
        stream = [i * output * STEP_S for i in range(int(lasts_s / (output * STEP_S)))]
        kinds = [kind] * BACKLOG + [other for other in KINDS if other != kind] + [kind] * len(stream)
        times = [0.0] * (BACKLOG + len(KINDS) - 1) + stream
        yield _load(f"one busy instance, and only {kind.replace('a ', '', 1).replace('call', 'calls', 1)} come",
                    lasts_s, times, kinds, 1)  # fmt: skip
    for instances in (2, 3):
        mean_s = STEP_S * np.mean([output for _, output, _, _ in KINDS.values()])
        gap_s = mean_s / (SHARE * instances)
        times = [i * gap_s for i in range(int(lasts_s / gap_s))]
        kinds = np.random.default_rng(0).permutation(list(KINDS) * (1 + len(times) // len(KINDS)))[
            : len(times)
        ]
        yield _load(
            f"{instances} equal instances, {SHARE:.0%} busy if calls are spread",
            lasts_s,
            times,
            kinds,
            instances,
        )


def _load(name: str, lasts_s: float, times, kinds, instances: int) -> Load:
    queries = []
    for at, kind in zip(times, kinds, strict=True):
        stage, output, tenant, scale = KINDS[str(kind)]
        queries.append(Query(float(at), (Call(stage, 16, output),), tenant, scale))
    spec = instance(STEP_S, seqs=1)
    return Load(name, lasts_s, Case(tuple(queries), (spec,) * instances), tuple(str(k) for k in kinds))


def longest_wait(policy: Policy, load: Load) -> Wait:
    """Run a load under a policy."""
    result = run(policy, load.case).run(0)
    wait_s = result.admit_s - result.release_s
    worst = int(np.argmax(wait_s))
    later = (result.release_s > result.release_s[worst]) & (result.admit_s < result.admit_s[worst])
    there = result.instance == result.instance[worst]
    return Wait(
        float(wait_s[worst]), load.kinds[worst], float(result.release_s[worst]), int((later & there).sum())
    )


def starved(policy: Policy, fcfs: Policy) -> tuple[str | None, float]:
    """What is wrong (None: nothing), and how many times as long as under `fcfs` the longest wait is, in the worst load."""
    worst = 0.0
    for load, twice in zip(loads(LASTS_S), loads(2 * LASTS_S), strict=True):
        wait, long, usual = longest_wait(policy, load), longest_wait(policy, twice), longest_wait(fcfs, twice)
        usual_s = max(usual.seconds, STEP_S)
        worst = max(worst, long.seconds / usual_s)
        grows = long.seconds > GROWS * wait.seconds and long.seconds > ABOVE_FCFS * usual_s
        if grows and long.seconds > OF_THE_TIME * twice.lasts_s:
            return (
                f"{load.name}: {wait.kind} that comes at {wait.released_s:.3g} s waits {wait.seconds:.3g} s when the load"
                f" lasts {load.lasts_s:g} s and {long.seconds:.3g} s when it lasts {twice.lasts_s:g} s, and {long.overtaken_by}"
                f" later calls go first there; first come, first served: {usual.seconds:.3g} s"
            ), worst
    return None, worst
