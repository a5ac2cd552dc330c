"""How sure and how flat: against a case worked by hand, and coverage on a known truth."""

from __future__ import annotations

import numpy as np
import pytest

from hexrepro.tuning import choice


def test_the_interval_of_the_best_covers_the_truth():
    """Quadratic costs with a noise common to all candidates, which must drop out, and one that tilts them.

    The best of a mean over n seeds is then 0.4 - mean(tilt) / 2: normal around 0.4, so 95 % of the intervals must hold 0.4.
    """
    rng, values = np.random.default_rng(7), np.linspace(0.0, 1.0, 101)
    covered = widths = 0.0
    searches, seeds = 200, 20
    for _ in range(searches):
        common = rng.normal(0.0, 50.0, (1, seeds))
        tilt = rng.normal(0.0, 0.5, (1, seeds))
        costs = (values[:, None] - 0.4) ** 2 + common + tilt * values[:, None]
        interval = choice.best_interval(costs, values, resamples=999)
        covered += interval.low <= 0.4 <= interval.high
        widths += interval.high - interval.low
    assert 0.92 <= covered / searches <= 0.99
    theory = 2 * 2.09 * 0.5 / 2 / np.sqrt(seeds)  # Student's t with 19 degrees of freedom
    assert widths / searches == pytest.approx(theory, rel=0.12)


def test_no_noise_no_width():
    costs = np.tile(np.array([[3.0], [1.0], [2.0]]), (1, 9))
    assert choice.best_interval(costs, [0.0, 0.5, 1.0]) == (0.5, 0.5)
    assert choice.shares(costs, ["a", "b", "c"]) == {"a": 0.0, "b": 1.0, "c": 0.0}


def test_one_seed_says_nothing():
    assert choice.best_interval(np.array([[1.0], [2.0]]), [0.0, 1.0]) == (-np.inf, np.inf)


def test_what_never_finishes_is_never_the_best():
    costs = np.array([[np.inf, 1.0, np.inf, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert (
        choice.shares(costs, [0, 1])[1] > 0.9
    )  # only a resample without the two infinite seeds prefers the first


def test_equals_share_and_the_first_is_named():
    costs = np.ones((2, 5))
    assert choice.shares(costs, ["a", "a"]) == {"a": 1.0}
    assert choice.resampled_best(costs).tolist() == [0] * choice.RESAMPLES


def test_flat_is_the_unbroken_run_within_a_share():
    values = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    costs = np.array([100.5, 102.0, 100.9, 100.0, 101.0, 101.1])[:, None] * np.ones((1, 2))
    assert choice.within(costs, values, 3, 0.01) == (0.2, 0.4)  # 0.0 lies beyond the hill at 0.1
    assert choice.within(costs, values, 3, 0.02) == (0.0, 0.5)
    assert choice.within(-costs, values, 1, 0.01) == (
        0.1,
        0.1,
    )  # of what is to be large: 102, and 1 % less is 100.98


def test_a_tie_is_what_the_seeds_do_not_tell_apart():
    values, rng = [0.0, 0.5, 1.0], np.random.default_rng(3)
    common = rng.normal(100.0, 30.0, 20)
    costs = np.stack([common, common + rng.normal(0.0, 1.0, 20) * np.linspace(-1, 1, 20), common + 2.0])
    costs[2] += rng.normal(0.0, 0.5, 20)
    assert choice.tied(costs, values, 0) == (0.0, 0.5)  # 2 s worse with a noise of 0.1: told apart, in pairs
