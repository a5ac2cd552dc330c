"""Making an example that fails a check small, whatever kind of example it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def shrunk(example: T, simpler: Callable[[T], Iterable[T]], fails: Callable[[T], object]) -> T:
    """The example after one simplification after the other, the first of `simpler(example)` that still `fails` each time."""
    while True:
        smaller = next((one for one in simpler(example) if fails(one)), None)
        if smaller is None:
            return example
        example = smaller
