"""Policies that installed packages bring along: entry points of the group `hexrepro.policies`.

Only the packages' metadata is read here; a package is imported when its policy is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

GROUP = "hexrepro.policies"


def installed_policies() -> dict[str, list[EntryPoint]]:
    """Name -> the entry points that offer it: one, unless two packages took the same name."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, []).append(entry)
    return dict(sorted(found.items()))


def source_of(entries: Sequence[EntryPoint]) -> str:
    """'their-package 1.2' of the packages behind a name."""
    return " and ".join(f"{e.dist.name} {e.dist.version}" if e.dist else "a package" for e in entries)
