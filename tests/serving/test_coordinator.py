"""The coordinator against the simulator: told of the same events, it decides the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hexrepro.cluster import load_cluster
from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.scheduling import policy_names
from hexrepro.scheduling.estimates import make_plan
from hexrepro.scheduling.views import instance_views
from hexrepro.serving.coordinator import Coordinator, NoInstance, Options
from hexrepro.serving.learning import Beliefs, Plan
from hexrepro.simulator.session import Simulation
from hexrepro.tuning.feed import Feed
from hexrepro.tuning.online import OnlineOptions, OnlineTuner
from hexrepro.workload import arrival_times, generate
from tests.serving.scripted import nothing_on_any_account

BASE_SLO_S = 40.0
FIRST, FINISHED, DISPATCHED, ADMITTED = range(4)  # the simulator's order at one time
COUNTERS = ("running", "waiting")
AMOUNTS = ("waiting_s", "outstanding_s", "dispatched_s", "prefill_tokens", "output_tokens", "kv_tokens")
NEVER = OnlineOptions(trigger="threshold", threshold=1e9)


@pytest.fixture(scope="module")
def cluster():
    """Memory enough that nothing is preempted, slots so few that calls wait."""
    whole = load_cluster("hetero2", "silicon")
    return Cluster("test", tuple(replace(i, kv_blocks=20_000, max_num_seqs=6) for i in whole.instances))


@pytest.fixture(scope="module")
def workload():
    """About 580 calls; with the arrivals so close together that calls wait."""
    w = generate("trace1", n_queries=30)
    w = w.with_arrivals(arrival_times("poisson", 30, 2.0, seed=3))
    return w.with_tenants(np.arange(30) % 2, ("gold", "bronze"), np.where(np.arange(30) % 2, 2.0, 1.0))


def events_of(simulation: Simulation) -> list[tuple[float, int, int, int, int]]:
    """(time, what, order, call), everything that happened in a run, in the simulator's order."""
    calls = simulation.calls
    assert calls["preemptions"].sum() == 0  # a live coordinator doesn't hear of those
    events = []
    for i, call in enumerate(calls):
        at = (int(call["instance"]), int(call["admitted"]))
        events += [
            (float(call["first_token_s"]), FIRST, *at, i),
            (float(call["finish_s"]), FINISHED, *at, i),
            (float(call["release_s"]), DISPATCHED, i, 0, i),
            (float(call["admit_s"]), ADMITTED, *at, i),
        ]
    return sorted(events)


def replay(simulation: Simulation, coordinator: Coordinator, changes: dict | None = None):
    """Tell the coordinator what happened in the run; yields (call, its placement) as each is decided.

    `changes`: time -> what to do with the coordinator once all is told that had happened by then.
    """
    w, number = simulation.workload, {}
    changes = dict(changes or {})
    left = np.diff(w.query_offsets).tolist()
    for time_s, what, _, _, i in events_of(simulation):
        for at_s in [t for t in changes if t < time_s]:
            changes.pop(at_s)(coordinator)
        query = int(w.query[i])
        if what == DISPATCHED:
            placement = coordinator.call_arrived(
                query,
                w.stage_names[w.stage[i]],
                int(w.input_tokens[i]),
                time_s,
                slo_s=float(simulation.slo_s[query]),
                tenant=w.tenant_names[w.tenant[query]],
                cached_tokens=int(w.template_tokens[i]),
            )
            number[i] = placement.call
            yield i, placement
            assert placement.instance == simulation.calls["instance"][i]
        elif what == ADMITTED:
            coordinator.started(number[i], time_s)
        elif what == FIRST:
            coordinator.first_token(number[i], time_s)
        else:
            coordinator.finished(number[i], time_s, int(w.output_tokens[i]))
            left[query] -= 1
            if left[query] == 0:
                coordinator.query_finished(query, time_s)


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("estimates", ["history", "median"])
def test_the_same_events_give_the_same_decisions(cluster, workload, policy, estimates) -> None:
    """Instance, key, budget and estimate of every call, and what the rules look at, to the bit.

    With fixed medians the simulator adds up the remaining work by a matrix product, in another order: there the last digits
    of budgets may differ.
    """
    simulation = Simulation(workload, cluster, policy, base_slo=BASE_SLO_S, estimates=estimates, seed=5)
    simulation.advance()
    beliefs = Beliefs.of(workload, instance_views(cluster))
    options = Options(window=100 if estimates == "history" else 0, plan_window=0, seed=5)
    coordinator = Coordinator(cluster, policy, options, beliefs=beliefs)
    decided = list(replay(simulation, coordinator))
    assert len(decided) == workload.n_calls
    exact = 0.0 if estimates == "history" else 1e-12
    fair = coordinator.policy.queue_rule.fair
    for i, placement in decided:
        call = simulation.calls[i]
        assert placement.instance == call["instance"]
        assert placement.estimate_s == call["estimate_s"]
        assert placement.budget_s == pytest.approx(call["budget_s"], rel=exact, abs=exact)
        assert fair or placement.key == pytest.approx(call["key"], rel=exact, abs=exact)
    assert coordinator.calls_under_way == coordinator.queries_under_way == 0
    for name in COUNTERS + AMOUNTS:
        assert np.array_equal(coordinator.views[name], simulation.instances[name]), name


@pytest.mark.parametrize("policy", ["hexgen_flow", "eft", "vllm", "ray"])
def test_they_agree_on_a_cluster_that_changes(cluster, workload, policy) -> None:
    """An instance is closed and opened again, another becomes slow and is found out."""
    simulation = Simulation(workload, cluster, policy, base_slo=BASE_SLO_S, seed=2)
    simulation.advance(6.0)
    simulation.close_instance(1)
    simulation.advance(12.0)
    simulation.slow_down(2, 1.75)
    simulation.believe(2, 1.75)
    simulation.advance(30.0)
    simulation.open_instance(1)
    simulation.advance()
    coordinator = Coordinator(
        cluster,
        policy,
        Options(window=0, plan_window=0, seed=2),
        beliefs=Beliefs.of(workload, instance_views(cluster)),
    )
    changes = {
        6.0: lambda of: of.instance_down(1),
        12.0: lambda of: of.believe(2, 1.75),
        30.0: lambda of: of.instance_up(1),
    }
    decided = list(replay(simulation, coordinator, changes))
    assert len(decided) == workload.n_calls
    for i, placement in decided:
        assert placement.instance == simulation.calls["instance"][i]
        assert placement.estimate_s == simulation.calls["estimate_s"][i]
        assert placement.budget_s == pytest.approx(simulation.calls["budget_s"][i], rel=1e-12, abs=1e-12)
    closed = (simulation.calls["release_s"] > 6.0) & (simulation.calls["release_s"] <= 30.0)
    assert closed.sum() > 50
    assert not (simulation.calls["instance"][closed] == 1).any()


def test_every_view_on_the_way_is_the_simulators(cluster, workload) -> None:
    """The counters, whenever the run is stopped."""
    simulation = Simulation(workload, cluster, "hexgen_flow", base_slo=BASE_SLO_S, estimates="history")
    simulation.advance()
    stopped = Simulation(workload, cluster, "hexgen_flow", base_slo=BASE_SLO_S, estimates="history")
    coordinator = Coordinator(
        cluster, "hexgen_flow", Options(plan_window=0), beliefs=Beliefs.of(workload, instance_views(cluster))
    )
    busiest = 0
    for i, _ in replay(simulation, coordinator):
        release_s = simulation.calls["release_s"][i]
        if i % 7 or (simulation.calls["release_s"] == release_s).sum() > 1:
            continue
        # just after: the simulator begins its steps at the same time, we hear of that next
        stopped.advance(np.nextafter(release_s, -np.inf)) if stopped.now_s < release_s else None
        before, here = stopped.instances, coordinator.views.copy()
        m = int(simulation.calls["instance"][i])
        others = [k for k in range(len(here)) if k != m]
        ends = np.abs(simulation.calls["finish_s"] - release_s).min() == 0
        if not ends:
            for name in COUNTERS + AMOUNTS:
                assert np.array_equal(here[name][others], before[name][others]), name
            assert here["waiting"][m] == before["waiting"][m] + 1
            busiest = max(busiest, int(here["waiting"].max()))
    assert busiest > 0


def test_the_tuner_hears_what_the_simulated_coordinator_tells_it(cluster, workload) -> None:
    def tuner() -> OnlineTuner:
        return OnlineTuner(coordinator.policy, cluster, options=NEVER)

    simulation = Simulation(workload, cluster, "hexgen_flow", base_slo=BASE_SLO_S)
    coordinator = Coordinator(cluster, "hexgen_flow")
    feed = Feed(simulation, tuner())
    feed.advance(1e6)
    options = Options(window=0, plan_window=0)
    beliefs = Beliefs.of(workload, instance_views(cluster))
    coordinator = Coordinator(cluster, "hexgen_flow", options, beliefs=beliefs, tuner=tuner())
    for _ in replay(simulation, coordinator):
        pass
    coordinator.tuner_log.catch_up(1e6)
    theirs, ours = feed.tuner.history, coordinator.tuner_log.tuner.history
    assert not ours.open
    assert len(ours.finished) == len(theirs.finished) > 0
    for a, b in zip(ours.finished, theirs.finished, strict=True):
        names = [n for n in a.steps.dtype.names if n not in ("stage", "template")]  # numbered as they come
        assert np.array_equal(a.steps[names], b.steps[names])
        assert sorted(a.edges.tolist()) == sorted(b.edges.tolist())
        assert (a.arrival_s, a.finish_s, a.slo_s) == (b.arrival_s, b.finish_s, b.slo_s)
        assert [c.instance for c in a.calls] == [c.instance for c in b.calls]


def test_what_follows_a_place_is_learned_as_from_a_trace(workload) -> None:
    """Told of each query's steps, the plan is `make_plan`'s of the same queries."""
    depth = np.zeros(workload.n_calls, np.int64)
    for c in range(workload.n_calls):
        for e in workload.successors[workload.succ_offsets[c] : workload.succ_offsets[c + 1]]:
            depth[e] = max(depth[e], depth[c] + 1)
    plan = Plan({}, window=1000)
    seen: dict[int, tuple[int, int]] = {}
    for q in range(workload.n_queries):
        calls = range(workload.query_offsets[q], workload.query_offsets[q + 1])
        steps = {(int(depth[c]), int(workload.stage[c])) for c in calls}
        plan.learn(steps)
        for c in calls:
            before = sum(d < depth[c] and s == workload.stage[c] for d, s in steps)
            seen[c] = (int(workload.stage[c]), before)
    truth = make_plan(workload)
    for c in range(workload.n_calls):
        ours = np.zeros(len(workload.stage_names))
        for stage, steps in plan.remaining(*seen[c]):
            ours[stage] = steps
        assert ours == pytest.approx(truth.remaining[truth.position[c]])


def test_old_queries_are_forgotten() -> None:
    plan = Plan({}, window=2)
    plan.learn({(0, 0), (1, 1)})
    plan.learn({(0, 0), (1, 1), (2, 1)})
    assert plan.remaining(0, 0) == [(1, 1.5)]
    plan.learn({(0, 0)})
    assert plan.remaining(0, 0) == [(1, 1.0)]
    assert plan.remaining(1, 1) == []
    assert plan.remaining(1, 0) == [*plan.remaining(2, 0), (1, 1.0)]
    plan.learn({(0, 1), (1, 2)})
    assert plan.remaining(1, 5) == [(2, 1.0)]  # nobody was there: as at the last place known


# ------------------------------------------------------------------------------------------ by hand


def test_a_call_that_says_nothing_is_a_query_of_its_own(cluster) -> None:
    coordinator = Coordinator(cluster, "hexgen_flow")
    placement = coordinator.call_arrived(None, "call", 100, 0.0)
    assert coordinator.queries_under_way == 1
    coordinator.finished(placement.call, 1.0, 20)
    assert coordinator.queries_under_way == coordinator.calls_under_way == 0


def test_lengths_are_learned_from_the_first_call_on(cluster) -> None:
    coordinator = Coordinator(cluster, "hexgen_flow", Options(output_tokens=300))
    first = coordinator.call_arrived(None, "draft", 100, 0.0)
    assert first.output_tokens == 300
    assert coordinator.call_arrived(None, "draft", 100, 0.0, max_tokens=40).output_tokens == 40
    coordinator.finished(first.call, 1.0, 20)
    assert coordinator.call_arrived(None, "draft", 100, 1.0).output_tokens == 20


def test_an_instance_that_is_down_gets_nothing_and_its_calls_move(cluster) -> None:
    coordinator = Coordinator(cluster, "vllm")
    placement = coordinator.call_arrived(None, "call", 100, 0.0)
    assert placement.instance == 0
    coordinator.started(placement.call, 0.0)
    coordinator.instance_down(0)
    moved = coordinator.moved(placement.call, 0.5)
    assert moved.instance != 0
    assert coordinator.views["running"][0] == coordinator.views["outstanding_s"][0] == 0
    assert coordinator.views["waiting"][moved.instance] == 1
    assert {coordinator.call_arrived(None, "call", 1, 1.0).instance for _ in range(9)} == {1, 2, 3}
    for m in (1, 2, 3):
        coordinator.instance_down(m)
    with pytest.raises(NoInstance):
        coordinator.call_arrived(None, "call", 1, 2.0)
    coordinator.instance_up(2)
    assert coordinator.call_arrived(None, "call", 1, 2.0).instance == 2


def test_a_move_avoids_where_the_call_failed(cluster) -> None:
    coordinator = Coordinator(cluster, "low")
    placement = coordinator.call_arrived(None, "call", 100, 0.0)
    moved = coordinator.moved(placement.call, 0.0, avoid={placement.instance})
    assert moved.instance != placement.instance


def test_a_rule_that_fails_leaves_the_books_as_they_were(cluster, monkeypatch) -> None:
    """A user's rule that gives NaN, at a move and at a new call of a query that is idle."""
    of = Coordinator(cluster, "vllm")
    first = of.call_arrived("q", "s", 10, 0.0)
    of.finished(first.call, 1.0, 5)
    second = of.call_arrived("p", "s", 10, 1.0)
    of.started(second.call, 1.0)
    with monkeypatch.context() as broken:
        broken.setattr("hexrepro.serving.coordinator.decide", lambda *args: (0, float("nan")))
        with pytest.raises(InputError, match="gave NaN"):
            of.moved(second.call, 2.0, avoid={second.instance})
        for query in ("q", "new"):
            with pytest.raises(InputError, match="gave NaN"):
                of.call_arrived(query, "s", 10, 2.0)
    assert of.queries_under_way == 2  # q goes on; the new one never was
    assert of.call_arrived("q", "s", 10, 3.0).after == (first.call,)
    of.failed(second.call, 4.0)
    of.failed(second.call + 1, 4.0)
    nothing_on_any_account(of)
    assert of.calls_waiting == of.calls_under_way == 0


def test_the_tuner_knows_which_instances_are_there_and_how_fast(cluster) -> None:
    tuner = OnlineTuner(Coordinator(cluster, "hexgen_flow").policy, cluster, options=NEVER)
    coordinator = Coordinator(cluster, "hexgen_flow", tuner=tuner)
    coordinator.instance_down(1)
    coordinator.believe(2, 2.0)
    coordinator.tuner_log.catch_up(1.0)
    assert tuner._closed.tolist() == [False, True, False, False]
    expected = 2.0 * cluster.instances[2].latency.base_s
    assert tuner._cluster.instances[2].latency.base_s == expected


def test_idle_queries_end(cluster) -> None:
    coordinator = Coordinator(cluster, "hexgen_flow", Options(idle_s=10.0))
    placement = coordinator.call_arrived("q", "call", 100, 0.0)
    assert coordinator.expire(100.0) == 0  # a call is under way
    coordinator.finished(placement.call, 100.0, 5)
    assert coordinator.expire(109.0) == 0
    assert coordinator.expire(110.0) == 1
    assert coordinator.queries_under_way == 0


def test_nothing_is_learned_from_a_query_with_a_failed_call(cluster) -> None:
    tuner = OnlineTuner(Coordinator(cluster, "hexgen_flow").policy, cluster, options=NEVER)
    coordinator = Coordinator(cluster, "hexgen_flow", tuner=tuner)
    placement = coordinator.call_arrived("q", "a", 100, 0.0)
    coordinator.failed(placement.call, 1.0)
    again = coordinator.call_arrived("q", "a", 100, 1.5)
    coordinator.finished(again.call, 2.0, 5)
    coordinator.query_finished("q", 2.0)
    coordinator.tuner_log.catch_up(3.0)
    assert tuner.history.finished == []
    assert not tuner.history.open
    assert tuner.history.arrivals == [0.0]
    assert not coordinator.views["outstanding_s"].any()


def test_a_slow_instance_is_found_out(cluster) -> None:
    """Alone on an instance, 100 tokens in 2.5 times the modelled decode time, 8 times."""
    coordinator = Coordinator(cluster, "vllm", Options(speed_window=8))
    at = coordinator.views[0].copy()
    now_s = 0.0
    for m in (1, 2, 3):
        coordinator.instance_down(m)
    for _ in range(8):
        call = coordinator.call_arrived(None, "call", 100, now_s)
        coordinator.started(call.call, now_s)
        coordinator.first_token(call.call, now_s + 1.0)
        decode_s = 100 * (at["base_s"] + at["sequence_s"] + at["kv_token_s"] * 150)
        now_s += 1.0 + 2.5 * decode_s
        coordinator.finished(call.call, now_s, 101)
    assert coordinator.speed[0] == pytest.approx(2.5, rel=0.01)
    assert coordinator.views["base_s"][0] == pytest.approx(2.5 * at["base_s"], rel=0.01)
    slow = coordinator.call_arrived(None, "call", 100, now_s)
    coordinator.instance_up(1)
    assert coordinator.views["kind"][0] != coordinator.views["kind"][1]
    assert slow.estimate_s > 0


def test_sequences_side_by_side_take_the_time_of_one_and_the_memory_of_all(cluster) -> None:
    one, four = Coordinator(cluster, "vllm"), Coordinator(cluster, "vllm")
    single = one.call_arrived(None, "call", 100, 0.0, output_tokens=50)
    several = four.call_arrived(None, "call", 100, 0.0, output_tokens=50, sequences=4)
    assert several.estimate_s == single.estimate_s
    assert (single.output_tokens, several.output_tokens) == (50, 200)
    assert four.views["kv_tokens"][0] == 100 + 4 * 50
    four.finished(several.call, 1.0, 4 * 30)
    assert four.stages.called("call").output_median == 30
    assert not four.views["kv_tokens"].any()
    assert not four.views["output_tokens"].any()


def test_a_query_without_end_does_not_fill_the_memory(cluster) -> None:
    """Some client sends all its calls under one id: after `max_calls` it is another query."""
    coordinator = Coordinator(cluster, "hexgen_flow", Options(max_calls=5))
    placements = []
    for i in range(12):
        placements.append(coordinator.call_arrived("q", "call", 10, float(i), slo_s=float(i + 1)))
        coordinator.finished(placements[-1].call, i + 0.5, 1)
    assert [p.query for p in placements] == [0] * 5 + [1] * 5 + [2] * 2
    assert [p.slo_s for p in placements] == [1.0] * 5 + [6.0] * 5 + [11.0] * 2
    assert [p.after for p in placements[3:7]] == [(2,), (3,), (), (5,)]
    assert coordinator.queries_under_way == 1
    for _ in range(4):  # the same with calls side by side, which the first query must still see to their end
        placements.append(coordinator.call_arrived("q", "call", 10, 20.0))
    assert [p.query for p in placements[-4:]] == [2, 2, 2, 3]
    for placement in placements[-4:]:
        coordinator.failed(placement.call, 21.0)
    coordinator.query_finished("q", 22.0)
    assert coordinator.queries_under_way == coordinator.calls_under_way == 0


def test_a_last_call_that_fails_may_be_tried_again(cluster) -> None:
    """The query is still there with its clock, as OpenAI's client sends a failed call again by itself."""
    coordinator = Coordinator(cluster, "hexgen_flow")
    first = coordinator.call_arrived("q", "call", 10, 0.0, slo_s=30.0)
    coordinator.finished(first.call, 1.0, 5)
    last = coordinator.call_arrived("q", "call", 10, 1.0, final=True)
    coordinator.failed(last.call, 20.0)
    assert coordinator.queries_under_way == 1
    again = coordinator.call_arrived("q", "call", 10, 21.0, final=True)
    assert (again.query, again.after) == (first.query, (first.call,))
    assert again.budget_s < last.budget_s
    coordinator.finished(again.call, 22.0, 5)
    assert coordinator.queries_under_way == 0


def test_names_from_clients_do_not_fill_the_memory(cluster) -> None:
    coordinator = Coordinator(cluster, "hexgen_flow", Options(max_stages=4, max_tenants=3))
    for i in range(20):
        placement = coordinator.call_arrived(None, f"s{i}", 10, 0.0, tenant=f"t{i}")
        coordinator.finished(placement.call, 0.0, 1)
    assert [s.name for s in coordinator.stages.list] == ["s0", "s1", "s2", "s3", "other"]
    assert coordinator._queries.tenant_number("t19") == 2


@pytest.mark.parametrize("field", ["slo_s", "window", "idle_s"])
def test_options_out_of_range_are_named(field) -> None:
    with pytest.raises(InputError, match=field):
        Options(**{field: -1})
