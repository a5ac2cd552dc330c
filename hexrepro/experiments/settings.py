"""A composed config as checked values. Every mistake is named here, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from hexrepro.errors import InputError
from hexrepro.experiments.explain import suggest
from hexrepro.scheduling.estimates import ESTIMATORS
from hexrepro.simulator.engine import PREFIX_CACHING
from hexrepro.workload.arrivals import PROCESSES


@dataclass(frozen=True)
class Selection:
    """How alpha is chosen: among `alphas`, on the arrivals of `seeds` seeds from `first_seed` on."""

    policies: tuple[str, ...]
    alphas: tuple[float, ...]
    seeds: int
    first_seed: int


@dataclass(frozen=True)
class Traffic:
    """The traces, and at which rates (queries/s) and by which process their queries arrive; no rate = as recorded."""

    traces: tuple[str, ...]
    rates_qps: tuple[float | None, ...]
    arrivals: str
    arrival_options: Mapping[str, float]
    path: str | None
    model: str | None  # the served model, where it is another than the cluster config names
    trace_seed: int
    n_queries: int | None
    cached_share: float | None  # of each prompt, what is a shared prefix; None = as the trace says
    arrivals_file: str | None  # recorded times of the user's own, instead of those that the trace holds

    @property
    def arrivals_name(self) -> str:
        """The arrival process in one word, for tables."""
        if self.arrivals == "gamma":
            return f"gamma_cv{self.arrival_options.get('cv', 1.0):g}"
        return self.arrivals


@dataclass(frozen=True)
class Tenants:
    """Who asks: each tenant's SLO over the base SLO, and its share of the queries."""

    names: tuple[str, ...]
    slo_scales: tuple[float, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Background:
    """A second workload on the same instances; its SLO is slo_scale times its own base SLO, and the run's slo_scale."""

    trace: str
    rate_qps: float
    slo_scale: float


@dataclass(frozen=True)
class Settings:
    """What one comparison runs."""

    experiment: str
    cluster: Mapping[str, Any]
    scale_out: Mapping[str, int]  # by profile
    profiles: tuple[str, ...]
    prefix_caching: Mapping[str, str]  # by profile
    traffic: Traffic
    tenants: Tenants | None
    background: Background | None
    scored: int | None  # only the middle so many queries count; None = all
    axes: Mapping[str, Any]  # config values that stand in a column of their own
    policies: Mapping[str, Mapping | str]  # name -> its config, or its name again where it was not composed
    engine: Mapping[str, Any]
    slo_scale: float
    seeds: int
    estimator: str
    selection: Selection
    alpha: float | None
    baseline: str
    confidence: float
    calls: bool
    queries: bool
    curves: bool
    figures: bool
    workers: int | None


def read_settings(cfg: DictConfig, choices: Mapping[str, Any]) -> Settings:
    """Check a composed config. `choices` are Hydra's: which option each config group has."""
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    profiles = _texts(plain, "profile")
    selection = plain["selection"]
    policies = dict(plain.get("policy") or {})
    return Settings(
        experiment=str(choices["experiment"]),
        cluster=plain["cluster"],
        scale_out=_scale_out(plain["scale_out"], profiles),
        profiles=profiles,
        prefix_caching=_prefix_caching(plain["prefix_caching"], profiles),
        traffic=_traffic(plain["workload"]),
        tenants=_tenants(plain["tenants"]),
        background=_background(plain["background"]),
        scored=None if plain["scored"] == "all" else whole(plain["scored"], "scored"),
        axes=_axes(plain["axes"], cfg, choices, profiles),
        policies=policies,
        engine=dict(plain["engine"]),
        slo_scale=number(plain["slo_scale"], "slo_scale", above=0.0),
        seeds=whole(plain["seeds"], "seeds"),
        estimator=_one_of(plain["estimator"], "estimator", ESTIMATORS),
        selection=Selection(
            policies=_texts(selection, "policies", "selection.", empty=True),
            alphas=candidates(selection["alphas"], "selection.alphas"),
            seeds=whole(selection["seeds"], "selection.seeds"),
            first_seed=whole(selection["first_seed"], "selection.first_seed"),
        ),
        alpha=None if plain["alpha"] is None else number(plain["alpha"], "alpha", least=0.0, most=1.0),
        baseline=_baseline(str(plain["baseline"]), policies),
        confidence=number(plain["confidence"], "confidence", above=0.0, below=1.0),
        calls=_flag(plain["calls"], "calls"),
        queries=_flag(plain["queries"], "queries"),
        curves=_flag(plain["curves"], "curves"),
        figures=_flag(plain["figures"], "figures"),
        workers=None if plain["workers"] is None else whole(plain["workers"], "workers"),
    )


def _baseline(name: str, policies: dict[str, Mapping | str]) -> str:
    policies.setdefault(name, name)  # ratios need it, whether or not it was asked for
    return name


def by_view(value: Any, name: str, profiles: tuple[str, ...]) -> dict[str, Any]:
    """A value for all hardware views, or one for each, by view."""
    given = value if isinstance(value, Mapping) else dict.fromkeys(profiles, value)
    for profile in profiles:
        if profile not in given:
            raise InputError(
                f"profile={profile} is unknown (one of: {', '.join(given)}); a view of your own also needs"
                f" +{name}.{profile}=VALUE"
            )
    return {profile: given[profile] for profile in profiles}


def _prefix_caching(value: Any, profiles: tuple[str, ...]) -> dict[str, str]:
    given = by_view(value, "prefix_caching", profiles)
    # YAML reads a bare off as false
    modes = {view: "off" if mode is False else str(mode) for view, mode in given.items()}
    return {view: _one_of(mode, "prefix_caching", PREFIX_CACHING) for view, mode in modes.items()}


def _scale_out(value: Any, profiles: tuple[str, ...]) -> dict[str, int]:
    return {view: whole(n, "scale_out") for view, n in by_view(value, "scale_out", profiles).items()}


def _traffic(workload: Mapping[str, Any]) -> Traffic:
    options = dict(workload)
    traces = _texts(workload, "traces", "workload.")
    rates = options.get("rate_qps")
    rates = list(rates) if isinstance(rates, list) else [rates]
    if not rates:
        raise InputError("workload.rate_qps=[] is empty; give at least one rate in queries/s")
    arrivals = _one_of(options.get("arrivals", "poisson"), "workload.arrivals", PROCESSES)
    n_queries = options.get("n_queries")
    cached_share, arrivals_file = options.get("cached_share"), options.get("arrivals_file")
    if arrivals_file is not None and arrivals != "recorded":
        raise InputError(
            f"workload.arrivals_file={arrivals_file} needs workload.arrivals=recorded, not {arrivals}"
        )
    return Traffic(
        traces=traces,
        rates_qps=tuple(
            None if r is None else number(r, "workload.rate_qps", above=0.0, unit=" queries/s") for r in rates
        ),
        arrivals=arrivals,
        arrival_options={
            name: number(options[name], f"workload.{name}", above=0.0)
            for name in ("cv", "peak", "on_s", "sigma", "corr_queries")
            if options.get(name) is not None
        },
        path=options.get("path"),
        model=options.get("model"),
        trace_seed=whole(options.get("trace_seed", 0), "workload.trace_seed", least=0),
        n_queries=None if n_queries is None else whole(n_queries, "workload.n_queries"),
        cached_share=None
        if cached_share is None
        else number(cached_share, "workload.cached_share", least=0.0, most=1.0),
        arrivals_file=arrivals_file,
    )


def _tenants(value: Any) -> Tenants | None:
    value = _mapping(value, "tenants", ("names", "slo_scales", "shares"))
    names = _texts(value, "names", "tenants.", empty=True)
    if not names:
        return None
    numbers = {"slo_scales": value["slo_scales"], "shares": value.get("shares") or [1.0] * len(names)}
    for name, given in numbers.items():
        if not isinstance(given, list) or len(given) != len(names):
            raise InputError(
                f"tenants.{name}={given} must be a list of {len(names)} numbers, one for each of tenants.names"
            )
        numbers[name] = tuple(number(x, f"tenants.{name}", above=0.0) for x in given)
    return Tenants(names, **numbers)


def _background(value: Any) -> Background | None:
    value = _mapping(value, "background", ("workload", "rate_qps", "slo_scale"))
    rate_qps = number(value["rate_qps"], "background.rate_qps", least=0.0, unit=" queries/s")
    slo_scale = number(value["slo_scale"], "background.slo_scale", above=0.0)
    if rate_qps == 0:
        return None
    if value["workload"] is None:
        raise InputError("background.workload has no value; give one, as in background=chat")
    return Background(str(value["workload"]), rate_qps, slo_scale)


def _axes(
    value: Any, cfg: DictConfig, choices: Mapping[str, Any], profiles: tuple[str, ...]
) -> dict[str, Any]:
    """Column name -> the config value (or one for each view), or the choice of a config group, that its key names."""
    if not isinstance(value, Mapping):
        raise InputError(f"axes={value!r} must map names of columns to config keys, {{instances: scale_out}}")
    axes = {}
    for name, key in value.items():
        found = choices.get(key, OmegaConf.select(cfg, str(key), default=_MISSING))
        if OmegaConf.is_dict(found) and set(profiles) <= set(found):
            found = dict(found)
        if found is _MISSING or OmegaConf.is_config(found):
            raise InputError(f"axes.{name}={key} must name one value of the config, or a config group")
        axes[str(name)] = found
    return axes


_MISSING = object()


def _mapping(value: Any, name: str, known: Iterable[str]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{name}={value!r} must be a mapping of {', '.join(known)}")
    for key in value:
        if key not in known:
            raise InputError(f"{name}.{key} is no option{suggest(str(key), known)}")
    return dict(value)


def _texts(plain: Mapping[str, Any], name: str, prefix: str = "", empty: bool = False) -> tuple[str, ...]:
    value = plain[name]
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(i, str) for i in items) or not (items or empty):
        raise InputError(f"{prefix}{name}={value!r} must be a name or a list of names")
    if len(set(items)) < len(items):
        raise InputError(f"{prefix}{name}={value!r} names something twice")
    return tuple(items)


def _one_of(value: Any, name: str, known: Iterable[str]) -> str:
    if value not in known:
        raise InputError(f"{name}={value} is unknown{suggest(str(value), known)}")
    return value


def number(
    value: Any,
    name: str,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    unit: str = "",
) -> float:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or not (above < value < below and least <= value <= most):
        bounds = [f"above {above:g}"] if above > -math.inf else []
        bounds += [f"at least {least:g}"] if least > -math.inf else []
        bounds += [f"below {below:g}"] if below < math.inf else []
        bounds += [f"at most {most:g}"] if most < math.inf else []
        raise InputError(f"{name}={value} must be a number {' and '.join(bounds) or 'that is finite'}{unit}")
    return float(value)


def whole(value: Any, name: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name}={value} must be a whole number of at least {least}")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name}={value} must be true or false")
    return value


def candidates(value: Any, name: str) -> tuple[float, ...]:
    """Alphas to try: a list of them, or how many, evenly spaced from 0 to 1."""
    if isinstance(value, list):
        found = tuple(number(a, name, least=0.0, most=1.0) for a in value)
        if not found or len(set(found)) < len(found):
            raise InputError(f"{name}={value} must name at least one alpha, and none twice")
        return found
    return tuple(float(a) for a in np.linspace(0.0, 1.0, whole(value, name)).round(6))


def section(cfg: DictConfig, name: str, known: Iterable[str], experiment: str) -> dict[str, Any]:
    """The config's part `name` as plain values: all of `known` with a value, and nothing else. `experiment` has one."""
    if not OmegaConf.is_config(cfg.get(name)):
        raise InputError(f"run={name} needs the values of `{name}`; experiment={experiment} has them")
    given = OmegaConf.to_container(cfg[name], resolve=True)
    for option in given:
        if option not in known:
            raise InputError(f"{name}.{option} is no option{suggest(str(option), known)}")
    for option in known:
        if given.get(option) is None:
            raise InputError(f"{name}.{option} has no value; give one: {name}.{option}=VALUE")
    return given
