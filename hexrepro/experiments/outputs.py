"""The files of a run directory: all of them, or none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import OmegaConf

from hexrepro.errors import InputError
from hexrepro.experiments import Job, tidy
from hexrepro.experiments.cells import CellResult, Setting, parquet_options
from hexrepro.experiments.outcome import (
    FOCUS,
    Measured,
    Outcome,
    counted,
    hardware,
    latency_s,
    normalised,
    rate,
    runs,
)
from hexrepro.experiments.settings import Settings
from hexrepro.report import metrics
from hexrepro.report.intervals import mean_band
from hexrepro.report.metrics import attainment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLED = ("p95_s", "throughput_qps", "attainment", "scale_at_95", "scale_at_99")
CURVE_POINTS = 61


def check_writable(run_dir: Path) -> None:
    """InputError when the run directory cannot be written."""
    try:
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write the run directory {run_dir}: {error.strerror}; hydra.run.dir=DIR chooses another"
        ) from error


def write(job: Job, settings: Settings, outcomes: Sequence[Outcome], printed: str) -> None:
    """Everything that a comparison leaves behind."""
    with all_or_nothing(job.run_dir) as part:
        tidy.write(part / "summary.csv", summary(settings, outcomes))
        tidy.write(part / "samples.csv", samples(settings, outcomes))
        if settings.curves:
            tidy.write(part / "curves.csv", curves(settings, outcomes))
            tidy.write(part / "quantiles.csv", quantiles(settings, outcomes))
        kinds = ["queries", "instances"] if settings.queries else []
        for kind in kinds + (["calls"] if settings.calls else []):
            _write_rows(part / f"{kind}.parquet", kind, settings, outcomes)
        if settings.figures:
            _write_figures(part, settings, outcomes)
        (part / "tables.txt").write_text(printed, encoding="utf-8")
        write_config(job, part)


def write_config(job: Job, part: Path) -> None:
    """The whole config, and above it the command that gave it."""
    command = " ".join(["python -m hexrepro", *job.overrides])
    config = OmegaConf.to_yaml(job.cfg, resolve=True)
    (part / "config.yaml").write_text(f"# {command}\n{config}", encoding="utf-8")


@contextmanager
def all_or_nothing(run_dir: Path) -> Iterator[Path]:
    """A directory to write into, whose files move to `run_dir` once all of them are there."""
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=run_dir))
    try:
        yield part
        for file in sorted(part.rglob("*")):
            place = run_dir / file.relative_to(part)
            if file.is_dir():
                place.mkdir(exist_ok=True)  # one of an earlier run keeps its other files
            else:
                os.replace(file, place)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def summary(settings: Settings, outcomes: Sequence[Outcome]) -> Iterator[dict]:
    """One row for each metric of each cell and tenant; METRIC_ratio is the ratio to the baseline."""
    for setting, of, same in _measured(settings, outcomes):
        ratios = {f"{metric}_ratio": interval for metric, interval in (of.ratios or {}).items()}
        for metric, interval in {**of.values, **ratios}.items():
            yield {
                **same,
                "metric": metric,
                "value": float(interval.value),
                "ci_low": float(interval.low),
                "ci_high": float(interval.high),
                "seeds": len(setting.seeds),
            }


def samples(settings: Settings, outcomes: Sequence[Outcome]) -> Iterator[dict]:
    """One row a seed, so that a reader can pair policies."""
    for setting, of, same in _measured(settings, outcomes):
        for metric in SAMPLED:
            for seed, value in zip(setting.seeds, of.samples[metric], strict=True):
                yield {**same, "seed": int(seed), "metric": metric, "value": float(value)}


def _measured(settings: Settings, outcomes: Sequence[Outcome]) -> Iterator[tuple[Setting, Measured, dict]]:
    for outcome in outcomes:
        for of in outcome.measured:
            same = tidy.labels(settings, outcome.setting, of.policy, of.alpha, of.tenant)
            yield outcome.setting, of, same


def curves(settings: Settings, outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """SLO attainment against SLO scale, from 0 to a little beyond where the baseline and HexGen-Flow reach 99 %."""

    def of_outcome(outcome: Outcome) -> tuple[np.ndarray, Callable]:
        strong = {settings.baseline, FOCUS}
        ends = [float(m.values["scale_at_99"].value) for m in outcome.measured if m.policy in strong]
        scales = np.linspace(0.0, max([3.0, *(1.15 * e for e in ends if np.isfinite(e))]), CURVE_POINTS)
        return scales, lambda result, queries: attainment(
            normalised(outcome.setting, result)[:, queries], scales
        )

    return _bands(settings, outcomes, of_outcome, "scale", "attainment", most=1.0)


def quantiles(settings: Settings, outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """The latency distribution: its percentiles from 1 to 99."""
    levels = np.arange(1, 100) / 100

    def of_outcome(outcome: Outcome) -> tuple[np.ndarray, Callable]:
        return levels, lambda result, queries: metrics.quantiles(latency_s(result)[:, queries], levels)

    return _bands(settings, outcomes, of_outcome, "p", "latency_s")


def _bands(
    settings: Settings,
    outcomes: Sequence[Outcome],
    of_outcome: Callable[[Outcome], tuple[np.ndarray, Callable]],
    x: str,
    y: str,
    most: float = np.inf,
) -> pd.DataFrame:
    """A curve with its band for each cell and tenant, point by point."""
    parts = []
    for outcome in outcomes:
        points, curve = of_outcome(outcome)
        for of in outcome.measured:
            queries = counted(outcome.setting, settings)[of.tenant]
            band = mean_band(curve(outcome.results[of.policy], queries).T, settings.confidence)
            same = tidy.labels(settings, outcome.setting, of.policy, of.alpha, of.tenant)
            numbers = {
                x: points,
                y: band.value,
                "ci_low": np.maximum(band.low, 0.0),  # neither a share nor a time is below 0
                "ci_high": np.minimum(band.high, most),
            }
            parts.append(pd.DataFrame({**same, **numbers}, index=range(len(points))))
    return pd.concat(parts, ignore_index=True)


def _write_rows(path: Path, kind: str, settings: Settings, outcomes: Sequence[Outcome]) -> None:
    """All cells' rows of one kind in one file, a cell at a time, with the columns that say which cell it is."""
    writer = None
    try:
        for outcome in outcomes:
            for policy, result in outcome.results.items():
                rows = pq.read_table(result.files[kind]).replace_schema_metadata(None)
                same = _row_labels(settings, outcome.setting, policy, result, len(rows))
                table = pa.table({**same, **{name: rows[name] for name in rows.column_names}})
                if writer is None:
                    options = parquet_options(rows.schema)
                    options["use_dictionary"] += list(same)
                    writer = pq.ParquetWriter(path, table.schema, **options)
                writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _row_labels(
    settings: Settings, setting: Setting, policy: str, result: CellResult, n: int
) -> dict[str, pa.Array]:
    same = tidy.labels(settings, setting, policy, result.alpha)
    texts = {name: same[name] for name in ("cluster", "profile", "prefix_caching", "trace", "policy")}
    numbers = {name: same[name] for name in ("rate_qps", "alpha")}
    zeros = pa.array(np.zeros(n, np.int32))
    return {name: pa.DictionaryArray.from_arrays(zeros, pa.array([text])) for name, text in texts.items()} | {
        name: pa.array(np.full(n, np.nan if number is None else number)) for name, number in numbers.items()
    }


def _write_figures(part: Path, settings: Settings, outcomes: Sequence[Outcome]) -> None:
    from hexrepro.report import figures  # a second to import: not for a sweep without figures

    for profile in settings.profiles:
        shown = [outcome for outcome in outcomes if outcome.setting.profile == profile]
        figures.save(attainment_figure(shown, settings), part / f"attainment_{profile}")


def attainment_figure(outcomes: Sequence[Outcome], settings: Settings) -> Figure:
    """SLO attainment against SLO scale in one view."""
    from hexrepro.report import figures

    panels = {
        (rate(o.setting), o.setting.trace): {
            policy: normalised(o.setting, r)[:, counted(o.setting, settings)[tidy.ALL]]
            for policy, r in o.results.items()
        }
        for o in outcomes
    }
    setting = outcomes[0].setting
    over = (
        f"mean and {settings.confidence:.0%} interval, {runs(setting)}"
        if len(setting.seeds) > 1
        else runs(setting)
    )
    if settings.scored is not None:
        over += f", only the middle {settings.scored} queries of each"
    return figures.attainment_figure(
        panels,
        title=f"{hardware(setting)}\n{over}",
        baseline=settings.baseline,
        confidence=settings.confidence,
    )
