"""Numba as this package uses it: one decorator, and a disk cache that notices edits.

Numba's cache looks only at the file of the cached function, so a kernel that inlines a helper from another file keeps
running the old helper after an edit (numba issue 9483). Here the cache directory carries a digest of every source
file that can end up in compiled code: an edit anywhere gives a fresh directory.
"""

import hashlib
import os
import shutil
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent
ROOMS = ("workload", "cluster", "scheduling", "simulator")
# Of these rooms what no simulation runs: commands, readers of traces, makers of profiles. What they make (a workload, a
# cluster) goes into a cell's key by its content. So their sources decide no result, and an edit of them makes none stale.
ASIDE = {
    "workload": ("__main__", "draw", "formats", "show", "survey"),
    "cluster": (
        "__main__", "batches", "catalogue", "make_profiles", "own_profiles", "profile_files", "profile_parts", "published",
        "shapes", "silicon", "silicon_profiles",
    ),
    "scheduling": ("__main__",),
}  # fmt: skip


def cache_root() -> Path:
    """Where caches live: `$HEXREPRO_CACHE`, else the user's cache directory."""
    if root := os.environ.get("HEXREPRO_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hexrepro"


@cache
def source_digest() -> str:
    """A digest of the sources that decide a simulation's result; part of every cache key."""
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            if path.relative_to(PACKAGE / room).parts[0].removesuffix(".py") in ASIDE.get(room, ()):
                continue
            digest.update(path.relative_to(PACKAGE).as_posix().encode())
            digest.update(path.read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:16]


def _use_cache_directory() -> None:
    """Point Numba at this source version's directory; forget all but the newest few versions."""
    if "NUMBA_CACHE_DIR" in os.environ:  # the user's own choice wins
        return
    root = cache_root() / "numba"
    here = root / source_digest()
    try:
        here.mkdir(parents=True, exist_ok=True)
        os.utime(here)
        versions = sorted(root.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:  # a read-only home: Numba falls back to compiling in memory
        return
    for old in versions[4:]:
        shutil.rmtree(old, ignore_errors=True)
    numba.config.CACHE_DIR = str(here)


import numba  # noqa: E402

_use_cache_directory()


def njit(function=None, **options):
    """`numba.njit` without the GIL, with NumPy's division rules and with the disk cache."""
    options = {"cache": True, "nogil": True, "error_model": "numpy"} | options
    return numba.njit(**options) if function is None else numba.njit(**options)(function)


def kernel(function=None, **options):
    """`njit` for functions that only compiled code calls and that allocate nothing.

    No reference counting (its atomic increments, at every use of an array, cost more than the work itself) and no wrapper for
    calls from Python (unpacking a tuple of arrays is more code to compile than most functions).
    """
    return njit(function, **{"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True} | options)


def inlined(function):
    """A `kernel` that LLVM must inline: for hot functions with one caller, where handing over all those arrays would show."""
    return kernel(function, forceinline=True)
