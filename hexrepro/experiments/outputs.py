"""The files of a run directory: all of them, or none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from hexrepro.errors import InputError
from hexrepro.experiments import Job
from hexrepro.experiments.cells import KINDS, CellResult, Setting, parquet_options
from hexrepro.experiments.outcome import Outcome, hardware, normalised, rate, runs
from hexrepro.experiments.settings import Settings
from hexrepro.report import figures


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
    with _all_or_nothing(job.run_dir) as part:
        summary(settings, outcomes).to_csv(part / "summary.csv", index=False)
        for kind in KINDS:
            if kind != "calls" or settings.calls:
                _write_rows(part / f"{kind}.parquet", kind, outcomes)
        for profile in settings.profiles:
            shown = [outcome for outcome in outcomes if outcome.setting.profile == profile]
            figures.save(attainment_figure(shown, settings), part / f"attainment_{profile}")
        (part / "tables.txt").write_text(printed, encoding="utf-8")
        command = " ".join(["python -m hexrepro", *job.overrides])
        config = OmegaConf.to_yaml(job.cfg, resolve=True)
        (part / "config.yaml").write_text(f"# {command}\n{config}", encoding="utf-8")


@contextmanager
def _all_or_nothing(run_dir: Path) -> Iterator[Path]:
    """A directory to write into, whose files move to `run_dir` once all of them are there."""
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=run_dir))
    try:
        yield part
        for file in sorted(part.iterdir()):
            os.replace(file, run_dir / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def summary(settings: Settings, outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Tidy: one row for each metric of each cell; METRIC_ratio is the ratio to the baseline."""
    records = []
    for outcome in outcomes:
        setting = outcome.setting
        for row in outcome.rows:
            ratios = {f"{metric}_ratio": interval for metric, interval in (row.ratios or {}).items()}
            for metric, interval in {**row.values, **ratios}.items():
                records.append(
                    {
                        "experiment": settings.experiment,
                        "cluster": setting.cluster.name,
                        "profile": setting.profile,
                        "trace": setting.trace,
                        "rate_qps": setting.rate_qps,
                        "policy": row.policy,
                        "alpha": row.alpha,
                        "metric": metric,
                        "value": float(interval.value),
                        "ci_low": float(interval.low),
                        "ci_high": float(interval.high),
                        "seeds": len(setting.seeds),
                    }
                )
    return pd.DataFrame.from_records(records)


def _write_rows(path: Path, kind: str, outcomes: Sequence[Outcome]) -> None:
    """All cells' rows of one kind in one file, a cell at a time, with the columns that say which cell it is."""
    writer = None
    try:
        for outcome in outcomes:
            for policy, result in outcome.results.items():
                rows = pq.read_table(result.files[kind]).replace_schema_metadata(None)
                same = _labels(outcome.setting, policy, result, len(rows))
                table = pa.table({**same, **{name: rows[name] for name in rows.column_names}})
                if writer is None:
                    options = parquet_options(rows.schema)
                    options["use_dictionary"] += list(same)
                    writer = pq.ParquetWriter(path, table.schema, **options)
                writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _labels(setting: Setting, policy: str, result: CellResult, n: int) -> dict[str, pa.Array]:
    texts = {
        "cluster": setting.cluster.name,
        "profile": setting.profile,
        "trace": setting.trace,
        "policy": policy,
    }
    numbers = {"rate_qps": setting.rate_qps, "alpha": result.alpha}
    zeros = pa.array(np.zeros(n, np.int32))
    return {name: pa.DictionaryArray.from_arrays(zeros, pa.array([text])) for name, text in texts.items()} | {
        name: pa.array(np.full(n, np.nan if number is None else number)) for name, number in numbers.items()
    }


def attainment_figure(outcomes: Sequence[Outcome], settings: Settings) -> Figure:
    """SLO attainment against SLO scale in one view."""
    panels = {
        (rate(o.setting), o.setting.trace): {
            policy: normalised(o.setting, r) for policy, r in o.results.items()
        }
        for o in outcomes
    }
    setting = outcomes[0].setting
    over = (
        f"mean and {settings.confidence:.0%} interval, {runs(setting)}"
        if len(setting.seeds) > 1
        else runs(setting)
    )
    return figures.attainment_figure(
        panels,
        title=f"{hardware(setting)}\n{over}",
        baseline=settings.baseline,
        confidence=settings.confidence,
    )
