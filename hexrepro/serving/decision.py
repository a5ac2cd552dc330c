"""The decision of `hexrepro/scheduling/decision.py` as one call from Python, which costs about as much as calling one rule."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hexrepro.compiled import njit
from hexrepro.scheduling import decision
from hexrepro.scheduling.decision import NOBODY, OUTSIDE, desk
from hexrepro.scheduling.rules import Rule
from hexrepro.scheduling.views import DISPATCH, QUEUE

__all__ = ["NOBODY", "OUTSIDE", "address", "decide", "desk"]

_FROM_LENGTHS = np.zeros((0, 0))  # t_comp is estimated from the call's lengths


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


@njit
def decide(desk, views, is_open, dispatch_at, params, queue_at, queue_params, seed):
    """`decision.decide`, the rules given by their addresses."""
    return decision.decide(
        desk, views, is_open, _FROM_LENGTHS, _dispatch_rule_at(dispatch_at), params, _queue_rule_at(queue_at),
        queue_params, seed,
    )  # fmt: skip
