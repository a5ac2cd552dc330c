"""Goodput: the highest rate of arrivals at which a given share of the queries still meets its SLO.

Per seed, policy and setting, by bisection over the rate on a log scale. All rates see the same arrivals, only closer or
further apart, so the answer at one seed is a property of the policy and not of the draw, and policies are compared in
pairs. Each step of the bisection is one compiled call over all seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from rich import box
from rich.table import Table

from hexrepro import simulator
from hexrepro.errors import InputError
from hexrepro.experiments import Job, outputs, tidy
from hexrepro.experiments.cache import check_cache_dir, code_version, fingerprint, prune, write_atomically
from hexrepro.experiments.cells import Setting
from hexrepro.experiments.compare import policies_of
from hexrepro.experiments.explain import suggest
from hexrepro.experiments.inputs import settings_of
from hexrepro.experiments.outcome import hardware
from hexrepro.experiments.printed import Printed
from hexrepro.experiments.progress import Cells
from hexrepro.experiments.settings import Settings, by_view, candidates, number, read_settings, section, whole
from hexrepro.report.intervals import Interval, mean_interval, ratio_interval
from hexrepro.report.tables import factor, with_half_width
from hexrepro.scheduling import Policy

STRIDE = 1.25  # while a run has not yet met and failed
PILOT_SEEDS = 2  # whose answer the other seeds start from

# processes that only stretch with the rate, so that one draw serves all rates
STRETCHING = ("poisson", "gamma", "modulated", "deterministic")


@dataclass(frozen=True)
class Question:
    """At which rate does `attainment` of the queries meet `slo_scales`? Sought between two rates, to a relative error."""

    slo_scales: tuple[float, ...]
    attainment: float
    low_qps: float
    high_qps: float
    within: float
    alphas: tuple[float, ...]
    alpha_seeds: int


@dataclass(frozen=True, eq=False)
class Answer:
    """The rate of each seed (float64[R], queries/s), and the alpha with which it was reached."""

    setting: Setting
    slo_scale: float
    policy: str
    alpha: float | None
    rates_qps: np.ndarray


def highest_rate(
    meets: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    *,
    low: float,
    high: float,
    within: float,
) -> np.ndarray:
    """For each run, the rate between `low` and `high` at which it stops to meet the demand (float64[R]).

    ``meets(rates)`` says for each run whether it meets the demand at its rate (bool[R]). From `start` (float64[R]) each
    run goes up or down by STRIDE until it has met the demand at one rate and failed at a higher one, and then halves what
    lies between on a log scale until that is `within` of itself; returned is the middle. 0 where not even `low` meets the
    demand, `high` where `high` does. A run that fails at a rate and meets the demand at a higher one has several borders;
    one of them is found.
    """
    rate = np.clip(np.asarray(start, np.float64), low, high)
    met, failed = np.zeros(len(rate)), np.full(len(rate), np.inf)  # the highest met, and the least failed
    while True:
        good = meets(rate)
        met, failed = np.where(good, rate, met), np.where(good, failed, rate)
        out = (met >= high) | (failed <= low)
        if np.all(out | (failed <= met * (1 + within))):
            break
        up, down = np.minimum(met * STRIDE, high), np.maximum(failed / STRIDE, low)
        between = np.sqrt(met) * np.sqrt(np.where(np.isfinite(failed), failed, 1.0))
        rate = np.where(np.isinf(failed), up, np.where(met == 0.0, down, between))
        rate = np.where(out, np.where(met >= high, high, low), rate)
    middle = np.sqrt(met) * np.sqrt(np.where(np.isfinite(failed), failed, 1.0))
    return np.where(failed <= low, 0.0, np.where(met >= high, high, middle))


def run(job: Job) -> None:
    """Find the rates of every policy in every setting, print them, and write goodput.csv."""
    settings = read_settings(job.cfg, job.choices)
    question, queries, names = _question(job.cfg, settings)
    settings = replace(settings, policies=_chosen(settings, names), scored=None)
    policies = policies_of(settings)
    plan = [
        (replace(setting, slo_scale=scale), policy)
        for profile in settings.profiles
        for setting in settings_of(_at_unit_rate(settings, profile, queries[profile]))
        for scale in question.slo_scales
        for policy in policies
    ]
    outputs.check_writable(job.run_dir)
    cache = check_cache_dir()
    printed, answers = Printed(), []
    with Cells(len(plan), printed.out) as progress:
        for at, (setting, policy) in enumerate(plan):
            what = f"{setting.trace}, {hardware(setting)}, SLO scale {setting.slo_scale:g}"
            progress.begin(f"goodput: {what}")
            answer, cached = _get(setting, policy, question, settings, cache)
            answers.append(answer)
            progress.advance(cached)
            if (at + 1) % len(policies) == 0:
                progress.setting_done(what)
    grouped = [answers[i : i + len(policies)] for i in range(0, len(answers), len(policies))]
    for table in _tables(grouped, question, settings):
        printed.add(table)
    with outputs.all_or_nothing(job.run_dir) as part:
        tidy.write(part / "goodput.csv", _rows(grouped, question, settings))
        tidy.write(part / "goodput_samples.csv", _sample_rows(answers, settings))
        (part / "tables.txt").write_text(printed.text(), encoding="utf-8")
        outputs.write_config(job, part)
    prune(cache)
    printed.results(job.run_dir)


def _question(cfg: DictConfig, settings: Settings) -> tuple[Question, dict[str, int], list[str]]:
    """The config's `goodput`: what is asked, with how many queries a run in each view, of which policies."""
    known = (
        "slo_scales",
        "attainment",
        "rates_qps",
        "within",
        "n_queries",
        "policies",
        "alphas",
        "alpha_seeds",
    )
    given = section(cfg, "goodput", known, experiment="throughput")
    scales, ends = given["slo_scales"], given["rates_qps"]
    scales = scales if isinstance(scales, list) else [scales]
    if not isinstance(ends, list) or len(ends) != 2:
        raise InputError(
            f"goodput.rates_qps={ends} must be two rates in queries/s, the least and the highest"
        )
    low, high = (number(x, "goodput.rates_qps", above=0.0, unit=" queries/s") for x in ends)
    if low >= high:
        raise InputError(f"goodput.rates_qps={ends}: the second must be above the first")
    question = Question(
        slo_scales=tuple(number(x, "goodput.slo_scales", above=0.0) for x in scales),
        attainment=number(given["attainment"], "goodput.attainment", above=0.0, most=1.0),
        low_qps=low,
        high_qps=high,
        within=number(given["within"], "goodput.within", above=0.0, below=1.0),
        alphas=candidates(given["alphas"], "goodput.alphas"),
        alpha_seeds=whole(given["alpha_seeds"], "goodput.alpha_seeds"),
    )
    queries = by_view(given["n_queries"], "goodput.n_queries", settings.profiles)
    return (
        question,
        {profile: whole(n, "goodput.n_queries") for profile, n in queries.items()},
        list(given["policies"]),
    )


def _at_unit_rate(settings: Settings, profile: str, queries: int) -> Settings:
    """One view, and arrivals of one query a second, which the bisection stretches."""
    if settings.traffic.arrivals not in STRETCHING:
        raise InputError(
            f"run=goodput takes arrivals that stretch with the rate ({', '.join(STRETCHING)}),"
            f" not {settings.traffic.arrivals}"
        )
    if settings.background is not None:
        raise InputError("run=goodput takes no second workload; leave background at none")
    traffic = replace(settings.traffic, rates_qps=(1.0,), n_queries=queries)
    return replace(settings, traffic=traffic, profiles=(profile,))


def _chosen(settings: Settings, names: Sequence[str]) -> dict[str, Any]:
    """Of the run's policies those that goodput.policies names, and the baseline."""
    for name in names:
        if name not in settings.policies:
            raise InputError(f"goodput.policies names {name}{suggest(name, settings.policies)}")
    return {name: of for name, of in settings.policies.items() if name in names or name == settings.baseline}


def _get(
    setting: Setting, policy: Policy, question: Question, settings: Settings, cache: Path
) -> tuple[Answer, bool]:
    """From the cache, or found and put there."""
    alphas = question.alphas if settings.alpha is None and policy.name in settings.selection.policies else ()
    asked = replace(question, slo_scales=(setting.slo_scale,), alphas=alphas)
    recipe = Path(__file__).read_text(encoding="utf-8")
    file = cache / f"{fingerprint(code_version(), recipe, setting.fingerprint, policy, asked)}.goodput.json"
    try:
        found, cached = json.loads(file.read_text()), True
        rates_qps = np.array(found["rates_qps"], np.float64)
    except (OSError, ValueError, KeyError):  # not there, or damaged from outside
        alpha, rates_qps = _find(setting, policy, asked, settings.workers)
        found, cached = {"alpha": alpha, "rates_qps": rates_qps.tolist()}, False
        write_atomically(file, lambda part: part.write_text(json.dumps(found)))
    return Answer(setting, setting.slo_scale, policy.name, found["alpha"], rates_qps), cached


def _find(
    setting: Setting, policy: Policy, question: Question, workers: int | None
) -> tuple[float | None, np.ndarray]:
    """The alpha with the highest mean rate on other seeds (the least of equals), and the rates at the reported seeds."""

    def answer(arrivals_s: np.ndarray, seeds: np.ndarray, start: float, params=None) -> np.ndarray:
        start_qps = np.full(len(seeds), start)
        return _bisect(setting, policy, question, workers, arrivals_s, seeds, start_qps, params)

    other_s, other_seeds = setting.selection_arrivals_s, setting.selection_seeds
    alone = float(np.sqrt(question.low_qps * question.high_qps))
    pilot = answer(other_s[:PILOT_SEEDS], other_seeds[:PILOT_SEEDS], alone)
    start = float(pilot.mean()) or alone
    alpha = policy.dispatch_params.get("alpha", policy.dispatch_rule.defaults.get("alpha"))
    if question.alphas:
        n = min(question.alpha_seeds, len(other_seeds))
        params = np.stack([policy.with_params(alpha=a).dispatch_vector for a in question.alphas])
        arrivals_s, seeds = np.tile(other_s[:n], (len(params), 1)), np.tile(other_seeds[:n], len(params))
        rates_qps = answer(arrivals_s, seeds, start, np.repeat(params, n, axis=0))
        mean_qps = rates_qps.reshape(len(params), n).mean(axis=1)
        alpha, start = question.alphas[int(np.argmax(mean_qps))], float(mean_qps.max()) or alone
        policy = policy.with_params(alpha=alpha)
    return alpha, answer(setting.arrivals_s, setting.seeds, start)


def _bisect(
    setting: Setting,
    policy: Policy,
    question: Question,
    workers: int | None,
    unit_arrivals_s: np.ndarray,
    seeds: np.ndarray,
    start_qps: np.ndarray,
    dispatch_params: np.ndarray | None = None,
) -> np.ndarray:
    """The highest rate of each run; unit_arrivals_s float64[R, Q] are arrivals of one query a second."""

    def meets(rates_qps: np.ndarray) -> np.ndarray:
        grid = simulator.simulate_grid(
            setting.workload,
            setting.cluster,
            policy,
            arrivals_s=unit_arrivals_s / rates_qps[:, None],
            seeds=seeds,
            dispatch_params=dispatch_params,
            base_slo=setting.slo_s,
            engine=setting.engine,
            estimates=setting.estimator,
            workers=workers,
        )
        return np.mean(grid.latency_s <= grid.slo_s, axis=1) >= question.attainment

    return highest_rate(
        meets, start_qps, low=question.low_qps, high=question.high_qps, within=question.within
    )


# ---- what is left behind -----------------------------------------------------------------------------------


def _intervals(group: Sequence[Answer], settings: Settings) -> Iterator[tuple[Answer, Interval, Interval]]:
    """Of the answers to one question: the mean rate, and its ratio to the baseline's."""
    base = next(a.rates_qps for a in group if a.policy == settings.baseline)
    for answer in group:
        mean = mean_interval(answer.rates_qps, settings.confidence)
        yield answer, mean, ratio_interval(answer.rates_qps, base, settings.confidence)


def _rows(groups: Sequence[Sequence[Answer]], question: Question, settings: Settings) -> Iterator[dict]:
    for group in groups:
        for answer, mean, ratio in _intervals(group, settings):
            yield {
                **_labels(answer, settings),
                "slo_scale": answer.slo_scale,
                "attainment": question.attainment,
                "rate_at_qps": float(mean.value),
                "ci_low": float(mean.low),
                "ci_high": float(mean.high),
                "seeds": len(answer.rates_qps),
                "ratio": float(ratio.value),
                "ratio_ci_low": float(ratio.low),
                "ratio_ci_high": float(ratio.high),
            }


def _sample_rows(answers: Sequence[Answer], settings: Settings) -> Iterator[dict]:
    for answer in answers:
        for seed, rate_qps in zip(answer.setting.seeds, answer.rates_qps, strict=True):
            yield {
                **_labels(answer, settings),
                "slo_scale": answer.slo_scale,
                "seed": int(seed),
                "rate_at_qps": float(rate_qps),
            }


def _labels(answer: Answer, settings: Settings) -> dict[str, Any]:
    same = tidy.labels(settings, answer.setting, answer.policy, answer.alpha)
    return same | {"rate_qps": None}  # the rate is the answer


def _tables(groups: Sequence[Sequence[Answer]], question: Question, settings: Settings) -> Iterator[Table]:
    """One table for each view and scale: the policies' rates in each trace."""
    shown: dict[tuple[str, float], list[Sequence[Answer]]] = {}
    for group in groups:
        shown.setdefault((hardware(group[0].setting), group[0].slo_scale), []).append(group)
    for (where, scale), of in shown.items():
        table = Table(
            title=f"Rate at which {question.attainment:.0%} of the queries meet SLO scale {scale:g}; {where}",
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            padding=(0, 1),
        )
        for name in ("trace", "policy", "α"):
            table.add_column(name)
        for name in ("queries/s", f"times {settings.baseline}'s"):
            table.add_column(name, justify="right")
        for group in of:
            for i, (answer, mean, ratio) in enumerate(_intervals(group, settings)):
                table.add_row(
                    answer.setting.trace if i == 0 else "",
                    answer.policy,
                    "–" if answer.alpha is None else f"{answer.alpha:g}",
                    with_half_width(mean, 3),
                    "baseline" if answer.policy == settings.baseline else factor(ratio),
                )
        yield table
