"""Queue rules: keys worked out by hand, and the order that follows in the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from hexrepro.cluster.types import Cluster
from hexrepro.scheduling import load_policy
from hexrepro.scheduling.queues import fcfs, least_laxity, request_groups, urgency, vtc
from hexrepro.simulator import EngineOptions, simulate
from tests.scheduling.views_by_hand import call
from tests.strategies import make_instance, make_workload

AT_100 = dict(now_s=100.0, budget_s=12.0, slo_s=60.0, t_comp_s=7.0, arrival_s=90.0)


@pytest.mark.parametrize(
    ("rule", "params", "key"),
    [
        (fcfs, {}, 0.0),
        (urgency, {}, 105.0),  # 100 + 12 - 7
        (least_laxity, {}, 97.0),  # 100 + 60 / 15 - 7
        (least_laxity, dict(calls_per_query=4.0), 108.0),
        (request_groups, {}, 10.0),  # deadline 104
        (request_groups, dict(calls_per_query=4.0), 11.0),  # deadline 115
        (request_groups, dict(calls_per_query=4.0, group_s=50.0), 2.0),
        (vtc, {}, 0.0),
    ],
)
def test_key(rule, params: dict, key: float) -> None:
    assert rule(call(**AT_100), rule.params(**params)) == key


def test_overdue_calls_come_first_the_latest_of_all_first() -> None:
    """A negative budget: the call is late already."""
    budgets = [3.0, -50.0, -1.0, 0.0]
    keys = [urgency(call(**(AT_100 | dict(budget_s=b))), np.zeros(0)) for b in budgets]
    assert np.argsort(keys).tolist() == [1, 2, 3, 0]


def test_of_equal_budgets_the_longer_call_is_more_urgent() -> None:
    short, long = (urgency(call(**(AT_100 | dict(t_comp_s=t))), np.zeros(0)) for t in (1.0, 9.0))
    assert long < short


def order_of_service(policy: str | dict, slo_scales: list[float], base_slo: float) -> list[int]:
    """One slot, taken until 10 s by a first query; of those that come at 1, 2, 3, ... s, who is served when."""
    queries = [dict(arrival_s=0, calls=[dict(input_tokens=4, output_tokens=10)])]
    for i, scale in enumerate(slo_scales, start=1):
        queries.append(dict(arrival_s=i, slo_scale=scale, calls=[dict(input_tokens=4, output_tokens=10)]))
    cluster = Cluster("one", (make_instance("one", (1.0, 0, 0, 0, 0), 1000, max_num_seqs=1),))
    engine = EngineOptions(prefix_caching="off")
    result = simulate(make_workload(queries), cluster, load_policy(policy), base_slo=base_slo, engine=engine)
    return (np.argsort(result.admit_s[1:]) + 1).tolist()


SCALES = [8.0, 2.0, 1.0, 2.0]
BY_DEADLINE = dict(
    name="groups", dispatch="round_robin", queue="request_groups", queue_params=dict(calls_per_query=1)
)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("vllm", [1, 2, 3, 4]),
        ("rr_pq", [3, 2, 4, 1]),  # latest starts 231, 52, 23, 54
        ("llf", [3, 2, 4, 1]),  # deadlines 17, 6, 5, 8, each less 10
        (BY_DEADLINE, [3, 2, 4, 1]),  # deadlines 241, 62, 33, 64
    ],
)
def test_order_in_the_simulator(policy, order: list[int]) -> None:
    assert order_of_service(policy, SCALES, base_slo=30.0) == order


def test_within_a_group_of_deadlines_first_come_first_served() -> None:
    """Deadlines 59, 58, 57 and 66 s: the first three are one group, where urgency would turn them round."""
    scales = [58 / 100, 56 / 100, 54 / 100, 62 / 100]
    assert order_of_service(BY_DEADLINE, scales, base_slo=100.0) == [1, 2, 3, 4]
    assert order_of_service("rr_pq", scales, base_slo=100.0) == [3, 2, 1, 4]
