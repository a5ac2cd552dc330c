"""A profile from a table of measured batches: input tokens, output tokens, batch, latency.

A row is what `vllm bench latency` measures: `batch` equal calls are handed in at once, and `latency` is the seconds until the
last of them has its last token. Which steps an engine takes for that is worked out step by step, as vLLM's scheduler does
(decodes first, then prompts in order, within a token budget); then `fit_calls` fits the step time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hexrepro.cluster.latency import fit_calls, fit_errors
from hexrepro.cluster.profile_files import Made
from hexrepro.cluster.profile_parts import MAX_NUM_SEQS, rounded, rounded_coefficients, rounded_errors
from hexrepro.errors import InputError

MOST = 1e6  # tokens, calls, seconds: more is a slip, and would be stepped through one by one
COLUMNS = {  # ours -> the names that a file may give it
    "input_tokens": ("input_tokens", "input", "input_len", "prompt_tokens"),
    "output_tokens": ("output_tokens", "output", "output_len"),
    "batch": ("batch", "batch_size"),
    "latency_s": ("latency_s", "latency", "seconds"),
}


def batch_terms(
    input_tokens: int, output_tokens: int, batch: int, budget: int, max_num_seqs: int = MAX_NUM_SEQS
) -> tuple[int, int, float, int, float]:
    """What multiplies each coefficient over the life of a batch of equal calls: (steps, P, A, S, K).

    Sequences take part in a step while they prefill or decode; at most `max_num_seqs` are under way.
    """
    computed, made = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
    steps, context, sequences, kv_read = 0, 0.0, 0, 0.0
    while (computed < input_tokens).any():
        decoding = (computed == input_tokens) & (made < output_tokens)
        free, chunks = budget - int(decoding.sum()), np.zeros(batch, np.int64)
        seats = max_num_seqs - int(decoding.sum())
        for call in np.flatnonzero(computed < input_tokens):
            if free <= 0 or seats <= 0:
                break
            chunks[call] = min(free, input_tokens - computed[call])
            free, seats = free - chunks[call], seats - 1
        steps += 1
        sequences += int(decoding.sum() + (chunks > 0).sum())
        kv_read += float((input_tokens + made[decoding] - 1).sum())
        context += float((chunks * computed + chunks * chunks / 2).sum())
        computed += chunks
        made += decoding | ((chunks > 0) & (computed == input_tokens))
    left = output_tokens - made  # all decode from here on
    tokens = int(left.sum())
    kv_read += float((left * (input_tokens + made - 1) + left * (left - 1) / 2).sum())
    return steps + int(left.max()), batch * input_tokens, context, sequences + tokens, kv_read


def read_batches(path: Path) -> dict[str, NDArray[np.float64]]:
    """The columns of a CSV file of batches, checked."""
    import pandas as pd

    try:
        frame = pd.read_csv(path, skipinitialspace=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InputError(
            f"{path}: cannot be read ({reason}); a CSV file of measured batches is needed"
        ) from None
    found = {}
    for column, names in COLUMNS.items():
        name = next((n for n in names if n in frame), None)
        if name is None:
            raise InputError(
                f"{path}: column {column} is missing (it may be called {', '.join(names)}); the file has"
                f" {', '.join(map(str, frame.columns))}"
            )
        values = pd.to_numeric(frame[name], errors="coerce").to_numpy(np.float64)
        whole = column != "latency_s"
        wrong = ~((values > 0) & (values <= MOST))  # a NaN is wrong too
        wrong[~wrong] = whole & (values[~wrong] % 1 != 0)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            value = frame[name].iloc[row]
            value = value.item() if isinstance(value, np.generic) else value
            want = "a whole number of at least 1" if whole else "a number of seconds above 0"
            raise InputError(
                f"{path}: row {row + 2}, column {name}: {value!r}; it must be {want}, and at most {MOST:g}"
            )
        found[column] = values
    if frame.empty:
        raise InputError(f"{path}: has no rows; one row a measured batch is needed")
    return found


def made_of_batches(
    path: Path,
    name: str,
    *,
    kv_tokens: int,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = MAX_NUM_SEQS,
    tensor_parallel: int = 1,
    block_size: int = 16,
) -> Made:
    """A GPU's entry, fitted to a CSV file of batches. Each kind of row weighs the same."""
    columns = read_batches(path)
    inputs, outputs, batch, seconds = columns.values()
    rows = np.column_stack([inputs, outputs, batch]).astype(np.int64)
    terms = np.array(
        [batch_terms(*map(int, row), max_num_batched_tokens, max_num_seqs) for row in rows], np.float64
    )
    steps, prefill, context, sequences, kv_read = terms.T
    kinds = np.where(outputs == 1, "prefill", np.where(batch == 1, "alone", "together"))
    weights = np.array([1.0 / np.sum(kinds == kind) for kind in kinds])
    odd = []
    if np.ptp(batch) == 0:
        # every step holds the same number of sequences: their cost cannot be told from the step's
        sequences = np.zeros_like(sequences)
        odd.append(
            f"all rows have batch {batch[0]:g}: nothing is known of batching, sequence_s is taken as 0"
        )
    calls = np.ones_like(steps) if np.ptp(steps) > 0 else np.zeros_like(steps)
    odd += _undetermined(path, calls, steps, prefill, context, sequences, kv_read)
    try:
        fit = fit_calls(calls, steps, prefill, context, sequences, kv_read, seconds, weights=weights)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    blocks = kv_tokens // block_size
    reach = {
        "context_tokens": int((inputs + outputs).max()),
        "sequences": int(batch.max()),
        "kv_tokens": int((batch * (inputs + outputs)).max()),
    }
    entry = {
        "tensor_parallel": tensor_parallel,
        "latency": rounded_coefficients(fit.model),
        "fit": {"all": rounded_errors(fit.errors)}
        | {
            str(kind): rounded_errors(fit_errors(fit.predicted_s[kinds == kind], seconds[kinds == kind]))
            for kind in dict.fromkeys(kinds)
        }
        | {"overhead_s": rounded(fit.overhead_s)},
        "reach": reach,
        "kv_blocks": blocks,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    source = f"{len(seconds)} measured batches of {path.name}"
    return Made(name, entry, kinds, seconds, fit.predicted_s, reach, source, tuple(odd))


def _undetermined(path: Path, *terms: NDArray[np.float64]) -> list[str]:
    """A warning where the rows do not tell the coefficients apart; InputError where they can not, being too few."""
    used = np.column_stack([term / term.max() for term in terms if term.any()])
    different = len(np.unique(used, axis=0))
    if different < used.shape[1]:
        raise InputError(
            f"{path}: {different} different batches are too few for {used.shape[1]} coefficients; measure batches of other"
            " input, output and batch"
        )
    rank = int(np.linalg.matrix_rank(used))
    if rank == used.shape[1]:
        return []
    return [
        f"the rows tell only {rank} of {used.shape[1]} coefficients apart: other batches than these are guesses; measure other"
        " input, output and batch as well"
    ]
