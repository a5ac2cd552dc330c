"""The step-time model fitted to what profiling measured of an endpoint.

Measurements are rows of a DataFrame: kind (decode or prefill), calls (1 where the API's share is in it), length of the prompts,
together (calls at a time), steps, seconds; and sequences, prefill_tokens, prefill_context, kv_tokens, summed over the steps.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from hexrepro.cluster.latency import CallFit, fit_calls
from hexrepro.validation.endpoint_design import BUDGETS


def features(frame: pd.DataFrame, budget: int) -> pd.DataFrame:
    """The measurements with the terms of the model; those of prompts depend on the token budget of a step."""
    frame = frame.copy()
    prompt = frame["kind"] == "prefill"
    length = frame.loc[prompt, "length"].astype(float)
    frame.loc[prompt, "steps"] = np.ceil(length / budget)
    frame.loc[prompt, "sequences"] = np.ceil(length / budget)
    frame.loc[prompt, "prefill_tokens"] = length
    frame.loc[prompt, "prefill_context"] = length**2 / 2
    frame.loc[prompt, "kv_tokens"] = 0.0
    return frame


def fit_budget(frame: pd.DataFrame, budget: int | None) -> tuple[CallFit, int, str]:
    """The fit, the token budget that it chose, and how sure that is."""
    kinds = frame["kind"].to_numpy()
    weights = np.where(kinds == "decode", 1 / np.sum(kinds == "decode"), 1 / np.sum(kinds == "prefill"))
    longest = frame.loc[frame["kind"] == "prefill", "length"].max()
    # with a budget above the longest prompt none is chunked: all those look alike
    tried = (
        [budget]
        if budget
        else [b for b in BUDGETS if b < longest] + [min(b for b in (*BUDGETS, 2**30) if b >= longest)]
    )
    fits = {}
    for candidate in tried:
        x = features(frame, candidate)
        columns = ("calls", "steps", "prefill_tokens", "prefill_context", "sequences", "kv_tokens", "seconds")
        fit = fit_calls(*(x[c].to_numpy(float) for c in columns), weights=weights)
        fits[candidate] = fit, float(np.sum(weights * (fit.predicted_s / x["seconds"] - 1) ** 2))
    ranked = sorted(fits, key=lambda b: fits[b][1])
    best = ranked[0]
    if budget:
        how = "given"
    elif len(ranked) > 1 and fits[ranked[1]][1] < 1.5 * fits[best][1]:
        how = f"chosen by the fit, but {ranked[1]} fits nearly as well: give it if you know it"
    elif best >= longest:
        how = f"no prompt of up to {longest} tokens was cut"
    else:
        how = "chosen by the fit"
    return fits[best][0], best, how
