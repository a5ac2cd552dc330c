"""The main job: all policies against a baseline, on each cluster view, trace and rate, over many arrival seeds.

Every policy sees the same arrivals at the same seed, so policies are compared in pairs. Where alpha has to be chosen, it
is chosen on arrivals of other seeds than those reported.
"""

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
from omegaconf import OmegaConf
from rich.console import Console

from hexrepro.errors import InputError
from hexrepro.experiments import Job, cells
from hexrepro.experiments.cache import check_cache_dir, prune
from hexrepro.experiments.cells import Cell, CellResult, Setting
from hexrepro.experiments.inputs import settings_of
from hexrepro.experiments.progress import Cells
from hexrepro.experiments.settings import Settings, read_settings
from hexrepro.report import figures, tables
from hexrepro.report.intervals import Interval, mean_interval, ratio_interval
from hexrepro.report.metrics import measure
from hexrepro.scheduling import Policy, load_policy

FOCUS = "hexgen_flow"
WIDTH = 150  # of the printed tables where there is no terminal to ask
Done = list[tuple[Setting, list[tuple[Cell, CellResult]]]]


def run(job: Job) -> None:
    """Compute or fetch every cell, print a table for each setting, and write the results."""
    settings = read_settings(job.cfg, job.choices)
    policies = [load_policy(spec) for spec in settings.policies.values()]
    plan = [(setting, _cells(setting, policies, settings)) for setting in settings_of(settings)]
    _check_writable(job.run_dir)
    cache = check_cache_dir()

    out, log = _consoles()
    done: Done = []
    rows: list[tables.Row] = []
    table_rows: list[list[tables.Row]] = []
    with Cells(sum(len(group) for _, group in plan), out) as progress:
        for setting, group in plan:
            name = describe(setting)
            progress.begin(name)
            finished = []
            for cell in group:
                result = cells.get(cell, cache, settings.workers)
                progress.advance(result.cached)
                finished.append((cell, result))
            done.append((setting, finished))
            rows = _summarise(setting, finished, settings)
            table_rows.append(rows)
            progress.setting_done(name)
            table = tables.comparison_table(name, rows, tables.columns(settings.slo_scale), settings.confidence)
            for console in (out, log):
                console.print(table)
                console.print()
    for table in _gains(done, table_rows, settings):
        for console in (out, log):
            console.print(table)
            console.print()
    with _all_or_nothing(job.run_dir) as part:
        _write(part, job, settings, done, table_rows, log)
    prune(cache)
    out.print(f"Results: {job.run_dir}", soft_wrap=True, highlight=False)


def describe(setting: Setting) -> str:
    """A setting in words, for titles."""
    return (
        f"{setting.trace}, {_rate(setting)}; {setting.cluster.name}, {setting.profile} step times, "
        f"prefix caching: {setting.engine.prefix_caching}; base SLO {setting.base_slo_s:.1f} s; "
        f"{_runs(setting)}"
    )


def _runs(setting: Setting) -> str:
    return f"{len(setting.seeds)} arrival seeds" if len(setting.seeds) > 1 else "one run, so no interval"


def _rate(setting: Setting) -> str:
    return "recorded arrivals" if setting.rate_qps is None else f"{setting.rate_qps:g} queries/s"


def _cells(setting: Setting, policies: Sequence[Policy], settings: Settings) -> list[Cell]:
    chosen = settings.selection
    unknown = [name for name in chosen.policies if name in settings.policies and not _takes_alpha(name, policies)]
    if unknown:
        raise InputError(f"selection.policies names {unknown[0]}, whose dispatch rule has no parameter alpha; leave it out")
    result = []
    for name, policy in zip(settings.policies, policies, strict=True):
        alphas: tuple[float, ...] = ()
        if name in chosen.policies and settings.alpha is not None:
            policy = policy.with_params(alpha=settings.alpha)
        elif name in chosen.policies:
            alphas = tuple(float(a) for a in np.linspace(0.0, 1.0, chosen.alphas).round(6))
        result.append(Cell(setting, policy, alphas))
    return result


def _takes_alpha(name: str, policies: Sequence[Policy]) -> bool:
    return any(p.name == name and "alpha" in p.dispatch_rule.defaults for p in policies)


def _consoles() -> tuple[Console, Console]:
    """Where tables are printed, and where they are kept as plain text for the run directory."""
    out = Console()
    if not out.is_terminal:
        out = Console(width=WIDTH)
    return out, Console(width=WIDTH, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 -- lives as long as the run


# ---- from times to tables -------------------------------------------------------------------------------------------


def _summarise(setting: Setting, finished: list[tuple[Cell, CellResult]], settings: Settings) -> list[tables.Row]:
    """One row a policy, the baseline first."""
    samples = {cell.policy.name: _measure(setting, result, settings.slo_scale) for cell, result in finished}
    alphas = {cell.policy.name: result.alpha for cell, result in finished}
    order = sorted(samples, key=lambda name: name != settings.baseline)
    base = samples[settings.baseline]
    names = list(base)
    rows = []
    for policy in order:
        stacked = np.stack([samples[policy][m] for m in names])
        values = _unstack(names, mean_interval(stacked, settings.confidence))
        ratios = None
        if policy != settings.baseline:
            stacked_base = np.stack([base[m] for m in names])
            ratios = _unstack(names, ratio_interval(stacked, stacked_base, settings.confidence))
        rows.append(tables.Row(policy, alphas[policy], values, ratios))
    return rows


def _measure(setting: Setting, result: CellResult, slo_scale: float) -> dict[str, np.ndarray]:
    base_slo_s = setting.base_slo_s * setting.workload.slo_scale
    return measure(result.arrival_s, result.finish_s, base_slo_s, slo_scale) | result.engine


def _unstack(names: list[str], stacked: Interval) -> dict[str, Interval]:
    return {name: Interval(*(x[i] for x in stacked)) for i, name in enumerate(names)}


def _gains(done: Done, table_rows: list[list[tables.Row]], settings: Settings) -> Iterator:
    """For each view a table of what HexGen-Flow gains; nothing when it was not run."""
    names = list(settings.policies)
    if FOCUS not in names or settings.baseline == FOCUS:
        return
    for profile in settings.profiles:
        gains = [
            _gain(setting, finished, rows, settings)
            for (setting, finished), rows in zip(done, table_rows, strict=True)
            if setting.profile == profile
        ]
        title = f"What {FOCUS} gains over {settings.baseline} on {done[0][0].cluster.name}, {profile} step times"
        yield tables.gain_table(title, FOCUS, settings.baseline, gains)


def _gain(
    setting: Setting, finished: list[tuple[Cell, CellResult]], rows: list[tables.Row], settings: Settings
) -> tables.Gain:
    by_name = {row.policy: row for row in rows}
    focus, baseline = by_name[FOCUS], by_name[settings.baseline]
    p95 = {c.policy.name: _measure(setting, r, settings.slo_scale)["p95_s"] for c, r in finished}
    others = [name for name in p95 if name != FOCUS]
    best = min(others, key=lambda name: p95[name].mean())
    return tables.Gain(
        setting=f"{setting.trace}, {_rate(setting)}",
        alpha=focus.alpha,
        p95_ratio=focus.ratios["p95_s"],
        throughput_ratio=focus.ratios["throughput_qps"],
        scale_baseline=baseline.values["scale_at_95"],
        scale=focus.values["scale_at_95"],
        best_other=best,
        best_other_ratio=ratio_interval(p95[best], p95[FOCUS], settings.confidence),
    )


# ---- files ----------------------------------------------------------------------------------------------------------


def _check_writable(run_dir: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write the run directory {run_dir}: {error.strerror}; hydra.run.dir=DIR chooses another"
        ) from error


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


def _write(
    part: Path, job: Job, settings: Settings, done: Done, table_rows: list[list[tables.Row]], log: Console
) -> None:
    summary(settings, done, table_rows).to_csv(part / "summary.csv", index=False)
    for kind in cells.KINDS:
        _write_rows(part / f"{kind}.parquet", kind, done)
    for profile in settings.profiles:
        figure = _figure(profile, done, settings)
        figures.save(figure, part / f"attainment_{profile}")
    (part / "tables.txt").write_text(log.export_text(), encoding="utf-8")
    command = " ".join(["python -m hexrepro", *job.overrides])
    config = OmegaConf.to_yaml(job.cfg, resolve=True)
    (part / "config.yaml").write_text(f"# {command}\n{config}", encoding="utf-8")


def summary(settings: Settings, done: Done, table_rows: list[list[tables.Row]]) -> pd.DataFrame:
    """Tidy: one row for each metric of each cell; METRIC_ratio is the ratio to the baseline."""
    records = []
    for (setting, _), rows in zip(done, table_rows, strict=True):
        where = {
            "experiment": settings.experiment,
            "cluster": setting.cluster.name,
            "profile": setting.profile,
            "trace": setting.trace,
            "rate_qps": setting.rate_qps,
        }
        for row in rows:
            measured = dict(row.values)
            measured.update({f"{m}_ratio": interval for m, interval in (row.ratios or {}).items()})
            for metric, interval in measured.items():
                records.append(
                    {
                        **where,
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


def _write_rows(path: Path, kind: str, done: Done) -> None:
    """All cells' rows of one kind in one file, a cell at a time, with the columns that say which cell it is."""
    labels = {
        "cluster": lambda s, c, r: s.cluster.name,
        "profile": lambda s, c, r: s.profile,
        "trace": lambda s, c, r: s.trace,
        "policy": lambda s, c, r: c.policy.name,
    }
    writer = None
    try:
        for setting, finished in done:
            for cell, result in finished:
                rows = pq.read_table(result.files[kind]).replace_schema_metadata(None)
                n = len(rows)
                same = {name: _constant(label(setting, cell, result), n) for name, label in labels.items()}
                same["rate_qps"] = pa.array(np.full(n, np.nan if setting.rate_qps is None else setting.rate_qps))
                same["alpha"] = pa.array(np.full(n, np.nan if result.alpha is None else result.alpha))
                table = pa.table({**same, **{name: rows[name] for name in rows.column_names}})
                if writer is None:
                    options = cells.parquet_options(rows.schema)
                    options["use_dictionary"] += list(same)
                    writer = pq.ParquetWriter(path, table.schema, **options)
                writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _constant(value: str, n: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array([value]))


def _figure(profile: str, done: Done, settings: Settings):
    panels, title = {}, ""
    for setting, finished in done:
        if setting.profile != profile:
            continue
        base_slo_s = setting.base_slo_s * setting.workload.slo_scale
        panels[_rate(setting), setting.trace] = {
            cell.policy.name: (result.finish_s - result.arrival_s) / base_slo_s for cell, result in finished
        }
        runs = _runs(setting) if len(setting.seeds) == 1 else f"mean and {settings.confidence:.0%} interval, {_runs(setting)}"
        title = f"{setting.cluster.name}, {profile} step times, prefix caching: {setting.engine.prefix_caching}\n{runs}"
    return figures.attainment_figure(panels, title=title, baseline=settings.baseline, confidence=settings.confidence)
