"""Running experiments for the figures, and telling whether their results are still those of the code.

Results lie in RESULTS/EXPERIMENT/*.csv with `run.yaml` beside them: the command, how long it took, and digests of the
configs and of the code that made them. Another digest means that the results are stale.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import pandas as pd
import yaml

from hexrepro.compiled import source_digest
from hexrepro.errors import InputError
from hexrepro.paths import conf_dir, data_dir
from hexrepro.report import results

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
RUN_DIR = Path("outputs") / "paper_figures"  # below the repository, ignored by git
STAMP = "run.yaml"
POLL_S = 0.2
GRACE_S = 3.0


Rows = Callable[[pd.DataFrame], pd.Series]


def _default_view(frame: pd.DataFrame) -> pd.Series:
    views = zip(frame["profile"], frame["prefix_caching"], strict=True)
    return pd.Series([view in results.DEFAULTS for view in views], index=frame.index)


def _metrics(*names: str) -> Rows:
    return lambda frame: frame["metric"].isin([*names, *(f"{name}_ratio" for name in names)])


def _none(frame: pd.DataFrame) -> pd.Series:
    return pd.Series(False, index=frame.index)


USUALLY_KEPT: dict[str, Rows] = {
    "curves": _none,
    "quantiles": _none,
    "samples": _none,
    "goodput_samples": _none,
    "summary": _metrics("p95_s", "scale_at_95", "throughput_qps", "attainment", "jain_attainment"),
}
KEPT: dict[str, dict[str, Rows]] = {
    "attainment": {
        "curves": _default_view,
        "quantiles": lambda f: (
            _default_view(f)
            & (f["cluster"] == "hetero1")
            & f["p"].round(2).isin((0.05, 0.25, 0.5, 0.75, 0.95, 0.99))
        ),
        "samples": lambda f: _metrics("p95_s", "throughput_qps")(f) & (f["cluster"] != "homo"),
        "summary": _metrics("p95_s", "scale_at_95", "scale_at_99", "throughput_qps"),
    },
    "throughput": {"summary": _metrics("throughput_qps")},
    "alpha_sensitivity": {"alpha": lambda f: (f["metric"] == "p95_s") & (f["policy"] == "hexgen_flow")},
    "ablation": {"samples": _metrics("scale_at_95")},
    "second_workflow": {"curves": _default_view},
}
"""Experiment -> file -> the rows that a figure or a verdict reads. Results are committed, so the long files are cut to
these; a file that is named neither here nor in USUALLY_KEPT is kept whole."""


@dataclass(frozen=True)
class Stamp:
    """What made the results of an experiment. `cached` tells that part of the work was there from an earlier run, so
    that `seconds` is not the time from nothing."""

    command: str
    clusters: list[str]
    seeds: int
    seconds: float
    cached: bool
    date: str
    config: str
    code: str


def command(experiment: str) -> str:
    """What a reader types to run the experiment alone."""
    return f"python -m hexrepro experiment={experiment}"


def config_digest(experiment: str) -> str:
    """A digest of what an experiment's config is composed of: its own YAML, the defaults, every option of every group,
    and the project's data; without what says where a sweep runs, how the gateway serves, and what the agent is asked."""
    conf, data = conf_dir(), data_dir()
    files = [conf / "config.yaml", conf / "experiment" / f"{experiment}.yaml"]
    groups = [
        d for d in sorted(conf.iterdir()) if d.is_dir() and d.name not in ("experiment", "hydra", "serving")
    ]
    files += [f for group in groups for f in sorted(group.rglob("*.yaml"))]
    rooms = [d for d in sorted(data.iterdir()) if d.is_dir() and d.name != "text2sql"]
    kinds = (".yaml", ".csv", ".json", ".parquet")
    files += [f for room in rooms for f in sorted(room.rglob("*")) if f.suffix in kinds]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + (file.read_bytes() if file.exists() else b""))
    return digest.hexdigest()[:16]


def stamp_of(experiment: str, directory: Path = RESULTS) -> Stamp | None:
    """The stamp of an experiment's results; None when there are none, or no whole ones."""
    file = directory / experiment / STAMP
    if not file.exists() or not any(file.parent.glob("*.csv")):
        return None
    try:
        return Stamp(**yaml.safe_load(file.read_text(encoding="utf-8")))
    except (TypeError, yaml.YAMLError) as error:
        raise InputError(f"{file}: not a stamp of a run: {error}; delete it to run anew") from error


def state(experiment: str, directory: Path = RESULTS) -> str:
    """'missing', 'stale' (configs or code have changed since) or 'fresh'."""
    stamp = stamp_of(experiment, directory)
    if stamp is None:
        return "missing"
    same = (stamp.config, stamp.code) == (config_digest(experiment), source_digest())
    return "fresh" if same else "stale"


def run(
    experiment: str,
    tell: Callable[[str], None] = lambda _: None,
    directory: Path = RESULTS,
) -> Stamp:
    """Run an experiment in a process of its own and keep its results. `tell` gets its latest line of output as it goes.

    Ctrl-C reaches the process too, and it keeps its finished cells: the same run goes on from there.
    """
    if not (conf_dir() / "experiment" / f"{experiment}.yaml").exists():
        raise InputError(f"conf/experiment/{experiment}.yaml is missing")
    run_dir = RUN_DIR / experiment
    shutil.rmtree(ROOT / run_dir, ignore_errors=True)  # an earlier run's jobs would be taken for this one's
    (ROOT / run_dir).mkdir(parents=True)
    log = ROOT / RUN_DIR / f"{experiment}.log"
    config, code = config_digest(experiment), source_digest()
    start = time.monotonic()
    argv = [
        sys.executable,
        *("-m", "hexrepro", f"experiment={experiment}"),
        *(f"hydra.run.dir={run_dir}", f"hydra.sweep.dir={run_dir}"),
    ]
    status = _watch(argv, log, tell)
    if status == 130:
        raise KeyboardInterrupt
    if status != 0:
        raise InputError(
            f"experiment {experiment} failed: {last_line(log)} (all it said: {log.relative_to(ROOT)})"
        )
    keep(experiment, ROOT / run_dir, directory / experiment)
    frames = results.read(directory / experiment)
    stamp = Stamp(
        command=command(experiment),
        clusters=sorted({c for f in frames.values() if "cluster" in f for c in f["cluster"].dropna()}),
        seeds=int(max((f["seeds"].max() for f in frames.values() if "seeds" in f), default=0)),
        seconds=round(time.monotonic() - start, 1),
        cached="of them cached" in log.read_text(encoding="utf-8", errors="replace"),
        date=date.today().isoformat(),
        config=config,
        code=code,
    )
    (directory / experiment / STAMP).write_text(
        yaml.safe_dump(asdict(stamp), sort_keys=False), encoding="utf-8"
    )
    return stamp


def _watch(argv: list[str], log: Path, tell: Callable[[str], None]) -> int:
    """Run a command with all its output in a file; returns its exit status."""
    with log.open("wb") as out:
        process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            while process.poll() is None:
                tell(last_line(log))
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            try:
                process.wait(GRACE_S)  # a terminal has sent it the same signal, and it ends in order
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                process.wait()
            raise
        finally:
            if process.poll() is None:
                process.terminate()
    return process.returncode


def last_line(log: Path) -> str:
    """The last line that is not empty."""
    with log.open("rb") as file:
        file.seek(max(0, os.path.getsize(log) - 2000))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def keep(experiment: str, run_dir: Path, place: Path) -> None:
    """Merge a run's result files, one directory or one for each job of a sweep, and keep them with 6 digits."""
    jobs = sorted(
        {file.parent for file in [*run_dir.glob("*.csv"), *run_dir.glob("*/*.csv")]},
        key=lambda job: (len(job.name.split("_")[0]), job.name),  # 2_attainment before 10_attainment
    )
    merged = results.merge(jobs)
    for stem, wanted in (USUALLY_KEPT | KEPT.get(experiment, {})).items():
        if stem in merged:
            merged[stem] = merged[stem][wanted(merged[stem])]
    merged = {stem: frame for stem, frame in merged.items() if len(frame)}
    if not merged:
        raise InputError(f"{run_dir.name} has written no result file into {run_dir}")
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=_made(place.parent)))
    try:
        for stem, frame in merged.items():
            frame.to_csv(part / f"{stem}.csv", index=False, float_format="%.6g")
        shutil.rmtree(place, ignore_errors=True)
        part.chmod(0o755)
        os.replace(part, place)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
