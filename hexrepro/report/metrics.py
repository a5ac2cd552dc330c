"""What one run is measured by. Plain NumPy on arrays; no intervals, no plots.

Every query that arrived counts: one that never finished has latency `inf`, and so misses every SLO. A *normalised*
latency is a query's latency over its base SLO (its SLO at scale 1), so a query attains scale s when it is at most s.
"""

from __future__ import annotations

import numpy as np


def quantile(latency_s: np.ndarray, p: float) -> np.ndarray:
    """The p-quantile over the last axis, interpolated linearly; `inf` as soon as an unfinished query has weight in it.

    latency_s: float[..., Q] seconds. Returns float[...].
    """
    ordered = np.sort(np.asarray(latency_s, np.float64), axis=-1)
    place = p * (ordered.shape[-1] - 1)
    low = int(np.floor(place))
    weight = place - low
    if weight == 0.0:
        return ordered[..., low]
    with np.errstate(invalid="ignore"):  # inf - inf; both ends infinite means infinite
        between = ordered[..., low] + weight * (ordered[..., low + 1] - ordered[..., low])
    return np.where(np.isinf(ordered[..., low + 1]), np.inf, between)


def quantiles(latency_s: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """`quantile` at several levels. latency_s: float64[..., Q]; levels: float[K]. Returns float[..., K]."""
    ordered = np.sort(np.asarray(latency_s, np.float64), axis=-1)
    place = np.asarray(levels) * (ordered.shape[-1] - 1)
    low = np.floor(place).astype(np.int64)
    weight = place - low
    below = ordered[..., low]
    above = ordered[..., np.minimum(low + 1, ordered.shape[-1] - 1)]
    with np.errstate(invalid="ignore"):  # as in `quantile`
        between = below + weight * (above - below)
    return np.where(weight == 0.0, below, np.where(np.isinf(above), np.inf, between))


def middle(n: int, scored: int | None) -> slice:
    """The middle `scored` of n queries in order of arrival; all of them when None or not fewer."""
    if scored is None or scored >= n:
        return slice(0, n)
    first = (n - scored) // 2
    return slice(first, first + scored)


def attainment(normalised: np.ndarray, scales: np.ndarray | float) -> np.ndarray:
    """Share of queries that attain each SLO scale.

    normalised: float[..., Q]; scales: float[K] or one number. Returns float[..., K], or float[...] for one number.
    """
    normalised = np.asarray(normalised, np.float64)
    if np.ndim(scales) == 0:
        return np.mean(normalised <= scales, axis=-1)
    return np.stack([np.mean(normalised <= s, axis=-1) for s in np.asarray(scales)], axis=-1)


def scale_at_attainment(normalised: np.ndarray, p: float) -> np.ndarray:
    """The least SLO scale that a share p of the queries attains; `inf` when fewer ever finish.

    This is the p-quantile of the normalised latencies, and one of them: no interpolation, since attainment is a step
    function. normalised: float[..., Q]. Returns float[...].
    """
    ordered = np.sort(np.asarray(normalised, np.float64), axis=-1)
    n = ordered.shape[-1]
    needed = int(np.ceil(p * n - 1e-9 * n))  # 0.95 * 20 must need 19 queries, not 20
    return ordered[..., max(needed, 1) - 1]


def throughput_qps(arrival_s: np.ndarray, finish_s: np.ndarray) -> np.ndarray:
    """Completed queries over the time from the first arrival to the last finish, in queries/s.

    arrival_s, finish_s: float[..., Q], finish `inf` when unfinished. Returns float[...]; 0 when nothing finished.
    """
    return _rate(np.isfinite(finish_s), arrival_s, finish_s)


def goodput_qps(arrival_s: np.ndarray, finish_s: np.ndarray, slo_s: np.ndarray) -> np.ndarray:
    """Queries that met their SLO over the same time as in `throughput_qps`, in queries/s. slo_s: float[..., Q]."""
    arrival_s, finish_s = np.asarray(arrival_s), np.asarray(finish_s)
    return _rate(finish_s - arrival_s <= slo_s, arrival_s, finish_s)


def cost_per_1000(price_per_hour: float, throughput: np.ndarray) -> np.ndarray:
    """$ for 1 000 completed queries: $ an hour times the makespan (first arrival to last finish) over the queries completed.

    price_per_hour: of all GPUs of the cluster; throughput: float[...] queries/s, of `throughput_qps`. Returns float[...], `inf`
    where nothing completes. It is the money for a cluster kept for this load alone and given back at the end; in a short run
    the time in which the last queries drain weighs in it.
    """
    with np.errstate(divide="ignore"):
        return price_per_hour / 3600 * 1000 / np.asarray(throughput, np.float64)


def _rate(counted: np.ndarray, arrival_s: np.ndarray, finish_s: np.ndarray) -> np.ndarray:
    finished = np.isfinite(finish_s)
    last = np.max(np.where(finished, finish_s, -np.inf), axis=-1)
    span = last - np.min(arrival_s, axis=-1)
    n = np.sum(counted, axis=-1)
    return np.where(finished.any(axis=-1), n / np.where(np.isfinite(span) & (span > 0), span, np.inf), 0.0)


def jain_index(shares: np.ndarray) -> np.ndarray:
    """Jain's fairness index over the last axis: 1 when all shares are equal, 1/n when one has everything.

    shares: float[..., n], >= 0. All zero counts as equal.
    """
    shares = np.asarray(shares, np.float64)
    total, squares = shares.sum(axis=-1), (shares**2).sum(axis=-1)
    return np.where(squares > 0, total**2 / (shares.shape[-1] * np.where(squares > 0, squares, 1.0)), 1.0)


def measure(
    arrival_s: np.ndarray, finish_s: np.ndarray, base_slo_s: np.ndarray, slo_scale: float
) -> dict[str, np.ndarray]:
    """Everything that a comparison reports of a policy, one value a run.

    arrival_s, finish_s: float[R, Q]; base_slo_s: float[Q], each query's SLO at scale 1. Returns name -> float[R].
    """
    latency_s = finish_s - arrival_s
    normalised = latency_s / base_slo_s
    return {
        "mean_s": np.mean(latency_s, axis=-1),
        "p50_s": quantile(latency_s, 0.50),
        "p95_s": quantile(latency_s, 0.95),
        "p99_s": quantile(latency_s, 0.99),
        "throughput_qps": throughput_qps(arrival_s, finish_s),
        "goodput_qps": goodput_qps(arrival_s, finish_s, slo_scale * base_slo_s),
        "attainment": attainment(normalised, slo_scale),
        "scale_at_95": scale_at_attainment(normalised, 0.95),
        "scale_at_99": scale_at_attainment(normalised, 0.99),
    }
