"""Metrics on cases small enough to work out by hand."""

import numpy as np
import pytest

from hexrepro.report import metrics

INF = np.inf


def test_quantile_interpolates_linearly():
    assert metrics.quantile(np.array([4.0, 1.0, 3.0, 2.0]), 0.5) == 2.5
    assert metrics.quantile(np.array([10.0, 20.0]), 0.95) == pytest.approx(19.5)
    assert metrics.quantile(np.array([7.0]), 0.99) == 7.0


def test_quantile_of_unfinished_queries_is_infinite_only_where_they_weigh():
    latency_s = np.array([[1.0, 2.0, 3.0, INF], [INF, INF, INF, INF]])
    # at 0.5 of four: halfway from 2 to 3; at 0.9 of four: between 3 and inf
    np.testing.assert_array_equal(metrics.quantile(latency_s, 0.5), [2.5, INF])
    np.testing.assert_array_equal(metrics.quantile(latency_s, 0.9), [INF, INF])
    # exactly at the third value: the infinite fourth has no weight
    assert metrics.quantile(np.array([1.0, 2.0, 3.0, INF]), 2 / 3) == pytest.approx(3.0)


def test_quantiles_are_quantile_at_each_level():
    latency_s = np.array([[5.0, 1.0, 3.0, INF, 2.0], [7.0, 7.0, 1.0, 0.0, 2.0]])
    levels = np.array([0.01, 0.25, 0.5, 0.7, 0.75, 0.9, 0.99])
    found = metrics.quantiles(latency_s, levels)
    assert found.shape == (2, 7)
    np.testing.assert_array_equal(found, np.stack([metrics.quantile(latency_s, p) for p in levels], axis=-1))


@pytest.mark.parametrize(
    ("n", "scored", "kept"),
    [(6, 2, [2, 3]), (7, 2, [2, 3]), (7, 3, [2, 3, 4]), (4, 4, [0, 1, 2, 3]), (3, 50, [0, 1, 2]), (3, None, [0, 1, 2])],
)  # fmt: skip
def test_the_middle_queries(n, scored, kept):
    assert list(np.arange(n)[metrics.middle(n, scored)]) == kept


def test_attainment_counts_every_query_and_a_tie_attains():
    normalised = np.array([1.0, 2.0, 3.0, INF])
    assert metrics.attainment(normalised, 2.0) == 0.5
    np.testing.assert_array_equal(
        metrics.attainment(normalised, np.array([0.5, 1.0, 3.0, 100.0])), [0, 0.25, 0.75, 0.75]
    )


def test_attainment_over_runs_keeps_their_axis():
    normalised = np.array([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(
        metrics.attainment(normalised, np.array([1.0, 3.0])), [[0.5, 1.0], [0.0, 0.5]]
    )


@pytest.mark.parametrize(
    ("p", "scale"),
    [(0.95, 19.0), (0.951, 20.0), (1.0, 20.0), (0.05, 1.0), (0.5, 10.0), (0.01, 1.0)],
)
def test_scale_at_attainment_is_the_least_that_suffices(p, scale):
    normalised = np.random.default_rng(0).permutation(np.arange(1.0, 21.0))  # 20 queries: 1, 2, ..., 20
    found = metrics.scale_at_attainment(normalised, p)
    assert found == scale
    assert metrics.attainment(normalised, float(found)) >= p
    assert metrics.attainment(normalised, float(found) - 1e-9) < p


def test_scale_at_attainment_is_infinite_when_too_few_finish():
    assert metrics.scale_at_attainment(np.array([1.0, 2.0, 3.0, INF]), 0.95) == INF
    assert metrics.scale_at_attainment(np.array([1.0, 2.0, 3.0, INF]), 0.75) == 3.0


def test_throughput_runs_from_the_first_arrival_to_the_last_finish():
    arrival_s = np.array([[2.0, 3.0, 4.0], [0.0, 0.0, 0.0]])
    finish_s = np.array([[12.0, 5.0, 6.0], [4.0, 2.0, INF]])
    # 3 queries in 12 - 2 s; 2 finished queries in 4 s
    np.testing.assert_allclose(metrics.throughput_qps(arrival_s, finish_s), [0.3, 0.5])


def test_throughput_of_nothing_finished_is_zero():
    assert metrics.throughput_qps(np.array([0.0, 1.0]), np.array([INF, INF])) == 0.0


def test_goodput_counts_only_queries_within_their_slo():
    arrival_s, finish_s = np.array([0.0, 0.0, 5.0, 5.0]), np.array([2.0, 4.0, 10.0, INF])
    slo_s = np.array([2.0, 3.0, 5.0, 5.0])
    # met: the first (exactly) and the third; over 10 s
    assert metrics.goodput_qps(arrival_s, finish_s, slo_s) == pytest.approx(0.2)


def test_jain_index():
    assert metrics.jain_index(np.array([5.0, 5.0, 5.0])) == pytest.approx(1.0)
    assert metrics.jain_index(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert metrics.jain_index(np.array([1.0, 2.0, 3.0])) == pytest.approx(36 / (3 * 14))
    assert metrics.jain_index(np.zeros(3)) == 1.0


def test_measure_uses_each_query_s_own_slo():
    arrival_s, finish_s = np.array([[0.0, 0.0]]), np.array([[10.0, 30.0]])
    measured = metrics.measure(arrival_s, finish_s, base_slo_s=np.array([10.0, 20.0]), slo_scale=1.2)
    assert measured["mean_s"] == [20.0]
    assert measured["p50_s"] == [20.0]
    assert measured["attainment"] == [0.5]  # 10 <= 12, 30 > 24
    assert measured["scale_at_95"] == [1.5]
    assert measured["throughput_qps"] == pytest.approx(2 / 30)
    assert measured["goodput_qps"] == pytest.approx(1 / 30)
