"""How sure a number is: bootstrap intervals over arrival seeds, and paired ratios between policies.

The seeds are the independent repetitions; the queries inside one run are not. Two policies see the same arrivals at the
same seed, so their ratio is resampled in pairs, which removes most of the noise that the arrivals bring.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
from scipy import stats

RESAMPLES = 4999
FEW_SEEDS = 8


class Interval(NamedTuple):
    """An estimate with its interval; all three have the shape of the metrics (any shape, or a number)."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def is_tie(self) -> np.ndarray:
        """For a ratio: whether the interval contains 1, so that no difference has been shown."""
        return (self.low <= 1.0) & (self.high >= 1.0)


def mean_interval(samples: np.ndarray, confidence: float = 0.95) -> Interval:
    """Mean over seeds. samples: float[..., R], one value a seed."""
    samples = np.asarray(samples, np.float64)
    return _bootstrap((samples,), lambda mean: mean, confidence)


def mean_band(samples: np.ndarray, confidence: float = 0.95) -> Interval:
    """Mean over seeds with Student's interval, point by point: for the many points of a curve. samples: float[..., R]."""
    samples = np.asarray(samples, np.float64)
    seeds = samples.shape[-1]
    value = samples.mean(axis=-1)
    if seeds == 1:
        return Interval(value, np.full_like(value, -np.inf), np.full_like(value, np.inf))
    half = stats.t.ppf((1 + confidence) / 2, seeds - 1) * samples.std(axis=-1, ddof=1) / np.sqrt(seeds)
    return Interval(value, value - half, value + half)


def ratio_interval(samples: np.ndarray, baseline: np.ndarray, confidence: float = 0.95) -> Interval:
    """Mean of `samples` over mean of `baseline`, seeds paired. Both float[..., R]."""

    def ratio(x, y):
        with np.errstate(divide="ignore", invalid="ignore"):
            return x / y

    samples, baseline = np.asarray(samples, np.float64), np.asarray(baseline, np.float64)
    return _bootstrap((samples, baseline), ratio, confidence)


def expanded_level(confidence: float, n: int) -> float:
    """The level to ask of a bootstrap of n samples so that it covers as promised.

    Resampling n values shows a spread that is too small by sqrt((n - 1)/n), and normal instead of t tails; with 20
    seeds a nominal 95 % interval covers 92 %. This is Hesterberg's correction ("expanded" bootstrap, 2015).
    """
    t = stats.t.ppf((1 + confidence) / 2, n - 1) * np.sqrt(n / (n - 1))
    return float(stats.norm.cdf(t) - stats.norm.cdf(-t))


def _bootstrap(data: tuple[np.ndarray, ...], of_means, confidence: float) -> Interval:
    """BCa bootstrap, along the last axis, of a function of the data's means; the same resamples for every row, and the
    same on every call (seed 0)."""
    shape, seeds = data[0].shape[:-1], data[0].shape[-1]
    rows = [x.reshape(-1, seeds) for x in data]
    value = of_means(*(x.mean(axis=-1) for x in rows))
    low, high = value.copy(), value.copy()
    varies = np.isfinite(value) & ~_constant(rows)
    if seeds == 1:
        low[varies], high[varies] = -np.inf, np.inf  # one seed says nothing about the spread
    elif varies.any():
        ends = _ends([x[varies] for x in rows], of_means, confidence)
        # a ratio to what is nearly always 0 has no ends
        low[varies], high[varies] = (
            np.where(np.isnan(e), o, e) for e, o in zip(ends, (-np.inf, np.inf), strict=True)
        )
    return Interval(value.reshape(shape), low.reshape(shape), high.reshape(shape))


def _ends(rows: list[np.ndarray], of_means, confidence: float) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper ends: BCa, or Student's interval with the jackknife's error where BCa is undefined (hardly any
    spread) or has too few seeds to resample."""
    seeds = rows[0].shape[-1]

    def statistic(picked: np.ndarray, axis: int = -1) -> np.ndarray:
        """For resamples given as indices of seeds, int[..., k]: float[rows, ...]. One matrix product serves all rows."""
        flat = picked.reshape(-1, picked.shape[-1])
        at = np.arange(len(flat))[:, None] * seeds + flat
        weights = np.bincount(at.ravel(), minlength=len(flat) * seeds).reshape(-1, seeds) / flat.shape[-1]
        return of_means(*(x @ weights.T for x in rows)).reshape(-1, *picked.shape[:-1])

    value = of_means(*(x.mean(axis=-1) for x in rows))
    left_out = of_means(*((x.sum(axis=-1, keepdims=True) - x) / (seeds - 1) for x in rows))
    with np.errstate(invalid="ignore"):
        apart = left_out - left_out.mean(axis=-1, keepdims=True)
        error = np.sqrt((seeds - 1) / seeds * (apart**2).sum(axis=-1))
    half = stats.t.ppf((1 + confidence) / 2, seeds - 1) * error
    low, high = value - half, value + half
    if seeds < FEW_SEEDS:
        return low, high
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        bca = stats.bootstrap(
            (np.arange(seeds),),
            statistic,
            axis=-1,
            vectorized=True,
            n_resamples=RESAMPLES,
            confidence_level=expanded_level(confidence, seeds),
            method="BCa",
            rng=np.random.default_rng(0),
        ).confidence_interval
    defined = np.isfinite(bca.low) & np.isfinite(bca.high)
    return np.where(defined, bca.low, low), np.where(defined, bca.high, high)


def _constant(rows: list[np.ndarray]) -> np.ndarray:
    """Which rows have no sampling distribution: the same at each of several seeds, or a policy against itself."""
    against_itself = np.all(rows[0] == rows[-1], axis=-1) if len(rows) > 1 else np.zeros(len(rows[0]), bool)
    if rows[0].shape[-1] == 1:
        return against_itself
    return against_itself | np.all([np.all(x == x[:, :1], axis=-1) for x in rows], axis=0)
