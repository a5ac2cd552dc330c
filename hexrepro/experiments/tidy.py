"""The tidy CSV files of an experiment: which columns label a row, in which order, and how numbers are written.

Figures read only these files. A study of several jobs (a Hydra multirun) leaves one directory a job; a reader puts the
files of one name below one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from hexrepro.experiments.cells import Setting
from hexrepro.experiments.settings import Settings

LABELS = (
    "experiment", "cluster", "profile", "prefix_caching", "trace", "arrivals", "rate_qps", "policy", "alpha", "tenant",
)  # fmt: skip
ALL = "all"  # the tenant that stands for all queries


def labels(
    settings: Settings, setting: Setting, policy: str, alpha: float | None, tenant: str = ALL
) -> dict[str, Any]:
    """The labels of a row, and behind them the study's own axes."""
    axes = {
        name: value[setting.profile] if isinstance(value, Mapping) else value
        for name, value in settings.axes.items()
    }
    scored = {} if settings.scored is None else {"scored": settings.scored}
    return {
        "experiment": settings.experiment,
        "cluster": setting.cluster.name,
        "profile": setting.profile,
        "prefix_caching": setting.engine.prefix_caching,
        "trace": setting.trace,
        "arrivals": setting.arrivals,
        "rate_qps": setting.rate_qps,
        "policy": policy,
        "alpha": alpha,
        "tenant": tenant,
        **axes,
        **scored,
    }


def write(path: Path, rows: Iterable[Mapping[str, Any]] | pd.DataFrame) -> None:
    """A CSV file with six significant digits; the header is there even when no row is."""
    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame.from_records(list(rows))
    frame.to_csv(path, index=False, float_format="%.6g")
