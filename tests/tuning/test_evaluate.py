"""Candidates in one batch against each of them alone, through the simulator's own front door."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hexrepro.scheduling import load_policy
from hexrepro.scheduling.estimates import estimate
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator import simulate_grid
from hexrepro.tuning.evaluate import Evaluator
from hexrepro.tuning.objective import objective
from hexrepro.tuning.space import read_space
from tests.tuning.small import small_problem


def test_a_batch_equals_its_candidates_one_by_one():
    """Every kind of dimension at once: each candidate against a call of `simulate_grid` of its own."""
    problem = small_problem(estimator="history", tenants=True)
    space = read_space(
        {
            "alpha": {"low": 0.0, "high": 1.0},
            "beta": {"low": 0.1, "high": 10.0, "log": True},
            "queue": ["urgency", "fcfs", "request_groups"],
            "window": {"low": 1, "high": 50},
            "weights": {"gold": {"low": 0.1, "high": 2.0}},
        },
        load_policy("hexgen_flow"),
        tenants=problem.workload.tenant_names,
        estimator="history",
    )
    rng = np.random.default_rng(1)
    candidates = [{d.name: d.at(rng.random()) for d in space.dimensions} for _ in range(7)]
    candidates += [{**candidates[0], "alpha": 0.9}, {**candidates[0], "alpha": 0.1}]  # these share a call
    evaluator = Evaluator(problem, space, [objective("p95"), objective("attainment", 2.0)])
    scores = evaluator(candidates)
    assert scores.shape == (2, 9, 3)
    assert evaluator.calls == 7
    assert evaluator.runs == 27

    views = instance_views(problem.cluster)
    for i, c in enumerate(candidates):
        told = replace(
            problem.workload,
            slo_scale=problem.workload.slo_scale
            * np.where(problem.workload.tenant == 0, c["weight.gold"], 1.0),
        )
        policy = replace(load_policy("hexgen_flow"), queue=c["queue"]).with_params(
            alpha=c["alpha"], beta=c["beta"]
        )
        grid = simulate_grid(
            told, problem.cluster, policy, arrivals_s=problem.arrivals_s, seeds=problem.seeds,
            base_slo=2.0 * problem.base_slo_s, estimates=estimate(told, views, estimator="history", window=c["window"]),
        )  # fmt: skip
        np.testing.assert_array_equal(
            scores[0, i], np.quantile(grid.latency_s, 0.95, axis=1, method="linear")
        )
        slo_s = 2.0 * problem.base_slo_s * problem.workload.slo_scale  # not what the scheduler was told
        np.testing.assert_array_equal(scores[1, i], (grid.latency_s <= slo_s).mean(axis=1))


def test_policies_are_candidates_too():
    problem = small_problem()
    names = ["hexgen_flow", "vllm", "eft", "vtc"]
    space = read_space({"policy": names}, load_policy("hexgen_flow"))
    scores = Evaluator(problem, space, [objective("mean")])([{"policy": name} for name in names])
    for name, values in zip(names, scores[0], strict=True):
        grid = simulate_grid(
            problem.workload, problem.cluster, name, arrivals_s=problem.arrivals_s, seeds=problem.seeds,
            base_slo=2.0 * problem.base_slo_s,
        )  # fmt: skip
        np.testing.assert_array_equal(values, grid.latency_s.mean(axis=1))


def test_nothing_is_simulated_twice(fake_simulator):
    space = read_space({"alpha": {"low": 0.0, "high": 1.0, "step": 0.1}}, load_policy("hexgen_flow"))
    evaluator = Evaluator(small_problem(), space, [objective("p95")])
    first = evaluator([{"alpha": 0.3}, {"alpha": 0.1 + 0.2}, {"alpha": 1.0}])
    again = evaluator([{"alpha": 1.0}, {"alpha": 0.3}, {"alpha": 0.5}])
    assert fake_simulator == [("hexgen_flow", 6), ("hexgen_flow", 3)]
    np.testing.assert_array_equal(first[:, 0], first[:, 1])
    np.testing.assert_array_equal(first[:, [2, 0]], again[:, [0, 1]])
    assert again[0, 1].mean() < again[0, 2].mean() < again[0, 0].mean()  # best at 0.3


@pytest.mark.parametrize("workers", [1, 3])
def test_scores_do_not_depend_on_the_number_of_workers(workers):
    space = read_space({"alpha": {"low": 0.0, "high": 1.0}}, load_policy("hexgen_flow"))
    candidates = [{"alpha": a} for a in (0.0, 0.4, 1.0)]
    alone = Evaluator(small_problem(), space, [objective("p95")])(candidates)
    np.testing.assert_array_equal(
        Evaluator(small_problem(), space, [objective("p95")], workers=workers)(candidates), alone
    )
