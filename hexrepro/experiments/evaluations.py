"""Simulated candidates on disk, and the tuning problem of a setting: what `tune` and `alpha_sensitivity` share.

Every batch of candidates is kept in the cell cache under what it was computed from. So the same command goes on after
Ctrl-C, and runs again in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hexrepro.experiments.cache import code_version, fingerprint, write_atomically
from hexrepro.experiments.cells import Setting
from hexrepro.report import metrics
from hexrepro.tuning import evaluate, objective
from hexrepro.tuning.evaluate import Evaluator, Problem
from hexrepro.tuning.objective import Objective
from hexrepro.tuning.space import Candidate, Space


def problem(setting: Setting, *, reported: bool) -> Problem:
    """The tuning problem of a setting, on the arrivals that are reported or on those of other seeds."""
    return Problem(
        workload=setting.workload,
        cluster=setting.cluster,
        engine=setting.engine,
        estimator=setting.estimator,
        base_slo_s=setting.base_slo_s,
        slo_scale=setting.slo_scale,
        arrivals_s=setting.arrivals_s if reported else setting.selection_arrivals_s,
        seeds=setting.seeds if reported else setting.selection_seeds,
    )


def evaluator(
    setting: Setting,
    space: Space,
    objectives: Sequence[Objective],
    directory: Path,
    *,
    reported: bool,
    workers: int | None = None,
) -> Evaluator:
    """An evaluator that keeps what it simulates in `directory`."""
    load = problem(setting, reported=reported)
    return Evaluator(
        load, space, objectives, workers=workers, store=_Store(directory, load, space, objectives)
    )


class _Store:
    """Scores of batches of candidates, each batch one file."""

    def __init__(self, directory: Path, load: Problem, space: Space, objectives: Sequence[Objective]) -> None:
        self._directory = directory
        named = [(o.name, o.slo_scale) for o in objectives]
        self._prefix = fingerprint(code_version(), _recipe(), load, dict(space.policies), named)

    def __call__(self, candidates: Sequence[Candidate], compute: Callable[[], np.ndarray]) -> np.ndarray:
        file = self._directory / f"{fingerprint(self._prefix, list(candidates))}.scores.parquet"
        if file.exists():
            try:
                table = pq.read_table(file)
                shape = [int(n) for n in table.schema.metadata[b"shape"].split()]
                return table["score"].to_numpy().reshape(shape)
            except (pa.ArrowInvalid, OSError, KeyError, ValueError):
                pass  # damaged from outside: compute it anew
        scores = compute()
        table = pa.table({"score": scores.ravel()}).replace_schema_metadata(
            {"shape": " ".join(map(str, scores.shape))}
        )
        write_atomically(file, lambda part: pq.write_table(table, part))
        return scores


@cache
def _recipe() -> tuple[bytes, ...]:
    """The sources that turn simulated times into scores."""
    return tuple(Path(m.__file__).read_text(encoding="utf-8") for m in (evaluate, objective, metrics))


def row(label: Mapping[str, Any], metric: str, value: float, low: float, high: float, seeds: int) -> dict:
    """One row of alpha.csv."""
    return {**label, "metric": metric, "value": value, "ci_low": low, "ci_high": high, "seeds": seeds}
