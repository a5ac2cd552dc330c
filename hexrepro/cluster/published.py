"""Profiles from the published latencies of single requests: the views `measured` and `released`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hexrepro.cluster.latency import Fit, fit_errors, fit_solo, solo_features
from hexrepro.cluster.profile_parts import (
    GPUS,
    RELEASED_CODE,
    RELEASED_DECODE_S,
    WHOLE_PROMPT,
    Profile,
    new_profile,
    rounded_coefficients,
    rounded_errors,
    standard_workflow_s,
)
from hexrepro.cluster.shapes import LLAMA_70B, QWEN3_30B, ModelShape
from hexrepro.cluster.types import kv_blocks
from hexrepro.errors import InputError


def measured_profiles(csv: Path) -> list[Profile]:
    """The profiles that the published single-request latencies in one CSV file give."""
    columns = _read_csv(csv)
    if "a100_latency_s" in columns:
        return [_llama_measured(columns), _llama_released(columns)]
    return [_trace4_measured(columns)]


MEASURED_NOTES = """\
Published latencies of single requests, fitted by latency = base_s * steps + prefill_token_s * input
tokens with relative weights, the whole prompt in one step. This view knows how long a call takes that
runs alone. What it can not know:
- Batching. No two requests ran together, so sequence_s = kv_token_s = 0: a decode step takes the same
  time whatever the batch, as in the released simulator. Batches look cheaper than they are.
- Cold prefill. The slope over input tokens is far below a cold prefill (A100: 0.012 ms a token, against
  0.15 ms in view silicon), so these runs were most likely prefix-cached. Run this view with prefix
  caching off, or the prefill is discounted twice.
- Context. An ordinary fit with an intercept gives, in ms a token of input and of output: {ols}. Its
  intercepts are negative ({intercepts} ms): on A6000 and L40S decoding slows down with the context.
  kv_token_s would fit {kv} and halve the errors of those two. This view keeps the released assumption.
- KV capacity is the released simulator's assumption: one card of 40 GB (A100) or 48 GB, 4-bit weights and
  KV, nothing reserved.
"""


def _llama_measured(columns: dict[str, NDArray[np.float64]]) -> Profile:
    inputs, outputs = columns["input_tokens"], columns["output_tokens"]
    gpus, ols, intercepts, kv = {}, [], [], []
    for gpu in GPUS:
        seconds = columns[f"{gpu}_latency_s"]
        fit = fit_solo(inputs, outputs, seconds, max_num_batched_tokens=WHOLE_PROMPT)
        gpus[gpu] = _measured_gpu(gpu, fit, LLAMA_70B)
        design = np.column_stack([np.ones_like(inputs), inputs, outputs])
        constant, slope_in, slope_out = np.linalg.lstsq(design, seconds, rcond=None)[0] * 1e3
        ols.append(f"{gpu} {slope_in:.3f} and {slope_out:.1f}")
        intercepts.append(f"{constant:.0f}")
        kv.append(f"{_solo_kv_token_s(inputs, outputs, seconds) * 1e9:.0f} ns")
    notes = MEASURED_NOTES.format(ols=", ".join(ols), intercepts=", ".join(intercepts), kv=", ".join(kv))
    return new_profile(LLAMA_70B.name, "measured", _published(len(inputs)), notes, gpus, WHOLE_PROMPT)


RELEASED_NOTES = """\
The released simulator's engine as far as five coefficients can say it, for the batching mode
prefill_first: a decode step takes its constant (35, 58, 54.5 ms) whatever the batch, and what is left of
the published latencies is prefill, fitted per input token in seconds (not in relative errors). The
released engine takes prefill = latency - output tokens * constant for the very (input, output) pair; most
of that remainder grows with the output rather than the input, since the constants are below the measured
decode time (A100 39 ms). So the fit holds for the sum over calls, not for each. Its batch is bounded by
KV memory only, and its admission uses 95 % of the pool: kv_blocks is that share. Run with prefix caching
off.
"""
RELEASED_ADMISSION = 0.95


def _llama_released(columns: dict[str, NDArray[np.float64]]) -> Profile:
    inputs, outputs = columns["input_tokens"], columns["output_tokens"]
    gpus = {}
    for gpu in GPUS:
        fit = fit_solo(
            inputs,
            outputs,
            columns[f"{gpu}_latency_s"],
            max_num_batched_tokens=WHOLE_PROMPT,
            base_s=RELEASED_DECODE_S[gpu],
            relative=False,
        )
        gpus[gpu] = _measured_gpu(gpu, fit, LLAMA_70B)
        gpus[gpu]["kv_blocks"] = int(RELEASED_ADMISSION * gpus[gpu]["kv_blocks"])
    profile = new_profile(
        LLAMA_70B.name, "released", _published(len(inputs)), RELEASED_NOTES, gpus, WHOLE_PROMPT
    )
    profile["max_num_seqs"] = 4096
    return profile


TRACE4_NOTES = """\
Published latencies of single requests of Trace 4's model, which is not named; its speed is that of a
mixture of experts with about 3 billion active parameters, probably Qwen3-30B-A3B. base_s is the time per
output token; prefill_token_s is fitted to the time to first token (relative weights, the whole prompt in
one step). The errors are those of the total latency, and under ttft those of the time to first token.
- No batching, as in the 70B model's view: sequence_s = kv_token_s = 0.
- The prefill here does not look cached: it grows about in proportion to the input.
- Odd facts of the data: the A6000 decodes fastest (6.7 ms a token, L40S 8.1, A100 8.9) and has by far the
  slowest prefill; the L40S's time to first token jumps from 0.12 s to 0.65 s where the prompt passes 2048
  tokens, a usual token budget of vLLM, which one slope can not follow.
- KV capacity is an assumption (nothing is published): one card as for the 70B model, 4-bit weights and KV
  of Qwen3-30B-A3B.
"""


def _trace4_measured(columns: dict[str, NDArray[np.float64]]) -> Profile:
    inputs, outputs = columns["input_tokens"], columns["output_tokens"]
    gpus = {}
    for gpu in GPUS:
        total, ttft, per_token = (
            columns[f"{gpu}_{name}"] for name in ("total_s", "ttft_s", "per_output_token_s")
        )
        decode = fit_solo(np.ones_like(outputs), outputs, per_token * outputs, base_s=None).model.base_s
        prefill = fit_solo(
            inputs, np.ones_like(inputs), ttft, max_num_batched_tokens=WHOLE_PROMPT, base_s=decode
        )
        predicted = prefill.model.solo_latency_s(inputs, 0, outputs, WHOLE_PROMPT)
        gpus[gpu] = _measured_gpu(gpu, Fit(prefill.model, fit_errors(predicted, total)), QWEN3_30B)
        gpus[gpu]["fit"]["ttft"] = rounded_errors(prefill.errors)
        del gpus[gpu]["check"]  # the standard workflow is the 70B model's
    return new_profile(QWEN3_30B.name, "measured", _published(len(inputs)), TRACE4_NOTES, gpus, WHOLE_PROMPT)


def _measured_gpu(gpu: str, fit: Fit, shape: ModelShape) -> Profile:
    capacity = {
        "gpu_memory_bytes": 40e9 if gpu == "a100" else 48e9,
        "weights_bytes": shape.parameters * 0.5,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "kv_bytes_per_value": 0.5,
        "gpu_memory_utilization": 1.0,
        "null_blocks": 0,
    }
    return {
        "latency": rounded_coefficients(fit.model),
        "fit": rounded_errors(fit.errors),
        "kv_blocks": kv_blocks(**capacity),
        "kv_capacity": capacity,
        **RELEASED_CODE[gpu],
        "check": {"standard_workflow_s": round(standard_workflow_s(fit.model, WHOLE_PROMPT), 2)},
    }


def _solo_kv_token_s(
    inputs: NDArray[np.float64], outputs: NDArray[np.float64], seconds: NDArray[np.float64]
) -> float:
    """kv_token_s of a fit that lets decoding slow down with the context."""
    from scipy.optimize import nnls

    steps, prefill, _, _, kv_read = solo_features(inputs, 0, outputs, WHOLE_PROMPT)
    scale = np.array([1.0, 1.0, 1e3])
    design = np.column_stack([steps, prefill, kv_read]) / seconds[:, None] / scale
    return float(nnls(design, np.ones_like(seconds))[0][2] / scale[2])


def _published(rows: int) -> str:
    return f"single-request latencies released with HexGen-Flow (arXiv 2505.05286), {rows} pairs, not copied"


def _read_csv(path: Path) -> dict[str, NDArray[np.float64]]:
    import pandas as pd

    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read ({error}); a CSV file of single-request latencies is needed"
        ) from None
    needed = ["input_tokens", "output_tokens"]
    if "a100_latency_s" in frame:
        needed += [f"{gpu}_latency_s" for gpu in GPUS]
    else:
        needed += [f"{gpu}_{name}" for gpu in GPUS for name in ("total_s", "ttft_s", "per_output_token_s")]
    for column in needed:
        if column not in frame:
            raise InputError(f"{path}: column {column} is missing; needed are {', '.join(needed)}")
        values = pd.to_numeric(frame[column], errors="coerce")
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            value = frame[column].iloc[bad[0]]
            raise InputError(
                f"{path}: row {bad[0] + 2}, column {column}: {value!r}; it must be a number above 0"
            )
    return {column: frame[column].to_numpy(dtype=np.float64) for column in needed}
