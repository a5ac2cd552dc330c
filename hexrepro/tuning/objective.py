"""What a search wants: one number for each run, to be made small or large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hexrepro.errors import InputError
from hexrepro.report import metrics

# (arrival_s, finish_s, base_slo_s, slo_scale) -> one value a run
_MEASURES: dict[str, tuple[str, bool, Callable]] = {
    "p95": ("p95_s", False, lambda a, f, base, scale: metrics.quantile(f - a, 0.95)),
    "p99": ("p99_s", False, lambda a, f, base, scale: metrics.quantile(f - a, 0.99)),
    "mean": ("mean_s", False, lambda a, f, base, scale: np.mean(f - a, axis=-1)),
    "scale_at_95": (
        "scale_at_95",
        False,
        lambda a, f, base, scale: metrics.scale_at_attainment((f - a) / base, 0.95),
    ),
    "scale_at_99": (
        "scale_at_99",
        False,
        lambda a, f, base, scale: metrics.scale_at_attainment((f - a) / base, 0.99),
    ),
    "throughput": ("throughput_qps", True, lambda a, f, base, scale: metrics.throughput_qps(a, f)),
    "goodput": ("goodput_qps", True, lambda a, f, base, scale: metrics.goodput_qps(a, f, scale * base)),
    "attainment": ("attainment", True, lambda a, f, base, scale: metrics.attainment((f - a) / base, scale)),
}
_SCALED = ("goodput", "attainment")
NAMES = tuple(_MEASURES)


@dataclass(frozen=True)
class Objective:
    """One number for each run. `name` as the user gives it, `metric` as results files call it."""

    name: str
    metric: str
    maximise: bool
    slo_scale: float
    _measure: Callable = field(repr=False)

    @property
    def direction(self) -> str:
        """As Optuna calls it."""
        return "maximize" if self.maximise else "minimize"

    def values(self, arrival_s: np.ndarray, finish_s: np.ndarray, base_slo_s: np.ndarray) -> np.ndarray:
        """float64[R]. arrival_s, finish_s: float64[R, Q]; base_slo_s: float64[Q], each query's SLO at scale 1."""
        return self._measure(arrival_s, finish_s, base_slo_s, self.slo_scale)

    def cost(self, values: np.ndarray) -> np.ndarray:
        """The values so that less is better."""
        return -values if self.maximise else values


def objective(name: str, slo_scale: float = 5.0) -> Objective:
    """An objective by its name. `goodput` and `attainment` count the queries that meet `slo_scale`; `goodput@3.5`, another."""
    base, at, scale = str(name).partition("@")
    if base not in _MEASURES or (at and base not in _SCALED):
        raise InputError(
            f"objective {name} is unknown (one of: {', '.join(NAMES)}; goodput and attainment also at an SLO scale,"
            " such as attainment@3.5)"
        )
    if at:
        try:
            slo_scale = float(scale)
        except ValueError:
            slo_scale = -1.0
        if not 0.0 < slo_scale < np.inf:
            raise InputError(f"objective {name}: the SLO scale after @ must be a number above 0")
    metric, maximise, measure = _MEASURES[base]
    return Objective(str(name), f"{metric}@{slo_scale:g}" if at else metric, maximise, slo_scale, measure)
