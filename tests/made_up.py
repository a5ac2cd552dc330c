"""Result files with made-up numbers: the contract between experiments and figures, small."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from hexrepro.report.intervals import mean_interval, ratio_interval

POLICIES = ("vllm", "ray", "vtc", "qlm", "llf", "rr_pq", "wb_fcfs", "hexgen_flow", "eft", "low")
GAINS = dict(zip(POLICIES, (1.0, 1.4, 0.95, 1.56, 0.97, 1.0, 1.52, 1.55, 1.5, 1.5), strict=True))
METRICS = ("p95_s", "throughput_qps", "scale_at_95", "scale_at_99")


def labels(experiment: str, **given) -> dict:
    """The label columns, in order."""
    usual = dict(
        experiment=experiment,
        cluster="hetero1",
        profile="silicon",
        prefix_caching="template",
        trace="trace1",
        arrivals="poisson",
        rate_qps=0.5,
        policy="vllm",
        alpha=np.nan,
        tenant="all",
    )
    return usual | given


def cell(experiment: str, axes: Mapping, gains: Mapping[str, float], seeds: int = 4) -> dict[str, list[dict]]:
    """All policies in one setting: `gains` says how many times lower than vLLM's the latencies are."""
    rng = np.random.default_rng(7)
    noise = 1.0 + 0.02 * rng.standard_normal((len(gains), seeds))
    base = {"p95_s": 200.0, "throughput_qps": 0.3, "scale_at_95": 5.4, "scale_at_99": 6.0}
    rows: dict[str, list[dict]] = {"summary": [], "samples": [], "curves": [], "quantiles": []}
    values = {}
    for i, (policy, gain) in enumerate(gains.items()):
        here = labels(experiment, policy=policy, alpha=0.2 if policy == "hexgen_flow" else np.nan) | dict(
            axes
        )
        for metric in METRICS:
            up = metric == "throughput_qps"
            x = base[metric] * (gain if up else 1.0 / gain) * noise[i]
            values[policy, metric] = x
            rows["samples"] += [here | dict(seed=s, metric=metric, value=x[s]) for s in range(seeds)]
            found = {metric: mean_interval(x)}
            if policy != "vllm" and ("vllm", metric) in values:
                found[f"{metric}_ratio"] = ratio_interval(x, values["vllm", metric])
            for name, v in found.items():
                rows["summary"].append(
                    here
                    | dict(
                        metric=name,
                        value=float(v.value),
                        ci_low=float(v.low),
                        ci_high=float(v.high),
                        seeds=seeds,
                    )
                )
        for scale in np.linspace(1, 10, 19):
            share = 1 / (1 + np.exp(-3.0 * (scale * gain - 4.4)))
            rows["curves"].append(
                here
                | dict(
                    scale=scale, attainment=share, ci_low=max(0, share - 0.02), ci_high=min(1, share + 0.02)
                )
            )
        for p in (0.05, 0.25, 0.5, 0.75, 0.95, 0.99):
            q = 200.0 / gain * p
            rows["quantiles"].append(here | dict(p=p, latency_s=q, ci_low=0.97 * q, ci_high=1.03 * q))
    return rows


def study(
    experiment: str,
    settings: Iterable[Mapping],
    gains: Mapping[str, float] = GAINS,
    seeds: int = 4,
) -> dict[str, pd.DataFrame]:
    """Result files over settings (label and axis columns each)."""
    files: dict[str, list[dict]] = {}
    for axes in settings:
        for stem, rows in cell(experiment, axes, gains, seeds).items():
            files.setdefault(stem, []).extend(rows)
    return {stem: pd.DataFrame(rows) for stem, rows in files.items()}
