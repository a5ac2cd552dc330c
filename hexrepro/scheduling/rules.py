"""How a plain Python function becomes a rule that compiled code can call.

A rule reaches the simulator's kernel as a function pointer. So the kernel is compiled once for all rules, present and
future, and a new rule costs only its own compilation (milliseconds). The price is one indirect call, about 15 ns.
"""

from collections.abc import Callable
from functools import cached_property

import numba
import numba.experimental.function_type
import numpy as np
from numba import types
from numba.core.errors import NumbaError

from hexrepro.compiled import njit
from hexrepro.errors import InputError
from hexrepro.scheduling.views import DISPATCH, QUEUE


class Rule(types.WrapperAddressProtocol):
    """A scheduling rule: callable from Python, and by address from compiled code.

    `defaults` names its parameters in the order in which `params` carries them.
    """

    def __init__(self, function: Callable, signature, defaults: dict[str, float]):
        self.name, self.function, self.defaults = function.__name__, function, defaults
        self._signature = signature
        self.__doc__ = function.__doc__

    def __repr__(self) -> str:
        return f"<rule {self.name}({', '.join(f'{k}={v:g}' for k, v in self.defaults.items())})>"

    def params(self, **values: float) -> np.ndarray:
        """float64[len(defaults)]: the defaults, with `values` in their places."""
        for name, value in values.items():
            if name not in self.defaults:
                known = ", ".join(self.defaults) or "none"
                raise InputError(f"{self.name}: unknown parameter {name}={value!r} (it takes: {known})")
            if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
                raise InputError(f"{self.name}: {name} must be a finite number, got {value!r}")
        return np.array(list((self.defaults | values).values()), np.float64)

    def __call__(self, *args):
        """Ask the rule from Python (the gateway): the same machine code that the simulator runs."""
        return _ask(self, *args)

    @cached_property
    def _entry(self):
        options = {"nopython": True, "error_model": "numpy"}
        try:
            try:
                return numba.cfunc(self._signature, cache=True, **options)(self.function)
            except RuntimeError as error:  # a function typed at a prompt has no file beside which to cache
                if "cannot cache" not in str(error):
                    raise
                return numba.cfunc(self._signature, **options)(self.function)
        except (NumbaError, KeyError, TypeError, AttributeError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise InputError(f"rule {self.name} does not compile: {' '.join(lines[-3:])[:300]}") from error

    def __wrapper_address__(self) -> int:
        return self._entry.address

    def signature(self):
        return self._signature


@njit
def _ask(rule, *args):
    return rule(*args)


def dispatch_rule(**defaults: float) -> Callable[[Callable], Rule]:
    """Make `f(call, t_comp_s, instances, params) -> index` a dispatch rule. `defaults`: its parameters."""
    return lambda function: Rule(function, DISPATCH, defaults)


def queue_rule(fair: bool = False, **defaults: float) -> Callable[[Callable], Rule]:
    """Make `f(call, params) -> key` a queue rule: least key first, and constant while the call waits.

    `fair=True` puts the clients' virtual token counters (VTC) above the key; see `queues.vtc`.
    """

    def decorate(function: Callable) -> Rule:
        rule = Rule(function, QUEUE, defaults)
        rule.fair = fair
        return rule

    return decorate
