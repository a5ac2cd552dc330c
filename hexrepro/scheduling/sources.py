"""What a rule is made of: its own source file, and the files and constants that it reaches from there.

Compiled code and simulated results are cached. Numba looks only at the file of a rule itself, so a helper in the file next
door could be edited and the old one go on running; this digest changes with either.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CONSTANTS = (bool, int, float, complex, str, bytes, tuple, type(None))
_NOT_FOLLOWED = ("hexrepro", "numpy", "numba", "math", "cmath", "operator", "builtins")
"""The packages of libraries, which change with their version, and this one, whose sources have a digest of their own."""


def digest(function: Callable) -> str:
    """16 hex digits for a function and all that it uses."""
    files, constants = set(), []
    for f in reached(function):
        files.add(f.__code__.co_filename)
        for name, value in _used(f):
            if isinstance(value, _CONSTANTS) or hasattr(value, "tobytes"):
                raw = value.tobytes() if hasattr(value, "tobytes") else value
                constants.append((f"{f.__module__}.{f.__qualname__} {name}", repr(raw)))
    result = hashlib.sha256()
    for file in sorted(files):
        path = Path(file)  # code typed at a prompt has none
        result.update(file.encode() + b"\0" + (path.read_bytes() if path.is_file() else b""))
    result.update(repr(sorted(constants)).encode())
    return result.hexdigest()[:16]


def reached(function: Callable) -> list[types.FunctionType]:
    """A function, and the user's own that it calls, those that these call, and so on."""
    found: dict[int, types.FunctionType] = {}
    waiting: list[Any] = [function]
    while waiting:
        f = waiting.pop()
        f = getattr(f, "py_func", f)  # what @njit wraps
        f = getattr(f, "function", f)  # what a rule wraps
        if not isinstance(f, types.FunctionType) or id(f) in found:
            continue
        if found and str(f.__module__).split(".")[0] in _NOT_FOLLOWED:
            continue
        found[id(f)] = f
        waiting += (value for _, value in _used(f))
    return list(found.values())


def _used(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Names and values of the globals, closure cells and module attributes that a function may use."""
    names = set(_names(function.__code__))
    for name in names & set(function.__globals__):
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] not in _NOT_FOLLOWED:
            yield from ((f"{name}.{at}", getattr(value, at)) for at in names if hasattr(value, at))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
