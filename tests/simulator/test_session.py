"""A run that is stopped, changed, copied and gone on with.

The truths: `simulate`, which does all at once; arithmetic on steps of constant length; and the estimates of a cluster that
is as the changed one is believed to be.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.scheduling import estimate, load_policy, policy_names
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator import EngineOptions, Result, simulate
from hexrepro.simulator.session import Simulation
from hexrepro.workload import Workload, arrival_times, generate
from tests.strategies import make_instance, make_workload, pressed_runs, runs

BASE_SLO_S = 8.0
STEP_S = 1 / 64
POLICIES = policy_names()
OF_A_CALL = ("instance", "release_s", "admit_s", "first_token_s", "finish_s", "cached_tokens", "preemptions")
any_run = st.one_of(runs(max_queries=8, max_calls=6), pressed_runs())
few = settings(max_examples=25, deadline=None)


def cluster_of(instances: int, step_s: float = STEP_S, kv_blocks: int = 10_000, **sizes: int) -> Cluster:
    """Instances whose steps all take `step_s`, whatever is in them."""
    specs = [
        make_instance(f"i{m}", (step_s, 0.0, 0.0, 0.0, 0.0), kv_blocks, **sizes) for m in range(instances)
    ]
    return Cluster("alike", tuple(specs))


def call(input_tokens: int = 10, output_tokens: int = 10, **more) -> dict:
    return dict(input_tokens=input_tokens, output_tokens=output_tokens, **more)


def started(workload: Workload, cluster: Cluster, policy, **options) -> Simulation:
    return Simulation(workload, cluster, load_policy(policy), base_slo=BASE_SLO_S, **options)


def assert_same(simulation: Simulation, result: Result, tolerance_s: float = 0.0) -> None:
    calls = simulation.calls
    assert simulation.done
    assert np.array_equal(calls["instance"], result.instance)
    assert np.array_equal(calls["preemptions"], result.call_preemptions)
    for name in ("release_s", "admit_s", "first_token_s", "finish_s"):
        expected = result.call_finish_s if name == "finish_s" else getattr(result, name)
        assert np.abs(calls[name] - expected).max() <= tolerance_s, name
    assert np.abs(simulation.finish_s - result.finish_s).max() <= tolerance_s


def some_times(result: Result, rng: np.random.Generator, n: int) -> list[float]:
    """Times at which to stop a run: at random, and exactly at events of it."""
    events = np.concatenate([result.release_s, result.first_token_s, result.call_finish_s])
    return sorted(
        [*np.round(rng.uniform(0, events.max(), n) * 4096) / 4096, *rng.choice(events, n), events.max() + 1]
    )


# ------------------------------------------------------------------------------------------ stopping and going on


@given(
    drawn=any_run,
    policy=st.sampled_from(POLICIES),
    estimator=st.sampled_from(["median", "history"]),
    seed=st.integers(0, 99),
)
@few
def test_pieces_equal_the_whole(drawn, policy: str, estimator: str, seed: int) -> None:
    """To the bit, wherever the run is stopped; and at every stop it shows what has happened so far."""
    workload, cluster, batching, caching = drawn
    options = dict(engine=EngineOptions(batching, caching), estimates=estimator, seed=seed)
    result = simulate(workload, cluster, policy, base_slo=BASE_SLO_S, **options)
    simulation = started(workload, cluster, policy, **options)
    for until_s in some_times(result, np.random.default_rng(seed), 6):
        simulation.advance(until_s)
        assert simulation.now_s == until_s
        happened = np.where(result.call_finish_s <= until_s, result.call_finish_s, np.nan)
        assert np.array_equal(simulation.calls["finish_s"], happened, equal_nan=True)
        assert np.array_equal(
            simulation.finish_s, np.where(result.finish_s <= until_s, result.finish_s, np.inf)
        )
    assert_same(simulation, result)


@pytest.mark.parametrize("policy", ["vllm", "hexgen_flow", "vtc"])
def test_pieces_equal_the_whole_on_a_trace(policy: str) -> None:
    workload = generate("trace1", n_queries=30)
    workload = workload.with_arrivals(arrival_times("poisson", 30, 1.0, seed=2))
    specs = [
        make_instance(f"i{m}", (s, 1e-4, 1e-9, 1e-4, 1e-7), 4000) for m, s in enumerate((0.03, 0.03, 0.05))
    ]
    cluster = Cluster("three", tuple(specs))
    result = simulate(workload, cluster, policy, base_slo=60.0)
    simulation = Simulation(workload, cluster, policy, base_slo=60.0)
    while not simulation.done:
        simulation.advance(simulation.now_s + 0.7)
    assert_same(simulation, result)


def test_the_clock_does_not_turn_back() -> None:
    simulation = started(make_workload([dict(arrival_s=0.0, calls=[call()])]), cluster_of(1), "vllm")
    simulation.advance(1.0)
    with pytest.raises(InputError, match=r"until_s=0\.5 lies before 1 s"):
        simulation.advance(0.5)
    simulation.advance(1.0)


def test_arrivals_are_needed() -> None:
    with pytest.raises(InputError, match="holds no arrival times"):
        Simulation(generate("tiny"), cluster_of(1), "vllm")


def test_parameters_may_change_on_the_way() -> None:
    """From the start: as if the policy had had them; later: the calls before keep their places."""
    workload = generate("tiny").with_arrivals(arrival_times("poisson", 12, 2.0))
    cluster = Cluster(
        "uneven",
        tuple(make_instance(f"i{m}", (s, 1e-5, 0.0, 0.0, 0.0), 9000) for m, s in enumerate((0.01, 0.04))),
    )
    policy = load_policy("hexgen_flow").with_params(alpha=0.0)
    at = list(policy.dispatch_rule.defaults).index("alpha")
    other = simulate(workload, cluster, policy.with_params(alpha=1.0), base_slo=BASE_SLO_S)
    before = simulate(workload, cluster, policy, base_slo=BASE_SLO_S)
    assert not np.array_equal(other.instance, before.instance)
    simulation = started(workload, cluster, policy)
    simulation.params[at] = 1.0
    simulation.advance()
    assert_same(simulation, other)
    simulation = started(workload, cluster, policy)
    simulation.advance(3.0)
    simulation.params[at] = 1.0
    simulation.advance()
    early = before.release_s <= 3.0
    assert np.array_equal(simulation.calls["instance"][early], before.instance[early])
    assert (simulation.calls["instance"][simulation.calls["release_s"] > 3.0] == 0).all()  # the faster
    assert (before.instance[~early] == 1).any()
    assert policy.dispatch_params["alpha"] == 0.0


# ------------------------------------------------------------------------------------------------------ slow_down


@pytest.mark.parametrize(
    ("changes", "tokens_s"),
    [
        # the step in progress ends as it began, the rest take twice as long
        ([(3.5, 2.0)], [1, 2, 3, 4, 6, 8, 10, 12]),
        # a step that begins at the time of the change has begun
        ([(3.0, 2.0)], [1, 2, 3, 4, 6, 8, 10, 12]),
        ([(0.5, 4.0), (6.0, 1.0)], [1, 5, 9, 10, 11, 12, 13, 14]),
        # two changes within one step: the last one counts, and neither touches that step
        ([(2.25, 8.0), (2.5, 1.0)], [1, 2, 3, 4, 5, 6, 7, 8]),
        ([(0.5, 8.0), (3.0, 1.0), (7.0, 2.0)], [1, 9, 11, 13, 15, 17, 19, 21]),
    ],
)
def test_slow_down_by_hand(changes, tokens_s) -> None:
    """One call, steps of 1 s: its tokens come one a step."""
    n = len(tokens_s)
    for output in (1, 3, n):
        workload = make_workload([dict(arrival_s=0.0, calls=[call(10, output)])])
        simulation = started(workload, cluster_of(1, step_s=1.0), "vllm")
        for at_s, factor in changes:
            simulation.advance(at_s)
            simulation.slow_down(0, factor)
        simulation.advance()
        assert simulation.calls["first_token_s"][0] == tokens_s[0]
        assert simulation.finish_s[0] == tokens_s[output - 1]


def test_slow_down_within_a_prompt() -> None:
    """A prompt of three chunks; slowed down in the first: the second and third take four times as long."""
    workload = make_workload([dict(arrival_s=0.0, calls=[call(12, 2)])])
    cluster = cluster_of(1, step_s=1.0, max_num_seqs=4, budget=4)
    simulation = started(workload, cluster, "vllm")
    simulation.advance(0.25)
    simulation.slow_down(0, 4.0)
    simulation.advance()
    assert (simulation.calls["first_token_s"][0], simulation.finish_s[0]) == (9.0, 13.0)


def ends_s(changes: list[tuple[float, float]], steps: int, step_s: float) -> np.ndarray:
    """When each of `steps` steps in a row ends, from time 0: a step takes the factor that holds when it begins."""
    ends, now, factor = [0.0], 0.0, 1.0
    waiting = list(changes)
    for _ in range(steps):
        while waiting and waiting[0][0] < now:
            factor = waiting.pop(0)[1]
        now += factor * step_s
        ends.append(now)
    return np.array(ends)


@pytest.mark.parametrize("policy", ["vllm", "vtc"])
@pytest.mark.parametrize("batching", ["chunked", "prefill_first"])
@pytest.mark.parametrize("kv_blocks", [30, 10_000])
def test_slow_down_stretches_the_steps(policy: str, batching: str, kv_blocks: int) -> None:
    """All calls come at time 0 and every step takes as long as any other, so that slowing down moves only the ends of steps.

    With little KV memory the calls preempt each other.
    """
    rng = np.random.default_rng(4)
    queries = [
        dict(arrival_s=0.0, tenant=i % 3, calls=[call(int(rng.integers(1, 60)), int(rng.integers(1, 60)))])
        for i in range(24)
    ]
    workload = make_workload(queries, n_tenants=3)
    cluster = cluster_of(1, kv_blocks=kv_blocks, block_size=4, max_num_seqs=8, budget=32)
    options = dict(engine=EngineOptions(batching, "off"))
    plain = simulate(workload, cluster, policy, base_slo=BASE_SLO_S, **options)
    assert (plain.preemptions[0] > 0) == (kv_blocks == 30)
    changes = sorted(
        (float(rng.integers(1, 60 * 64)) / 640, float(2.0 ** rng.integers(-2, 3))) for _ in range(12)
    )
    simulation = started(workload, cluster, policy, **options)
    for at_s, factor in changes:
        simulation.advance(at_s)
        simulation.slow_down(0, factor)
    simulation.advance()
    ends = ends_s(changes, int(plain.steps[0]), STEP_S)
    for got, was in (
        (simulation.calls["first_token_s"], plain.first_token_s),
        (simulation.calls["finish_s"], plain.call_finish_s),
    ):
        steps = np.rint(was / STEP_S).astype(int)
        assert np.array_equal(was, steps * STEP_S)
        assert got == pytest.approx(ends[steps], abs=1e-9)


@given(drawn=any_run, policy=st.sampled_from(POLICIES), seed=st.integers(0, 99))
@few
def test_slowing_down_by_nothing_changes_nothing(drawn, policy: str, seed: int) -> None:
    """It cuts a stretch of decode steps in two, which is not to be seen from outside."""
    workload, cluster, batching, caching = drawn
    options = dict(engine=EngineOptions(batching, caching))
    result = simulate(workload, cluster, policy, base_slo=BASE_SLO_S, **options)
    simulation = started(workload, cluster, policy, **options)
    rng = np.random.default_rng(seed)
    for until_s in some_times(result, rng, 8):
        simulation.advance(until_s)
        simulation.slow_down(int(rng.integers(len(cluster))), 1.0)
    assert_same(simulation, result, 1e-9)


def test_slow_from_the_start_is_a_slower_instance() -> None:
    """Round robin, which believes nothing: as if the instance had another latency model."""
    workload = generate("tiny").with_arrivals(arrival_times("poisson", 12, 4.0))
    coefficients = (1 / 64, 1 / 16384, 0.0, 1 / 1024, 1 / 2**20)
    fast = [make_instance(f"i{m}", coefficients, 2000) for m in range(2)]
    slow = make_instance("i1", [4 * x for x in coefficients], 2000)
    expected = simulate(workload, Cluster("b", (fast[0], slow)), "vllm", base_slo=BASE_SLO_S)
    simulation = started(workload, Cluster("a", tuple(fast)), "vllm")
    simulation.slow_down(1, 4.0)
    simulation.advance()
    assert_same(simulation, expected, 1e-9)


@pytest.mark.parametrize("factor", [0.0, -1.0, np.inf, np.nan])
def test_bad_factors(factor: float) -> None:
    simulation = started(make_workload([dict(arrival_s=0.0, calls=[call()])]), cluster_of(1), "vllm")
    with pytest.raises(InputError, match=r"instance 0: factor=.* must be a positive number"):
        simulation.slow_down(0, factor)
    with pytest.raises(InputError, match=r"instance 0: factor=.* must be a positive number"):
        simulation.believe(0, factor)


def test_a_fair_queue_charges_the_step_in_progress_once() -> None:
    """Tenant 1 decodes in a step that began slow, from 1 to 11 s; its speed is back at 2 s, and tenant 0 comes at 6 s. By then
    tenant 1 has got one token (price 2) and one prompt token (price 1), and tenant 0 is lifted to that."""
    queries = [
        dict(arrival_s=0.0, tenant=1, calls=[call(1, 20), call(1, 5)]),
        dict(arrival_s=6.0, tenant=0, calls=[call(1, 5)]),
    ]
    policy = dict(name="fair", dispatch="round_robin", queue="vtc", client="tenant")
    cluster = cluster_of(1, step_s=1.0, max_num_seqs=1)
    simulation = started(make_workload(queries, n_tenants=2), cluster, policy)
    for at_s, factor in ((0.5, 10.0), (2.0, 1.0)):
        simulation.advance(at_s)
        simulation.slow_down(0, factor)
    simulation.advance(6.0)
    assert simulation._memory.clients["counter"][0].tolist() == [3.0, 3.0]
    simulation.advance()
    assert simulation.calls["finish_s"].tolist() == [29.0, 39.0, 34.0]


# ----------------------------------------------------------------------------------------- instances leave and join


def many_calls(n: int = 60) -> Workload:
    queries = [
        dict(arrival_s=i * 5 * STEP_S, calls=[call(8, 12), call(4, 6 + i % 7, after=[0])]) for i in range(n)
    ]
    return make_workload(queries)


def test_a_closed_instance_gets_nothing_and_finishes_what_it_has() -> None:
    workload, cluster = many_calls(), cluster_of(3)
    simulation = started(workload, cluster, "vllm")
    closed_s, opened_s = 1.0 + STEP_S / 3, 2.5 + STEP_S / 3
    simulation.advance(closed_s)
    has = (simulation.calls["instance"] == 1) & np.isnan(simulation.calls["finish_s"])
    assert has.any()
    simulation.close_instance(1)
    assert simulation.is_open.tolist() == [True, False, True]
    simulation.advance(opened_s)
    assert (simulation.instances["running"] + simulation.instances["waiting"])[1] == 0
    simulation.open_instance(1)
    simulation.advance()
    calls = simulation.calls
    assert (calls["instance"][has] == 1).all()
    assert np.isfinite(calls["finish_s"]).all()
    # round robin goes round those that are open
    order = np.lexsort((np.arange(workload.n_calls), calls["release_s"]))
    for i, c in enumerate(order):
        there = [0, 2] if closed_s < calls["release_s"][c] <= opened_s else [0, 1, 2]
        assert calls["instance"][c] == there[i % len(there)]


@given(drawn=runs(max_queries=8, max_calls=6), policy=st.sampled_from(POLICIES), seed=st.integers(0, 99))
@few
def test_no_policy_sends_a_call_to_a_closed_instance(drawn, policy: str, seed: int) -> None:
    workload, cluster, batching, caching = drawn
    simulation = started(workload, cluster, policy, engine=EngineOptions(batching, caching), seed=seed)
    rng = np.random.default_rng(seed)
    for until_s in np.sort(rng.uniform(0, workload.arrival_s[-1] + 4, 6)):
        before = simulation.calls["instance"].copy()
        was_open = simulation.is_open.copy()
        simulation.advance(until_s)
        new = (before < 0) & (simulation.calls["instance"] >= 0)
        assert was_open[simulation.calls["instance"][new]].all()
        m = int(rng.integers(len(cluster)))
        if simulation.is_open[m] and simulation.is_open.sum() > 1:
            simulation.close_instance(m)
        else:
            simulation.open_instance(m)
    simulation.advance()
    assert simulation.done
    assert np.isfinite(simulation.finish_s).all()


def test_the_others_are_all_there_is() -> None:
    """Closed from the start: as if the cluster had only the rest, for a rule that looks at each instance."""
    workload = generate("tiny").with_arrivals(arrival_times("poisson", 12, 4.0))
    specs = [
        make_instance(f"i{m}", (s, 1 / 16384, 0.0, 0.0, 0.0), 2000)
        for m, s in enumerate((1 / 64, 1 / 128, 1 / 32, 1 / 64))
    ]
    rest = [specs[m] for m in (0, 2, 3)]
    for policy in ("hexgen_flow", "eft", "qlm", "ray"):
        expected = simulate(workload, Cluster("rest", tuple(rest)), policy, base_slo=BASE_SLO_S)
        simulation = started(workload, Cluster("all", tuple(specs)), policy)
        simulation.close_instance(1)
        simulation.advance()
        assert np.array_equal(simulation.calls["instance"], np.array([0, 2, 3])[expected.instance])
        assert np.array_equal(simulation.finish_s, expected.finish_s)
        assert simulation.calls["budget_s"] == pytest.approx(expected.budget_s, rel=1e-12)


def test_the_last_instance_stays() -> None:
    simulation = started(many_calls(), cluster_of(2), "vllm")
    simulation.close_instance(0)
    with pytest.raises(InputError, match="instance 1 is the last that takes calls"):
        simulation.close_instance(1)
    simulation.close_instance(0)  # it is closed already
    simulation.open_instance(0)
    simulation.close_instance(1)
    simulation.advance()
    assert (simulation.calls["instance"] == 0).all()


# -------------------------------------------------------------------------------------------------------- believe


def test_believing_flips_the_choice_and_not_the_speed() -> None:
    """Two equal instances, alpha = 1, which sends each call where it runs fastest: at first to 0, the first of equals. Once 0
    is believed to be slower, to 1; once it is believed to be faster, to 0."""
    queries = [dict(arrival_s=20.0 * i, calls=[call(10, 10)]) for i in range(4)]
    policy = load_policy("hexgen_flow").with_params(alpha=1.0)
    simulation = started(make_workload(queries), cluster_of(2, step_s=1.0), policy)
    for at_s, factor in ((4.5, 2.0), (24.5, 0.5), (44.5, 1.0)):
        simulation.advance(at_s)
        simulation.believe(0, factor)
    simulation.advance()
    assert simulation.calls["instance"].tolist() == [0, 1, 0, 0]
    assert simulation.calls["finish_s"].tolist() == [10.0, 30.0, 50.0, 70.0]
    assert simulation.calls["estimate_s"].tolist() == [10.0, 10.0, 5.0, 10.0]


@given(drawn=any_run, policy=st.sampled_from(["vllm", "vtc", "ray"]), seed=st.integers(0, 99))
@few
def test_what_is_believed_does_not_change_the_truth(drawn, policy: str, seed: int) -> None:
    """For policies that do not use beliefs: a run whose instances slow down is the same whether that is known or not."""
    workload, cluster, batching, caching = drawn
    options = dict(engine=EngineOptions(batching, caching))
    unknown, known = (started(workload, cluster, policy, **options) for _ in range(2))
    rng = np.random.default_rng(seed)
    for until_s in np.sort(np.round(rng.uniform(0, workload.arrival_s[-1] + 4, 6) * 64) / 64):
        m, factor = int(rng.integers(len(cluster))), float(2.0 ** rng.integers(-2, 3))
        for simulation in (unknown, known):
            simulation.advance(until_s)
            simulation.slow_down(m, factor)
        known.believe(m, factor if rng.random() < 0.5 else 2.0)
        known.believe(int(rng.integers(len(cluster))), 0.5)
    for simulation in (unknown, known):
        simulation.advance()
    for name in OF_A_CALL:
        assert known.calls[name] == pytest.approx(unknown.calls[name], abs=1e-9), name


def test_beliefs_are_those_of_a_cluster_with_these_speeds() -> None:
    """Estimates and budgets after `believe` and `close_instance` equal those on a cluster that is as believed."""
    workload = generate("tiny").with_arrivals(arrival_times("poisson", 12, 0.02))
    coefficients = [(s, s / 256, 1e-8, s / 16, 1e-7) for s in (1 / 64, 1 / 128, 1 / 32)]
    specs = [make_instance(f"i{m}", c, 2000) for m, c in enumerate(coefficients)]
    changed = make_instance("i2", [3 * x for x in coefficients[2]], 2000)
    simulation = started(workload, Cluster("c", tuple(specs)), "hexgen_flow")
    simulation.close_instance(1)
    simulation.believe(2, 3.0)
    simulation.advance()
    believed = instance_views(Cluster("b", (specs[0], changed)))
    beliefs = estimate(workload, believed)
    mean_s, rest_s = beliefs.stage_mean_s, beliefs.remaining_s
    left_s = BASE_SLO_S - (simulation.calls["release_s"] - workload.arrival_s[workload.query])
    assert simulation.calls["budget_s"] == pytest.approx(left_s * mean_s / (mean_s + rest_s), rel=1e-9)
    by_latency = [s.latency.solo_latency_s for s in (specs[0], specs[1], changed)]
    for c in range(workload.n_calls):
        solo_s = by_latency[simulation.calls["instance"][c]]
        expected = solo_s(workload.input_tokens[c], beliefs.cached_tokens[c], beliefs.output_tokens[c])
        assert simulation.calls["estimate_s"][c] == pytest.approx(expected, rel=1e-9)


# ----------------------------------------------------------------------------------------------------------- fork


@given(drawn=any_run, policy=st.sampled_from(POLICIES), seed=st.integers(0, 99))
@few
def test_forks_go_their_own_ways(drawn, policy: str, seed: int) -> None:
    """Both end as the whole run does; and what is done to one does nothing to the other."""
    workload, cluster, batching, caching = drawn
    options = dict(engine=EngineOptions(batching, caching))
    result = simulate(workload, cluster, policy, base_slo=BASE_SLO_S, **options)
    simulation = started(workload, cluster, policy, **options)
    first, second, *_ = some_times(result, np.random.default_rng(seed), 3)
    simulation.advance(first)
    fork, spoilt = simulation.fork(), simulation.fork()
    spoilt.slow_down(0, 3.0)
    spoilt.believe(len(cluster) - 1, 0.25)
    spoilt.params[:] = 0.0
    if len(cluster) > 1:
        spoilt.close_instance(0)
    spoilt.advance()
    fork.advance(second)
    fork.fork().advance()
    simulation.advance()
    fork.advance()
    assert_same(simulation, result)
    assert_same(fork, result)


def test_a_fork_takes_the_changes_along() -> None:
    workload, cluster = many_calls(), cluster_of(3)
    whole, simulation = (started(workload, cluster, "hexgen_flow") for _ in range(2))
    for each in (whole, simulation):
        each.advance(1.0)
        each.slow_down(0, 2.0)
        each.believe(0, 2.0)
        each.close_instance(1)
        each.advance(1.25)
    fork = simulation.fork()
    assert np.array_equal(fork.is_open, simulation.is_open)
    for each in (whole, fork):
        each.advance(2.0)
        each.slow_down(0, 1.0)
        each.open_instance(1)
        each.advance()
    assert np.array_equal(fork.finish_s, whole.finish_s)
    assert np.isinf(simulation.finish_s).any()
    assert simulation.is_open.tolist() == [True, False, True]
