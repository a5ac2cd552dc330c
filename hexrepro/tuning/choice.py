"""How sure the best of several candidates is, and how flat it lies.

All candidates see the same arrivals, so the seeds are resampled for all of them at once: what the arrivals do to every
candidate alike drops out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hexrepro.report.intervals import RESAMPLES, expanded_level, mean_band


class Range(NamedTuple):
    """From low to high."""

    low: float
    high: float


def resampled_best(costs: np.ndarray, resamples: int = RESAMPLES) -> np.ndarray:
    """int64[resamples]: the best candidate on each resample of the seeds. costs: float64[candidates, S], less is better."""
    seeds = costs.shape[1]
    finite = np.where(
        np.isfinite(costs), costs, 1e6 * (1.0 + np.abs(costs[np.isfinite(costs)]).max(initial=0))
    )
    drawn = np.random.default_rng(0).multinomial(seeds, np.full(seeds, 1.0 / seeds), size=resamples)
    return np.argmin(drawn @ finite.T, axis=1)


def best_interval(
    costs: np.ndarray, values: Sequence[float], confidence: float = 0.95, resamples: int = RESAMPLES
) -> Range:
    """Interval of the value of the best candidate, by a paired bootstrap over seeds. values: float[candidates].

    The level is widened for the few seeds that there are, as for means (see report/intervals.py).
    """
    seeds = costs.shape[1]
    if seeds == 1:
        return Range(-np.inf, np.inf)
    tail = (1.0 - expanded_level(confidence, seeds)) / 2.0
    found = np.asarray(values, np.float64)[resampled_best(costs, resamples)]
    low, high = np.quantile(found, [tail, 1.0 - tail], method="nearest")
    return Range(float(low), float(high))


def shares(costs: np.ndarray, values: Sequence) -> dict:
    """How often each choice is the best one's, over resamples of the seeds. values: one choice a candidate."""
    found = np.bincount(resampled_best(costs), minlength=len(values)) / RESAMPLES
    result: dict = {}
    for value, share in zip(values, found, strict=True):
        result[value] = result.get(value, 0.0) + float(share)
    return result


def within(costs: np.ndarray, values: Sequence[float], at: int, share: float = 0.01) -> Range:
    """The values around candidate `at` whose mean cost is at most `share` of its own worse. values ascending."""
    mean = costs.mean(axis=-1)
    return _block(mean <= mean[at] + share * abs(mean[at]), values, at)


def tied(costs: np.ndarray, values: Sequence[float], at: int, confidence: float = 0.95) -> Range:
    """The values around candidate `at` of which it is not shown that they are worse than it, seeds paired."""
    with np.errstate(invalid="ignore"):
        difference = mean_band(costs - costs[at], confidence)
    return _block(~(difference.low > 0.0), values, at)


def _block(fine: np.ndarray, values: Sequence[float], at: int) -> Range:
    """The unbroken run of `fine` around `at`."""
    low = high = at
    while low > 0 and fine[low - 1]:
        low -= 1
    while high < len(values) - 1 and fine[high + 1]:
        high += 1
    return Range(float(values[low]), float(values[high]))
