"""Runs of a sweep in other processes and on other machines: what our side of Hydra's launchers has to see to.

The launchers (joblib, Ray, submitit) call `launch._job` somewhere else, where this module is loaded anew, and bring back what
it returned or raised.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Iterator, Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from hexrepro.errors import InputError
from hexrepro.experiments.cache import check_cache_dir
from hexrepro.experiments.explain import explain
from hexrepro.paths import conf_dir

PLUGINS = {"joblib": "hydra_joblib_launcher", "ray": "hydra_ray_launcher", "slurm": "hydra_submitit_launcher"}
THREADS = ("SLURM_CPUS_PER_TASK", "OMP_NUM_THREADS")
"""Where Slurm says how many cores a job has; joblib and Ray say it where OpenMP looks."""

STAMP = "%Y-%m-%d_%H-%M-%S"

_launched_in: int | None = None  # the process whose command line it was


class _Broken(RuntimeError):
    """An error that is no user's mistake, with the traceback it had where it happened."""


def check_installed(overrides: Sequence[str]) -> None:
    """InputError when the launcher that is asked for is not installed."""
    for override in overrides:
        group, _, name = override.partition("=")
        if group != "hydra/launcher" or name not in PLUGINS:
            continue
        try:
            found = importlib.util.find_spec(f"hydra_plugins.{PLUGINS[name]}")
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise InputError(f"{override} needs a package that is missing: pip install 'hexrepro[{name}]'")


def prefer_our_configs() -> None:
    """Forget the plugins' own configs where conf/hydra/launcher has one of the same name: Hydra would mix the two, and warn."""
    theirs = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for file in (conf_dir() / "hydra" / "launcher").glob("*.yaml"):
        theirs.pop(file.name, None)


def started(overrides: Sequence[str]) -> str:
    """Date and time to the second, for the name of a run directory: no two commands on this machine get the same.

    Whoever comes in a second that is taken waits for the next one, unless the directory is named on the command line.
    """
    if any(override.startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for override in overrides):
        return time.strftime(STAMP)
    try:
        import fcntl

        with (check_cache_dir().parent / "started").open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            before = file.read()
            while (now := time.strftime(STAMP)) == before:
                time.sleep(0.02)
            file.truncate(0)
            file.write(now)
            return now
    except (
        ImportError,
        OSError,
        InputError,
    ):  # not on Windows; and the run itself says what is wrong with the cache
        return time.strftime(STAMP)


@contextlib.contextmanager
def jobs(slurm_name: str) -> Iterator[None]:
    """While Hydra runs: note which process this is, say where a sweep's results lie, and cancel Slurm's jobs on Ctrl-C
    (joblib has ended its own, and Ray's end with this process).

    Hydra hands what the runs return to nobody: its callbacks `on_job_end` run where the run ran, and `on_multirun_end` is not
    told. And of a failed run it would announce what it then raises in words of its own. So its reading of the values is ours.
    """
    global _launched_in
    _launched_in = os.getpid()
    done: list[JobReturn] = []

    def value(job: JobReturn):
        if job.status == JobStatus.FAILED:
            raise job._return_value
        if isinstance(job._return_value, str):
            done.append(job)
        return job._return_value

    hydras = JobReturn.return_value
    JobReturn.return_value = property(value, hydras.fset)
    try:
        yield
    except KeyboardInterrupt:
        if shutil.which("scancel"):
            subprocess.run(["scancel", "--me", f"--name={slurm_name}"], check=False, capture_output=True)
        raise
    finally:
        JobReturn.return_value = hydras
    if done:
        print(f"Results: {os.path.abspath(done[0].hydra_cfg.hydra.sweep.dir)}")


def here() -> bool:
    """Whether this is the process that was launched."""
    return os.getpid() == _launched_in


@contextlib.contextmanager
def told_in_one_line() -> Iterator[None]:
    """What a run raises, so that it travels: a mistake as it is, all else with its traceback as text."""
    if multiprocessing.parent_process() is not None:  # joblib's: the terminal sends them its Ctrl-C as well,
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # but it is the process that was launched that ends them
    try:
        yield
    except InputError as mistake:
        raise InputError(str(mistake)) from None
    except Exception as error:
        if line := explain(error):
            raise InputError(line) from None
        raise _Broken(f"a run of the sweep has failed\n{traceback.format_exc()}") from None


def share_cores(cfg: DictConfig) -> None:
    """Several runs at a time on one machine: each takes the cores that its launcher gives it, not all."""
    given = next((os.environ[name] for name in THREADS if os.environ.get(name, "").isdigit()), None)
    if cfg.workers is None and given is not None:
        cfg.workers = max(1, int(given))
