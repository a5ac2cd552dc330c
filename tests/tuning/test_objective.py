"""Each objective on two runs of four queries, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hexrepro.errors import InputError
from hexrepro.tuning.objective import NAMES, objective

# run 0: latencies 10, 20, 30, 40 s, done 40 s after the first arrival; run 1: all 10 s, the last arrives at 10 s
ARRIVAL_S = np.array([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 10.0]])
LATENCY_S = np.array([[10.0, 20.0, 30.0, 40.0], [10.0, 10.0, 10.0, 10.0]])
BASE_SLO_S = np.array([10.0, 10.0, 5.0, 20.0])  # normalised: 1, 2, 6, 2 and 1, 1, 2, 0.5

BY_HAND = {
    "p95": ([38.5, 10.0], False),  # at place 0.95 * 3 = 2.85: 30 + 0.85 * 10
    "p99": ([39.7, 10.0], False),
    "mean": ([25.0, 10.0], False),
    "scale_at_95": ([6.0, 2.0], False),
    "scale_at_99": ([6.0, 2.0], False),
    "throughput": ([4 / 40, 4 / 20], True),
    "goodput": ([3 / 40, 4 / 20], True),  # at SLO scale 2
    "goodput@1": ([1 / 40, 3 / 20], True),
    "attainment": ([0.75, 1.0], True),
    "attainment@1.5": ([0.25, 0.75], True),
}


@pytest.mark.parametrize(("name", "by_hand", "maximise"), [(k, *v) for k, v in BY_HAND.items()])
def test_by_hand(name, by_hand, maximise):
    wanted = objective(name, slo_scale=2.0)
    values = wanted.values(ARRIVAL_S, ARRIVAL_S + LATENCY_S, BASE_SLO_S)
    np.testing.assert_allclose(values, by_hand)
    assert wanted.maximise == maximise
    assert wanted.direction == ("maximize" if maximise else "minimize")
    np.testing.assert_array_equal(wanted.cost(values), -values if maximise else values)


def test_all_are_worked_by_hand():
    assert {name.partition("@")[0] for name in BY_HAND} == set(NAMES)


@pytest.mark.parametrize(
    "name", ["p96", "p95@3", "attainment@", "attainment@0", "goodput@fast", "goodput@inf", ""]
)
def test_unknown_ones_are_refused(name):
    with pytest.raises(InputError, match=r"^objective "):
        objective(name)
