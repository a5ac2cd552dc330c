"""Find the parameters that serve each setting best, and say how sure and how flat the answer is.

Candidates are tried on the arrivals of some seeds (`selection.seeds`), and what is reported of the best one comes from
the arrivals of others (`seeds`): no candidate looks good for having been lucky.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hexrepro.errors import InputError
from hexrepro.experiments import Job, outputs, tidy
from hexrepro.experiments.cache import check_cache_dir, fingerprint, prune
from hexrepro.experiments.cells import Setting
from hexrepro.experiments.evaluations import evaluator, row
from hexrepro.experiments.inputs import settings_of
from hexrepro.experiments.outcome import describe, short
from hexrepro.experiments.printed import Printed
from hexrepro.experiments.progress import Cells
from hexrepro.experiments.settings import Settings, read_settings, whole
from hexrepro.report.intervals import Interval, mean_band, mean_interval
from hexrepro.report.tables import with_half_width
from hexrepro.scheduling import Policy, load_policy
from hexrepro.tuning import choice
from hexrepro.tuning.objective import Objective, objective
from hexrepro.tuning.offline import Search, batches, search
from hexrepro.tuning.samplers import Samplers, Sampling, open_storage
from hexrepro.tuning.space import RESERVED, WEIGHT, Candidate, Space, read_space

SHOWN = 9  # points of a curve that the terminal shows


@dataclass(frozen=True)
class Tuning:
    """The checked `tuning` part of a config."""

    policy: Policy
    space: Mapping[str, Any]
    objectives: tuple[Objective, ...]
    sampling: Sampling
    storage: str | None
    curve: int
    flat: float


@dataclass(frozen=True, eq=False)
class Curve:
    """Scores along one dimension through the best candidate, on the reported seeds.

    scores: float64[objectives, points, R]; at: the best candidate's place.
    """

    name: str
    points: list[Candidate]
    scores: np.ndarray
    at: int

    @property
    def values(self) -> list:
        return [p[self.name] for p in self.points]


@dataclass(frozen=True, eq=False)
class Tuned:
    """A setting, its finished search, the best candidate with its scores on the reported seeds float64[objectives, R], the
    curves through it, and the Pareto front's scores on the reported seeds float64[objectives, front, R]."""

    setting: Setting
    search: Search
    best: Candidate
    scores: np.ndarray
    curves: list[Curve]
    front: list[Candidate]
    front_scores: np.ndarray


def run(job: Job) -> None:
    """Search every setting, print a table for each, and write the results."""
    settings = read_settings(job.cfg, job.choices)
    tuning = read_tuning(job.cfg)
    plan = settings_of(settings)
    spaces = [
        read_space(tuning.space, tuning.policy, tenants=s.workload.tenant_names, estimator=settings.estimator)
        for s in plan
    ]
    Samplers(tuning.sampling, spaces[0], tuning.objectives)  # a mistake shows before anything is simulated
    outputs.check_writable(job.run_dir)
    cache = check_cache_dir()
    storage = open_storage(tuning.storage)

    printed = Printed()
    done: list[Tuned] = []
    with Cells(
        sum(batches(tuning.sampling, space) for space in spaces), printed.out, unit="batches"
    ) as progress:
        for setting, space in zip(plan, spaces, strict=True):
            progress.begin(short(setting, settings))
            tuned = tune(setting, space, tuning, settings, cache, storage, lambda: progress.advance(False))
            progress.setting_done(short(setting, settings))
            done.append(tuned)
            for table in _tables(tuned, tuning, settings):
                printed.add(table)
    _write(job, settings, tuning, done, printed.text())
    prune(cache)
    printed.results(job.run_dir)


def read_tuning(cfg: DictConfig) -> Tuning:
    """Check the `tuning` part of a composed config, and that there is one policy to tune."""
    names = list(cfg.policy)
    if len(names) != 1:
        raise InputError(
            f"policy=[{','.join(names)}]: tune takes one policy; to choose among several, name them in"
            " tuning.space.policy"
        )
    plain = OmegaConf.to_container(cfg.tuning, resolve=True, throw_on_missing=True)
    names = plain["objective"] if isinstance(plain["objective"], list) else [plain["objective"]]
    objectives = tuple(objective(name, float(cfg.slo_scale)) for name in names)
    if not objectives or len({o.name for o in objectives}) < len(objectives):
        raise InputError(f"tuning.objective={names} must name at least one objective, and none twice")
    sampler = dict(plain["sampler"])
    known = ("name", "trials", "batch", "spread", "points", "options")
    for key in sampler:
        if key not in known:
            raise InputError(f"tuning.sampler.{key} is unknown (one of: {', '.join(known)})")
    curve, flat = plain["curve"], plain["flat"]
    if isinstance(flat, bool) or not isinstance(flat, int | float) or not 0.0 <= flat < 1.0:
        raise InputError(f"tuning.flat={flat} must be a share between 0 and 1, such as 0.01")
    if plain["storage"] is not None and not isinstance(plain["storage"], str):
        raise InputError(f"tuning.storage={plain['storage']} must be sqlite:///FILE, journal:FILE, or null")
    spec = OmegaConf.to_container(cfg.policy, resolve=True)
    return Tuning(
        policy=load_policy(next(iter(spec.values()))),
        space=plain["space"],
        objectives=objectives,
        sampling=Sampling(**sampler, seed=plain["seed"]),
        storage=plain["storage"],
        curve=whole(curve, "tuning.curve", 2),
        flat=float(flat),
    )


def tune(
    setting: Setting,
    space: Space,
    tuning: Tuning,
    settings: Settings,
    cache: Path,
    storage: optuna.storages.BaseStorage | None = None,
    progress=None,
) -> Tuned:
    """Search one setting, and measure the answer on the reported seeds."""
    shared = {"directory": cache, "workers": settings.workers}
    tried = evaluator(setting, space, tuning.objectives, reported=False, **shared)
    found = search(
        tried, tuning.sampling, storage=storage, study_name=study_name(setting, tuning), progress=progress
    )
    best = found.candidates[found.best()]
    reported = evaluator(setting, space, tuning.objectives, reported=True, **shared)
    slices = [space.slice(best, name, tuning.curve) for name in space.names]
    front = [found.candidates[i] for i in found.front()] if len(tuning.objectives) > 1 else []
    reported(
        [*front, best, *(c for points in slices for c in points)]
    )  # all in one call; below they are known
    curves = [
        Curve(name, points, reported(points), points.index(best))
        for name, points in zip(space.names, slices, strict=True)
    ]
    none = np.empty((len(tuning.objectives), 0, len(setting.seeds)))
    return Tuned(
        setting, found, best, reported([best])[:, 0], curves, front, reported(front) if front else none
    )


def study_name(setting: Setting, tuning: Tuning) -> str:
    """Its name in the storage: what the search is, in words, and a hash of all that decides it."""
    from hexrepro.experiments.cache import code_version

    sampling = tuning.sampling
    digest = fingerprint(
        code_version(), setting.fingerprint, tuning.policy, tuning.space, [o.name for o in tuning.objectives],
        sampling.name, sampling.batch, sampling.seed, sampling.spread, sampling.points, sampling.options,
    )  # fmt: skip
    rate = "recorded" if setting.rate_qps is None else f"{setting.rate_qps:g}"
    return f"{setting.trace} {rate} {setting.cluster.name} {setting.profile} {sampling.name} {digest[:10]}"


# ---- what is printed ---------------------------------------------------------------------------------------------------


def _tables(tuned: Tuned, tuning: Tuning, settings: Settings) -> list[Table | Group]:
    tables = [_answer(tuned, tuning, settings)]
    if tuned.front:
        tables.append(_front_table(tuned, tuning, settings))
    return tables + [_curve_table(curve, tuning, settings) for curve in tuned.curves]


def _answer(tuned: Tuned, tuning: Tuning, settings: Settings) -> Group:
    s, o = tuned.search, tuning.objectives[0]
    at_best = mean_interval(tuned.scores, settings.confidence)
    measured = "; ".join(
        f"{each.metric} {with_half_width(Interval(*(x[i] for x in at_best)), 3 if each.maximise else 2)}"
        for i, each in enumerate(tuning.objectives)
    )
    runs = s.scores.shape[-1] * len(s.candidates)
    spent = f"{s.overhead:.0%} of it the sampler ({tuning.sampling.name})"
    if s.runs < runs:
        spent = f"sampler {tuning.sampling.name}, {runs - s.runs} of {runs} runs from the cache"
    title = f"{describe(tuned.setting, settings)}\n{tuning.policy.name}: best mean {o.metric}"
    caption = (
        f"On {len(tuned.setting.seeds)} other arrival seeds: {measured}.\n{len(s.trials)} trials"
        f" ({len(s.candidates)} candidates) × {s.scores.shape[-1]} arrival seeds in {s.sampler_s + s.simulation_s:.2f} s,"
        f" {spent}; the interval is by paired bootstrap over these seeds."
    )
    table = Table(**_LOOKS)
    for head in (
        "parameter", "best", f"{settings.confidence:.0%} interval", f"at most {tuning.flat:.0%} worse", "not shown worse",
    ):  # fmt: skip
        table.add_column(head, justify="left" if head == "parameter" else "right")
    for curve in tuned.curves:
        table.add_row(curve.name, _text(tuned.best[curve.name]), *_how_sure(tuned, curve, tuning, settings))
    return Group(Text(title, style="bold"), table, Text(caption, style="dim"))


def _how_sure(tuned: Tuned, curve: Curve, tuning: Tuning, settings: Settings) -> tuple[str, str, str]:
    space, costs = tuned.search.space, tuned.search.costs[0]
    values = [c[curve.name] for c in tuned.search.candidates]
    if not space[curve.name].numeric:
        shares = choice.shares(costs, values)
        others = sorted(((v, x) for v, x in shares.items() if x >= 0.005), key=lambda item: -item[1])
        return ", ".join(f"{v} {x:.0%}" for v, x in others), "", ""
    interval = choice.best_interval(costs, values, settings.confidence)
    flat, tied = _flatness(curve, tuning, settings)
    return tuple(f"{_text(r.low)} – {_text(r.high)}" for r in (interval, flat, tied))


def _flatness(curve: Curve, tuning: Tuning, settings: Settings) -> tuple[choice.Range, choice.Range]:
    costs = tuning.objectives[0].cost(curve.scores[0])
    flat = choice.within(costs, curve.values, curve.at, tuning.flat)
    return flat, choice.tied(costs, curve.values, curve.at, settings.confidence)


def _curve_table(curve: Curve, tuning: Tuning, settings: Settings) -> Table:
    picked = sorted({round(i) for i in np.linspace(0, len(curve.points) - 1, SHOWN)} | {curve.at})
    table = Table(title=f"along {curve.name}, on the reported seeds", **_LOOKS)
    table.add_column(curve.name)
    for i in picked:
        table.add_column(
            _text(curve.values[i]), justify="right", no_wrap=True, style="bold" if i == curve.at else ""
        )
    for o, scores in zip(tuning.objectives, curve.scores, strict=True):
        band = mean_band(scores, settings.confidence)
        cells = [Interval(*(x[i] for x in band)) for i in picked]
        table.add_row(o.metric, *(with_half_width(c, 3 if o.maximise else 1) for c in cells))
    return table


def _front_table(tuned: Tuned, tuning: Tuning, settings: Settings) -> Table:
    table = Table(
        title="Pareto front of the search; values on the reported seeds, on which a point may be beaten",
        **_LOOKS,
    )
    for name in tuned.search.space.names:
        table.add_column(name, justify="right")
    for o in tuning.objectives:
        table.add_column(o.metric, justify="right")
    for i, candidate in enumerate(tuned.front):
        bands = [
            mean_band(tuned.front_scores[k, i], settings.confidence) for k in range(len(tuning.objectives))
        ]
        digits = [3 if o.maximise else 1 for o in tuning.objectives]
        table.add_row(
            *(_text(v) for v in candidate.values()),
            *(with_half_width(b, d) for b, d in zip(bands, digits, strict=True)),
        )
    return table


_LOOKS = {
    "title_justify": "left",
    "title_style": "bold",
    "caption_justify": "left",
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "pad_edge": False,
}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


# ---- what is written ---------------------------------------------------------------------------------------------------


def _write(job: Job, settings: Settings, tuning: Tuning, done: list[Tuned], printed: str) -> None:
    curves, trials, fronts, answers = [], [], [], {}
    for tuned in done:
        curves += _curve_rows(tuned, tuning, settings)
        trials += _trial_rows(tuned, tuning, settings)
        fronts += _front_rows(tuned, tuning, settings)
        answers[study_name(tuned.setting, tuning).rpartition(" ")[0]] = _best(tuned, tuning, settings, job)
    tidy.write(job.run_dir / "alpha.csv", curves)
    tidy.write(job.run_dir / "trials.csv", trials)
    if fronts:
        tidy.write(job.run_dir / "pareto.csv", fronts)
    for tuned in done:
        _write_policy(job.run_dir / "policy", tuned)
    text = yaml.safe_dump(answers, sort_keys=False, allow_unicode=True, width=118, default_flow_style=None)
    (job.run_dir / "best.yaml").write_text(
        "# The answer for each setting: trace, rate, cluster, view, sampler\n" + text, encoding="utf-8"
    )
    (job.run_dir / "tables.txt").write_text(printed, encoding="utf-8")
    outputs.write_config(job, job.run_dir)


def _labels(tuned: Tuned, settings: Settings, candidate: Candidate) -> dict[str, Any]:
    policy = tuned.search.space.policy(candidate)
    alpha = policy.dispatch_params.get("alpha", policy.dispatch_rule.defaults.get("alpha"))
    return tidy.labels(settings, tuned.setting, policy.name, alpha)


def _curve_rows(tuned: Tuned, tuning: Tuning, settings: Settings) -> list[dict]:
    """Every curve's points on the reported seeds, and the answer of each numeric dimension with its three ranges."""
    rows, n = [], len(tuned.setting.seeds)
    for curve in tuned.curves:
        axis = {"parameter": curve.name}
        for o, scores in zip(tuning.objectives, curve.scores, strict=True):
            band = mean_band(scores, settings.confidence)
            for i, point in enumerate(curve.points):
                label = _labels(tuned, settings, point)
                rows.append(row(label, o.metric, *(float(x[i]) for x in band), n) | axis | point)
        if tuned.search.space[curve.name].numeric:
            values = [c[curve.name] for c in tuned.search.candidates]
            interval = choice.best_interval(tuned.search.costs[0], values, settings.confidence)
            flat, tied = _flatness(curve, tuning, settings)
            label, best = _labels(tuned, settings, tuned.best), tuned.best[curve.name]
            for name, found, seeds in (
                ("best", interval, tuned.search.scores.shape[-1]), ("best_flat", flat, n), ("best_tied", tied, n),
            ):  # fmt: skip
                rows.append(row(label, name, best, *found, seeds) | axis | tuned.best)
    return rows


def _trial_rows(tuned: Tuned, tuning: Tuning, settings: Settings) -> list[dict]:
    """Every trial in order, with its mean scores on the seeds of the search."""
    found = tuned.search
    means = found.scores.mean(axis=-1)
    place = {tuple(c.values()): i for i, c in enumerate(found.candidates)}
    return [
        _labels(tuned, settings, c)
        | {"trial": t, **c}
        | {o.metric: means[k, place[tuple(c.values())]] for k, o in enumerate(tuning.objectives)}
        for t, c in enumerate(found.trials)
    ]


def _front_rows(tuned: Tuned, tuning: Tuning, settings: Settings) -> list[dict]:
    rows = []
    for i, candidate in enumerate(tuned.front):
        for k, o in enumerate(tuning.objectives):
            band = mean_band(tuned.front_scores[k, i], settings.confidence)
            label = _labels(tuned, settings, candidate)
            rows.append(row(label, o.metric, *map(float, band), len(tuned.setting.seeds)) | candidate)
    return rows


def _policy_name(tuned: Tuned) -> str:
    """Of the tuned policy as a file: letters, digits and underscores."""
    s = tuned.setting
    rate = "recorded" if s.rate_qps is None else f"{s.rate_qps:g}".replace(".", "p")
    policy = tuned.search.space.policy(tuned.best).name
    return f"{policy}_{s.trace}_{rate}_{s.cluster.name}_{s.profile}"


def _best(tuned: Tuned, tuning: Tuning, settings: Settings, job: Job) -> dict[str, Any]:
    """The answer as data, with the command that runs it."""
    at_best = mean_interval(tuned.scores, settings.confidence)
    answer: dict[str, Any] = {
        "params": {k: v if isinstance(v, str) else float(f"{v:.9g}") for k, v in tuned.best.items()},
        "reported": {
            o.metric: [float(f"{x[i]:.6g}") for x in at_best] for i, o in enumerate(tuning.objectives)
        },
    }
    in_policy = [k for k in tuned.best if k != "window" and not k.startswith(WEIGHT)]
    here = f"{_command(tuned.setting, job)} policy=[vllm,"
    if in_policy == ["alpha"] and tuning.policy.name in settings.selection.policies:
        answer["command"] = f"{here}{tuning.policy.name}] alpha={tuned.best['alpha']:g}"
    elif in_policy:
        answer["command"] = f"{here}{_policy_name(tuned)}] --config-dir {job.run_dir}"
    left = [k for k in tuned.best if k not in in_policy]
    if left:
        answer["not_in_the_policy"] = left  # the scheduler around it has to be given these
    return answer


def _command(setting: Setting, job: Job) -> str:
    """The main job on this setting alone."""
    parts = [
        "python -m hexrepro experiment=hetero1",
        f"cluster={job.choices['cluster']}",
        f"workload={job.choices['workload']}",
        f"workload.traces=[{setting.trace}]" if job.choices["workload"] != "file" else "",
        "" if setting.rate_qps is None else f"workload.rate_qps={setting.rate_qps:g}",
        f"profile={setting.profile}",
        f"prefix_caching={setting.engine.prefix_caching}",
    ]
    return " ".join(part for part in parts if part)


def _write_policy(directory: Path, tuned: Tuned) -> None:
    """The tuned policy as a file that --config-dir RUN_DIR offers as policy=NAME."""
    policy, name = tuned.search.space.policy(tuned.best), _policy_name(tuned)
    content = {"name": name, "dispatch": policy.dispatch, "queue": policy.queue}
    for kind in ("dispatch_params", "queue_params"):
        if params := getattr(policy, kind):
            content[kind] = {k: float(v) for k, v in params.items()}
    if policy.client != "query":
        content["client"] = policy.client
    directory.mkdir(exist_ok=True)
    tuned_names = ", ".join(k for k in tuned.best if k not in RESERVED) or ", ".join(tuned.best)
    text = f"# {policy.name}, tuned ({tuned_names})\n" + yaml.safe_dump(content, sort_keys=False)
    (directory / f"{name}.yaml").write_text(text, encoding="utf-8")
