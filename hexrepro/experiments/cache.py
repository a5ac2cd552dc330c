"""Finished cells on disk, found again by what went into them.

A cell's key is a hash of everything that decides its result: the workload's arrays, the cluster's numbers, the policy,
the arrivals, the options, and the code (every source file of the packages that take part). An entry appears under its
name in one step once it is complete, so an interrupted run leaves either a whole entry or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np

from hexrepro.compiled import cache_root, source_digest
from hexrepro.errors import InputError

LIMIT_BYTES = 4 * 2**30


@cache
def code_version() -> str:
    """What of the code decides a cell's result: the simulator's sources, the recipe of a cell, and the compiler."""
    recipe = hashlib.sha256(Path(__file__).with_name("cells.py").read_bytes()).hexdigest()
    return f"{source_digest()} {recipe} numba {numba.__version__} numpy {np.__version__}"


def fingerprint(*parts: Any) -> str:
    """A hash of values: numbers, texts, arrays, dataclasses, mappings and sequences of them."""
    digest = hashlib.sha256()
    for part in parts:
        _feed(digest, part)
    return digest.hexdigest()[:40]


def _feed(digest, value: Any) -> None:
    if isinstance(value, np.ndarray):
        digest.update(
            f"array {value.dtype.str} {value.shape}\0".encode() + np.ascontiguousarray(value).tobytes()
        )
    elif is_dataclass(value) and not isinstance(value, type):
        digest.update(f"{type(value).__name__}(".encode())
        for field in fields(value):
            digest.update(field.name.encode() + b"=")
            _feed(digest, getattr(value, field.name))
        digest.update(b")")
    elif isinstance(value, Mapping):
        digest.update(b"{")
        for key in sorted(value):
            digest.update(str(key).encode() + b":")
            _feed(digest, value[key])
        digest.update(b"}")
    elif isinstance(value, list | tuple):
        digest.update(b"[")
        for item in value:
            _feed(digest, item)
        digest.update(b"]")
    elif value is None or isinstance(value, str | int | float | bool | np.generic):
        digest.update(f"{type(value).__name__} {value!r}\0".encode())
    else:
        raise TypeError(f"cannot take a fingerprint of {type(value).__name__}")


def check_cache_dir() -> Path:
    """The directory of the cells, made if need be; InputError when it cannot be written."""
    directory = cache_root().expanduser() / "cells"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        raise InputError(
            f"cannot write the cache directory {directory}: {error.strerror}; HEXREPRO_CACHE=DIR chooses another"
        ) from error


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file under another name, then give it its own in one step."""
    part = path.with_name(
        f"{path.name}.{uuid.uuid4().hex}.part"
    )  # machines that share the directory share process ids
    try:
        write(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def prune(directory: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Forget the entries that were not used for longest until the cache is within its limit."""
    entries = []
    for file in directory.glob("*.parquet"):
        with contextlib.suppress(FileNotFoundError):  # another process prunes as well
            entries.append((file.stat().st_mtime, file.stat().st_size, file))
    entries.sort()
    total = sum(size for _, size, _ in entries)
    for _, size, file in entries:
        if total <= limit_bytes:
            break
        file.unlink(missing_ok=True)
        total -= size
