"""What the profiles of every view are put together from; `make_profiles` writes them."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

import numpy as np

from hexrepro.cluster.latency import FitErrors, LatencyModel

GPUS = ("a100", "a6000", "l40s")
RELEASED_PRICE = "list price in the code released with HexGen-Flow, which does not use it; undated"
# public list prices, $ per GPU and hour: one provider, one day. As transcribed with source and day in
# github.com/tgarg01/silybench-data, prices/gpu_hourly.yaml, commit 045df3bf. It has no RTX PRO 6000.
LIST_PRICE = "RunPod, Secure Cloud, on demand, https://www.runpod.io/pricing, read 2026-09-25"
LIST_PRICES = {"l40s": 1.09, "h100": 3.49, "h200": 4.59, "b200": 6.79}
NO_PRICE = "none that we can cite: give price_per_hour in the cluster config"
# k of the released dispatch score, and the price
RELEASED_CODE: dict[str, dict[str, float | str]] = {
    "a100": {"load_weight": 1.0, "price_per_hour": 1.4, "price_source": RELEASED_PRICE},
    "a6000": {"load_weight": 0.5, "price_per_hour": 0.5, "price_source": RELEASED_PRICE},
    "l40s": {"load_weight": 0.5, "price_per_hour": LIST_PRICES["l40s"], "price_source": LIST_PRICE},
}
# decode step of the released simulator, whatever the batch
RELEASED_DECODE_S = {"a100": 0.035, "a6000": 0.058, "l40s": 0.0545}
# decode seconds per token in the published latencies (least squares with an intercept); checks derived GPUs
PUBLISHED_DECODE_S = {"a100": 0.0391, "a6000": 0.0605, "l40s": 0.0563}
# a token budget above any prompt: the published latencies do not tell how prompts were chunked
WHOLE_PROMPT = 16384
# count, input tokens, output tokens, template tokens: CHESS's standard workflow at the medians of its stages
STANDARD_WORKFLOW = (
    (4, 308, 5, 213),
    (1, 667, 45, 630),
    (1, 11748, 678, 9158),
    (4, 5963, 79, 3059),
    (3, 275, 4, 213),
    (1, 1109, 103, 436),
    (1, 961, 22, 261),
)


MAX_NUM_SEQS = 256  # vLLM's default

Profile = dict[str, Any]


def standard_workflow_s(
    model: LatencyModel, budget: int, *, template_cached: bool = False, block_size: int = 16
) -> float:
    """Seconds of the standard 15-call workflow, one call after the other, on an idle instance."""
    counts, inputs, outputs, templates = (np.array(column) for column in zip(*STANDARD_WORKFLOW, strict=True))
    cached = templates // block_size * block_size if template_cached else np.zeros_like(inputs)
    return float(counts @ np.asarray(model.solo_latency_s(inputs, cached, outputs, budget)))


def new_profile(
    model: str, view: str, source: Any, notes: str, gpus: dict[str, Profile], budget: int
) -> Profile:
    """The whole file of a profile; `budget` is its max_num_batched_tokens."""
    return {
        "model": model,
        "view": view,
        "source": source,
        "notes": wrapped(notes),
        "tensor_parallel": 1,
        "block_size": 16,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": budget,
        "gpus": gpus,
    }


def price_of(gpu: str) -> Profile:
    """Price and source of a GPU by our name, as fields of its entry."""
    if gpu in RELEASED_CODE:
        return {key: RELEASED_CODE[gpu][key] for key in ("price_per_hour", "price_source")}
    known = gpu in LIST_PRICES
    return {"price_per_hour": LIST_PRICES.get(gpu), "price_source": LIST_PRICE if known else NO_PRICE}


def rounded_coefficients(model: LatencyModel) -> dict[str, float]:
    return {name: rounded(value) for name, value in asdict(model).items()}


def rounded_errors(errors: FitErrors) -> dict[str, float]:
    return {
        "n": errors.n,
        "mape": round(errors.mape, 4),
        "max": round(errors.max, 4),
        "r2": round(errors.r2, 5),
    }


def wrapped(text: str) -> str:
    """Notes in lines of 100 characters; items ("- ") and lines indented by 3 or more (tables) stay apart."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        table = line.startswith("   ")
        if (
            not blocks
            or line.startswith("- ")
            or table
            or (not line.startswith(" ") and blocks[-1][0][0] in "- ")
        ):
            blocks.append([])
        blocks[-1].append(line if table else line.strip())
    lines = []
    for block in blocks:
        hang = "  " if block[0].startswith("- ") else ""
        table = block[0].startswith(" ")
        lines += block if table else textwrap.wrap(" ".join(block), 100, subsequent_indent=hang)
    return "\n".join(lines) + "\n"


def rounded(value: float) -> float:
    return float(f"{value:.6g}")
