"""Intervals must contain the truth as often as they promise."""

import numpy as np
import pytest
from scipy import stats

from hexrepro.report.intervals import RESAMPLES, mean_interval, ratio_interval

# 600 experiments of 20 seeds: the share that covers has a standard error of 0.9 points around 95 %
EXPERIMENTS, SEEDS = 600, 20


@pytest.mark.parametrize(
    ("draw", "truth", "least"),
    [
        (lambda rng, size: rng.normal(10.0, 2.0, size), 10.0, 0.925),
        (
            lambda rng, size: rng.exponential(3.0, size),
            3.0,
            0.89,
        ),  # skewed: 20 values show too little of the tail
        (lambda rng, size: rng.uniform(0.0, 1.0, size), 0.5, 0.925),
    ],
    ids=["normal", "exponential", "uniform"],
)
def test_mean_interval_covers_the_true_mean(draw, truth, least):
    samples = draw(np.random.default_rng(7), (EXPERIMENTS, SEEDS))
    interval = mean_interval(samples)
    covers = np.mean((interval.low <= truth) & (truth <= interval.high))
    assert least <= covers <= 0.985


@pytest.mark.parametrize("seeds", [2, 3, 7, 8])
def test_few_seeds_still_cover(seeds):
    rng = np.random.default_rng(9)
    samples, baseline = (
        rng.normal(10.0, 1.0, (EXPERIMENTS, seeds)),
        rng.normal(20.0, 1.0, (EXPERIMENTS, seeds)),
    )
    for interval, truth in ((mean_interval(samples), 10.0), (ratio_interval(samples, baseline), 0.5)):
        covers = np.mean((interval.low <= truth) & (truth <= interval.high))
        assert 0.925 <= covers <= 0.985


def test_paired_ratio_covers_and_pairing_narrows_it():
    rng = np.random.default_rng(8)
    baseline = rng.lognormal(0.0, 0.4, (EXPERIMENTS, SEEDS))
    samples = 0.7 * baseline * rng.lognormal(-0.005, 0.1, baseline.shape)  # mean factor exactly 0.7
    interval = ratio_interval(samples, baseline)
    covers = np.mean((interval.low <= 0.7) & (interval.high >= 0.7))
    assert 0.925 <= covers <= 0.985
    unpaired = ratio_interval(samples, baseline[:, ::-1])
    assert np.mean(interval.high - interval.low) < 0.5 * np.mean(unpaired.high - unpaired.low)


def test_confidence_widens_the_interval():
    samples = np.random.default_rng(1).normal(size=(1, SEEDS))
    narrow, wide = mean_interval(samples, 0.8), mean_interval(samples, 0.99)
    assert wide.low[0] < narrow.low[0] < narrow.high[0] < wide.high[0]


def test_the_same_samples_give_the_same_interval():
    samples = np.random.default_rng(2).normal(size=(3, SEEDS))
    first, again = mean_interval(samples), mean_interval(samples)
    np.testing.assert_array_equal(first.low, again.low)
    # and a row's interval does not depend on the rows beside it
    np.testing.assert_allclose(mean_interval(samples[1]).high, first.high[1], rtol=1e-12)


def test_intervals_are_scipy_s():
    """The bootstrap is SciPy's BCa of the same resamples, however the data are handed to it."""
    rng = np.random.default_rng(5)
    x, y = rng.gamma(2.0, 1.0, (2, 5, SEEDS))
    t = stats.t.ppf(0.975, SEEDS - 1) * np.sqrt(SEEDS / (SEEDS - 1))

    def plainly(statistic, *data):
        level = stats.norm.cdf(t) - stats.norm.cdf(-t)
        options = dict(n_resamples=RESAMPLES, confidence_level=level, rng=np.random.default_rng(0))
        found = stats.bootstrap(data, statistic, paired=len(data) > 1, axis=-1, vectorized=True, **options)
        return found.confidence_interval

    for interval, truth in (
        (mean_interval(x), plainly(lambda x, axis: x.mean(axis), x)),
        (ratio_interval(x, y), plainly(lambda x, y, axis: x.mean(axis) / y.mean(axis), x, y)),
    ):
        np.testing.assert_allclose(interval.low, truth.low, rtol=1e-9)
        np.testing.assert_allclose(interval.high, truth.high, rtol=1e-9)


def test_what_never_varies_has_no_width():
    interval = mean_interval(np.full(SEEDS, 3.0))
    assert (interval.value, interval.low, interval.high) == (3.0, 3.0, 3.0)
    samples = np.random.default_rng(3).normal(5.0, 1.0, SEEDS)
    same = ratio_interval(samples, samples)
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)
    assert same.is_tie


def test_an_unfinished_query_makes_the_mean_infinite_not_nan():
    samples = np.array([1.0, 2.0, np.inf])
    assert mean_interval(samples).value == np.inf
    assert ratio_interval(samples, np.ones(3)).value == np.inf


def test_one_seed_says_nothing_about_the_spread():
    interval = mean_interval(np.array([4.0]))
    assert interval.value == 4.0
    assert interval.low == -np.inf
    assert interval.high == np.inf


def test_tie_is_an_interval_around_one():
    rng = np.random.default_rng(4)
    baseline = rng.normal(10.0, 1.0, SEEDS)
    assert ratio_interval(baseline + rng.normal(0.0, 0.5, SEEDS), baseline).is_tie
    assert not ratio_interval(0.8 * baseline + rng.normal(0.0, 0.1, SEEDS), baseline).is_tie


def test_a_ratio_to_what_is_nearly_always_zero_has_no_ends():
    baseline = np.zeros(SEEDS)
    baseline[3] = 0.1
    interval = ratio_interval(np.ones(SEEDS), baseline)
    assert interval.value == pytest.approx(200.0)
    assert interval.low <= 1.0 or interval.high == np.inf
    assert not np.isnan([interval.low, interval.high]).any()
