"""A composed config as checked values. Every mistake is named here, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hexrepro.errors import InputError
from hexrepro.experiments.explain import suggest
from hexrepro.scheduling.estimates import ESTIMATORS
from hexrepro.simulator.engine import PREFIX_CACHING
from hexrepro.workload.arrivals import PROCESSES


@dataclass(frozen=True)
class Selection:
    """How alpha is chosen: `alphas` candidates from 0 to 1, on the arrivals of `seeds` seeds from `first_seed` on."""

    policies: tuple[str, ...]
    alphas: int
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


@dataclass(frozen=True)
class Settings:
    """What one comparison runs."""

    experiment: str
    cluster: Mapping[str, Any]
    profiles: tuple[str, ...]
    prefix_caching: Mapping[str, str]  # by profile
    traffic: Traffic
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
        profiles=profiles,
        prefix_caching=_prefix_caching(plain["prefix_caching"], profiles),
        traffic=_traffic(plain["workload"]),
        policies=policies,
        engine=dict(plain["engine"]),
        slo_scale=_number(plain["slo_scale"], "slo_scale", above=0.0),
        seeds=_count(plain["seeds"], "seeds"),
        estimator=_one_of(plain["estimator"], "estimator", ESTIMATORS),
        selection=Selection(
            policies=_texts(selection, "policies", "selection.", empty=True),
            alphas=_count(selection["alphas"], "selection.alphas"),
            seeds=_count(selection["seeds"], "selection.seeds"),
            first_seed=_count(selection["first_seed"], "selection.first_seed"),
        ),
        alpha=None if plain["alpha"] is None else _number(plain["alpha"], "alpha", least=0.0, most=1.0),
        baseline=_baseline(str(plain["baseline"]), policies),
        confidence=_number(plain["confidence"], "confidence", above=0.0, below=1.0),
        calls=_flag(plain["calls"], "calls"),
        workers=None if plain["workers"] is None else _count(plain["workers"], "workers"),
    )


def _baseline(name: str, policies: dict[str, Mapping | str]) -> str:
    policies.setdefault(name, name)  # ratios need it, whether or not it was asked for
    return name


def _prefix_caching(value: Any, profiles: tuple[str, ...]) -> dict[str, str]:
    by_view = value if isinstance(value, Mapping) else dict.fromkeys(profiles, value)
    result = {}
    for profile in profiles:
        if profile not in by_view:
            raise InputError(
                f"profile={profile} is unknown (one of: {', '.join(by_view)}); a view of your own also needs"
                f" +prefix_caching.{profile}=template"
            )
        mode = "off" if by_view[profile] is False else str(by_view[profile])  # YAML reads a bare off as false
        result[profile] = _one_of(mode, "prefix_caching", PREFIX_CACHING)
    return result


def _traffic(workload: Mapping[str, Any]) -> Traffic:
    options = dict(workload)
    traces = _texts(workload, "traces", "workload.")
    rates = options.get("rate_qps")
    rates = list(rates) if isinstance(rates, list) else [rates]
    if not rates:
        raise InputError("workload.rate_qps=[] is empty; give at least one rate in queries/s")
    arrivals = _one_of(options.get("arrivals", "poisson"), "workload.arrivals", PROCESSES)
    n_queries = options.get("n_queries")
    return Traffic(
        traces=traces,
        rates_qps=tuple(
            None if r is None else _number(r, "workload.rate_qps", above=0.0, unit=" queries/s")
            for r in rates
        ),
        arrivals=arrivals,
        arrival_options={
            name: _number(options[name], f"workload.{name}", above=0.0)
            for name in ("cv", "peak", "on_s")
            if options.get(name) is not None
        },
        path=options.get("path"),
        model=options.get("model"),
        trace_seed=_count(options.get("trace_seed", 0), "workload.trace_seed", least=0),
        n_queries=None if n_queries is None else _count(n_queries, "workload.n_queries"),
    )


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


def _number(
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


def _count(value: Any, name: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name}={value} must be a whole number of at least {least}")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name}={value} must be true or false")
    return value
