"""Whether the numbers of a settings class can be used."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any, get_type_hints

from hexrepro.errors import InputError


def check_numbers(of: Any, place: str, zero: Collection[str] = ()) -> None:
    """Refuse a dataclass instance whose `int` and `float` fields are not numbers of that kind, finite and above 0 (those named
    in `zero`: 0 or more). Other fields are passed over. `place`: what the message begins with. Raises InputError."""
    hints = get_type_hints(type(of))
    for f in fields(of):
        kind, value = hints[f.name], getattr(of, f.name)
        if kind not in (int, float):
            continue
        if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
            raise InputError(f"{place}: {f.name}={value!r} must be a {'whole ' if kind is int else ''}number")
        fine = value >= 0 if f.name in zero else value > 0  # neither is true of NaN
        if not fine or value == float("inf"):
            raise InputError(
                f"{place}: {f.name}={value!r} must be {'0 or more' if f.name in zero else 'above 0'}"
            )
