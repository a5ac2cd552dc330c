"""The claims, as data: the paper's value and how sure it is, the measurement that answers it, and what the answer turns on.

A claim's `measure` takes all results and one condition (a hardware view, with or without prefix caching) and gives the
cell of REPRODUCTION.md and a judgement, or None where that condition was not run. No number of ours stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from hexrepro.report import verdicts
from hexrepro.report.results import (
    PLAIN,
    SETTING,
    Condition,
    Results,
    inverse,
    paired_ratio,
    setting_name,
    where,
)
from hexrepro.report.style import name_of
from hexrepro.report.verdicts import BestAlpha, Change, Gain, Judgement

MIXED = ("hetero1", "hetero2")
FOCUS, BASELINE = "hexgen_flow", "vllm"

TUNERS = {"paper": "tuner, on degradation", "continuous": "tuner, continuous"}
"""The tuners of the experiment alpha_online: the paper's, and ours."""
VALUES = ("value", "ci_low", "ci_high")

TAGS = {
    "A": "the authors' abstract, data or released code",
    "B": "two summaries of the paper agree",
    "C": "one summary of the paper",
    "D": "computed by us",
}

Measured = tuple[str, Judgement]
Everything = Mapping[str, Results]
"""Experiment -> its result files."""


@dataclass(frozen=True)
class Claim:
    """A row of REPRODUCTION.md. `tag` says how sure the paper's value is; an own finding has tag D and no paper value.
    `shows` names the module of paper_figures that shows it, and `picture` one of its files."""

    name: str
    text: str
    paper: str
    tag: str
    shows: str
    picture: str
    measure: Callable[[Everything, Condition], Measured | None]
    turns_on: str

    @property
    def own(self) -> bool:
        return self.tag == "D"


def claims() -> list[Claim]:
    """All claims, the paper's in the order of their weight, then our own findings."""
    return [*_PAPERS, *_OWN]


# --- from result files to gains ---------------------------------------------------------------------------------------


def _rows(everything: Everything, experiment: str, file: str, condition: Condition) -> pd.DataFrame | None:
    frame = everything.get(experiment, {}).get(file)
    if frame is None:
        return None
    frame = where(frame, profile=condition[0], prefix_caching=condition[1])
    return frame if len(frame) else None


def as_gains(frame: pd.DataFrame, names: Sequence[str] = SETTING, group: str = "cluster") -> list[Gain]:
    """One gain a row; they are judged by the values of `group`."""
    return [
        Gain(
            setting_name(row, names),
            float(row["value"]),
            float(row["ci_low"]),
            float(row["ci_high"]),
            name_of(str(row[group])),
        )
        for row in frame.to_dict("records")
    ]


def over_vllm(summary: pd.DataFrame, metric: str, policy: str = FOCUS) -> pd.DataFrame:
    """How many times better than vLLM's the metric of a policy is, a row a setting: throughput as it is, a time or a
    scale turned round."""
    rows = where(summary, metric=f"{metric}_ratio", policy=policy, tenant="all")
    return rows if metric in ("throughput_qps", "attainment", "goodput_qps") else inverse(rows)


def over_strongest(
    samples: pd.DataFrame, metric: str, rivals: Sequence[str] = PLAIN, policy: str = FOCUS
) -> pd.DataFrame:
    """The same against whichever rival is best in each setting, seeds paired; column `rival` says which."""
    higher = metric == "throughput_qps"
    rows = where(samples, metric=metric, policy=list(rivals), tenant="all")
    means = rows.groupby([*SETTING, "policy"], sort=False)["value"].mean().reset_index()
    means = means.sort_values("value", ascending=not higher, kind="stable")
    best = means.drop_duplicates(list(SETTING)).set_index(list(SETTING))["policy"]
    parts = []
    for rival in dict.fromkeys(best):
        ours = samples[samples["policy"].isin([policy, rival])]
        ratios = (
            paired_ratio(ours, metric, policy, rival) if higher else paired_ratio(ours, metric, rival, policy)
        )
        keys = pd.MultiIndex.from_frame(ratios[list(SETTING)])
        parts.append(ratios[np.asarray(best.reindex(keys) == rival)].assign(rival=rival))
    return pd.concat(parts, ignore_index=True)


# --- how a cell reads -------------------------------------------------------------------------------------------------


def factor(gain: Gain) -> str:
    """'1.60 × (1.58–1.62)', and whether that is a tie."""
    high = f"{gain.high:.2f}" if np.isfinite(gain.high) else "∞"
    return f"{gain.value:.2f} × ({gain.low:.2f}–{high}){' tie' if gain.tie else ''}"


def shown(gains: Sequence[Gain]) -> str:
    """The mean over settings with its interval, and the least and the most of them."""
    text = factor(verdicts.mean_gain(gains))
    values = [g.value for g in gains]
    return text + (f", {min(values):.2f} to {max(values):.2f}" if len(gains) > 1 else "")


def judged(gains: Sequence[Gain], rule: Callable[..., Judgement], *numbers: float) -> Measured | None:
    """A line for each group with its own judgement; together they hold when each does, and fail when none does."""
    groups: dict[str, list[Gain]] = {}
    for gain in gains:
        groups.setdefault(gain.group, []).append(gain)
    if not groups:
        return None
    each = {group: rule(part, *numbers) for group, part in groups.items()}
    lines = [f"{group}: {shown(part)}: {each[group].why}" for group, part in groups.items()]
    return "<br>".join(lines), Judgement(verdicts.both(each).grade, "")


# --- the measurements -------------------------------------------------------------------------------------------------


def _vllm(metric: str, rule, *numbers: float, clusters=MIXED, policy: str = FOCUS):
    def measure(everything: Everything, condition: Condition) -> Measured | None:
        summary = _rows(everything, "attainment", "summary", condition)
        if summary is None:
            return None
        rows = over_vllm(where(summary, cluster=list(clusters)), metric, policy)
        return judged(as_gains(rows), rule, *numbers)

    return measure


def _strongest(metric: str, least: float, most: float):
    def measure(everything: Everything, condition: Condition) -> Measured | None:
        samples = _rows(everything, "attainment", "samples", condition)
        if samples is None:
            return None
        rows = over_strongest(where(samples, cluster=list(MIXED)), metric)
        gains = as_gains(rows)
        rivals = ", ".join(name_of(r) for r in dict.fromkeys(rows["rival"]))
        cell, judgement = judged(gains, verdicts.in_range, least, most)
        return f"{cell}<br>strongest: {rivals}", judgement

    return measure


def _goodput(everything: Everything, condition: Condition) -> Measured | None:
    rows = _rows(everything, "throughput", "goodput", condition)
    if rows is None:
        return None
    rows = where(rows, cluster=list(MIXED), policy=FOCUS)
    rows = rows.assign(value=rows["ratio"], ci_low=rows["ratio_ci_low"], ci_high=rows["ratio_ci_high"])
    return judged(as_gains(rows, ("cluster", "trace", "slo_scale")), verdicts.in_range, 1.49, 1.81)


def _trace1_scale(everything: Everything, condition: Condition) -> Measured | None:
    summary = _rows(everything, "attainment", "summary", condition)
    if summary is None:
        return None
    summary = where(summary, cluster=list(MIXED), trace="trace1", tenant="all")
    changes = []
    for row in over_vllm(summary, "scale_at_95").to_dict("records"):
        here = where(summary, cluster=row["cluster"], rate_qps=row["rate_qps"], metric="scale_at_95")
        before, after = (as_gains(where(here, policy=p))[0] for p in (BASELINE, FOCUS))
        changes.append(Change(before.setting, before, after, as_gains(pd.DataFrame([row]))[0]))
    if not changes:
        return None
    cell = "<br>".join(
        f"{c.setting.replace(', Trace 1', '')}: {_pm(c.before)} → {_pm(c.after)}" for c in changes
    )
    return cell, verdicts.from_to(changes, 5.4, 3.5)


def _pm(gain: Gain) -> str:
    return f"{gain.value:.1f} ±{(gain.high - gain.low) / 2:.1f}"


def _ablation(everything: Everything, condition: Condition) -> Measured | None:
    """Gains in the SLO scale at 95 %, which knows of mixed SLOs: a query counts against its own."""
    samples = _rows(everything, "ablation", "samples", condition)
    if samples is None:
        return None
    samples = where(samples, cluster=list(MIXED))
    parts = {
        "WB against RR": ("wb_fcfs", "vllm", ("one", "mixed")),
        "PQ against FCFS, one SLO": ("rr_pq", "vllm", ("one",)),
        "PQ against FCFS, mixed SLOs": ("rr_pq", "vllm", ("mixed",)),
        "both against WB, one SLO": ("hexgen_flow", "wb_fcfs", ("one",)),
        "both against WB, mixed SLOs": ("hexgen_flow", "wb_fcfs", ("mixed",)),
        "both against PQ": ("hexgen_flow", "rr_pq", ("one", "mixed")),
    }
    lines, each = [], {}
    for text, (policy, against, mixes) in parts.items():
        here = where(samples, slo_mix=list(mixes))
        gains = as_gains(paired_ratio(here, "scale_at_95", against, policy, (*SETTING, "slo_mix")))
        if gains:
            each[text] = verdicts.helps(gains)
            lines.append(f"{text}: {shown(gains)}: {each[text].why}")
    return ("<br>".join(lines), Judgement(verdicts.both(each).grade, "")) if each else None


def _robust(
    experiment: str, metric: str, choose: Callable[[pd.DataFrame], pd.DataFrame], group: str = "cluster"
):
    """The gain over vLLM in every setting of an experiment, by `group`."""

    def measure(everything: Everything, condition: Condition) -> Measured | None:
        summary = _rows(everything, experiment, "summary", condition)
        if summary is None:
            return None
        rows = choose(where(summary, metric=f"{metric}_ratio", policy=FOCUS))
        return judged(as_gains(inverse(rows), group=group), verdicts.always)

    return measure


def _at_30(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[np.isclose(rows["rate_qps"], 30.0)]


def _bursts(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["arrivals"] != "poisson"]


def _everyone(rows: pd.DataFrame) -> pd.DataFrame:
    return where(rows, tenant="all", cluster=list(MIXED))


def _beside_chat(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows[(rows["chat_qps"] > 0) & (rows["tenant"] != "all")]
    return rows.assign(load=np.where(rows["tenant"] == "chat", "chat calls", "Text-to-SQL queries"))


def _best_alpha(everything: Everything, condition: Condition) -> Measured | None:
    rows = _rows(everything, "alpha_sensitivity", "paper_alpha", condition)
    if rows is None:
        return None
    rows = where(rows, policy=FOCUS)
    found = [
        BestAlpha(
            setting_name(row),
            Gain(
                setting_name(row), float(row["p95_ratio"]), float(row["ratio_low"]), float(row["ratio_high"])
            ),
            float(row["alpha"]),
            float(row["paper_alpha"]),
        )
        for row in rows.to_dict("records")
    ]
    lines = []
    for (cluster, trace), part in rows.groupby(["cluster", "trace"], sort=False):
        pairs = (
            f"{r['alpha']:g} ({r['paper_alpha']:g})" for r in part.sort_values("rate_qps").to_dict("records")
        )
        lines.append(f"{name_of(cluster)}, {name_of(trace)}: {', '.join(pairs)}")
    worst = max(found, key=lambda f: f.penalty.value)
    lines.append(f"P95 at theirs at most {100 * (worst.penalty.value - 1):.0f} % higher")
    return "<br>".join(lines), verdicts.same_alpha(found)


def _tuner(everything: Everything, condition: Condition) -> Measured | None:
    """The best fixed α's P95 over each tuner's."""
    rows = _rows(everything, "alpha_online", "alpha_online", condition)
    if rows is None:
        return None
    tuners = where(rows, metric="p95_s_ratio")
    tuners = inverse(where(tuners, policy=list(TUNERS))).replace({"policy": TUNERS})
    return judged(as_gains(tuners, ("policy",), group="policy"), verdicts.never_worse)


def _no_parameter(everything: Everything, condition: Condition) -> Measured | None:
    """HexGen-Flow's P95 over the best of the rules without a parameter, which knows no α: ≥ 1 where that is as good."""
    samples = _rows(everything, "attainment", "samples", condition)
    if samples is None:
        return None
    rows = over_strongest(where(samples, cluster=list(MIXED)), "p95_s", rivals=("low", "eft", "qlm"))
    gains = as_gains(inverse(rows))
    return judged(gains, verdicts.never_worse)


def _no_mix(everything: Everything, condition: Condition) -> Measured | None:
    """The gain over vLLM where instances differ, and where all are alike."""
    summary = _rows(everything, "attainment", "summary", condition)
    if summary is None:
        return None
    ends = [as_gains(over_vllm(where(summary, cluster=c), "p95_s")) for c in ("hetero1", "homo")]
    if not all(ends):
        return None
    mixed, alike = (verdicts.mean_gain(gains) for gains in ends)
    return f"Hetero-1: {factor(mixed)} → Homo: {factor(alike)}", verdicts.shrinks(mixed, alike)


def _overhead(everything: Everything, condition: Condition) -> Measured | None:
    """One decision, the longest over all cluster sizes."""
    timings = _rows(everything, "scale", "timings", condition)
    if timings is None:
        return None
    rows = where(timings, metric="decision_s", policy=FOCUS)
    times = [
        Gain(f"{r['instances']} instances", *(1e3 * r[c] for c in VALUES)) for r in rows.to_dict("records")
    ]
    lines = [f"{t.setting}: {t.value:.2g} ms ({t.low:.2g}–{t.high:.2g})" for t in times]
    return "<br>".join(lines), verdicts.below(max(times, key=lambda t: t.value), 5.0, "ms a call")


def _prefill(everything: Everything, condition: Condition) -> Measured | None:
    """The gain at both ends of the share that is cached, and where it is least."""
    summary = _rows(everything, "prefill_matters", "summary", condition)
    if summary is None:
        return None
    lines, each = [], {}
    for cluster, rows in over_vllm(summary, "p95_s").groupby("cluster", sort=False):
        means = {
            share: verdicts.mean_gain(as_gains(part))
            for share, part in rows.groupby("cached_share", sort=True)
        }
        first, *_, last = means.values()
        least = min(means, key=lambda share: means[share].value)
        each[cluster] = verdicts.shrinks(first, last)
        lines.append(
            f"{name_of(cluster)}: {factor(first)} → {factor(last)}: {each[cluster].why}; "
            f"least {means[least].value:.2f} × with {100 * least:.0f} % cached"
        )
    return "<br>".join(lines), Judgement(verdicts.both(each).grade, "")


# --- the table --------------------------------------------------------------------------------------------------------

_PREFILL = (
    "how fast the slow cards compute prompts, which nobody published, and whether the template is cached: "
    "round robin gives slow cards as many calls as fast ones"
)
_RIVAL = (
    "what a rival is: by its own published definition QLM estimates waiting times and so sees the difference between "
    "instances; under round robin, as in the released code, it could not"
)

_PAPERS: list[Claim] = [
    Claim(
        "p95_vllm",
        "P95 latency lower than vLLM's, all traces",
        "1.42–1.56 ×",
        "A",
        "latency",
        "latency_p95",
        _vllm("p95_s", verdicts.in_range, 1.42, 1.56),
        _PREFILL,
    ),
    Claim(
        "p95_strongest",
        "P95 latency lower than the strongest rival's, all traces",
        "1.42–1.56 ×",
        "A",
        "latency",
        "latency_p95",
        _strongest("p95_s", 1.42, 1.56),
        _RIVAL,
    ),
    Claim(
        "throughput_vllm",
        "Throughput higher than vLLM's, all traces",
        "1.49–1.81 ×",
        "A",
        "throughput",
        "throughput",
        _vllm("throughput_qps", verdicts.in_range, 1.49, 1.81),
        _PREFILL + "; completed queries over the time to the last one, so the tail decides",
    ),
    Claim(
        "throughput_strongest",
        "Throughput higher than the strongest rival's, all traces",
        "1.49–1.81 ×",
        "A",
        "throughput",
        "throughput",
        _strongest("throughput_qps", 1.49, 1.81),
        _RIVAL,
    ),
    Claim(
        "goodput",
        "Throughput read as goodput: highest rate at which 95 % of the queries meet an SLO, against vLLM's",
        "1.49–1.81 ×",
        "A",
        "throughput",
        "throughput_goodput",
        _goodput,
        "what the paper means by throughput, which its abstracts do not say",
    ),
    Claim(
        "trace1_scale",
        "SLO scale at which 95 % of Trace 1's queries attain it, vLLM → HexGen-Flow",
        "5.4 → 3.5",
        "C",
        "attainment",
        "attainment_scales",
        _trace1_scale,
        "which cluster, rate and baseline the numbers belong to, which the summary does not say",
    ),
    Claim(
        "v1_deadline",
        "v1, against vLLM: latency deadline that 95 % meet, lower",
        "up to 1.67 ×, mean 1.41 ×",
        "A",
        "attainment",
        "attainment_scales",
        _vllm("scale_at_95", verdicts.mean_and_most, 1.41, 1.67),
        _PREFILL,
    ),
    Claim(
        "v1_throughput",
        "v1, against vLLM: throughput higher",
        "up to 1.75 ×, mean 1.65 ×",
        "A",
        "throughput",
        "throughput",
        _vllm("throughput_qps", verdicts.mean_and_most, 1.65, 1.75),
        _PREFILL,
    ),
    Claim(
        "ablation",
        "Ablation: workload-balanced dispatch (WB) and the urgency queue (PQ) each help, the two together are best",
        "qualitative",
        "B",
        "ablation",
        "ablation",
        _ablation,
        "whether SLOs differ: under one common SLO the urgency order is nearly that of arrival",
    ),
    Claim(
        "high_load",
        "Robust at 30 queries/s: P95 lower than vLLM's",
        "qualitative",
        "B",
        "high_load",
        "high_load",
        _robust("high_load", "p95_s", _at_30),
        "how large a cluster carries 30 queries/s, which neither summary says; ours is in the experiment's YAML",
    ),
    Claim(
        "bursty",
        "Robust in bursts: P95 lower than vLLM's",
        "qualitative",
        "B",
        "bursty",
        "bursty",
        _robust("bursty", "p95_s", _bursts, group="arrivals"),
        "the shape of the bursts, which neither summary gives",
    ),
    Claim(
        "multi_tenant",
        "Robust with tenants of mixed SLOs: SLO scale at 95 %, each query by its own SLO, lower than vLLM's",
        "qualitative",
        "B",
        "multi_tenant",
        "multi_tenant_hetero1",
        _robust("multi_tenant", "scale_at_95", _everyone),
        "the tenants' shares and scales, which neither summary gives",
    ),
    Claim(
        "mixed_load",
        "Robust beside another load on the same instances: P95 of both lower than vLLM's",
        "qualitative",
        "C",
        "mixed_load",
        "mixed_load",
        _robust("mixed_load", "p95_s", _beside_chat, group="load"),
        "the shape and the size of the other load, which neither summary gives",
    ),
    Claim(
        "best_alpha",
        "Best α by setting: ours (the authors'), from the lower to the higher rate",
        "in brackets in the cells",
        "A",
        "alpha_sensitivity",
        "alpha_sensitivity",
        _best_alpha,
        "how the queue's time is counted (work waiting and running, or all ever sent) and what β is",
    ),
    Claim(
        "overhead",
        "Scheduling overhead per request",
        "below 5 ms",
        "C",
        "scale",
        "scale",
        _overhead,
        "what is counted: ours is one decision asked from Python, without HTTP and tokenising",
    ),
]

_OWN: list[Claim] = [
    Claim(
        "no_parameter",
        "The best rule without a parameter (least work, EFT, QLM) is no worse than HexGen-Flow at its best α: HexGen-Flow's "
        "P95 over that rule's",
        "–",
        "D",
        "latency",
        "latency_p95",
        _no_parameter,
        "a rule that counts KV memory or looks at batches sees more than a score in seconds",
    ),
    Claim(
        "no_mix",
        "The gain comes from the difference between instances: P95 gain over vLLM on Hetero-1 → on Homo",
        "–",
        "D",
        "latency",
        "latency_p95",
        _no_mix,
        "whether KV memory is short, so that where a call is placed matters even among equals",
    ),
    Claim(
        "prefill",
        "The cost of prompts decides the gain: P95 gain with nothing cached → with the whole prompt cached",
        "–",
        "D",
        "prefill_matters",
        "prefill_matters",
        _prefill,
        "the ratio of the cards' prompt speeds, which is wider than that of their decode speeds",
    ),
    Claim(
        "tuner",
        "An α-tuner at work is no worse than the best fixed α of the day: that one's P95 over the tuner's",
        "–",
        "D",
        "alpha_tuning",
        "alpha_tuning_p95",
        _tuner,
        "how much the best α moves within the day, and how much of the tail is lost before the tuner has noticed",
    ),
]
