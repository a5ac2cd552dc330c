"""The comparison of replay and simulation: its arithmetic by hand, and a stub server of known step times from end to end."""

from __future__ import annotations

import numpy as np
import pytest

from hexrepro.errors import InputError
from hexrepro.validation.fidelity import (
    BY_QUERY,
    OLDEST_QUERY,
    call_overhead_s,
    compare_runs,
    drawn_lateness,
    replay_and_simulate,
    shortened,
    simulate_measured,
    simulate_placed,
    with_overhead,
)
from hexrepro.validation.replay import Replay
from hexrepro.workload import arrival_times, generate
from tests.strategies import make_instance, make_workload
from tests.validation.paced_stub import PacedStub


def run(workload, release, first, end, late=0.0, cached=0):
    """A replay with these times of its calls, in seconds."""
    n = workload.n_calls
    release, first, end = (np.array(x, float) for x in (release, first, end))
    return Replay(
        arrival_s=workload.arrival_s,
        finish_s=np.maximum.reduceat(end, workload.query_offsets[:-1]),
        release_s=release,
        sent_s=release + late,
        first_token_s=first,
        call_finish_s=end,
        instance=np.zeros(n, np.int32),
        call_cached_tokens=np.full(n, cached, np.int32),
        errors={},
        stopped=None,
    )


def two_queries():
    call = dict(input_tokens=10, output_tokens=2)
    return make_workload(
        [dict(arrival_s=0.0, calls=[call, call | dict(after=[0])]), dict(arrival_s=1.0, calls=[call])]
    )


def test_errors_by_hand():
    workload = two_queries()
    measured = run(workload, [0, 2, 1], [1, 3, 3], [2, 4, 5])
    # each call comes to its engine 0.5 s later: the simulation's releases hold that
    simulated = run(workload, [0.5, 2.0, 1.5], [1, 3, 4], [1.5, 4, 6], cached=3)
    check = compare_runs(workload, measured, simulated, 0.5)
    # latencies: measured 2, 2, 4; simulated 1.5, 2.5, 5
    assert list(check.calls["latency_measured_s"]) == [2, 2, 4]
    assert list(check.calls["latency_simulated_s"]) == [1.5, 2.5, 5]
    assert list(check.calls["latency_error"]) == pytest.approx([-0.25, 0.25, 0.25])
    assert list(check.calls["cached_simulated"]) == [3, 3, 3]
    # queries: both begin at their arrival; measured 4 and 4, simulated 4 and 5
    assert list(check.queries["error"]) == pytest.approx([0, 0.25])
    errors = check.summary.set_index("metric")["error"]
    assert errors["query_mean_s"] == pytest.approx(4.5 / 4 - 1)
    assert errors["query_p95_s"] == pytest.approx(4.95 / 4 - 1)
    assert errors["call_mean_s"] == pytest.approx(3 / (8 / 3) - 1)
    # two queries in 5 s, and in 6 s
    assert errors["throughput_qps"] == pytest.approx(5 / 6 - 1)
    spread = check.spread.set_index("of")
    assert spread.loc["calls", "mean_abs"] == pytest.approx(0.25)
    assert check.left_out == 0


def test_what_did_not_finish_is_left_out_and_counted():
    workload = two_queries()
    measured = run(workload, [0, np.nan, 1], [np.nan, np.nan, 3], [np.inf, np.inf, 5])
    check = compare_runs(workload, measured, run(workload, [0, 2, 1], [1, 3, 3], [2, 4, 5]))
    assert check.left_out == 2
    assert list(check.queries["query"]) == [1]
    assert len(check.calls) == 1
    nothing = run(workload, [0, np.nan, 1], [np.nan] * 3, [np.inf] * 3)
    with pytest.raises(InputError, match="no query of 'drawn' finished"):
        compare_runs(workload, nothing, nothing)


def test_a_calls_own_lateness_is_the_clients():
    workload = two_queries()
    measured = run(workload, [0, np.nan, 1], [1, 1, 1], [2, 2, 2], late=np.array([0.1, 0.0, 0.3]))
    # the call that was never sent: the median of the others
    assert call_overhead_s(measured, 0.01) == pytest.approx([0.11, 0.21, 0.31])
    assert with_overhead(workload, np.array([0.1, 0.2, 0.3])).tool_time_s == pytest.approx([0.1, 0.2, 0.3])


def test_shortened_by_hand():
    shared = dict(template=0, template_tokens=43, context=0, context_tokens=3)
    workload = make_workload(
        [
            dict(
                arrival_s=0.0,
                calls=[
                    dict(input_tokens=100, output_tokens=9, **shared),
                    dict(input_tokens=48, output_tokens=1, **shared),
                ],
            )
        ]
    )
    short = shortened(workload, 4, 2)
    assert list(short.input_tokens) == [25, 12]
    assert list(short.output_tokens) == [4, 1]
    assert list(short.template_tokens) == [10, 10]
    # nothing is left of the context
    assert list(short.context) == [-1, -1]
    assert shortened(workload, 1, 1).equals(workload)
    with pytest.raises(InputError, match="must be 1 or more"):
        shortened(workload, 0, 1)


STEPS = dict(base_s=0.010, prefill_token_s=2e-5, sequence_s=5e-4)


@pytest.mark.parametrize("policy", ["vllm", OLDEST_QUERY], ids=["fcfs", "priority"])
def test_a_stub_of_known_step_times(policy):
    """Two slots, five queries of parallel calls: they queue, and by the two orders differently."""
    fan = [dict(input_tokens=100, output_tokens=4)]
    fan += [dict(input_tokens=200, output_tokens=12, after=[0]) for _ in range(4)]
    workload = make_workload([dict(arrival_s=0.04 * i, calls=fan) for i in range(5)])
    instance = make_instance("one", (0.010, 2e-5, 0, 5e-4, 0), 4096, max_num_seqs=2, budget=2048)
    with PacedStub(**STEPS, max_num_seqs=2) as stub:
        check, measured, _ = replay_and_simulate(
            workload, [stub.url], [instance], 0.002, policy, model="stub", shared="off"
        )
        asked = stub.requests
    assert measured.errors == {}
    assert ("priority" in asked[0]) == (policy is OLDEST_QUERY)
    errors = check.summary.set_index("metric")["error"]
    assert abs(errors["query_mean_s"]) < 0.15
    assert abs(errors["throughput_qps"]) < 0.15
    # by the age of the query the first two end early; first come, first served they wait for all the others' first calls
    ends = measured.finish_s
    assert (np.diff(ends) > 0).all()
    if policy is OLDEST_QUERY:
        assert ends[0] < 0.6 * ends[-1]


def test_placement_by_query():
    """Two stubs of different speed; the simulation sends each query where the replay did, and the slow one's take longer."""
    query = [dict(input_tokens=50, output_tokens=6), dict(input_tokens=50, output_tokens=6, after=[0])]
    workload = make_workload([dict(arrival_s=0.05 * i, calls=query) for i in range(6)])
    instances = [
        make_instance(name, (base, 0, 0, 0, 0), 4096) for name, base in (("fast", 0.008), ("slow", 0.024))
    ]
    with PacedStub(base_s=0.008) as fast, PacedStub(base_s=0.024) as slow:
        check, measured, simulated = replay_and_simulate(
            workload, [fast.url, slow.url], instances, 0.002, BY_QUERY, model="stub", shared="off"
        )
    assert measured.errors == {}
    assert np.array_equal(measured.instance, workload.query % 2)
    assert np.array_equal(simulated.instance, measured.instance)
    assert check.queries["simulated_s"][1::2].min() > 2 * check.queries["simulated_s"][::2].max()
    assert check.queries["measured_s"][1::2].min() > 1.3 * check.queries["measured_s"][::2].max()


@pytest.mark.parametrize("policy", ["vllm", "hexgen_flow"])
def test_placed_where_it_was_it_is_the_same_simulation(policy):
    workload = shortened(generate("tiny", seed=2), 8, 4)
    workload = workload.with_arrivals(arrival_times("poisson", workload.n_queries, 6.0, seed=1))
    instances = [
        make_instance(name, (base, 1e-5, 0, 1e-4, 0), 4096, max_num_seqs=2)
        for name, base in (("fast", 0.008), ("slow", 0.024))
    ]
    free = simulate_measured(workload, instances, 0.002, policy, base_slo=3.0)
    placed = simulate_placed(workload, instances, 0.002, policy, free.instance, base_slo=3.0)
    assert np.array_equal(placed.call_finish_s, free.call_finish_s)
    assert np.array_equal(placed.budget_s, free.budget_s)
    other = simulate_placed(workload, instances, 0.002, policy, 1 - free.instance, base_slo=3.0)
    assert np.array_equal(other.instance, 1 - free.instance)
    unknown = simulate_placed(workload, instances, 0.002, policy, np.full(workload.n_calls, -1), base_slo=3.0)
    assert np.isfinite(unknown.finish_s).all()


def test_the_scheduler_knows_the_most_that_a_call_may_have():
    """Two queries of one stage, medians of 20 tokens; that of 10 tokens is believed to have no more."""
    calls = [dict(input_tokens=10, output_tokens=n) for n in (10, 20, 30)]
    workload = make_workload([dict(arrival_s=float(i), calls=[c]) for i, c in enumerate(calls)])
    run = simulate_measured(
        workload, [make_instance("one", (0.01, 0, 0, 0, 0), 64)], 0.0, "vllm", base_slo=1.0
    )
    assert run.estimate_s == pytest.approx([0.10, 0.20, 0.20])


def test_lateness_is_drawn_from_the_calls_own():
    late_s = np.array([[0.0, 1.0, 2.0], [0.5, 1.5, 2.5]])
    drawn_s = drawn_lateness(late_s, 200, seed=3)
    assert drawn_s.shape == (200, 3)
    for call in range(3):
        assert set(drawn_s[:, call]) == set(late_s[:, call])
    assert np.array_equal(drawn_s, drawn_lateness(late_s, 200, seed=3))


def test_refuses_a_policy_that_plain_servers_cannot_follow():
    workload = two_queries()
    with pytest.raises(InputError, match="policy hexgen_flow: plain servers can't follow it"):
        replay_and_simulate(workload, ["http://127.0.0.1:9"], [], 0.0, "hexgen_flow", model="m")
