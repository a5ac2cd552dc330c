"""One decision: estimate the call everywhere, let the policy choose an instance, ask for the call's place in its queue.

The simulator and the coordinator of the live system both decide here; they differ only in who fills in the records.
"""

from typing import NamedTuple

import numpy as np

from hexrepro.compiled import inlined, kernel
from hexrepro.scheduling.draws import uniform
from hexrepro.scheduling.estimates import budget_s, solo_latency_s
from hexrepro.scheduling.views import CALL, INSTANCE

NOBODY, OUTSIDE = np.int64(-1), np.int64(-2)  # no instance takes calls; the rule chose one that is not there


class Desk(NamedTuple):
    """Memory of a decision, allocated once."""

    call: np.ndarray  # CALL[1], the call at hand
    t_comp_s: np.ndarray  # float64[M]
    kind_s: np.ndarray  # float64[M], t_comp by kind of instance
    open_at: np.ndarray  # int64[M], the instances that take calls, while some do not
    open_views: np.ndarray  # INSTANCE[M], their views
    open_s: np.ndarray  # float64[M], t_comp on them


def desk(instances: int) -> Desk:
    """Memory for decisions among so many instances."""
    return Desk(
        call=np.zeros(1, CALL),
        t_comp_s=np.zeros(instances),
        kind_s=np.zeros(instances),
        open_at=np.zeros(instances, np.int64),
        open_views=np.zeros(instances, INSTANCE),
        open_s=np.zeros(instances),
    )


@inlined
def decide(desk, views, is_open, stage_s, dispatch, params, queue, queue_params, seed):
    """Place the call that stands in desk.call[0]. Returns (instance, key), or (NOBODY or OUTSIDE, 0).

    Its budget, random numbers, instance and t_comp are left in the record. `is_open`: bool[M], the instances that take calls; a
    rule sees them as if there were no others. `stage_s`: float64[S, M], what a call of each stage takes everywhere, or
    float64[0, 0] to estimate it from the call's lengths.
    """
    call = desk.call[0]
    call.budget_s = budget_s(call.slo_s, call.now_s - call.arrival_s, call.stage_mean_s, call.remaining_s)
    call.draw[0] = uniform(seed, 2 * call.sequence)
    call.draw[1] = uniform(seed, 2 * call.sequence + 1)
    if len(stage_s) > 0:
        for m in range(len(views)):
            desk.t_comp_s[m] = stage_s[call.stage, m]
    else:
        estimate_everywhere(desk, views)
    count = 0
    for m in range(len(views)):
        count += np.int64(is_open[m])
    if count == 0:
        return NOBODY, 0.0
    if count == len(views):
        m = dispatch(call, desk.t_comp_s, views, params)
        if m < 0 or m >= count:
            return OUTSIDE, 0.0
    else:
        m = choose_among_open(desk, views, is_open, dispatch, params)
        if m < 0:
            return OUTSIDE, 0.0
    call.instance = m
    call.t_comp_s = desk.t_comp_s[m]
    return m, queue(call, queue_params)


@kernel
def estimate_everywhere(desk, views):
    """t_comp of the call on every instance; computed once a kind of instance."""
    call, kinds = desk.call[0], 0
    for m in range(len(views)):
        kind = views[m].kind
        if kind == kinds:  # kinds are numbered in order of their first instance
            desk.kind_s[kind] = solo_latency_s(
                views[m], float(call.input_tokens), float(call.cached_tokens), call.output_tokens
            )
            kinds += 1
        desk.t_comp_s[m] = desk.kind_s[kind]


@kernel
def choose_among_open(desk, views, is_open, dispatch, params):
    """Let the rule choose among the instances that take calls: the others are not there for it."""
    count = 0
    for m in range(len(views)):
        if is_open[m]:
            desk.open_at[count] = m
            desk.open_views[count] = views[m]
            desk.open_s[count] = desk.t_comp_s[m]
            count += 1
    chosen = dispatch(desk.call[0], desk.open_s[:count], desk.open_views[:count], params)
    return desk.open_at[chosen] if 0 <= chosen < count else OUTSIDE
