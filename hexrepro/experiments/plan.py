"""What should I buy? The cheapest mix of GPUs that serves a trace at a rate within an SLO.

The simulator judges a mix, on the same arrivals for all mixes. A mix meets the demand when the lower end of the interval of
the share of queries within the SLO is not below it, both on the seeds that pick and on those that are reported (`judge.py`).
How mixes are searched stands in `mixes.py`. Every verdict is kept in the cell cache, so the same command goes on after Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import DictConfig

from hexrepro.cluster.profiles import load_cluster
from hexrepro.errors import InputError
from hexrepro.experiments import Job, mixes, outputs, plan_report, tidy
from hexrepro.experiments.cache import check_cache_dir, prune
from hexrepro.experiments.cells import Setting
from hexrepro.experiments.compare import policies_of
from hexrepro.experiments.inputs import settings_of
from hexrepro.experiments.judge import Demand, Judge
from hexrepro.experiments.mixes import Offer, Search, Verdict
from hexrepro.experiments.outcome import rate
from hexrepro.experiments.printed import Printed
from hexrepro.experiments.progress import Cells
from hexrepro.experiments.settings import Settings, by_view, candidates, number, read_settings, section, whole
from hexrepro.scheduling import Policy
from hexrepro.simulator.engine import check_fits

KNOWN = (
    "gpus", "attainment", "slo_s", "price_per_hour", "n_queries", "alphas", "trials", "seed", "most", "monotone", "cut",
    "runners_up",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """The checked `plan` part of a config. slo_s None: slo_scale times the base SLO of the cluster."""

    gpus: Mapping[str, int]
    attainment: float
    slo_s: float | None
    prices: Mapping[str, float]
    queries: Mapping[str, int]
    alphas: tuple[float, ...]
    trials: int
    seed: int
    most: int
    monotone: bool
    cut: float
    runners_up: int


@dataclass(eq=False)
class Answer:
    """A finished plan in one hardware view. alone: for each GPU the fewest instances that do it alone; present: the verdict on
    the cluster named in the config, where its prices are known."""

    setting: Setting
    policy: str
    demand: Demand
    offers: Sequence[Offer]
    left_out: Sequence[str]
    search: Search
    found: mixes.Found
    alone: Mapping[str, Verdict | None]
    present: Verdict | None
    mixes: int


def run(job: Job) -> None:
    """Plan in every view, print the answers, and write them."""
    settings = read_settings(job.cfg, job.choices)
    question = _question(job.cfg, settings)
    policies = policies_of(replace(settings, policies=_one_policy(settings)))
    outputs.check_writable(job.run_dir)
    cache = check_cache_dir()
    printed, answers = Printed(), []
    for profile in settings.profiles:
        one, picking = _two_settings(settings, profile, question)
        with Cells(question.most, printed.out, unit="mixes at most") as progress:
            progress.begin(f"{one.trace}, {rate(one)}, {profile}: judging mixes")
            answers.append(_plan(one, picking, policies[0], question, settings, cache, progress))
            progress.setting_done(f"{one.trace}, {rate(one)}, {profile}")
        for table in plan_report.tables(answers[-1], question, settings, job):
            printed.add(table)
    with outputs.all_or_nothing(job.run_dir) as part:
        tidy.write(
            part / "plan.csv", (row for answer in answers for row in plan_report.rows(answer, settings))
        )
        plan_report.write_clusters(part / "cluster", answers, question, job)
        for answer in answers if settings.figures else ():
            plan_report.write_figure(part, answer)
        (part / "tables.txt").write_text(printed.text(), encoding="utf-8")
        outputs.write_config(job, part)
    prune(cache)
    printed.results(job.run_dir)


# ---- what is asked -----------------------------------------------------------------------------------------------------


def _question(cfg: DictConfig, settings: Settings) -> Question:
    given = section(cfg, "plan", KNOWN, experiment="plan")
    gpus = _by_gpu(given["gpus"], "plan.gpus", "a100:4,h100:2")
    prices = _by_gpu(given["price_per_hour"], "plan.price_per_hour", "h100:2.2")
    if not gpus:
        raise InputError(
            "plan.gpus=[] is empty; name GPUs of the profile and their most instances, [a100:4,h100:2]"
        )
    for gpu in prices:
        if gpu not in gpus:
            raise InputError(
                f"plan.price_per_hour names {gpu}, but plan.gpus does not name it ({', '.join(gpus)})"
            )
    if settings.seeds < 2:
        raise InputError("seeds=1: a plan needs two seeds or more, or there is no interval")
    if not isinstance(given["monotone"], bool):
        raise InputError(f"plan.monotone={given['monotone']} must be true or false")
    queries = by_view(given["n_queries"], "plan.n_queries", settings.profiles)
    slo = given["slo_s"]
    return Question(
        gpus={str(gpu): whole(most, f"plan.gpus.{gpu}") for gpu, most in gpus.items()},
        attainment=number(given["attainment"], "plan.attainment", above=0.0, most=1.0),
        slo_s=None if slo == "scale" else number(slo, "plan.slo_s", above=0.0, unit=" seconds, or `scale`"),
        prices={gpu: number(price, f"plan.price_per_hour.{gpu}", above=0.0) for gpu, price in prices.items()},
        queries={view: whole(n, "plan.n_queries") for view, n in queries.items()},
        alphas=candidates(given["alphas"], "plan.alphas"),
        trials=whole(given["trials"], "plan.trials", least=0),
        seed=whole(given["seed"], "plan.seed", least=0),
        most=whole(given["most"], "plan.most"),
        monotone=given["monotone"],
        cut=number(given["cut"], "plan.cut", least=0.0, most=1.0),
        runners_up=whole(given["runners_up"], "plan.runners_up", least=0),
    )


def _by_gpu(given: Any, name: str, example: str) -> dict[str, Any]:
    """[a100:4,h100:2] as a mapping. A list, since Hydra would merge a mapping with the one in the file."""
    if not isinstance(given, list) or not all(isinstance(entry, str) for entry in given):
        raise InputError(f"{name}={given} must be a list of GPU:NUMBER, [{example}]")
    found = {}
    for entry in given:
        gpu, _, value = entry.partition(":")
        try:
            found[gpu.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            found[gpu.strip()] = value
        if not gpu.strip() or not value.strip():
            raise InputError(f"{name}: {entry!r} must be GPU:NUMBER, as in [{example}]")
    if len(found) < len(given):
        raise InputError(f"{name}={given} names a GPU twice")
    return found


def _one_policy(settings: Settings) -> dict[str, Any]:
    asked = [name for name in settings.policies if name != settings.baseline] or [settings.baseline]
    if len(asked) > 1:
        raise InputError(f"policy=[{','.join(asked)}]: plan takes one policy")
    return {asked[0]: settings.policies[asked[0]]}


def _two_settings(settings: Settings, profile: str, question: Question) -> tuple[Setting, Setting]:
    """The reported setting, and the same with as many other arrivals, by which mixes are picked."""
    traffic = settings.traffic
    if len(traffic.traces) > 1 or len(traffic.rates_qps) > 1:
        raise InputError(
            f"plan takes one trace at one rate, not {len(traffic.traces)} and {len(traffic.rates_qps)}:"
            " workload=trace1 workload.rate_qps=0.5"
        )
    traffic = replace(traffic, n_queries=traffic.n_queries or question.queries[profile])
    twice = replace(settings, traffic=traffic, profiles=(profile,), seeds=2 * settings.seeds)
    both = settings_of(twice)[0]
    runs = len(both.seeds) // 2
    if runs < 2:
        raise InputError(
            f"the recorded arrivals give {len(both.seeds)} run{'s' * (len(both.seeds) > 1)} of {both.workload.n_queries}"
            " queries, and a plan needs 4 (2 to pick a mix, 2 to report it): give workload.rate_qps=RATE, or longer recordings"
        )
    one, picking = (
        replace(both, arrivals_s=both.arrivals_s[part], seeds=both.seeds[part])
        for part in (slice(runs), slice(runs, 2 * runs))
    )
    return one, picking


def _offers(setting: Setting, question: Question, settings: Settings) -> tuple[list[Offer], list[str]]:
    """What may be bought, and what is left out because a call of the trace does not fit into it."""
    config, offers, left_out = dict(settings.cluster), [], []
    for gpu, most in question.gpus.items():
        entry = {"gpu": gpu} | ({"price_per_hour": question.prices[gpu]} if gpu in question.prices else {})
        one = config | {"name": "offer", "instances": [entry]}
        cluster = load_cluster(one, setting.profile, model=settings.traffic.model)
        if cluster.price_per_hour is None:
            raise InputError(
                f"plan.gpus.{gpu}: its price is not known in view {setting.profile}; give $ per GPU and hour:"
                f" plan.price_per_hour=[{gpu}:PRICE]"
            )
        try:
            check_fits(setting.workload, cluster, decode_blocks=setting.engine.decode_blocks)
        except InputError as error:
            left_out.append(f"{gpu} ({error})")
            continue
        offers.append(Offer(gpu, most, cluster.price_per_hour, cluster.instances[0]))
    if not offers:
        raise InputError(f"plan.gpus: not one of them can serve the trace: {'; '.join(left_out)}")
    return offers, left_out


# ---- how it is answered ------------------------------------------------------------------------------------------------


def _plan(
    setting: Setting,
    picking: Setting,
    policy: Policy,
    question: Question,
    settings: Settings,
    cache: Path,
    progress: Cells,
) -> Answer:
    offers, left_out = _offers(setting, question, settings)
    demand = Demand(question.attainment, question.slo_s or setting.slo_s)
    judge = Judge(
        setting,
        picking,
        policy,
        offers,
        demand,
        settings,
        cache,
        alphas=question.alphas,
        cut=question.cut,
        progress=progress,
    )
    span_s = float((picking.arrivals_s[:, -1] - picking.arrivals_s[:, 0]).max())
    bounds = mixes.work_bounds(
        setting.workload,
        offers,
        attainment=demand.attainment,
        horizon_s=span_s + demand.slo_s * float(setting.workload.slo_scale.max()),
        prefix_caching=setting.engine.prefix_caching,
    )
    w = setting.workload
    alone_s = [
        o.spec.latency.solo_latency_s(w.input_tokens, 0, w.output_tokens, o.spec.max_num_batched_tokens)
        for o in offers
    ]
    space = mixes.all_mixes(offers, bounds, np.mean(alone_s, axis=1))
    search = Search(space, judge, monotone=question.monotone, most=question.most)
    search.run(question.trials, question.seed)
    fewest = {offer.gpu: search.fewest_of(g) for g, offer in enumerate(offers)}
    alone = {gpu: verdict for gpu, (verdict, known) in fewest.items() if known}
    search.next_best(question.runners_up, 4 * question.runners_up)
    priced = (
        replace(i, price_per_hour=question.prices.get(i.gpu, i.price_per_hour))
        for i in setting.cluster.instances
    )
    cluster = replace(setting.cluster, instances=tuple(priced))
    present = judge.of_cluster(cluster, ()) if cluster.price_per_hour is not None else None
    return Answer(
        setting,
        policy.name,
        demand,
        offers,
        left_out,
        search,
        search.found(),
        alone,
        present,
        len(space.counts),
    )
