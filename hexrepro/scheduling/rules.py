"""How a plain Python function becomes a rule that compiled code can call.

A rule reaches the simulator's kernel as a function pointer. So the kernel is compiled once for all rules, present and
future, and a new rule costs only its own compilation (milliseconds). The price is one indirect call, about 15 ns.
"""

import dis
import re
from collections.abc import Callable
from functools import cached_property
from types import FunctionType

import numba
import numba.experimental.function_type
import numpy as np
from numba import types
from numba.core.errors import NumbaError

from hexrepro.compiled import njit
from hexrepro.errors import InputError
from hexrepro.scheduling.sources import digest, reached
from hexrepro.scheduling.views import DISPATCH, QUEUE


class Rule(types.WrapperAddressProtocol):
    """A scheduling rule: callable from Python, and by address from compiled code.

    `defaults` names its parameters in the order in which `params` carries them.
    """

    def __init__(self, function: Callable, signature, defaults: dict[str, float]):
        function = getattr(function, "py_func", function)  # under @njit too
        if not isinstance(function, FunctionType):
            raise InputError(f"a rule must be a function, {function!r} is none")
        self.name, self.function, self.defaults = function.__name__, function, defaults
        self.params(**defaults)
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
        _refuse_what_gets_lost(self.function)
        options = {"nopython": True, "error_model": "numpy"}
        try:
            try:
                return numba.cfunc(self._signature, cache=True, **options)(self._stamped())
            except RuntimeError as error:  # a function typed at a prompt has no file beside which to cache
                if "cannot cache" not in str(error):
                    raise
                return numba.cfunc(self._signature, **options)(self.function)
        except (NumbaError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"rule {self.name} does not compile: {_reason(error)}") from error

    def _stamped(self) -> Callable:
        """The function under a name that changes with all it uses: Numba's cache would notice only edits of its own file."""
        if self.function.__module__.startswith("hexrepro."):
            return self.function  # its cache directory carries a digest of all sources
        f = self.function
        stamped = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
        stamped.__module__, stamped.__qualname__ = f.__module__, f"{f.__qualname__}_{digest(f)}"
        return stamped

    def __wrapper_address__(self) -> int:
        return self._entry.address

    def signature(self):
        return self._signature


def _refuse_what_gets_lost(function: FunctionType) -> None:
    """Called by address, a function can't raise: the error would be printed, and the answer be 0. Nor can it print."""
    for f in reached(function):
        if any(at.opname == "RAISE_VARARGS" for at in dis.get_instructions(f)):
            raise InputError(
                f"rule {function.__name__}: {f.__name__} raises an exception or asserts, which a compiled rule can't;"
                " let it answer with an instance or a key"
            )
        if "print" in f.__code__.co_names:
            raise InputError(
                f"rule {function.__name__}: {f.__name__} prints, which a compiled rule can't;"
                " ask its Python source instead: rule.function(call, ...)"
            )


def _reason(error: Exception) -> str:
    """What Numba has found wrong, and in which line, out of its many lines."""
    if isinstance(error, KeyError):
        return f"there is no field {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if re.match(r"\w+Error: ", line)]
    what = causes[-1] if causes else lines[min(lines[0].startswith("Failed in"), len(lines) - 1)]
    places = re.findall(r'File "[^"]*?([^"/]+\.py)", line (\d+):', str(error))
    return f"{what[:300]}{' ({}, line {})'.format(*places[-1]) if places else ''}"


@njit
def _ask(rule, *args):
    return rule(*args)


def dispatch_rule(*function, **defaults: float) -> Callable[[Callable], Rule]:
    """Make `f(call, t_comp_s, instances, params) -> index` a dispatch rule. `defaults`: its parameters."""
    if function:
        raise InputError("write @dispatch_rule(), with its parameters by name: @dispatch_rule(alpha=0.3)")
    return lambda function: Rule(function, DISPATCH, defaults)


def queue_rule(*function, fair: bool = False, **defaults: float) -> Callable[[Callable], Rule]:
    """Make `f(call, params) -> key` a queue rule: least key first, and constant while the call waits.

    `fair=True` puts the clients' virtual token counters (VTC) above the key; see `queues.vtc`.
    """
    if function:
        raise InputError("write @queue_rule(), with its parameters by name: @queue_rule(window_s=10.0)")

    def decorate(function: Callable) -> Rule:
        rule = Rule(function, QUEUE, defaults)
        rule.fair = fair
        return rule

    return decorate
