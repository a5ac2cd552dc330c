"""Two workers on one core get half the work done each; what cannot run is a mistake."""

from __future__ import annotations

import os

import pytest

from hexrepro.errors import InputError
from hexrepro.validation.core_sharing import slowdown

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")


def test_one_core_given_twice_is_shared() -> None:
    core = min(os.sched_getaffinity(0))
    assert slowdown([core, core], seconds=0.4) > 1.4  # 2 but for who else runs there


def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"cores \[100000\]"):
        slowdown([100_000], seconds=0.1)
