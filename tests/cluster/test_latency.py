"""The step-time model and its fits."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexrepro.cluster.latency import LatencyModel, fit_errors, fit_solo, fit_steps
from hexrepro.errors import InputError

coefficient = st.floats(0, 1e-2)
models = st.builds(LatencyModel, st.floats(1e-4, 0.1), coefficient, coefficient, coefficient, coefficient)


def solo_step_by_step(model, input_tokens, cached_tokens, output_tokens, budget):
    seconds, computed = 0.0, cached_tokens
    while computed < input_tokens:
        n = min(budget, input_tokens - computed)
        seconds += model.step_s(n, n * computed + n * n / 2, 1, 0)
        computed += n
    for token in range(output_tokens - 1):
        seconds += model.step_s(0, 0, 1, input_tokens + token)
    return seconds


@settings(max_examples=200, deadline=None)
@given(models, st.integers(1, 3000), st.floats(0, 1), st.integers(1, 60), st.integers(1, 2048))
def test_solo_latency_is_the_sum_of_its_steps(model, input_tokens, cached_share, output_tokens, budget):
    cached = int(cached_share * (input_tokens - 1))
    closed = model.solo_latency_s(input_tokens, cached, output_tokens, budget)
    assert closed == pytest.approx(solo_step_by_step(model, input_tokens, cached, output_tokens, budget))


def test_solo_latency_by_hand():
    model = LatencyModel(1.0, 0.1, 0.01, 0.2, 0.001)
    # 5 uncached tokens behind 3 cached ones in chunks of 4 and 1: A = 4*3 + 8 + 1*7 + 0.5
    # then two decode steps that read 8 and 9 tokens
    assert model.solo_latency_s(8, 3, 3, 4) == pytest.approx(4 * 1.2 + 0.5 + 0.01 * 27.5 + 0.001 * 17)


@given(models, st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_prefill_context_does_not_depend_on_the_chunks(model, chunks):
    done, context = 0, 0.0
    for n in chunks:
        context += n * done + n * n / 2
        done += n
    assert context == pytest.approx(done * done / 2)


def test_both_formulas_take_arrays():
    model = LatencyModel(0.03, 1e-4, 1e-8, 1e-4, 1e-7)
    tokens = np.array([[10, 20, 30]])
    assert model.step_s(tokens, 0, 1, np.zeros((4, 1))).shape == (4, 3)
    latency = model.solo_latency_s(tokens, 0, [[1], [5]], 16)
    assert latency.shape == (2, 3)
    assert latency[1, 2] == model.solo_latency_s(30, 0, 5, 16)
    assert isinstance(model.step_s(1, 0.5, 1, 0), float)
    assert model.coefficients.tolist() == [0.03, 1e-4, 1e-8, 1e-4, 1e-7]


@pytest.mark.parametrize(
    "field", ["base_s", "prefill_token_s", "prefill_context_s", "sequence_s", "kv_token_s"]
)
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, "fast", None, True])
def test_bad_coefficients_are_named(field, value):
    with pytest.raises(InputError, match=field):
        LatencyModel(**({"base_s": 0.01} | {field: value}))


def test_a_step_takes_time():
    with pytest.raises(InputError, match="base_s is 0"):
        LatencyModel(0)


@pytest.mark.parametrize(
    "call", [(10, 10, 1), (10, 11, 1), (10, -1, 1), (10, 0, 0), (0, 0, 1), (10, 0, 1, 0)]
)
def test_impossible_calls_are_refused(call):
    with pytest.raises(InputError, match="cached_tokens < input_tokens"):
        LatencyModel(0.01).solo_latency_s(*call)


def some_steps(rng, n):
    decodes = rng.integers(0, 64, n)
    prefill = np.where(rng.random(n) < 0.5, rng.integers(1, 2048, n), 0)
    context = prefill * rng.integers(0, 8000, n) + prefill**2 / 2
    return prefill, context, decodes + (prefill > 0), decodes * rng.integers(100, 8000, n)


TRUTH = LatencyModel(0.026, 1.5e-4, 3.6e-9, 1.0e-4, 6.2e-8)


def test_fit_steps_recovers_the_coefficients_exactly_without_noise():
    steps = some_steps(np.random.default_rng(1), 200)
    fit = fit_steps(*steps, TRUTH.step_s(*steps))
    assert fit.model.coefficients == pytest.approx(TRUTH.coefficients, rel=1e-6)
    assert fit.errors.max < 1e-6
    assert fit.errors.r2 == pytest.approx(1)


@pytest.mark.parametrize("seed", range(5))
def test_fit_steps_recovers_the_coefficients_from_noisy_times(seed):
    rng = np.random.default_rng(seed)
    steps = some_steps(rng, 2000)
    fit = fit_steps(*steps, TRUTH.step_s(*steps) * rng.normal(1, 0.03, 2000))
    # within four standard errors of weighted least squares
    design = np.column_stack([np.ones(2000), *steps]) / TRUTH.step_s(*steps)[:, None]
    standard_error = 0.03 * np.sqrt(np.diag(np.linalg.inv(design.T @ design)))
    assert (np.abs(fit.model.coefficients - TRUTH.coefficients) < 4 * standard_error).all()
    assert (standard_error < 0.05 * TRUTH.coefficients).all()
    # the mean absolute deviation of a normal with sigma 0.03
    assert fit.errors.mape == pytest.approx(0.03 * math.sqrt(2 / math.pi), rel=0.1)


def test_fit_steps_never_gives_a_negative_coefficient():
    rng = np.random.default_rng(2)
    prefill, context, sequences, kv = some_steps(rng, 300)
    fit = fit_steps(
        prefill, context, sequences, kv, 0.05 + 1e-4 * prefill - 1e-9 * kv + rng.normal(0, 1e-4, 300)
    )
    assert (fit.model.coefficients >= 0).all()
    assert fit.model.kv_token_s == 0


def test_fit_steps_weights_choose_between_kinds_that_disagree():
    prefill = np.array([0.0, 0.0, 0.0, 0.0, 1000.0])
    seconds = np.array([1.0, 1.0, 1.0, 2.0, 3.0])
    nothing = np.zeros(5)
    favoured = fit_steps(prefill, nothing, nothing, nothing, seconds, weights=[1e-6, 1e-6, 1e-6, 1, 1])
    assert favoured.model.base_s == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_fit_solo_recovers_the_coefficients_from_noisy_latencies(seed):
    rng = np.random.default_rng(seed)
    truth = LatencyModel(0.04, 1.5e-4)
    inputs, outputs = rng.integers(200, 14000, 500), rng.integers(1, 800, 500)
    seconds = truth.solo_latency_s(inputs, 0, outputs, 2048) * rng.normal(1, 0.02, 500)
    fit = fit_solo(inputs, outputs, seconds)
    assert fit.model.base_s == pytest.approx(0.04, rel=0.02)
    assert fit.model.prefill_token_s == pytest.approx(1.5e-4, rel=0.05)
    assert fit.model.coefficients[2:].tolist() == [0, 0, 0]
    assert fit.errors.n == 500
    assert fit.errors.mape == pytest.approx(0.02 * math.sqrt(2 / math.pi), rel=0.1)


def test_fit_solo_with_a_given_base():
    truth = LatencyModel(0.035, 2e-4)
    inputs, outputs = np.array([100, 2000, 9000]), np.array([10, 1, 500])
    seconds = truth.solo_latency_s(inputs, 0, outputs, 1 << 20)
    fit = fit_solo(inputs, outputs, seconds, max_num_batched_tokens=1 << 20, base_s=0.035, relative=False)
    assert fit.model.coefficients == pytest.approx(truth.coefficients)


def test_fit_errors_by_hand():
    errors = fit_errors([1.1, 1.6, 4.0], [1.0, 2.0, 4.0])
    assert errors == pytest.approx((3, 0.1, 0.2, 1 - 0.17 / (14 / 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": [1.0, 0.0, 1.0]}, "seconds, row 1"),
        ({"output_tokens": [1, math.nan, 1]}, "output_tokens, row 1"),
        ({"input_tokens": [5, -5, 5]}, "input_tokens, row 1"),
        ({"input_tokens": [5, 5]}, "input_tokens has shape"),
        ({"input_tokens": ["a", "b", "c"]}, "input_tokens holds something"),
        ({"input_tokens": [1], "output_tokens": [1], "seconds": [1.0]}, "too few"),
    ],
)
def test_bad_measurements_are_named(change, message):
    columns = {"input_tokens": [5, 6, 7], "output_tokens": [1, 2, 3], "seconds": [1.0, 2.0, 3.0]} | change
    with pytest.raises(InputError, match=message):
        fit_solo(**columns)
