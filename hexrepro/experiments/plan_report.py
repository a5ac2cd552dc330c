"""What a plan prints and leaves behind: the answer's table, plan.csv, the cluster config, the figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hexrepro.experiments import Job, tidy
from hexrepro.experiments.judge import cluster_of
from hexrepro.experiments.mixes import Counts, Offer, Verdict
from hexrepro.experiments.outcome import rate
from hexrepro.experiments.settings import Settings
from hexrepro.report.intervals import mean_interval
from hexrepro.report.tables import with_half_width

if TYPE_CHECKING:
    from hexrepro.experiments.plan import Answer, Question

RISING = 1.0  # a run whose last third is shown to take longer than its middle third has not settled


def in_words(offers: Sequence[Offer], counts: Counts) -> str:
    """'2 × h100 + 1 × l40s', GPUs of an instance in brackets where it has several."""
    parts = []
    for offer, count in zip(offers, counts, strict=True):
        if count:
            cards = offer.spec.tensor_parallel
            parts.append(f"{count} × {offer.gpu}" + (f" ({cards} GPUs each)" if cards > 1 else ""))
    return " + ".join(parts)


def tables(answer: Answer, question: Question, settings: Settings, job: Job) -> Iterator[Group]:
    setting, found, demand = answer.setting, answer.found, answer.demand
    of = (
        ""
        if setting.slo_scale == 1 or question.slo_s
        else f" ({setting.slo_scale:g} × {setting.base_slo_s:.1f} s, of {setting.cluster.name})"
    )
    title = (
        f"{setting.trace}, {rate(setting)}, {setting.workload.n_queries} queries; {setting.profile} step times, prefix caching:"
        f" {setting.engine.prefix_caching}\n{demand.attainment:.0%} of the queries within {demand.slo_s:.1f} s{of}: "
    )
    title += "the cheapest mix" if found.best else "no mix of these does it"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    table.add_column("instances")
    for head in (
        "$/h",
        "$ per 1 000\nqueries",
        "α",
        "within the SLO\n%",
        "meets it on\nseeds",
        "P95\ns",
        "last third /\nmiddle third",
    ):
        table.add_column(head, justify="right")
    for what, verdict in _shown(answer):
        table.add_row(what, *_cells(answer, verdict, settings))
    yield Group(
        Text(title, style="bold"),
        table,
        Text("\n".join(_caption(answer, question, settings)), style="dim"),
        *_use(answer, settings, job),
    )


def _shown(answer: Answer) -> Iterator[tuple[str, Verdict]]:
    best = answer.found.best
    if best:
        yield "the answer", best
    known = sorted(answer.found.verdicts.values(), key=lambda v: answer.search.space.place[v.counts])
    shown = {best.counts} if best else set()
    for verdict in [v for v in known if v.meets and v.counts not in shown][:3]:
        shown.add(verdict.counts)
        yield "as cheap" if verdict.price_per_hour == best.price_per_hour else "next best", verdict
    for gpu, verdict in answer.alone.items():
        if verdict is not None and verdict.counts not in shown:
            shown.add(verdict.counts)
            yield f"{gpu} alone", verdict
    cheaper = [v for v in known if not v.meets and (not best or v.price_per_hour <= best.price_per_hour)]
    if cheaper:
        yield "nearest miss" if best else "comes nearest", max(cheaper, key=lambda v: float(v.interval.value))
    if answer.present is not None:
        yield answer.setting.cluster.name, answer.present


def _cells(answer: Answer, verdict: Verdict, settings: Settings) -> list[str]:
    words = in_words(answer.offers, verdict.counts) if verdict.counts else "as it is"
    share = with_half_width(verdict.interval, 1, 100.0)
    return [
        words,
        f"{verdict.price_per_hour:.2f}",
        with_half_width(mean_interval(verdict.cost_per_1000, settings.confidence), 2),
        "–" if verdict.alpha is None else f"{verdict.alpha:g}",
        f"{share}{'' if verdict.fresh else ' *'}",
        f"{verdict.of_seeds} of {len(verdict.attainment)}",
        with_half_width(mean_interval(verdict.p95_s, settings.confidence), 1),
        with_half_width(mean_interval(verdict.drift, settings.confidence), 2),
    ]


def _use(answer: Answer, settings: Settings, job: Job) -> Iterator[Text]:
    if answer.found.best:
        yield Text("To use it:")
        yield Text(_command(answer, settings, job))


def _caption(answer: Answer, question: Question, settings: Settings) -> Iterator[str]:
    found, space = answer.found, answer.search.space
    confidence, seeds = settings.confidence, len(answer.setting.seeds)
    what = "cheaper mixes" if found.best else "mixes"
    total = space.place[found.best.counts] if found.best else answer.mixes
    ruled = (
        f"{found.by_work} cannot do the work in time, {found.by_part} are part of one that fails, {found.by_judge} were"
        " simulated"
    )
    if found.proved:
        yield f"{total} {what}, all ruled out: {ruled}."
    else:
        left = total - found.by_work - found.by_part - found.by_judge
        yield f"NOT PROVED: {left} of {total} {what} were not judged (plan.most={question.most}); {ruled}."
    yield (
        f"± half of the {confidence:.0%} interval over arrival seeds. A mix meets the demand when the interval's lower end"
        f" does, on {seeds} seeds that pick it and on {seeds} others, which are shown (* refused before, on the seeds shown)."
        f" {len(found.verdicts)} of {answer.mixes} mixes were simulated."
    )
    cheaper = [v for v in found.verdicts.values() if not found.best or space.place[v.counts] < total]
    unsure = [v.price_per_hour for v in cheaper if not v.meets and not v.fails]
    if unsure:
        yield (
            f"{len(unsure)} of the {what}, from $ {min(unsure):.2f} an hour, lie within the noise of the demand:"
            " with more seeds one of them may be the answer."
        )
    prices = ", ".join(f"{o.gpu} {o.price_per_hour / o.spec.tensor_parallel:g}" for o in answer.offers)
    yield (
        f"$ per GPU and hour: {prices}. Where the profile's (price_source there) they are of different sources and days:"
        " plan.price_per_hour=[GPU:PRICE] sets yours."
    )
    for gpu, verdict in answer.alone.items():
        if verdict is None:
            most = question.gpus[gpu]
            yield f"{gpu} alone does not do it with up to {most} instance{'s' * (most > 1)}."
    for left_out in answer.left_out:
        yield f"left out: {left_out}"
    if found.best:
        drift = mean_interval(found.best.drift)
        if float(drift.low) > RISING:
            yield "The latency still rises at the end of the run: a longer one would ask for more. Raise plan.n_queries."


# overrides that the answer settles, or that are the plan's own
SETTLED = (
    "experiment=", "plan.", "hydra.", "cluster", "policy", "profile=", "workload=", "workload.rate_qps",
    "workload.n_queries", "alpha=", "slo_scale", "selection.",
)  # fmt: skip


def _command(answer: Answer, settings: Settings, job: Job) -> str:
    """What runs the answer's cluster under the same load and SLO, which is another multiple of its own base SLO."""
    setting, best = answer.setting, answer.found.best
    generated = setting.rate_qps is not None and settings.traffic.path is None
    parts = [
        "python -m hexrepro experiment=hetero1 \\\n   ",
        f"--config-dir {job.run_dir} cluster={_name(answer)} policy={answer.policy} \\\n   ",
        f"workload={job.choices['workload']}",
        *(o for o in job.overrides if not o.lstrip("+").startswith(SETTLED)),
        "" if setting.rate_qps is None else f"workload.rate_qps={setting.rate_qps:g}",
        f"workload.n_queries={setting.workload.n_queries}" if generated and not settings.background else "",
        f"profile={setting.profile}",
        "" if best.alpha is None else f"alpha={best.alpha:g}",
        "" if settings.background else f"slo_scale={_slo_scale(answer):.6g}",
    ]
    return " ".join(part for part in parts if part)


def _slo_scale(answer: Answer) -> float:
    """The SLO over the base SLO of the answer's cluster: a faster cluster has a smaller one."""
    from hexrepro.scheduling import base_slo_s
    from hexrepro.scheduling.views import instance_views

    views = instance_views(cluster_of(answer.offers, answer.found.best.counts))
    return answer.demand.slo_s / base_slo_s(
        answer.setting.workload, views, prefix_caching=answer.setting.engine.prefix_caching
    )


# ---- what is written ---------------------------------------------------------------------------------------------------


def rows(answer: Answer, settings: Settings) -> Iterator[dict]:
    """Every mix that was judged, in order of price."""
    place = answer.search.space.place
    for verdict in sorted(answer.found.verdicts.values(), key=lambda v: place[v.counts]):
        label = tidy.labels(settings, answer.setting, answer.policy, verdict.alpha)
        yield {
            **label,
            "cluster": in_words(answer.offers, verdict.counts),
            **{offer.gpu: n for offer, n in zip(answer.offers, verdict.counts, strict=True)},
            "price_per_hour": verdict.price_per_hour,
            "cost_per_1000": float(verdict.cost_per_1000.mean()),
            "slo_s": answer.demand.slo_s,
            "demand": answer.demand.attainment,
            "attainment": float(verdict.interval.value),
            "ci_low": float(verdict.interval.low),
            "ci_high": float(verdict.interval.high),
            "p95_s": float(verdict.p95_s.mean()),
            "drift": float(verdict.drift.mean()),
            "seeds": len(verdict.attainment),
            "seeds_met": verdict.of_seeds,
            "meets": verdict.meets,
            "given_up": verdict.cut,
            "fresh": verdict.fresh,
            "answer": answer.found.best is not None and verdict.counts == answer.found.best.counts,
        }


def _name(answer: Answer) -> str:
    s = answer.setting
    at = "recorded" if s.rate_qps is None else f"{s.rate_qps:g}".replace(".", "p")
    return f"plan_{s.trace}_{at}_{s.profile}"


def write_clusters(folder: Path, answers: Sequence[Answer], question: Question, job: Job) -> None:
    """The answer of each view as a cluster config, which --config-dir RUN_DIR offers as cluster=NAME."""
    given = dict(job.cfg.cluster)
    for answer in answers:
        if answer.found.best is None:
            continue
        entries = []
        for offer, count in zip(answer.offers, answer.found.best.counts, strict=True):
            if count:
                price = {"price_per_hour": question.prices[offer.gpu]} if offer.gpu in question.prices else {}
                entries.append({"gpu": offer.gpu, "count": int(count)} | price)
        kept = {k: v for k, v in given.items() if k not in ("name", "instances")}
        if kept.get("profile"):
            kept["profile"] = str(Path(kept["profile"]).absolute())
        content = {"name": _name(answer)} | kept | {"instances": entries}
        best = answer.found.best
        head = (
            f"# {answer.demand.attainment:.0%} of {answer.setting.trace} at {rate(answer.setting)} within"
            f" {answer.demand.slo_s:.1f} s for $ {best.price_per_hour:.2f} an hour: the answer of experiment=plan\n"
        )
        folder.mkdir(exist_ok=True)
        text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
        (folder / f"{_name(answer)}.yaml").write_text(head + text, encoding="utf-8")


def write_figure(part: Path, answer: Answer) -> None:
    from hexrepro.report import figures  # a second to import
    from hexrepro.report.plan_figure import plan_figure

    verdicts = list(answer.found.verdicts.values())
    if not verdicts:
        return
    place = {verdict.counts: i for i, verdict in enumerate(verdicts)}
    named = {}
    if answer.found.best:
        named[place[answer.found.best.counts]] = in_words(answer.offers, answer.found.best.counts)
    for verdict in answer.alone.values():
        if verdict is not None:
            named.setdefault(place[verdict.counts], in_words(answer.offers, verdict.counts))
    s = answer.setting
    figures.save(
        plan_figure(
            [v.price_per_hour for v in verdicts],
            np.array([v.interval for v in verdicts]),
            [v.meets for v in verdicts],
            target=answer.demand.attainment,
            named=named,
            title=f"{s.trace}, {rate(s)}, SLO {answer.demand.slo_s:.0f} s; {s.profile} step times",
        ),
        part / f"plan_{s.profile}",
    )
