"""What a coordinator remembers: held against the workload that a simulation ran, and against queries told by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexrepro.scheduling import load_policy
from hexrepro.simulator import EngineOptions
from hexrepro.simulator.session import Simulation
from hexrepro.tuning.feed import Feed
from hexrepro.tuning.history import History, Query, places
from hexrepro.tuning.online import OnlineTuner
from hexrepro.workload import Workload, arrival_times, generate
from hexrepro.workload.dag import edges, levels
from tests.strategies import make_workload, runs
from tests.tuning.events_by_hand import chain, cluster_of, step, tell

POLICY = load_policy("hexgen_flow")
WARM = EngineOptions()


def watched(workload: Workload, cluster, stops_s, engine=WARM) -> tuple[Simulation, History]:
    """A simulation that has gone on from stop to stop, and the history that was told of it."""
    simulation = Simulation(workload, cluster, POLICY, base_slo=60.0, engine=engine)
    feed = Feed(simulation, OnlineTuner(POLICY, cluster, engine=engine))
    for until_s in stops_s:
        simulation.advance(until_s)
        feed.tell()
    return simulation, feed.tuner.history


def inferred(record: Query) -> dict[int, set[int]]:
    """Call of the workload -> the calls that it is believed to have waited for."""
    calls = {index: call for call, index in record.index.items()}
    before: dict[int, set[int]] = {call: set() for call in record.index}
    for first, then in record.edges.tolist():
        before[calls[then]].add(calls[first])
    return before


def true_prerequisites(workload: Workload) -> list[set[int]]:
    before: list[set[int]] = [set() for _ in range(workload.n_calls)]
    for first, then in zip(*edges(workload.succ_offsets, workload.successors), strict=True):
        before[then].add(int(first))
    return before


@pytest.mark.parametrize(
    ("name", "rate_qps", "step_s"), [("tiny", 2.0, 0.01), ("trace1", 1.0, 0.05), ("trace4", 2.0, 0.02)]
)
@pytest.mark.parametrize("tools", [False, True])
def test_the_workflow_is_inferred_from_the_events(
    name: str, rate_qps: float, step_s: float, tools: bool
) -> None:
    """Of each query that has finished by some time: who waits for whom, tool times, depths, lengths and templates."""
    workload = generate(name, n_queries=12).with_arrivals(arrival_times("poisson", 12, rate_qps, seed=1))
    if tools:
        tool_time_s = np.random.default_rng(0).exponential(0.5, workload.n_calls)
        # parallel calls of one barrier get one time: those released later would seem to follow the earlier ones
        group = levels(workload.succ_offsets, workload.successors) + 1000 * workload.query
        _, first, where = np.unique(group, return_index=True, return_inverse=True)
        workload = replace(workload, tool_time_s=tool_time_s[first][where])
    simulation = Simulation(workload, cluster_of(2, step_s), POLICY, base_slo=60.0)
    simulation.advance()
    end_s = float(np.quantile(simulation.finish_s, 0.7))
    simulation, history = watched(workload, cluster_of(2, step_s), np.linspace(0, end_s, 40))
    finished = np.flatnonzero(simulation.finish_s <= end_s)
    assert len(history.finished) == len(finished) >= 6
    assert (
        list(history.open)
        == np.flatnonzero((workload.arrival_s <= end_s) & (simulation.finish_s > end_s)).tolist()
    )
    before, depth = true_prerequisites(workload), levels(workload.succ_offsets, workload.successors)
    stages = list(history.stages)
    assert [q.finish_s for q in history.finished] == sorted(simulation.finish_s[finished])
    for record in history.finished:
        calls = np.array(list(record.index))
        assert {int(workload.query[c]) for c in calls} == {int(workload.query[calls[0]])}
        assert inferred(record) == {c: before[c] for c in calls}
        steps = record.steps
        assert np.array_equal(steps["depth"], depth[calls])
        assert steps["tool_time_s"] == pytest.approx(workload.tool_time_s[calls], abs=1e-9)
        assert [stages[s] for s in steps["stage"]] == [workload.stage_names[s] for s in workload.stage[calls]]
        for field in ("input_tokens", "output_tokens", "template", "template_tokens"):
            assert np.array_equal(steps[field], getattr(workload, field)[calls]), field


@given(drawn=runs(max_queries=6, max_calls=6), pieces=st.integers(1, 20))
@settings(max_examples=20, deadline=None)
def test_no_dependency_is_missed(drawn, pieces: int) -> None:
    """For any workflow a call comes after all that it waits for, if by way of others; and no event is lost or told twice."""
    workload, cluster, batching, caching = drawn
    engine = EngineOptions(batching, caching)
    whole = Simulation(workload, cluster, POLICY, base_slo=60.0, engine=engine)
    whole.advance()
    stops_s = np.linspace(0, whole.finish_s.max(), pieces + 1)
    simulation, history = watched(workload, cluster, stops_s, engine)
    assert not history.open
    assert len(history.finished) == len(history.arrivals) == workload.n_queries
    before = true_prerequisites(workload)
    for record in history.finished:
        ancestors: dict[int, set[int]] = {}
        for call, after in inferred(record).items():  # in order of dispatch: prerequisites first
            ancestors[call] = after.union(*(ancestors[a] for a in after)) if after else set()
            assert before[call] <= ancestors[call]
            told = record.calls[record.index[call]]
            for name in ("release_s", "first_token_s", "finish_s"):
                assert getattr(told, name) == simulation.calls[name][call]


def test_a_last_call_of_one_token() -> None:
    """Its first token and its end, and its query's, come at one time."""
    workload = make_workload([dict(arrival_s=0.0, calls=[dict(input_tokens=5, output_tokens=1)])])
    _, history = watched(workload, cluster_of(1), [0.5, 1.0])
    (record,) = history.finished
    assert (record.calls[0].first_token_s, record.finish_s) == (1.0, 1.0)


def test_what_is_running() -> None:
    """At 3.5 s of steps of 1 s: call 0 decodes, call 1 has begun to wait, and nothing is told of what comes."""
    call = dict(input_tokens=5, output_tokens=10)
    queries = [dict(arrival_s=float(2 * i), calls=[call, dict(call, after=[0])]) for i in range(3)]
    simulation, history = watched(make_workload(queries), cluster_of(1, max_num_seqs=1), [1.0, 2.0, 3.5])
    running = list(history.running())
    assert [(record.arrival_s, index) for record, index in running] == [(0.0, 0), (2.0, 0)]
    told = [record.calls[index] for record, index in running]
    assert [(c.first_token_s, c.finish_s, c.output_tokens) for c in told] == [(1.0, None, 0), (None, None, 0)]
    assert [c.key for c in told] == simulation.calls["key"][[0, 2]].tolist()
    assert [c.estimate_s for c in told] == simulation.calls["estimate_s"][[0, 2]].tolist()
    assert history.arrivals == [0.0, 2.0]


# -------------------------------------------------------------------------------------------------------- by hand


def test_places_count_the_steps_of_a_stage() -> None:
    """look | write, write | mend | mend | look: the second look is the second of its stage, at depth 4."""
    history = History()
    tell(
        history,
        "q",
        0.0,
        [
            step("look", 0.0, 1.0),
            step("write", 1.0, 2.0),
            step("write", 1.0, 3.0),
            step("mend", 3.0, 4.0),
            step("mend", 4.0, 5.0),
            step("look", 5.5, 6.0),
        ],
    )
    (record,) = history.finished
    look, write, mend = (history.stages[name] for name in ("look", "write", "mend"))
    assert [c.depth for c in record.calls] == [0, 1, 1, 2, 3, 4]
    assert [c.after for c in record.calls] == [(), (0,), (0,), (1, 2), (3,), (4,)]
    expected = {(look, 1): 0, (write, 1): 1, (mend, 1): 2, (mend, 2): 3, (look, 2): 4}
    assert record.places == places(record.calls) == expected
    assert record.steps["tool_time_s"].tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 0.5]
    assert places([]) == {}


def test_a_call_that_was_moved_starts_anew() -> None:
    history = History()
    tell(history, "q", 0.0, [step("a", 0.0, first_token_s=1.0)])
    call = history.open["q"].calls[0]
    call.output_tokens = 7  # as reported by its instance
    history.call_moved("q", 0, 3)
    assert (call.instance, call.first_token_s, call.output_tokens, call.release_s) == (3, None, 0, 0.0)
    history.first_token("q", 0, 4.0)
    history.call_finished("q", 0, 5.0, 9)
    history.query_finished("q", 5.0)
    assert (call.first_token_s, history.finished[0].steps["output_tokens"].tolist()) == (4.0, [9])


def test_a_call_without_a_first_token_event() -> None:
    """It had its first token at its end at the latest, and at least one."""
    history = History()
    tell(history, "q", 0.0, [step("a", 0.0, 2.0, output_tokens=0)])
    call = history.finished[0].calls[0]
    assert (call.first_token_s, call.output_tokens) == (2.0, 1)


def test_forget_drops_what_is_old_but_for_the_last() -> None:
    history = History()
    for i in range(10):
        chain(history, f"q{i}", 10.0 * i, "a", "b")  # ends 2 s later
    history.query_arrived("late", 95.0, slo_s=60.0)
    history.forget(52.0)
    assert [q.finish_s for q in history.finished] == [52.0, 62.0, 72.0, 82.0, 92.0]
    assert history.arrivals == [60.0, 70.0, 80.0, 90.0, 95.0]
    history.forget(80.0, keep=4)
    assert [q.finish_s for q in history.finished] == [62.0, 72.0, 82.0, 92.0]
    assert [q.finish_s for q in history.finished_since(80.0)] == [82.0, 92.0]
    history.forget(1e6, keep=1)
    assert [q.finish_s for q in history.finished] == [92.0]
    assert history.arrivals == []
    history.forget(2e6)
    assert history.finished == []
    assert list(history.open) == ["late"]


def test_dropped_and_empty_queries_leave_only_their_arrival() -> None:
    history = History()
    tell(history, "refused", 1.0, [step("a", 1.0)])
    history.query_dropped("refused")
    history.query_dropped("never heard of")
    history.query_arrived("empty", 2.0, slo_s=60.0)
    history.query_finished("empty", 2.5)
    assert (history.open, history.finished, history.arrivals) == ({}, [], [1.0, 2.0])
