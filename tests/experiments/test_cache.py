"""Fingerprints and files of the cell cache."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest

from hexrepro.experiments.cache import fingerprint, prune, write_atomically


@dataclass(frozen=True)
class Pair:
    a: object
    b: object


def test_equal_values_have_equal_fingerprints():
    one = fingerprint(Pair(np.arange(3.0), {"x": 1, "y": (2.0, None)}), "text")
    assert one == fingerprint(Pair(np.arange(3.0), {"y": (2.0, None), "x": 1}), "text")


@pytest.mark.parametrize(
    "other",
    [Pair(np.arange(3), 1), Pair(np.arange(3.0)[None], 1), Pair(np.arange(3.0), 1.0), Pair(np.arange(3.0), True),
     Pair(np.arange(3.0), "1"), Pair(np.arange(3.0), [1]), Pair(1, np.arange(3.0))],
)  # fmt: skip
def test_different_values_have_different_fingerprints(other):
    assert fingerprint(other) != fingerprint(Pair(np.arange(3.0), 1))


def test_values_that_have_no_fingerprint_are_refused():
    with pytest.raises(TypeError, match="set"):
        fingerprint({1, 2})


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    def half(part):
        part.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", half)
    assert list(tmp_path.iterdir()) == []
    write_atomically(tmp_path / "file", lambda part: part.write_text("whole"))
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_prune_forgets_what_was_not_used_for_longest(tmp_path):
    for age, name in enumerate("abcd"):
        file = tmp_path / f"{name}.parquet"
        file.write_bytes(bytes(100))
        os.utime(file, (1000 - age, 1000 - age))
    (tmp_path / "other.txt").write_bytes(bytes(1000))
    prune(tmp_path, limit_bytes=250)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.parquet", "b.parquet", "other.txt"]
