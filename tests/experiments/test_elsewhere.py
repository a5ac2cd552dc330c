"""Sweeps in other processes: the numbers of the serial sweep, mistakes in one line, Ctrl-C, and runs that meet on the disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numba
import pandas as pd
import pytest

from hexrepro import compiled
from hexrepro.cli import main
from hexrepro.experiments import elsewhere
from hexrepro.paths import conf_dir
from hexrepro.report import results

SMALL = (
    "seeds=2",
    "selection.seeds=2",
    "profile=silicon",
    "workload=trace1",
    "workload.n_queries=6",
    "figures=false",
)
COMPARE = ("experiment=hetero1", *SMALL, "policy=[vllm,eft]", "calls=false")
SWEEP = (*COMPARE, "workload.rate_qps=0.5,1", "-m")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """An empty directory; other processes find our compiled code, and start from no cells."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", numba.config.CACHE_DIR)
    monkeypatch.setenv("PYTHONPATH", str(compiled.PACKAGE.parent))
    monkeypatch.setenv("HEXREPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(launcher: str, monkeypatch, *more: str) -> int:
    """Run the sweep into a directory named after the launcher, from an empty cache."""
    monkeypatch.setenv("HEXREPRO_CACHE", f"cache_{launcher}")
    return main([*SWEEP, f"hydra/launcher={launcher}", f"hydra.sweep.dir={launcher}", *more])


def assert_same_numbers(one: Path, other: Path) -> None:
    """Every CSV file of every run, to the byte."""
    files = {f.relative_to(one) for f in one.glob("*/*.csv")}
    assert len(files) == 8  # summary, samples, curves, quantiles of two runs
    assert files == {f.relative_to(other) for f in other.glob("*/*.csv")}
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


def test_joblib(place, monkeypatch, capfd) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    assert sweep("basic", monkeypatch) == 0
    assert sweep("joblib", monkeypatch, "hydra.launcher.n_jobs=2") == 0
    assert_same_numbers(place / "basic", place / "joblib")
    out, err = capfd.readouterr()
    assert f"Results: {place / 'joblib'}\n" in out
    assert "Warning" not in err
    # a mistake in one run: the others are done, and it is one line
    assert sweep("joblib", monkeypatch, "hydra.launcher.n_jobs=2", "workload.rate_qps=0.5,-1") == 2
    *progress, mistake = capfd.readouterr().err.splitlines()
    assert mistake == "hexrepro: workload.rate_qps=-1 must be a number above 0 queries/s"
    assert all("cells done" in line for line in progress)


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def start(argv: list[str]) -> subprocess.Popen:
    """`python -m hexrepro` in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "hexrepro", *argv], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def wait_for(there: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def interrupt(process: subprocess.Popen) -> None:
    """Ctrl-C as a terminal sends it: to the whole group, of which nobody may be left afterwards."""
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1].splitlines()[-1].startswith("hexrepro: interrupted")
    assert process.returncode == 130
    wait_for(lambda: not alive(process.pid), 10.0)


def test_ctrl_c_ends_the_workers(place) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    process = start(
        [*SWEEP, "seeds=2000", "workload.n_queries=90", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    )
    wait_for(lambda: any(place.glob("outputs/sweeps/*/?_hetero1")))  # a worker is at it
    interrupt(process)


def test_ray(place, monkeypatch, capfd) -> None:
    """Some 25 s."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    assert sweep("basic", monkeypatch) == 0
    try:
        assert sweep("ray", monkeypatch) == 0
        assert_same_numbers(place / "basic", place / "ray")
        capfd.readouterr()
        assert sweep("ray", monkeypatch, "workload.rate_qps=0.5,-1") == 2
        assert capfd.readouterr().err == "hexrepro: workload.rate_qps=-1 must be a number above 0 queries/s\n"
    finally:
        ray.shutdown()


def test_ctrl_c_ends_ray(place) -> None:
    """The Ray that was started for the sweep, too."""
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    process = start([*SWEEP, "seeds=2000", "workload.n_queries=90", "hydra/launcher=ray"])
    wait_for(lambda: any(place.glob("outputs/sweeps/*/?_hetero1")), 120.0)
    interrupt(process)


SLURM = {  # what submitit calls, on this machine: jobs run at once, one after the other
    "sbatch": """
        import re, shlex, subprocess, sys
        script = sys.argv[-1]
        first, last = map(int, re.search(r"--array=(\\d+)-(\\d+)", open(script).read()).groups())
        same = "SLURM_ARRAY_JOB_ID=99 SLURM_CPUS_PER_TASK=4 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_JOB_NODELIST=here"
        same += " SLURM_NODEID=0 SLURM_LOCALID=0 SLURM_JOB_NUM_NODES=1"
        jobs = [
            f"env {same} SLURM_JOB_ID={100 + i} SLURM_ARRAY_TASK_ID={i} bash {shlex.quote(script)}"
            for i in range(first, last + 1)
        ]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(["bash", "-c", "sleep 0.5; " + "; ".join(jobs)], start_new_session=True, **quiet)
        print("Submitted batch job 99")
    """,
    "srun": """
        import subprocess, sys
        start = next(i for i, a in enumerate(sys.argv) if a.endswith("python") or "/python" in a)
        sys.exit(subprocess.run(sys.argv[start:]).returncode)
    """,
    "sacct": "print('JobID|State|NodeList\\n99_0|COMPLETED|here\\n99_1|COMPLETED|here')",
    "scancel": "",
}


@pytest.fixture
def slurm(place, monkeypatch):
    """Puts stand-ins for Slurm's commands in the way."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")

    def put(**commands: str) -> None:
        (place / "bin").mkdir()
        for name, code in commands.items():
            (place / "bin" / name).write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
            (place / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")

    return put


def test_slurm(place, slurm, monkeypatch, capfd) -> None:
    """That our config makes a job of each run, with its cores, and the same numbers."""
    slurm(**SLURM)
    assert sweep("basic", monkeypatch) == 0
    assert sweep("slurm", monkeypatch) == 0
    assert_same_numbers(place / "basic", place / "slurm")
    assert "workers: 4" in (place / "slurm" / "0_hetero1" / "config.yaml").read_text()
    (script,) = place.glob("slurm/.submitit/99/99_submission.sh")
    assert {"#SBATCH --time=240", "#SBATCH --cpus-per-task=4"} <= set(script.read_text().splitlines())
    capfd.readouterr()
    assert sweep("slurm", monkeypatch, "workload.rate_qps=0.5,-1", "hydra.sweep.dir=mistake") == 2
    assert (
        capfd.readouterr().err.splitlines()[-1]
        == "hexrepro: workload.rate_qps=-1 must be a number above 0 queries/s"
    )


def test_ctrl_c_cancels_the_jobs_of_slurm(place, slurm) -> None:
    """Jobs that wait in Slurm's queue; they are cancelled by the name they were submitted under."""
    told = "import pathlib, sys; pathlib.Path({!r}).write_text({})"
    slurm(
        sbatch=told.format("submitted", "open(sys.argv[-1]).read()") + "; print('Submitted batch job 99')",
        sacct="print('JobID|State|NodeList\\n99_0|PENDING|None\\n99_1|PENDING|None')",
        scancel=told.format("cancelled", "' '.join(sys.argv[1:])"),
        srun="",
    )
    process = start([*SWEEP, "hydra/launcher=slurm"])
    wait_for(lambda: (place / "submitted").is_file())
    interrupt(process)
    (name,) = re.findall("#SBATCH --job-name=(.*)", (place / "submitted").read_text())
    assert re.fullmatch(r"hexrepro_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", name)
    assert (place / "cancelled").read_text() == f"--me --name={name}"


@pytest.mark.parametrize("launcher", elsewhere.PLUGINS)
def test_a_launcher_that_is_not_installed(launcher: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(elsewhere.importlib.util, "find_spec", lambda name: None)
    assert main([*SWEEP, f"hydra/launcher={launcher}"]) == 2
    error = capsys.readouterr().err
    assert (
        error
        == f"hexrepro: hydra/launcher={launcher} needs a package that is missing: pip install 'hexrepro[{launcher}]'\n"
    )


def test_an_unknown_launcher(place, capsys) -> None:
    assert main([*SWEEP, "hydra/launcher=jobib"]) == 2
    assert "hydra/launcher=jobib is unknown; did you mean joblib?" in capsys.readouterr().err


def test_each_launcher_has_a_config_and_an_extra() -> None:
    assert {f.stem for f in (conf_dir() / "hydra" / "launcher").glob("*.yaml")} == set(elsewhere.PLUGINS)


# ---- runs that meet on the disk ------------------------------------------------------------------------------------

TUNE = (
    "experiment=tune",
    *SMALL,
    "workload.rate_qps=0.5",
    "tuning.sampler.trials=12",
    "tuning.sampler.batch=4",
    "tuning.curve=3",
)
BOTH = """
import sys, time
from hexrepro.cli import main
compare, tune = eval(sys.argv[1])
import hexrepro.experiments.compare, hexrepro.experiments.tune
print("ready", flush=True)
sys.stdin.readline()
sys.exit(main(compare) or main(tune))
"""


def test_two_processes_at_once(place, monkeypatch) -> None:
    """The same comparison into run directories named by the time, and the same search with one database, from one cell cache:
    begun in the same moment, both give what one alone gives."""
    compare = [*COMPARE, "workload.rate_qps=0.5"]
    tune = [*TUNE, "tuning.storage=sqlite:///study.db"]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", BOTH, repr((compare, [*tune, f"hydra.run.dir=tuned{i}"]))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in started:
        error = process.communicate(timeout=120)[1]
        assert process.returncode == 0, error

    monkeypatch.setenv("HEXREPRO_CACHE", "cache_alone")
    assert main([*compare, "hydra.run.dir=alone"]) == 0
    assert main([*TUNE, "hydra.run.dir=tuned_alone"]) == 0
    runs = sorted(place.glob("outputs/hetero1/*"))
    assert len(runs) == 2  # each has a directory of its own
    for run in runs:
        for file in ("summary.csv", "samples.csv", "curves.csv", "quantiles.csv"):
            assert (run / file).read_bytes() == (place / "alone" / file).read_bytes()
    for i in range(2):
        for file in ("trials.csv", "alpha.csv"):
            assert (place / f"tuned{i}" / file).read_bytes() == (place / "tuned_alone" / file).read_bytes()
    assert not list(place.glob("cache/**/*.part"))
    assert not list(place.glob("outputs/**/.part*"))
    merged = results.merge(runs, keep=["summary"])["summary"]
    alone = pd.read_csv("alone/summary.csv")
    assert len(merged) == 2 * len(alone)
    # whoever comes later takes the trials from the database, however the two have mixed there
    monkeypatch.setenv("HEXREPRO_CACHE", "cache_later")
    assert main([*tune, "hydra.run.dir=tuned_later"]) == 0
    assert (place / "tuned_later" / "trials.csv").read_bytes() == (
        place / "tuned_alone" / "trials.csv"
    ).read_bytes()


def test_no_two_commands_start_in_one_second(place) -> None:
    first, second = elsewhere.started([]), elsewhere.started([])
    assert first < second
    assert elsewhere.started(["hydra.run.dir=here"]) == time.strftime(elsewhere.STAMP)  # and nobody waits
