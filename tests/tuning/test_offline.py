"""The search: each sampler against the dense grid, the same answer on any number of workers and after an interruption."""

from __future__ import annotations

import importlib.util

import numpy as np
import optuna
import pytest

from hexrepro.errors import InputError
from hexrepro.scheduling import load_policy
from hexrepro.tuning import samplers
from hexrepro.tuning.evaluate import Evaluator
from hexrepro.tuning.objective import objective
from hexrepro.tuning.offline import batches, pareto_front, search
from hexrepro.tuning.samplers import Sampling, open_storage
from hexrepro.tuning.space import read_space
from tests.tuning.small import ALPHA, small_problem

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch (heavy)")
SAMPLINGS = {
    "grid": Sampling("grid", batch=10, points=101),
    "tpe": Sampling("tpe", trials=48, batch=8, spread=16),
    "tpe, no spread": Sampling("tpe", trials=64, batch=8, options={"n_startup_trials": 8}),
    "cmaes": Sampling("cmaes", trials=64, batch=8),
    "nsga2": Sampling("nsga2", trials=96, batch=12),
    "random": Sampling("random", trials=96, batch=16),
    "gp": Sampling("gp", trials=12, batch=4, spread=4),
}
ALL = [pytest.param(s, id=name, marks=needs_torch if name == "gp" else ()) for name, s in SAMPLINGS.items()]


def evaluator(config=ALPHA, objectives=("p95",), **options) -> Evaluator:
    space = read_space(config, load_policy("hexgen_flow"))
    return Evaluator(small_problem(), space, [objective(name, 2.0) for name in objectives], **options)


# ---- with a stand-in for the simulator: the best alpha is 0.3 -------------------------------------------------------


@pytest.mark.parametrize("sampling", ALL)
def test_every_sampler_finds_what_the_dense_grid_finds(sampling, fake_simulator):
    dense = search(evaluator(), Sampling("dense"))
    assert len(dense.candidates) == 101
    assert dense.candidates[dense.best()] == {"alpha": 0.3}
    found = search(evaluator(), sampling)
    assert found.candidates[found.best()]["alpha"] == pytest.approx(0.3, abs=0.02)
    assert len(found.trials) == (101 if sampling.name == "grid" else sampling.trials)
    assert found.candidates == sorted(found.candidates, key=lambda c: c["alpha"])
    # what it says of a candidate is what the grid says
    by_alpha = {c["alpha"]: s for c, s in zip(dense.candidates, dense.scores[0], strict=True)}
    for candidate, scores in zip(found.candidates, found.scores[0], strict=True):
        np.testing.assert_array_equal(scores, by_alpha[candidate["alpha"]])


def test_a_batch_is_one_call(fake_simulator):
    sampling = Sampling("random", trials=40, batch=16, seed=3)
    search(evaluator({"alpha": {"low": 0.0, "high": 1.0}}), sampling)
    assert [runs for _, runs in fake_simulator] == [16 * 3, 16 * 3, 8 * 3]
    assert batches(sampling, evaluator().space) == 3
    assert batches(Sampling("grid", batch=10, points=101), evaluator().space) == 11
    assert batches(Sampling("dense"), evaluator().space) == 1


def test_another_seed_is_another_search(fake_simulator):
    first, second = (search(evaluator(), Sampling("tpe", trials=32, spread=8, seed=seed)) for seed in (0, 1))
    assert first.trials[:8] == second.trials[:8]  # the even start
    assert first.trials != second.trials


def test_choices_and_ranges_together(fake_simulator):
    config = {**ALPHA, "queue": ["fcfs", "urgency"], "waiting_only": [0.0, 1.0]}
    for name in ("tpe", "cmaes", "nsga2"):
        found = search(evaluator(config), Sampling(name, trials=64, batch=16))
        assert found.candidates[found.best()]["alpha"] == pytest.approx(0.3, abs=0.08)
        assert {c["queue"] for c in found.trials} == {"fcfs", "urgency"}
        assert {c["waiting_only"] for c in found.trials} == {0.0, 1.0}


# ---- storages and interruptions -------------------------------------------------------------------------------------

INTERRUPTED = [p for p in ALL if p.id in ("grid", "tpe", "cmaes", "nsga2", "gp")]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("sampling", INTERRUPTED)
def test_an_interrupted_search_goes_on_and_ends_the_same(sampling, fake_simulator, tmp_path):
    whole = search(evaluator(), sampling)
    left = iter(range(2))

    def interrupt():
        if next(left, None) is None:
            raise Interrupted

    where = f"journal:{tmp_path}/tune.log"
    with pytest.raises(Interrupted):
        search(evaluator(), sampling, storage=open_storage(where), progress=interrupt)
    before = len(fake_simulator)
    again = evaluator()
    resumed = search(again, sampling, storage=open_storage(where))
    assert resumed.trials == whole.trials
    np.testing.assert_array_equal(resumed.scores, whole.scores)
    assert len(fake_simulator) > before  # it did go on
    # and once it is finished, nothing is asked any more
    finished = search(
        evaluator(), sampling, storage=open_storage(where), progress=lambda: pytest.fail("asked")
    )
    assert finished.trials == whole.trials


def test_killed_between_two_writes_of_a_batch(fake_simulator, tmp_path):
    sampling = Sampling("tpe", trials=24, batch=8, spread=8)
    full, cut = (open_storage(f"journal:{tmp_path}/{name}.log") for name in ("full", "cut"))
    whole = search(evaluator(), sampling, storage=full)
    kept = optuna.load_study(storage=full, study_name="hexrepro").get_trials()
    assert [evaluator().space.clean(t.params) for t in kept] == whole.trials
    optuna.create_study(storage=cut, study_name="hexrepro").add_trials(kept[:12])  # a batch and a half
    assert search(evaluator(), sampling, storage=cut).trials == whole.trials
    values = [t.value for t in optuna.load_study(storage=cut, study_name="hexrepro").get_trials()]
    assert values == [t.value for t in kept]


def test_a_finished_search_can_be_made_longer(fake_simulator, tmp_path):
    where = f"journal:{tmp_path}/tune.log"
    search(evaluator(), Sampling("tpe", trials=20, batch=8, spread=8), storage=open_storage(where))
    longer = Sampling("tpe", trials=40, batch=8, spread=8)
    assert (
        search(evaluator(), longer, storage=open_storage(where)).trials == search(evaluator(), longer).trials
    )


@pytest.mark.parametrize(
    "storage", ["sqlite:///{}/no/tune.db", "journal:{}/no/tune.log", "nothing://x", "tune.db"]
)
def test_a_storage_that_cannot_be_opened(storage, tmp_path):
    storage = storage.format(tmp_path)
    with pytest.raises(InputError) as error:
        open_storage(storage)
    assert f"tuning.storage={storage}" in str(error.value)
    assert "\n" not in str(error.value)


# ---- on the simulator -----------------------------------------------------------------------------------------------


def test_the_same_search_on_any_number_of_workers():
    sampling = Sampling("tpe", trials=24, batch=6, spread=6)
    first, second = (search(evaluator(workers=workers), sampling) for workers in (1, 3))
    assert first.trials == second.trials
    np.testing.assert_array_equal(first.scores, second.scores)


def test_the_dense_grid_is_the_truth_for_the_simulator_too():
    dense, found = (
        search(evaluator(), s) for s in (Sampling("dense"), Sampling("tpe", trials=40, spread=16))
    )
    least = dense.scores[0].mean(axis=1).min()
    assert found.scores[0, found.best()].mean() <= 1.01 * least
    assert found.scores[0, found.best()].mean() >= least


def test_the_pareto_front_of_a_search():
    """Against comparing every pair, of all candidates of a grid."""
    whole = search(evaluator(objectives=("p95", "mean", "attainment")), Sampling("grid", batch=50))
    means = whole.scores.mean(axis=-1).T
    front = []
    for i, a in enumerate(means):
        beaten = False
        for b in means:
            no_worse = b[0] <= a[0] and b[1] <= a[1] and b[2] >= a[2]
            better = b[0] < a[0] or b[1] < a[1] or b[2] > a[2]
            beaten = beaten or (no_worse and better)
        if not beaten:
            front.append(i)
    assert whole.front() == front
    assert 1 <= len(front) < 101
    assert {whole.best(k) for k in range(3)} & set(front)


def test_two_objectives_at_odds():
    costs = np.array([[1.0, 4.0], [2.0, 3.0], [2.0, 3.0], [3.0, 3.0], [4.0, 1.0], [1.0, 5.0]])
    assert pareto_front(costs) == [0, 1, 2, 4]


@pytest.mark.parametrize("name", ["tpe", "nsga2"])
def test_samplers_of_several_objectives_find_the_front(name, fake_simulator):
    """P95 and mean are both best at 0.3, so the front is what lies nearest to it (on both sides, if rounding differs)."""
    found = search(evaluator(objectives=("p95", "mean")), Sampling(name, trials=96, batch=12))
    for i in found.front():
        assert found.candidates[i]["alpha"] == pytest.approx(0.3, abs=0.03)


# ---- mistakes -------------------------------------------------------------------------------------------------------

MISTAKES = {
    "unknown sampler": (dict(name="tep"), ALPHA, ("p95",), ["tep", "tpe"]),
    "no trials": (dict(name="tpe"), ALPHA, ("p95",), ["tuning.sampler.trials"]),
    "batch of none": (dict(name="tpe", trials=8, batch=0), ALPHA, ("p95",), ["tuning.sampler.batch=0"]),
    "half a trial": (dict(name="tpe", trials=1.5), ALPHA, ("p95",), ["tuning.sampler.trials=1.5"]),
    "unknown option": (
        dict(name="tpe", trials=8, options={"n_startup": 3}),
        ALPHA,
        ("p95",),
        ["tuning.sampler.options", "n_startup"],
    ),
    "CMA-ES with two objectives": (
        dict(name="cmaes", trials=8),
        ALPHA,
        ("p95", "p99"),
        ["cmaes", "one objective", "nsga2"],
    ),
    "CMA-ES without a range": (
        dict(name="cmaes", trials=8),
        {"alpha": [0.0, 1.0]},
        ("p95",),
        ["cmaes", "range"],
    ),
}


@pytest.mark.parametrize(("sampling", "config", "objectives", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_before_anything_is_simulated(sampling, config, objectives, says, fake_simulator):
    with pytest.raises(InputError) as error:
        search(evaluator(config, objectives), Sampling(**sampling))
    for words in says:
        assert words in str(error.value)
    assert fake_simulator == []


@pytest.mark.parametrize(("sampler", "package"), [("gp", "torch"), ("cmaes", "cmaes")])
def test_a_missing_package_is_named(sampler, package, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        samplers.importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )
    with pytest.raises(InputError, match="not installed: pip install"):
        search(evaluator(), Sampling(sampler, trials=8))
