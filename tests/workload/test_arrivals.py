"""Arrival processes: the mean rate holds, and each has the law it claims. All seeds are fixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from hexrepro.errors import InputError
from hexrepro.workload import PROCESSES, arrival_times, read_times_s

RATE_QPS = 0.5


def gaps(process: str, n: int, seed: int = 0, **options: object) -> np.ndarray:
    return np.diff(arrival_times(process, n, RATE_QPS, seed, **options), prepend=0.0)


@given(
    st.sampled_from(["poisson", "gamma", "onoff", "modulated", "deterministic", "released"]),
    st.integers(1, 300),
    st.floats(0.01, 100),
    st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_any_process_gives_n_times_in_order_and_repeats_itself(process, n, rate_qps, seed):
    times = arrival_times(process, n, rate_qps, seed)
    assert times.shape == (n,)
    assert times.dtype == np.float64
    assert np.isfinite(times).all()
    assert times[0] >= 0
    assert np.all(np.diff(times) >= 0)
    assert np.array_equal(times, arrival_times(process, n, rate_qps, seed))


@pytest.mark.parametrize(
    ("process", "options", "cv"),
    [
        ("poisson", {}, 1.0),
        ("released", {}, 1.0),
        ("gamma", {"cv": 0.2}, 0.2),
        ("gamma", {"cv": 1.0}, 1.0),
        ("gamma", {"cv": 3.0}, 3.0),
        ("gamma", {"cv": 8.0}, 8.0),
    ],
)
def test_the_mean_rate_holds_at_every_cv(process, options, cv):
    """Mean gap within 3.5 standard errors, and the gaps' coefficient of variation within 10 %."""
    n = 100_000
    found = gaps(process, n, seed=11, **options)
    assert abs(found.mean() * RATE_QPS - 1) < 3.5 * cv / np.sqrt(n)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.1)


def test_gamma_with_cv_1_is_poisson_in_law():
    gamma = gaps("gamma", 20_000, seed=1, cv=1.0)
    poisson = gaps("poisson", 20_000, seed=2)
    assert stats.ks_2samp(gamma, poisson).pvalue > 0.01
    assert stats.kstest(gamma, stats.expon(scale=1 / RATE_QPS).cdf).pvalue > 0.01
    # and the test can tell: a cv of 1.1 is seen
    assert stats.ks_2samp(gaps("gamma", 20_000, seed=1, cv=1.1), poisson).pvalue < 1e-3


def test_poisson_counts_in_windows_have_variance_equal_to_mean():
    times = arrival_times("poisson", 60_000, RATE_QPS, seed=4)
    counts = np.histogram(times, np.arange(0, times[-1], 20.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("random_phases", [True, False])
@pytest.mark.parametrize("peak", [1.0, 2.0, 10.0])
def test_onoff_keeps_the_mean_rate(peak, random_phases):
    """Arrivals up to a fixed time, over 400 seeds: the mean within 3.5 standard errors of rate times time."""
    horizon_s = 200.0
    counts = [
        np.count_nonzero(
            arrival_times("onoff", 1200, RATE_QPS, seed, peak=peak, on_s=10.0, random_phases=random_phases)
            <= horizon_s
        )
        for seed in range(400)
    ]
    error = np.std(counts) / np.sqrt(len(counts))
    assert abs(np.mean(counts) - RATE_QPS * horizon_s) < 3.5 * error


def test_onoff_comes_in_bursts():
    bursty = arrival_times("onoff", 50_000, RATE_QPS, seed=3, peak=5.0, on_s=10.0)
    counts = np.histogram(bursty, np.arange(0, bursty[-1], 10.0))[0]
    assert counts.var() / counts.mean() > 5
    # the rate while on is the peak's: in a busy stretch, gaps are those of 5 x the mean rate
    assert np.median(np.diff(bursty)) == pytest.approx(np.log(2) / (5 * RATE_QPS), rel=0.1)
    # a peak of 1 is never off
    assert (
        stats.kstest(gaps("onoff", 20_000, seed=5, peak=1.0), stats.expon(scale=1 / RATE_QPS).cdf).pvalue
        > 0.01
    )


def test_onoff_with_fixed_phases_is_silent_while_off():
    times = arrival_times("onoff", 5_000, RATE_QPS, seed=3, peak=4.0, on_s=10.0, random_phases=False)
    # phases repeat every 40 s: arrivals fill 10 s of them, wherever they start
    phase = np.sort(times % 40.0)
    silent = np.max(np.diff(phase, append=phase[0] + 40.0))
    assert silent == pytest.approx(30.0, abs=0.2)


@pytest.mark.parametrize("sigma", [0.2, 1.0])
def test_modulated_keeps_the_mean_rate_and_has_the_dispersion_of_its_law(sigma):
    """Counts up to a fixed time over 1000 seeds: the mean is rate times time, and the variance over the mean is that of a
    Poisson process whose log rate is an Ornstein-Uhlenbeck process, 1 + 2 r/T int_0^T (T - u)(exp(s^2 e^(-u/c)) - 1) du."""
    horizon_s, corr_queries = 160.0, 30.0
    corr_s = corr_queries / RATE_QPS
    counts = np.array(
        [
            np.searchsorted(
                arrival_times("modulated", 1200, RATE_QPS, seed, sigma=sigma, corr_queries=corr_queries),
                horizon_s,
            )
            for seed in range(1000)
        ]
    )
    assert counts.max() < 1200
    assert abs(counts.mean() - RATE_QPS * horizon_s) < 3.5 * counts.std() / np.sqrt(len(counts))
    integral, _ = integrate.quad(
        lambda u: (horizon_s - u) * (np.exp(sigma**2 * np.exp(-u / corr_s)) - 1), 0, horizon_s
    )
    expected = 1 + 2 * RATE_QPS / horizon_s * integral
    # fourth moments are heavy at sigma 1
    assert counts.var() / counts.mean() == pytest.approx(expected, rel=0.12 if sigma < 1 else 0.25)


def test_modulated_stretches_with_the_rate():
    slow = arrival_times("modulated", 200, 0.5, seed=3, sigma=0.7, corr_queries=20)
    fast = arrival_times("modulated", 200, 5.0, seed=3, sigma=0.7, corr_queries=20)
    np.testing.assert_allclose(slow, 10 * fast)


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("0\n1.5\n4\n", [0, 1.5, 4]),
        ("time\n10\n12\n", [0, 2]),
        ("TIMESTAMP,Tokens\n2023-11-16 18:15:46.6805900,3\n2023-11-16 18:16:46.7805900,4\n", [0, 60.1]),
        ("2024-02-28T23:59:59Z\n2024-02-29T00:00:01Z\n\n", [0, 2]),
    ],
    ids=["seconds", "header", "date and time in a CSV", "ISO 8601"],
)
def test_a_file_of_times(text, times, tmp_path):
    (tmp_path / "times.csv").write_text(text)
    np.testing.assert_allclose(read_times_s(tmp_path / "times.csv"), times, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1\n2\nlater\n", ["line 3", "'later'"]),
        ("when\n1\n", ["1 times", "at least 2"]),
        ("3\n1\n", ["time 2 is before"]),
        (None, ["cannot be read"]),
    ],
)
def test_a_file_of_times_with_a_mistake(text, words, tmp_path):
    file = tmp_path / "times.csv"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_times_s(file)
    for word in ("times.csv", *words):
        assert word in str(caught.value)


def test_deterministic():
    assert arrival_times("deterministic", 3, 2.0).tolist() == [0.5, 1.0, 1.5]


def test_released_repeats_the_released_simulators_numbers():
    """The released recipe written out once more; its gaps are -ln(1 - U)/rate of the legacy generator's
    uniforms."""
    n, rate = 90, 0.5
    drawn = np.random.RandomState(0).gamma(1, 1 / rate, size=int(rate * 1.2 * 2 * n / rate))
    times = arrival_times("released", n, rate, seed=0)
    assert np.array_equal(times, np.cumsum(drawn)[:n])
    uniforms = np.array([0.5488135, 0.71518937, 0.60276338])  # RandomState(0).random_sample(3)
    assert times[:3] == pytest.approx(np.cumsum(-np.log(1 - uniforms)) / rate, rel=1e-6)


def test_recorded_times_are_shifted_and_stretched():
    recorded = [5.0, 6.0, 6.0, 9.0, 20.0]
    assert arrival_times("recorded", 4, times_s=recorded).tolist() == [0, 1, 1, 4]
    stretched = arrival_times("recorded", 4, 0.5, times_s=recorded)
    assert stretched == pytest.approx([0, 1.5, 1.5, 6])
    assert (4 - 1) / stretched[-1] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("poison", 5, 1.0), {}, ["unknown process 'poison'", ", ".join(PROCESSES)]),
        (("poisson", 5, -1.0), {}, ["rate_qps is -1.0", "above 0"]),
        (("poisson", 5, 0), {}, ["rate_qps is 0"]),
        (("poisson", 5, float("nan")), {}, ["rate_qps is nan"]),
        (("poisson", 5, float("inf")), {}, ["rate_qps is inf"]),
        (("poisson", 5, "fast"), {}, ["rate_qps is 'fast'"]),
        (("poisson", 5), {}, ["rate_qps is None"]),
        (("poisson", 0, 1.0), {}, ["n is 0"]),
        (("poisson", 2.5, 1.0), {}, ["n is 2.5"]),
        (("poisson", 5, 1.0, -1), {}, ["seed is -1"]),
        (("poisson", 5, 1.0), {"cv": 2.0}, ["no option 'cv'"]),
        (("gamma", 5, 1.0), {"cv": 0.0}, ["cv is 0.0"]),
        (("onoff", 5, 1.0), {"peak": 0.5}, ["peak is 0.5", "at least 1"]),
        (("onoff", 5, 1.0), {"on_s": -1.0}, ["on_s is -1.0"]),
        (("modulated", 5, 1.0), {"sigma": 0.0}, ["sigma is 0.0"]),
        (("modulated", 5, 1.0), {"corr_queries": -1.0}, ["corr_queries is -1.0"]),
        (("recorded", 2), {}, ["times_s"]),
        (("recorded", 3), {"times_s": [0.0, 1.0]}, ["holds 2 times", "n = 3"]),
        (("recorded", 2), {"times_s": [1.0, 0.0]}, ["times_s[1] is 0.0", "before 1.0"]),
        (("recorded", 2), {"times_s": [0.0, float("nan")]}, ["times_s[1] is nan"]),
        (("recorded", 2), {"times_s": ["a", "b"]}, ["list of numbers"]),
        (("recorded", 2, 1.0), {"times_s": [1.0, 1.0]}, ["equal"]),
    ],
)
def test_refuses_in_one_line(arguments, options, words):
    with pytest.raises(InputError) as caught:
        arrival_times(*arguments, **options)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
