"""One decision in one compiled call: estimate the call everywhere, let the policy choose, ask for its queue key.

The same steps in the same order as the simulator's `_dispatch`, made of the same functions; only the hands that fill in the
records differ. From Python it costs about as much as calling one rule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hexrepro.compiled import njit
from hexrepro.scheduling.draws import uniform
from hexrepro.scheduling.estimates import budget_s, solo_latency_s
from hexrepro.scheduling.rules import Rule
from hexrepro.scheduling.views import CALL, DISPATCH, INSTANCE, QUEUE

NOBODY, OUTSIDE = -1, -2  # no instance takes calls; the rule chose one that is not there


def _rule_at(signature):
    """An intrinsic that makes a rule of the address of its machine code.

    Handing over the rule itself would do the same, but Numba looks at its type anew at each call, which takes longer than the
    whole decision.
    """
    kind = types.FunctionType(signature)

    @intrinsic
    def rule_at(_context, address):
        def make(context, builder, signature, args):
            rule = cgutils.create_struct_proxy(kind)(context, builder)
            pointer = context.get_value_type(types.voidptr)
            rule.c_addr = builder.inttoptr(args[0], pointer)
            rule.py_addr = rule.jit_addr = pointer(None)
            return rule._getvalue()

        return kind(types.int64), make

    return rule_at


_dispatch_rule_at, _queue_rule_at = _rule_at(DISPATCH), _rule_at(QUEUE)


def address(rule: Rule) -> int:
    """Where the rule's machine code lies; the rule must outlive its use."""
    return rule.__wrapper_address__()


class Scratch(NamedTuple):
    """Memory of a decision, allocated once."""

    call: np.ndarray  # CALL[1]
    t_comp_s: np.ndarray  # float64[M]
    kind_s: np.ndarray  # float64[M], t_comp by kind of instance
    open_at: np.ndarray  # int64[M], the instances that take calls
    open_views: np.ndarray  # INSTANCE[M]
    open_s: np.ndarray  # float64[M]


def scratch(instances: int) -> Scratch:
    """Memory for decisions among so many instances."""
    return Scratch(
        call=np.zeros(1, CALL),
        t_comp_s=np.zeros(instances),
        kind_s=np.zeros(instances),
        open_at=np.zeros(instances, np.int64),
        open_views=np.zeros(instances, INSTANCE),
        open_s=np.zeros(instances),
    )


@njit
def decide(memory, views, is_open, dispatch_at, params, queue_at, queue_params, seed):
    """Place the call that stands in memory.call[0]: its budget, instance, t_comp and key.

    Returns (instance, key); the budget and t_comp are left in the record. `is_open`: bool[M]. A rule sees the instances that
    take calls as if there were no others. `dispatch_at`, `queue_at`: the rules' addresses.
    """
    dispatch, queue = _dispatch_rule_at(dispatch_at), _queue_rule_at(queue_at)
    view = memory.call[0]
    view.budget_s = budget_s(view.slo_s, view.now_s - view.arrival_s, view.stage_mean_s, view.remaining_s)
    view.draw[0] = uniform(seed, 2 * view.sequence)
    view.draw[1] = uniform(seed, 2 * view.sequence + 1)
    kinds = 0
    count = 0
    for m in range(len(views)):
        kind = views[m].kind
        if kind == kinds:  # kinds are numbered in order of their first instance
            memory.kind_s[kind] = solo_latency_s(
                views[m], float(view.input_tokens), float(view.cached_tokens), view.output_tokens
            )
            kinds += 1
        memory.t_comp_s[m] = memory.kind_s[kind]
        count += np.int64(is_open[m])
    if count == 0:
        return NOBODY, 0.0
    if count == len(views):
        m = dispatch(view, memory.t_comp_s, views, params)
        if m < 0 or m >= count:
            return OUTSIDE, 0.0
    else:
        count = 0
        for i in range(len(views)):
            if is_open[i]:
                memory.open_at[count] = i
                memory.open_views[count] = views[i]
                memory.open_s[count] = memory.t_comp_s[i]
                count += 1
        chosen = dispatch(view, memory.open_s[:count], memory.open_views[:count], params)
        if chosen < 0 or chosen >= count:
            return OUTSIDE, 0.0
        m = memory.open_at[chosen]
    view.instance = m
    view.t_comp_s = memory.t_comp_s[m]
    return m, queue(view, queue_params)
