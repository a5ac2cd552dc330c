"""The offline search: candidates asked in batches, each batch simulated in one compiled call on all arrival seeds.

The batch is fixed by the config, so a search does not depend on the number of workers (it would if as many candidates
were asked as there are workers: Optuna's issue 4412). An interrupted search goes on from its storage and ends as it would
have: see `samplers.py`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.trial import TrialState

from hexrepro.tuning.evaluate import Evaluator
from hexrepro.tuning.objective import Objective
from hexrepro.tuning.samplers import DENSE, Samplers, Sampling, silence
from hexrepro.tuning.space import Candidate, Space


@dataclass(frozen=True, eq=False)
class Search:
    """A finished search.

    candidates: what was tried, each once, sorted; scores: float64[objectives, candidates, S], one value an arrival seed;
    trials: the candidates in the order of the trials, repeats included. sampler_s and simulation_s share the wall time, in
    which `runs` were simulated; the others were known already.
    """

    space: Space
    objectives: tuple[Objective, ...]
    candidates: list[Candidate]
    scores: np.ndarray
    trials: list[Candidate]
    sampler_s: float
    simulation_s: float
    runs: int

    @property
    def costs(self) -> np.ndarray:
        """float64[objectives, candidates, S]: the scores so that less is better."""
        return np.stack([o.cost(s) for o, s in zip(self.objectives, self.scores, strict=True)])

    def best(self, objective: int = 0) -> int:
        """The candidate with the best mean; the first of equals."""
        return int(np.argmin(self.costs[objective].mean(axis=-1)))

    def front(self) -> list[int]:
        """The candidates that no other beats in one objective without losing in another, by their means."""
        return pareto_front(self.costs.mean(axis=-1).T)

    @property
    def overhead(self) -> float:
        """The sampler's share of the wall time."""
        return self.sampler_s / max(self.sampler_s + self.simulation_s, 1e-12)


def pareto_front(costs: np.ndarray) -> list[int]:
    """Indices of the rows of float64[n, objectives] that no other row dominates; equal rows are all kept."""
    no_worse = (costs[:, None, :] <= costs[None, :, :]).all(axis=-1)
    better = (costs[:, None, :] < costs[None, :, :]).any(axis=-1)
    return [int(i) for i in np.flatnonzero(~(no_worse & better).any(axis=0))]


def batches(sampling: Sampling, space: Space) -> int:
    """How many batches a search takes."""
    if sampling.name == DENSE:
        return 1
    return -(-_trials(sampling, space) // sampling.batch)


def search(
    evaluate: Evaluator,
    sampling: Sampling,
    *,
    storage: optuna.storages.BaseStorage | None = None,
    study_name: str = "hexrepro",
    progress: Callable[[], None] | None = None,
) -> Search:
    """Search the evaluator's space. `progress` is called after each batch."""
    start, seconds_before, runs_before = time.perf_counter(), evaluate.seconds, evaluate.runs
    space, objectives = evaluate.space, evaluate.objectives
    if sampling.name == DENSE:
        tried = space.grid(sampling.points)
        evaluate(tried)
        if progress:
            progress()
    else:
        tried = _ask_and_tell(evaluate, sampling, storage, study_name, progress)
    distinct = {tuple(c.values()): c for c in tried}
    candidates = sorted(distinct.values(), key=space.order)
    scores = evaluate(candidates)
    simulation_s = evaluate.seconds - seconds_before
    wall_s = time.perf_counter() - start
    runs = evaluate.runs - runs_before
    return Search(space, objectives, candidates, scores, tried, wall_s - simulation_s, simulation_s, runs)


def _trials(sampling: Sampling, space: Space) -> int:
    if sampling.name == "grid":
        size = len(space.grid(sampling.points))
        return size if sampling.trials is None else min(size, sampling.trials)
    return sampling.trials


def _ask_and_tell(
    evaluate: Evaluator,
    sampling: Sampling,
    storage: optuna.storages.BaseStorage | None,
    study_name: str,
    progress: Callable[[], None] | None,
) -> list[Candidate]:
    """The study lives in memory, where asking costs least; finished trials are copied to the storage as they come."""
    space, total = evaluate.space, _trials(sampling, evaluate.space)
    samplers = Samplers(sampling, space, evaluate.objectives)
    distributions = {d.name: d.distribution() for d in space.dimensions}
    directions = [o.direction for o in evaluate.objectives]
    silence()
    with samplers.quiet(), _Copy(storage, study_name, directions) as copy:
        study = optuna.create_study(directions=directions)
        # of a batch that was interrupted none is taken over: asked anew, it comes out the same
        whole = total if len(copy.trials) >= total else len(copy.trials) // sampling.batch * sampling.batch
        study.add_trials(copy.trials[:whole])
        for begin in range(whole, total, sampling.batch):
            asked = []
            for number in range(begin, min(begin + sampling.batch, total)):
                study.sampler = samplers.of_trial(number)
                asked.append(study.ask(distributions))
                asked[-1].set_user_attr(PLACE, number)
            means = evaluate([t.params for t in asked]).mean(axis=-1)
            for trial, values in zip(asked, means.T, strict=True):
                study.tell(trial, [float(v) for v in values])
            copy.take(study.get_trials(deepcopy=False))
            if progress:
                progress()
        return [space.clean(t.params) for t in study.get_trials(deepcopy=False)]


PLACE = (
    "place"  # of a trial in its search; its number in a storage may differ when several processes write there
)


class _Copy:
    """Copies a study's finished trials to a storage, beside the simulation: databases take their time to commit.

    Several processes may run one search with one storage: all propose the same trials in the same order, so whoever comes
    later leaves out what is there. `trials`: those that the storage held already, from the first on without a gap.
    """

    def __init__(
        self, storage: optuna.storages.BaseStorage | None, study_name: str, directions: Sequence[str]
    ) -> None:
        self.trials: list[optuna.trial.FrozenTrial] = []
        self._study, self._writer, self._writing = None, None, None
        if storage is not None:
            self._study = optuna.create_study(
                storage=storage, study_name=study_name, directions=directions, load_if_exists=True
            )
            finished = self._study.get_trials(states=(TrialState.COMPLETE,))
            by_place = {_place(t): t for t in sorted(finished, key=lambda t: t.number, reverse=True)}
            self.trials = [by_place[i] for i in itertools.takewhile(by_place.__contains__, itertools.count())]
            self._writer = ThreadPoolExecutor(1)

    def __enter__(self) -> _Copy:
        return self

    def take(self, trials: Sequence[optuna.trial.FrozenTrial]) -> None:
        """Copy those of a study's trials that the storage does not hold yet."""
        if self._study is None:
            return
        self._wait()
        new = list(trials[len(self.trials) :])
        self.trials += new
        self._writing = self._writer.submit(self._add, new)

    def _add(self, new: Sequence[optuna.trial.FrozenTrial]) -> None:
        there = {_place(trial) for trial in self._study.get_trials(deepcopy=False)}
        self._study.add_trials([trial for trial in new if _place(trial) not in there])

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._writer is not None:
            self._writer.shutdown()  # what has been simulated is written, Ctrl-C or not
            if kind is None:
                self._wait()


def _place(trial: optuna.trial.FrozenTrial) -> int:
    return trial.user_attrs.get(PLACE, trial.number)
