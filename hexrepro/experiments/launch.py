"""From a command line to an experiment, by way of Hydra.

Hydra composes the config, makes the run directory and does `-m` sweeps, here or, by its launchers, in other processes and on
other machines (`elsewhere.py`). We take its errors apart (`explain.py`) and leave no empty run directory behind when a
mistake shows up.
"""

from __future__ import annotations

import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hexrepro.errors import InputError
from hexrepro.experiments import RUNNERS, Job, elsewhere
from hexrepro.experiments.explain import explain, suggest
from hexrepro.experiments.policy_group import register
from hexrepro.paths import conf_dir

HYDRAS_OWN = "multirun.yaml"  # the config that Hydra leaves in a sweep's directory


class _Mistake(BaseException):
    """Carries an InputError through Hydra, which would print an `Exception` in its own words."""


def launch(argv: list[str]) -> None:
    """Run what `argv` asks for. Raises InputError for a user's mistake."""
    flags = _parse(argv)
    elsewhere.check_installed(flags.overrides)
    started = elsewhere.started(flags.overrides)
    OmegaConf.register_new_resolver("started", lambda: started, replace=True)
    config_dirs = [*([Path(flags.config_dir)] if flags.config_dir else []), conf_dir()]
    register(*config_dirs)
    elsewhere.prefer_our_configs()
    before = sys.argv
    sys.argv = ["hexrepro", *_overrides_first(argv, flags.overrides)]
    # Hydra then raises instead of printing and exiting
    full_error, os.environ["HYDRA_FULL_ERROR"] = os.environ.get("HYDRA_FULL_ERROR"), "1"
    try:
        with elsewhere.jobs(slurm_name=f"hexrepro_{started}"):
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(_job)()
    except _Mistake as mistake:
        raise mistake.__cause__ from None
    except Exception as error:
        line = explain(error, config_dirs)
        if line is None:
            raise
        raise InputError(line) from error
    finally:
        sys.argv = before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _parse(argv: list[str]) -> Namespace:
    parser = get_args_parser()

    def refuse(message: str) -> None:
        raise InputError(f"{message}; `python -m hexrepro --help` shows what there is")

    parser.error = refuse
    return parser.parse_intermixed_args(argv)


def _overrides_first(argv: list[str], overrides: list[str]) -> list[str]:
    """Hydra's own parser wants the overrides in one piece."""
    rest = list(argv)
    for override in overrides:
        rest.remove(override)
    return [*overrides, *rest]


def _job(cfg: DictConfig) -> str | None:
    """One run: what Hydra calls once the config is composed and the run directory stands. In another process than the one
    that was launched, it returns the run directory."""
    hydra_cfg = HydraConfig.get()
    job = Job(
        cfg=cfg,
        run_dir=Path(hydra_cfg.runtime.output_dir),
        choices=dict(hydra_cfg.runtime.choices),
        overrides=list(hydra_cfg.overrides.task),
    )
    sweep = hydra_cfg.mode == RunMode.MULTIRUN
    if elsewhere.here():
        try:
            _run(job, sweep)
        except InputError as mistake:
            raise _Mistake from mistake
        return None
    with elsewhere.told_in_one_line():
        elsewhere.share_cores(cfg)
        _run(job, sweep)
    return str(job.run_dir)


def _run(job: Job, sweep: bool) -> None:
    """Raises InputError for a user's mistake."""
    with _no_empty_directory(job.run_dir, sweep):
        runner = RUNNERS.get(str(job.cfg.run))
        if runner is None:
            raise InputError(f"run={job.cfg.run} is unknown{suggest(str(job.cfg.run), RUNNERS)}")
        module, function = runner.split(":")
        try:
            getattr(importlib.import_module(module), function)(job)
        except OmegaConfBaseException as error:
            raise InputError(explain(error)) from error


@contextmanager
def _no_empty_directory(run_dir: Path, sweep: bool) -> Iterator[None]:
    """Take the run directory away again when a run that failed has written nothing into it, and a sweep's when none of its
    jobs has."""
    try:
        yield
    except BaseException:
        for directory in (run_dir, *run_dir.parents[: 3 if sweep else 2]):
            if sweep and [f.name for f in directory.iterdir()] == [HYDRAS_OWN]:
                (directory / HYDRAS_OWN).unlink()
            try:
                directory.rmdir()  # refuses when there is anything in it
            except OSError:
                break
        raise
