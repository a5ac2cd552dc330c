"""Result files of an experiment: tidy CSVs with the same label columns, as the figures and the verdicts read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from hexrepro.errors import InputError
from hexrepro.report.intervals import ratio_interval
from hexrepro.report.style import name_of

LABELS = (
    "experiment",
    "cluster",
    "profile",
    "prefix_caching",
    "trace",
    "arrivals",
    "rate_qps",
    "policy",
    "alpha",
    "tenant",
)
SETTING = ("cluster", "trace", "rate_qps")
PLAIN = ("vllm", "ray", "vtc", "qlm", "llf")
"""The rivals that the paper compares with."""

Condition = tuple[str, str]
"""Hardware view, prefix caching."""

CONDITIONS: tuple[Condition, ...] = (
    ("silicon", "template"),
    ("silicon", "off"),
    ("measured", "off"),
    ("measured", "template"),
)
DEFAULTS: tuple[Condition, ...] = (("silicon", "template"), ("measured", "off"))
"""Each view with the caching that belongs to it: the measured latencies look cached already. These decide a verdict."""

Results = Mapping[str, pd.DataFrame]
"""File name without ending -> its rows."""


def read(directory: Path) -> dict[str, pd.DataFrame]:
    """All result files of a directory; the label columns that are texts stay texts."""
    texts = {name: str for name in LABELS if name not in ("rate_qps", "alpha")}
    frames = {}
    for file in sorted(directory.glob("*.csv")):
        try:
            frames[file.stem] = pd.read_csv(file, dtype=texts, keep_default_na=False, na_values=[""])
        except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
            raise InputError(f"{file}: not a result file: {error}") from error
    return frames


def merge(directories: Sequence[Path], keep: Iterable[str] | None = None) -> dict[str, pd.DataFrame]:
    """The result files of a sweep's jobs, those of one name below each other; `keep` names the files wanted."""
    parts: dict[str, list[pd.DataFrame]] = {}
    for directory in directories:
        for stem, frame in read(directory).items():
            if keep is None or stem in keep:
                parts.setdefault(stem, []).append(frame)
    return {stem: pd.concat(frames, ignore_index=True) for stem, frames in parts.items()}


def where(frame: pd.DataFrame, **labels) -> pd.DataFrame:
    """The rows with these labels; a list stands for any of its values."""
    mask = np.ones(len(frame), bool)
    for name, wanted in labels.items():
        column = frame[name]
        mask &= (
            column.isin(list(wanted)) if isinstance(wanted, list | tuple | set) else column == wanted
        ).to_numpy(bool)
    return frame[mask]


def setting_name(row: Mapping, names: Sequence[str] = SETTING) -> str:
    """'Hetero-1, Trace 2, 0.5 queries/s'."""
    parts = []
    for name in names:
        value = row[name]
        parts.append(f"{value:g} queries/s" if name == "rate_qps" else name_of(str(value)))
    return ", ".join(parts)


def paired_ratio(
    samples: pd.DataFrame, metric: str, over: str, under: str, by: Sequence[str] = SETTING
) -> pd.DataFrame:
    """Ratio of two policies' means for each setting, seeds paired: columns `by`, value, ci_low, ci_high.

    samples: one row a seed. Settings in which one of the two was not run are left out.
    """
    rows = samples[samples["metric"] == metric]
    if "tenant" in rows and "tenant" not in by:
        rows = rows[rows["tenant"] == "all"]
    both = rows[rows["policy"].isin((over, under))]
    wide = both.pivot_table(index=list(by), columns=["policy", "seed"], values="value", sort=False)
    there = wide.columns.get_level_values("policy")
    if over not in there or under not in there:
        return pd.DataFrame(columns=[*by, "value", "ci_low", "ci_high"])
    wide = wide.dropna()  # not a setting in which one of the two is missing
    seeds = sorted(set(both["seed"]))
    ratio = ratio_interval(*(wide[policy][seeds].to_numpy(float) for policy in (over, under)))
    return wide.index.to_frame(index=False).assign(value=ratio.value, ci_low=ratio.low, ci_high=ratio.high)


def inverse(frame: pd.DataFrame) -> pd.DataFrame:
    """Ratios turned round: P95 over the baseline's becomes how many times lower it is. An end at or below 0 (a wide interval
    of few seeds) becomes infinity."""
    with np.errstate(divide="ignore"):
        value, low, high = (1.0 / frame[c].clip(lower=0.0) for c in ("value", "ci_high", "ci_low"))
    return frame.assign(value=value, ci_low=low, ci_high=high)


def views_in(frame: pd.DataFrame, only_defaults: bool = False) -> list[Condition]:
    """The conditions of a frame, in their usual order; other combinations behind them."""
    there = set(zip(frame["profile"], frame["prefix_caching"], strict=True))
    usual = DEFAULTS if only_defaults and there & set(DEFAULTS) else CONDITIONS
    others = [] if only_defaults else sorted(there - set(CONDITIONS))
    return [c for c in usual if c in there] + others
