"""Optuna's samplers and storages by name.

A sampler is made anew for every trial, its seed drawn from the search's seed and the trial's number. So what a trial is
asked depends on the study alone: not on the process, not on how many workers there are, and not on an interruption.
"""

from __future__ import annotations

import importlib.util
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import sqlalchemy
from scipy.stats import qmc

from hexrepro.errors import InputError
from hexrepro.tuning.objective import Objective
from hexrepro.tuning.space import Candidate, Space

DENSE = "dense"  # every point of the grid in one call, without Optuna
NAMES = (DENSE, "grid", "tpe", "gp", "cmaes", "nsga2", "random")


@dataclass(frozen=True)
class Sampling:
    """How candidates are chosen.

    trials   candidates in all; None takes the whole grid (dense and grid only)
    batch    candidates asked at once and simulated in one call. Part of the search: another batch is another search.
    spread   the first so many candidates are spread evenly over the space instead of sampled (tpe, gp)
    points   of each range, at most, where a whole grid is tried (dense, grid)
    options  further arguments of Optuna's sampler
    """

    name: str
    trials: int | None = None
    batch: int = 16
    seed: int = 0
    spread: int = 0
    points: int = 101
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise InputError(f"tuning.sampler.name={self.name} is unknown (one of: {', '.join(NAMES)})")
        counts = {"batch": 1, "points": 2, "seed": 0, "spread": 0} | (
            {} if self.trials is None else {"trials": 1}
        )
        for name, least in counts.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"tuning.sampler.{name}={value} must be a whole number of at least {least}")
        if self.trials is None and self.name not in (DENSE, "grid"):
            raise InputError(f"tuning.sampler.trials has no value; {self.name} needs one")


class _Grid(optuna.samplers.GridSampler):
    """Without the call to `Study.stop` at the end, which is an error under ask and tell."""

    def after_trial(self, study, trial, state, values) -> None:
        pass


class Samplers:
    """Makes the sampler of each trial of one search."""

    def __init__(self, sampling: Sampling, space: Space, objectives: Sequence[Objective]) -> None:
        self.sampling = sampling
        if sampling.name == "gp" and importlib.util.find_spec("torch") is None:
            raise InputError(
                "tuning/sampler=gp needs PyTorch, which is not installed: pip install 'hexrepro[gp]',"
                " or take tuning/sampler=tpe"
            )
        if sampling.name == "cmaes":
            _check_cmaes(space, objectives)
        self._grid = None
        if sampling.name == "grid":
            self._grid = {d.name: d.points(sampling.points) for d in space.dimensions}
        self._spread = _spread(space, sampling) if sampling.spread else []
        with self.quiet():
            self.of_trial(len(self._spread))  # a mistake in the options shows here

    def of_trial(self, number: int) -> optuna.samplers.BaseSampler:
        """The sampler of one trial."""
        seed = int(np.random.SeedSequence([self.sampling.seed, number]).generate_state(1)[0] >> 1)
        if number < len(self._spread):
            rest = optuna.samplers.RandomSampler(seed)
            return optuna.samplers.PartialFixedSampler(self._spread[number], rest)
        try:
            return self._make(seed)
        except (TypeError, ValueError) as error:
            message = " ".join(str(error).split())
            raise InputError(f"tuning.sampler.options: {self.sampling.name}: {message}") from error

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Without Optuna's warnings of what is experimental; and with one thread for the Gaussian process, whose matrices
        are small: more threads wait for each other ten times longer than they compute."""
        threads = None
        if self.sampling.name == "gp":
            import torch

            threads = torch.get_num_threads()
            torch.set_num_threads(1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                yield
        finally:
            if threads is not None:
                torch.set_num_threads(threads)

    def _make(self, seed: int) -> optuna.samplers.BaseSampler:
        options, samplers = dict(self.sampling.options), optuna.samplers
        match self.sampling.name:
            case "grid":
                return _Grid(self._grid, seed=self.sampling.seed)  # its order is drawn once for all trials
            case "random":
                return samplers.RandomSampler(seed)
            case "tpe":
                # constant_liar: the candidates of one batch know of each other
                defaults = {"multivariate": True, "constant_liar": True, "n_startup_trials": 1}
                return samplers.TPESampler(**defaults | options, seed=seed)
            case "gp":
                return samplers.GPSampler(**{"n_startup_trials": 1} | options, seed=seed)
            case "cmaes":
                defaults = {"popsize": self.sampling.batch, "warn_independent_sampling": False}
                independent = samplers.TPESampler(seed=seed, constant_liar=True, multivariate=False)
                return samplers.CmaEsSampler(**defaults | options, seed=seed, independent_sampler=independent)
            case "nsga2":
                return samplers.NSGAIISampler(**{"population_size": self.sampling.batch} | options, seed=seed)
        raise AssertionError(self.sampling.name)


def _check_cmaes(space: Space, objectives: Sequence[Objective]) -> None:
    if importlib.util.find_spec("cmaes") is None:
        raise InputError(
            "tuning/sampler=cmaes needs the package cmaes, which is not installed: pip install 'hexrepro[tuning]',"
            " or take tuning/sampler=tpe"
        )
    if len(objectives) > 1:
        raise InputError("tuning/sampler=cmaes takes one objective; tuning/sampler=nsga2 or tpe take several")
    if all(d.choices for d in space.dimensions):
        raise InputError(
            "tuning/sampler=cmaes needs a range to search; every dimension of the space is a list"
        )


def _spread(space: Space, sampling: Sampling) -> list[Candidate]:
    """Points that fill the space evenly: end to end along one dimension, a scrambled Sobol sequence in several."""
    n = sampling.spread
    if len(space.dimensions) == 1:
        places = np.linspace(0.0, 1.0, n)[:, None]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # n need not be a power of two here
            places = qmc.Sobol(len(space.dimensions), rng=sampling.seed).random(n)
    return [{d.name: d.at(float(u)) for d, u in zip(space.dimensions, row, strict=True)} for row in places]


def open_storage(storage: str | None) -> optuna.storages.BaseStorage | None:
    """Where trials are kept: nowhere (None: in memory), a database by its URL (`sqlite:///tune.db`), or a journal file
    (`journal:tune.log`). optuna-dashboard opens the last two."""
    if storage is None:
        return None
    silence()
    try:
        if storage.startswith("journal:"):
            path = Path(storage.removeprefix("journal:")).expanduser()
            if not path.resolve().parent.is_dir():
                raise InputError(f"tuning.storage={storage}: no such directory: {path.resolve().parent}")
            from optuna.storages.journal import JournalFileBackend

            return optuna.storages.JournalStorage(JournalFileBackend(str(path)))
        kept = _database(storage)
        if storage.startswith("sqlite"):
            sqlalchemy.event.listen(kept.engine, "connect", _commit_fast)
            kept.engine.dispose()  # connections that were made before
        return kept
    except InputError:
        raise
    except Exception as error:  # SQLAlchemy's and the driver's errors have no common base
        message = " ".join(str(error).split()).split(" [SQL")[0].split(" (Background")[0]
        raise InputError(
            f"tuning.storage={storage} cannot be opened ({message}); give sqlite:///FILE, journal:FILE, or null"
        ) from error


def _database(storage: str) -> optuna.storages.RDBStorage:
    """Several processes may find a new database at once; who comes second to make a table finds it there on another try."""
    for left in range(9, -1, -1):
        try:
            return optuna.storages.RDBStorage(storage)
        except (
            sqlalchemy.exc.OperationalError,
            sqlalchemy.exc.IntegrityError,
            sqlalchemy.exc.ProgrammingError,
        ) as error:
            busy = any(word in str(error) for word in ("already exists", "locked", "UNIQUE", "duplicate key"))
            if not busy or left == 0:
                raise
            time.sleep(0.1)
    raise AssertionError


def _commit_fast(connection, _record) -> None:
    """SQLite's write-ahead log: a commit need not wait for the disk, and the file cannot be torn."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def silence() -> None:
    """Optuna tells of every study and trial, and warns of what is experimental; we show a progress bar instead."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("optuna").propagate = False
