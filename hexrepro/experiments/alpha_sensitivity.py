"""How the latency depends on α: a curve for each setting, and a map over α and the arrival rate.

The best α of a curve is the one with the least mean P95 on the seeds of the selection; what is said of it, its P95 against
that at the authors' α above all, comes from the reported seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.table import Table

from hexrepro.errors import InputError
from hexrepro.experiments import Job, outputs, tidy
from hexrepro.experiments.cache import check_cache_dir, prune
from hexrepro.experiments.cells import Setting
from hexrepro.experiments.evaluations import evaluator, row
from hexrepro.experiments.inputs import settings_of
from hexrepro.experiments.outcome import hardware, rate, runs, short
from hexrepro.experiments.printed import Printed
from hexrepro.experiments.progress import Cells
from hexrepro.experiments.settings import Settings, read_settings, whole
from hexrepro.report.intervals import Interval, mean_band, ratio_interval
from hexrepro.report.tables import factor, with_half_width
from hexrepro.scheduling import Policy, load_policy
from hexrepro.tuning import choice
from hexrepro.tuning.objective import objective
from hexrepro.tuning.space import Space, read_space


@dataclass(frozen=True)
class PaperAlpha:
    """The authors' best α for a setting; no cluster means that it is not said which."""

    cluster: str | None
    trace: str
    rate_qps: float
    alpha: float
    tag: str


@dataclass(frozen=True)
class Sensitivity:
    """The checked `sensitivity` part of a config."""

    metrics: tuple[str, ...]
    alphas: tuple[float, ...]
    heat_alphas: tuple[float, ...]
    heat_rates_qps: tuple[float, ...]
    heat_traces: tuple[str, ...]
    heat_policies: tuple[str, ...]
    flat: float
    paper: tuple[PaperAlpha, ...]


@dataclass(frozen=True, eq=False)
class Curve:
    """A policy in a setting at every α. scores: metric -> float64[α, R] on the reported seeds; selection_p95_s: float64[α, S]
    on the seeds of the selection."""

    setting: Setting
    policy: Policy
    alphas: tuple[float, ...]
    scores: Mapping[str, np.ndarray]
    selection_p95_s: np.ndarray

    @property
    def best(self) -> int:
        """The α with the least mean P95 on the seeds of the selection; the least of equals."""
        return int(np.argmin(self.selection_p95_s.mean(axis=-1)))


def run(job: Job) -> None:
    """Compute or fetch every curve and map, print the best α of each setting, and write the results."""
    settings = read_settings(job.cfg, job.choices)
    chosen = read_sensitivity(job.cfg, settings.traffic.traces)
    policies = [load_policy(spec) for spec in OmegaConf.to_container(job.cfg.policy, resolve=True).values()]
    for policy in policies:
        _space(policy, chosen.alphas)  # a policy without alpha shows before anything is simulated
    plan = settings_of(settings)
    heat_plan = _heat_plan(settings, chosen)
    outputs.check_writable(job.run_dir)
    cache = check_cache_dir()

    printed = Printed()
    warm = [p for p in policies if p.name in chosen.heat_policies]
    curves: list[Curve] = []
    heat: list[Curve] = []
    with Cells(
        len(plan) * len(policies) + len(heat_plan) * len(warm), printed.out, unit="curves"
    ) as progress:
        for settings_here, group, alphas, metrics, found in (
            (plan, policies, chosen.alphas, chosen.metrics, curves),
            (heat_plan, warm, chosen.heat_alphas, ("p95",), heat),
        ):
            for setting in settings_here:
                progress.begin(short(setting, settings))
                for policy in group:
                    found.append(
                        curve(setting, policy, alphas, cache, metrics=metrics, workers=settings.workers)
                    )
                    progress.advance(False)
                progress.setting_done(short(setting, settings))
    answers = [_answer(found, settings, chosen) for found in curves]
    for table in _tables(answers, settings, chosen):
        printed.add(table)
    _write(job, settings, answers, heat, printed.text())
    prune(cache)
    printed.results(job.run_dir)


def curve(
    setting: Setting,
    policy: Policy,
    alphas: Sequence[float],
    cache: Path,
    *,
    metrics: Sequence[str] = ("p95",),
    workers: int | None = None,
) -> Curve:
    """One policy in one setting at every α."""
    space, candidates = _space(policy, alphas), [{"alpha": a} for a in alphas]
    objectives = [objective(name, setting.slo_scale) for name in metrics]
    reported = evaluator(setting, space, objectives, cache, reported=True, workers=workers)(candidates)
    p95 = evaluator(setting, space, [objective("p95")], cache, reported=False, workers=workers)(candidates)
    scores = {o.metric: s for o, s in zip(objectives, reported, strict=True)}
    return Curve(setting, policy, tuple(alphas), scores, p95[0])


def _space(policy: Policy, alphas: Sequence[float]) -> Space:
    return read_space({"alpha": list(alphas)}, policy)


def _heat_plan(settings: Settings, chosen: Sensitivity) -> list[Setting]:
    """The settings of the map: its traces that this job has, at its rates."""
    traces = tuple(t for t in settings.traffic.traces if t in chosen.heat_traces)
    if not traces or not chosen.heat_rates_qps:
        return []
    traffic = replace(settings.traffic, traces=traces, rates_qps=chosen.heat_rates_qps)
    return settings_of(replace(settings, traffic=traffic))


def read_sensitivity(cfg: DictConfig, traces: Sequence[str]) -> Sensitivity:
    """Check the `sensitivity` part of a composed config. `traces` are those of this job."""
    plain = OmegaConf.to_container(cfg.sensitivity, resolve=True, throw_on_missing=True)
    heat, flat = plain["heatmap"], plain["flat"]
    if isinstance(flat, bool) or not isinstance(flat, int | float) or not 0.0 <= flat < 1.0:
        raise InputError(f"sensitivity.flat={flat} must be a share between 0 and 1, such as 0.01")
    paper = tuple(_paper_alpha(entry, i) for i, entry in enumerate(plain["paper_alpha"]))
    here = [p.alpha for p in paper if p.trace in traces]
    alphas = sorted({*_alphas(plain, "sensitivity"), *here})  # the authors' α are among the candidates
    rates = heat["rates_qps"]
    for value in rates:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InputError(f"sensitivity.heatmap.rates_qps={value} must be numbers above 0, in queries/s")
    metrics = ("p95", *(name for name in plain["metrics"] if name != "p95"))
    for name in metrics:
        objective(name)  # an unknown one is named here
    return Sensitivity(
        metrics=metrics,
        alphas=tuple(alphas),
        heat_alphas=tuple(_alphas(heat, "sensitivity.heatmap")),
        heat_rates_qps=tuple(float(r) for r in rates),
        heat_traces=tuple(heat["traces"]),
        heat_policies=tuple(heat["policies"]),
        flat=float(flat),
        paper=paper,
    )


def _alphas(plain: Mapping[str, Any], where: str) -> list[float]:
    n, also = whole(plain["alphas"], f"{where}.alphas", 2), plain["also"]
    for value in also:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
            raise InputError(f"{where}.also={value} must be numbers from 0 to 1")
    return sorted({float(a) for a in (*np.linspace(0.0, 1.0, n).round(6), *also)})


def _paper_alpha(entry: Mapping[str, Any], i: int) -> PaperAlpha:
    try:
        return PaperAlpha(
            None if entry["cluster"] is None else str(entry["cluster"]),
            str(entry["trace"]),
            float(entry["rate_qps"]),
            float(entry["alpha"]),
            str(entry["tag"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"sensitivity.paper_alpha[{i}]={entry!r} must have cluster, trace, rate_qps, alpha and tag"
        ) from error


def authors_alpha(setting: Setting, chosen: Sensitivity) -> PaperAlpha | None:
    """The authors' α for a setting, where there is one."""
    for p in chosen.paper:
        same = p.trace == setting.trace and p.rate_qps == setting.rate_qps
        if same and p.cluster in (None, setting.cluster.name):
            return p
    return None


def _answer(found: Curve, settings: Settings, chosen: Sensitivity) -> dict[str, Any]:
    """A curve with its best α, how sure and how flat that is, and the authors' α beside it."""
    p95, at, values = found.scores["p95_s"], found.best, found.alphas
    paper = authors_alpha(found.setting, chosen)
    answer = {
        "curve": found,
        "alpha": values[at],
        "interval": choice.best_interval(found.selection_p95_s, values, settings.confidence),
        "flat": choice.within(p95, values, at, chosen.flat),
        "tied": choice.tied(p95, values, at, settings.confidence),
        "paper": paper,
        "ratio": None,
    }
    if paper is not None:
        theirs = p95[values.index(paper.alpha)]
        answer["ratio"] = ratio_interval(theirs, p95[at], settings.confidence)
    return answer


def _verdict(ratio: Interval) -> str:
    if ratio.is_tie:
        return "tie"
    return "theirs is worse" if ratio.value > 1 else "theirs is better"


def _tables(answers: Sequence[dict], settings: Settings, chosen: Sensitivity) -> list[Table]:
    tables = []
    groups: dict[tuple[str, str], list[dict]] = {}
    for a in answers:
        groups.setdefault((a["curve"].setting.profile, a["curve"].policy.name), []).append(a)
    for (_, policy), shown in groups.items():
        first = shown[0]["curve"]
        table = Table(
            title=f"Best α of {policy}: {hardware(first.setting)}; {runs(first.setting)}",
            caption=f"interval: paired bootstrap over the {first.selection_p95_s.shape[-1]} seeds on which α* was chosen; "
            "the rest is on the reported seeds",
            title_justify="left",
            title_style="bold",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1),
        )
        for head in (
            "setting", "α*", f"{settings.confidence:.0%} interval", f"P95 at most\n{chosen.flat:.0%} higher",
            "not shown\nhigher", "P95 at α*, s", "the authors'\nα", "P95 there,\nagainst α*'s",
        ):  # fmt: skip
            table.add_column(head, justify="left" if head == "setting" else "right")
        for a in shown:
            found = a["curve"]
            band = mean_band(found.scores["p95_s"][found.best], settings.confidence)
            table.add_row(
                f"{found.setting.trace}, {rate(found.setting)}",
                f"{a['alpha']:g}",
                *(f"{r.low:g} – {r.high:g}" for r in (a["interval"], a["flat"], a["tied"])),
                with_half_width(band, 1),
                "–" if a["paper"] is None else f"{a['paper'].alpha:g} [{a['paper'].tag}]".replace("[", "\\["),
                "–" if a["ratio"] is None else factor(a["ratio"]),
            )
        tables.append(table)
    return tables


def _write(
    job: Job,
    settings: Settings,
    answers: Sequence[dict],
    heat: Sequence[Curve],
    printed: str,
) -> None:
    rows, heat_rows, paper_rows = [], [], []
    for answer in answers:
        rows += _curve_rows(answer["curve"], settings)
        rows += _best_rows(answer, settings)
        if answer["paper"] is not None:
            paper_rows.append(_paper_row(answer, settings))
    for found in heat:
        heat_rows += _heat_rows(found, settings)
    for name, records in (("alpha", rows), ("alpha_rate", heat_rows), ("paper_alpha", paper_rows)):
        if records:
            tidy.write(job.run_dir / f"{name}.csv", records)
    (job.run_dir / "tables.txt").write_text(printed, encoding="utf-8")
    outputs.write_config(job, job.run_dir)


def _curve_rows(found: Curve, settings: Settings) -> list[dict]:
    """Every metric at every α."""
    rows = []
    for metric, scores in found.scores.items():
        band = mean_band(scores, settings.confidence)
        for i, alpha in enumerate(found.alphas):
            label = tidy.labels(settings, found.setting, found.policy.name, alpha)
            rows.append(row(label, metric, *(float(x[i]) for x in band), scores.shape[-1]))
    return rows


def _best_rows(a: dict[str, Any], settings: Settings) -> list[dict]:
    """`best`: α* with its bootstrap interval; `best_flat`, `best_tied`: α* with the range that is as good on the reported
    seeds; `p95_s_ratio_paper`: P95 at the authors' α (in column alpha) over that at α*, seeds paired."""
    found = a["curve"]
    n = len(found.setting.seeds)
    label = tidy.labels(settings, found.setting, found.policy.name, a["alpha"])
    chosen_on = found.selection_p95_s.shape[-1]
    rows = [
        row(label, "best", a["alpha"], *a["interval"], chosen_on),
        row(label, "best_flat", a["alpha"], *a["flat"], n),
        row(label, "best_tied", a["alpha"], *a["tied"], n),
    ]
    if a["ratio"] is not None:
        theirs = {**label, "alpha": a["paper"].alpha}
        rows.append(row(theirs, "p95_s_ratio_paper", *map(float, a["ratio"]), n))
    return rows


def _paper_row(a: dict[str, Any], settings: Settings) -> dict:
    """The authors' α beside ours, in words for a reader."""
    found = a["curve"]
    ratio, band = a["ratio"], mean_band(found.scores["p95_s"][found.best], settings.confidence)
    label = tidy.labels(settings, found.setting, found.policy.name, a["alpha"])
    return label | {
        "alpha_low": a["interval"].low,
        "alpha_high": a["interval"].high,
        "flat_low": a["flat"].low,
        "flat_high": a["flat"].high,
        "p95_s": float(band.value),
        "paper_alpha": a["paper"].alpha,
        "tag": a["paper"].tag,
        "paper_cluster": a["paper"].cluster or "not said",
        "p95_ratio": float(ratio.value),
        "ratio_low": float(ratio.low),
        "ratio_high": float(ratio.high),
        "verdict": _verdict(ratio),
    }


def _heat_rows(found: Curve, settings: Settings) -> list[dict]:
    """P95 at every α of one rate, and relative to the best α of that rate, seeds paired."""
    p95, at, n = found.scores["p95_s"], found.best, len(found.setting.seeds)
    band = mean_band(p95, settings.confidence)
    ratio = ratio_interval(p95, np.broadcast_to(p95[at], p95.shape), settings.confidence)
    rows = []
    for metric, interval in (("p95_s", band), ("p95_s_ratio_best", ratio)):
        for i, alpha in enumerate(found.alphas):
            label = tidy.labels(settings, found.setting, found.policy.name, alpha)
            rows.append(row(label, metric, *(float(x[i]) for x in interval), n))
    label = tidy.labels(settings, found.setting, found.policy.name, found.alphas[at])
    interval = choice.best_interval(found.selection_p95_s, found.alphas, settings.confidence)
    rows.append(row(label, "best", found.alphas[at], *interval, found.selection_p95_s.shape[-1]))
    return rows
