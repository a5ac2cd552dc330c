"""The time of one engine step, as a function of what is in the batch.

    step time = base_s + prefill_token_s * P + prefill_context_s * A + sequence_s * S + kv_token_s * K

P  prefill tokens in the step,
A  attention work of the prefill: the sum over prefill chunks of n*k + n*n/2, where the chunk has n tokens and
   k tokens of its call were computed before; one prompt gives the same total in one chunk or in ten,
S  sequences in the step, decoding or prefilling,
K  KV tokens read by decoding: the sum over decoding sequences of the tokens computed before the step.

The five coefficients are seconds per unit. `fit_steps` fits them to timed steps, `fit_solo` to the latencies
of calls that had the engine for themselves, and `fit_calls` to what a client sees through a server's API.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hexrepro.errors import InputError


@dataclass(frozen=True)
class LatencyModel:
    """Five coefficients in seconds per unit, none negative; `base_s` (an empty step) is above 0."""

    base_s: float
    prefill_token_s: float = 0.0
    prefill_context_s: float = 0.0
    sequence_s: float = 0.0
    kv_token_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise InputError(f"latency model: {field.name} is {value!r}; it must be a number of seconds")
            if not math.isfinite(value) or value < 0:
                raise InputError(
                    f"latency model: {field.name} is {value!r}; it must be finite and not negative"
                )
            object.__setattr__(self, field.name, float(value))
        if self.base_s == 0:
            raise InputError("latency model: base_s is 0; a step takes time, so it must be above 0")

    @property
    def coefficients(self) -> NDArray[np.float64]:
        """The five coefficients in the order of the formula, for the compiled kernels."""
        return np.array(astuple(self))

    def step_s(
        self,
        prefill_tokens: ArrayLike,
        prefill_context: ArrayLike,
        sequences: ArrayLike,
        kv_tokens: ArrayLike,
    ) -> float | NDArray[np.float64]:
        """Seconds of one step with the formula's P, A, S, K; scalars or arrays that broadcast."""
        p, a, s, k = (
            np.asarray(x, dtype=np.float64) for x in (prefill_tokens, prefill_context, sequences, kv_tokens)
        )
        seconds = (
            self.base_s
            + self.prefill_token_s * p
            + self.prefill_context_s * a
            + self.sequence_s * s
            + self.kv_token_s * k
        )
        return _plain(seconds)

    def solo_latency_s(
        self,
        input_tokens: ArrayLike,
        cached_tokens: ArrayLike,
        output_tokens: ArrayLike,
        max_num_batched_tokens: ArrayLike = 2048,
    ) -> float | NDArray[np.float64]:
        """Seconds that one call takes when it has the instance for itself; scalars or arrays that broadcast.

        The uncached part of the prompt goes through in chunks of at most `max_num_batched_tokens`; the last
        chunk yields the first output token, and each further token takes one decode step. Equal to the sum of
        `step_s` over those steps.
        """
        features = solo_features(input_tokens, cached_tokens, output_tokens, max_num_batched_tokens)
        return _plain(sum(c * x for c, x in zip(astuple(self), features, strict=True)))


def solo_features(
    input_tokens: ArrayLike,
    cached_tokens: ArrayLike,
    output_tokens: ArrayLike,
    max_num_batched_tokens: ArrayLike = 2048,
) -> tuple[NDArray[np.float64], ...]:
    """What multiplies each coefficient over the life of a call that runs alone: (steps, P, A, S, K)."""
    inputs, cached, outputs, budget = (
        np.asarray(x, dtype=np.float64)
        for x in (input_tokens, cached_tokens, output_tokens, max_num_batched_tokens)
    )
    if np.any(outputs < 1) or np.any(cached < 0) or np.any(inputs - cached < 1) or np.any(budget < 1):
        raise InputError(
            "solo latency: a call needs output_tokens >= 1, 0 <= cached_tokens < input_tokens (the last"
            " prompt token is always computed) and max_num_batched_tokens >= 1"
        )
    return solo_terms(inputs, cached, outputs, budget)


def solo_terms(input_tokens, cached_tokens, output_tokens, max_num_batched_tokens):
    """The arithmetic of `solo_features` without its checks, floats or arrays; the scheduler compiles it."""
    uncached = input_tokens - cached_tokens
    decodes = output_tokens - 1
    steps = np.ceil(uncached / max_num_batched_tokens) + decodes
    context = uncached * cached_tokens + uncached * uncached / 2
    # decode step i (from 0) reads input_tokens + i tokens
    kv_read = decodes * input_tokens + decodes * (decodes - 1) / 2
    return steps, uncached, context, steps, kv_read  # one sequence a step, so S is the number of steps


class FitErrors(NamedTuple):
    """How far a fitted model is from its data. Relative errors are fractions of the measured time."""

    n: int
    mape: float  # mean of |predicted - measured| / measured
    max: float  # the worst of them
    r2: float  # of seconds, not of relative error


class Fit(NamedTuple):
    model: LatencyModel
    errors: FitErrors


def fit_errors(predicted_s: ArrayLike, measured_s: ArrayLike) -> FitErrors:
    """Error statistics of predictions against measurements, both in seconds."""
    predicted, measured = np.asarray(predicted_s, dtype=np.float64), np.asarray(measured_s, dtype=np.float64)
    relative = np.abs(predicted / measured - 1)
    spread = np.sum((measured - measured.mean()) ** 2)
    r2 = 1 - np.sum((predicted - measured) ** 2) / spread if spread > 0 else float("nan")
    return FitErrors(int(measured.size), float(relative.mean()), float(relative.max()), float(r2))


def fit_steps(
    prefill_tokens: ArrayLike,
    prefill_context: ArrayLike,
    sequences: ArrayLike,
    kv_tokens: ArrayLike,
    seconds: ArrayLike,
    weights: ArrayLike | None = None,
) -> Fit:
    """Fit all five coefficients to timed steps (float[n]), by non-negative least squares of relative errors.

    `weights` (float[n], 1 if absent) multiplies the squared relative error of a step: it lets kinds of steps
    with many samples not drown those with few.
    """
    p, a, s, k, t = _columns(
        prefill_tokens=prefill_tokens,
        prefill_context=prefill_context,
        sequences=sequences,
        kv_tokens=kv_tokens,
        seconds=seconds,
    )
    return _fit([np.ones_like(t), p, a, s, k], list(range(5)), t, np.zeros(5), weights)


def fit_solo(
    input_tokens: ArrayLike,
    output_tokens: ArrayLike,
    seconds: ArrayLike,
    *,
    cached_tokens: ArrayLike = 0,
    max_num_batched_tokens: ArrayLike = 2048,
    base_s: float | None = None,
    relative: bool = True,
) -> Fit:
    """Fit `base_s` and `prefill_token_s` to latencies of calls that ran alone, float[n] each.

    Calls that run alone say nothing of what another sequence in the batch costs, so the other three
    coefficients stay 0: a step costs the same whatever the batch. With `base_s` given only `prefill_token_s`
    is fitted. `relative` false weighs by seconds, so that long calls count most.
    """
    inputs, outputs, t = _columns(input_tokens=input_tokens, output_tokens=output_tokens, seconds=seconds)
    columns = list(
        np.broadcast_arrays(*solo_features(inputs, cached_tokens, outputs, max_num_batched_tokens))
    )
    known = np.zeros(5)
    if base_s is None:
        return _fit(columns, [0, 1], t, known, None if relative else t**2)
    known[0] = base_s
    return _fit(columns, [1], t, known, None if relative else t**2)


class CallFit(NamedTuple):
    """A fit to what a client sees: the engine's step time, and what the API adds to a call once."""

    model: LatencyModel
    overhead_s: float
    predicted_s: NDArray[np.float64]  # of each measurement
    errors: FitErrors


def fit_calls(
    calls: ArrayLike,
    steps: ArrayLike,
    prefill_tokens: ArrayLike,
    prefill_context: ArrayLike,
    sequences: ArrayLike,
    kv_tokens: ArrayLike,
    seconds: ArrayLike,
    weights: ArrayLike | None = None,
) -> CallFit:
    """Fit all five coefficients, and a constant per call, to times that a client took, float[n] each.

    A measurement spans `steps` engine steps; P, A, S and K are summed over them. `calls` is 1 where the time runs from the
    sending of a call, so that the API's share is in it, and 0 where it lies between two tokens. Non-negative least squares of
    relative errors; `weights` as in `fit_steps`.
    """
    c, n, p, a, s, k, t = _columns(
        calls=calls,
        steps=steps,
        prefill_tokens=prefill_tokens,
        prefill_context=prefill_context,
        sequences=sequences,
        kv_tokens=kv_tokens,
        seconds=seconds,
    )
    coefficients, predicted = _solve([n, p, a, s, k, c], list(range(6)), t, np.zeros(6), weights)
    return CallFit(
        LatencyModel(*coefficients[:5].tolist()), float(coefficients[5]), predicted, fit_errors(predicted, t)
    )


def _fit(
    columns: list[NDArray[np.float64]],
    free: list[int],
    seconds: NDArray[np.float64],
    known: NDArray[np.float64],
    weights: ArrayLike | None,
) -> Fit:
    coefficients, predicted = _solve(columns, free, seconds, known, weights)
    return Fit(LatencyModel(*coefficients.tolist()), fit_errors(predicted, seconds))


def _solve(
    columns: list[NDArray[np.float64]],
    free: list[int],
    seconds: NDArray[np.float64],
    known: NDArray[np.float64],
    weights: ArrayLike | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Non-negative least squares for the coefficients in `free`; the others keep their value in `known`.

    Returns all coefficients, and what they predict for each row.
    """
    from scipy.optimize import nnls

    x = np.column_stack(columns)
    if len(seconds) < len(free):
        raise InputError(f"fit: {len(seconds)} measurements are too few for {len(free)} coefficients")
    row = (
        np.sqrt(np.ones_like(seconds) if weights is None else np.asarray(weights, dtype=np.float64)) / seconds
    )
    design = x[:, free] * row[:, None]
    # columns of very different size (seconds per step, per squared token) are brought to one scale, or NNLS
    # loses digits
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(design / scale, (seconds - x @ known) * row)
    coefficients = known.copy()
    coefficients[free] = solution / scale
    if coefficients[0] <= 0:
        raise InputError(
            "fit: base_s comes out as 0; the measurements show no cost per step: add steps of other sizes"
        )
    return coefficients, x @ coefficients


def _columns(**named: ArrayLike) -> tuple[NDArray[np.float64], ...]:
    """The measurements as float64[n] columns of one length: finite, not negative, seconds above 0."""
    arrays = {}
    for name, values in named.items():
        try:
            arrays[name] = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"fit: {name} holds something that is not a number ({error})") from None
    length = arrays["seconds"].size
    for name, array in arrays.items():
        if array.ndim != 1 or array.size != length:
            raise InputError(
                f"fit: {name} has shape {array.shape}; it must be one column of {length} values like seconds"
            )
        bad = np.flatnonzero(~np.isfinite(array) | (array < 0) | ((name == "seconds") & (array == 0)))
        if bad.size:
            row = int(bad[0])
            want = "above 0" if name == "seconds" else "not negative"
            raise InputError(f"fit: {name}, row {row}: {array[row]!r}; it must be finite and {want}")
    return tuple(arrays.values())


def _plain(x: NDArray[np.float64]) -> float | NDArray[np.float64]:
    return float(x) if np.ndim(x) == 0 else x
