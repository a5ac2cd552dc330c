"""The search space: what is refused, and what its points are."""

from __future__ import annotations

import numpy as np
import pytest

from hexrepro.errors import InputError
from hexrepro.scheduling import load_policy
from hexrepro.tuning.space import read_space

UNIT = {"low": 0.0, "high": 1.0}

MISTAKES = {
    "empty": ({}, {}, ["tuning.space is empty"]),
    "unknown parameter": ({"alfa": UNIT}, {}, ["tuning.space.alfa", "workload_balanced", "alpha", "queue"]),
    "low above high": ({"alpha": {"low": 1.0, "high": 0.5}}, {}, ["alpha", "low=1", "high=0.5"]),
    "no high": ({"alpha": {"low": 0.0}}, {}, ["tuning.space.alpha.high=None", "finite number"]),
    "no number": ({"alpha": {"low": "a", "high": 1}}, {}, ["tuning.space.alpha.low=a"]),
    "step of zero": ({"alpha": {**UNIT, "step": 0}}, {}, ["alpha.step=0", "above 0"]),
    "log from zero": ({"alpha": {**UNIT, "log": True}}, {}, ["alpha.low=0", "logarithmic"]),
    "log with steps": ({"beta": {"low": 1, "high": 2, "step": 1, "log": True}}, {}, ["both step and log"]),
    "log as text": ({"beta": {"low": 1, "high": 2, "log": "yes"}}, {}, ["beta.log=yes", "true or false"]),
    "unknown key": ({"alpha": {"min": 0, "high": 1}}, {}, ["alpha.min", "low, high"]),
    "a bare number": ({"alpha": 0.5}, {}, ["tuning.space.alpha=0.5", "range"]),
    "no choice": ({"queue": []}, {}, ["tuning.space.queue", "at least one"]),
    "a choice twice": ({"queue": ["fcfs", "fcfs"]}, {}, ["queue", "twice"]),
    "unknown queue": ({"queue": ["urgency", "fifo"]}, {}, ["fifo", "fcfs", "urgency"]),
    "queue as a range": ({"queue": UNIT}, {}, ["tuning.space.queue", "list of names"]),
    "unknown policy": ({"policy": ["hexgen_flow", "vlm"]}, {}, ["vlm", "vllm"]),
    "policy without the parameter": (
        {"policy": ["hexgen_flow", "vllm"], "alpha": UNIT},
        {},
        ["tuning.space.alpha", "round_robin", "vllm"],
    ),
    "names for a number": ({"alpha": ["low", "high"]}, {}, ["tuning.space.alpha", "numbers"]),
    "window without history": (
        {"window": {"low": 1, "high": 9}},
        {},
        ["window", "estimator=history", "median"],
    ),
    "half a call": (
        {"window": {"low": 1.5, "high": 9}},
        {"estimator": "history"},
        ["tuning.space.window.low=1.5", "whole"],
    ),
    "window of nothing": (
        {"window": {"low": 0, "high": 9}},
        {"estimator": "history"},
        ["window", "at least 1"],
    ),
    "unknown tenant": (
        {"weights": {"silver": {"low": 1, "high": 2}}},
        {"tenants": ("gold", "bronze")},
        ["tuning.space.weights.silver", "gold, bronze"],
    ),
    "weight of zero": ({"weights": {"gold": UNIT}}, {"tenants": ("gold",)}, ["weights.gold", "above 0"]),
    "weights without tenants": ({"weights": [1, 2]}, {}, ["tuning.space.weights", "tenants"]),
}


@pytest.mark.parametrize(("config", "options", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_that_names_it(config, options, says):
    with pytest.raises(InputError) as error:
        read_space(config, load_policy("hexgen_flow"), **options)
    assert "\n" not in str(error.value)
    for words in says:
        assert words in str(error.value)


def space(config, **options):
    return read_space(config, load_policy("hexgen_flow"), **options)


def test_points_run_from_end_to_end_on_the_steps():
    assert space({"alpha": {**UNIT, "step": 0.25}})["alpha"].points(101) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert space({"alpha": {**UNIT, "step": 0.01}})["alpha"].points(101) == [i / 100 for i in range(101)]
    # a step that does not divide the range ends below its high end
    assert space({"alpha": {**UNIT, "step": 0.3}})["alpha"].points(9) == [0.0, 0.3, 0.6, 0.9]
    np.testing.assert_allclose(
        space({"beta": {"low": 0.1, "high": 10.0, "log": True}})["beta"].points(5), [0.1, 0.316228, 1, 3.16228, 10],
        rtol=1e-6,
    )  # fmt: skip
    assert space({"window": {"low": 1, "high": 4}}, estimator="history")["window"].points(99) == [1, 2, 3, 4]
    assert space({"alpha": {"low": 0.5, "high": 0.5}})["alpha"].points(7) == [0.5]


def test_a_grid_is_every_combination_and_is_refused_when_it_is_too_large():
    small = space({"alpha": {**UNIT, "step": 0.5}, "queue": ["fcfs", "urgency"]})
    assert small.grid() == [{"alpha": a, "queue": q} for a in (0.0, 0.5, 1.0) for q in ("fcfs", "urgency")]
    with pytest.raises(InputError, match="1030301 points"):
        space({"alpha": UNIT, "beta": UNIT, "waiting_only": UNIT}).grid(101)


def test_a_slice_holds_its_middle_and_is_denser_around_it():
    along = space({"alpha": {**UNIT, "step": 0.001}, "queue": ["fcfs"]})
    middle = {"alpha": 0.123, "queue": "fcfs"}
    points = along.slice(middle, "alpha", 11)
    values = [p["alpha"] for p in points]
    assert values == sorted(set(values))
    assert {*np.linspace(0, 1, 11).round(3), 0.103, 0.123, 0.143, 0.023, 0.223} <= set(values)
    assert middle in points
    assert {p["queue"] for p in points} == {"fcfs"}
    at_the_end = [p["alpha"] for p in along.slice({**middle, "alpha": 0.0}, "alpha", 6)]
    assert at_the_end == [
        0.0, 0.008, 0.016, 0.024, 0.032, 0.04, 0.08, 0.12, 0.16, 0.2, 0.4, 0.6, 0.8, 1.0,
    ]  # fmt: skip


def test_a_candidate_stands_for_a_policy():
    varied = space(
        {"alpha": UNIT, "queue": ["request_groups", "urgency"], "policy": ["hexgen_flow", "wb_fcfs"]}
    )
    policy = varied.policy({"alpha": 0.25, "queue": "request_groups", "policy": "wb_fcfs"})
    assert (policy.name, policy.dispatch, policy.queue) == ("wb_fcfs", "workload_balanced", "request_groups")
    assert policy.dispatch_vector.tolist() == [0.25, 1.0, 0.0]
    assert policy.queue_vector.tolist() == [15.0, 10.0]
    of_queue = space({"group_s": {"low": 1, "high": 60}, "queue": ["request_groups"]})
    assert of_queue.policy({"group_s": 7.0, "queue": "request_groups"}).queue_vector.tolist() == [15.0, 7.0]
