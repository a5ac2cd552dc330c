"""What must hold of every simulation, whatever the workload, the cluster, the policy and the engine's mode.

The list is BLIS's (inference-sim): conservation, lifecycle, causality, a clock that never turns back, KV conservation, work
conservation, determinism, the oracle boundary, replay parity; and two symmetries that any simulator of time must have.
Drawn times are dyadic (see tests/strategies.py), so sums are exact and most comparisons are with `==`.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hexrepro.cluster import load_cluster
from hexrepro.cluster.types import Cluster
from hexrepro.scheduling import Policy, estimate, load_policy, policy_names
from hexrepro.scheduling.estimates import ESTIMATORS
from hexrepro.scheduling.rules import dispatch_rule
from hexrepro.scheduling.views import CALL, INSTANCE, instance_views
from hexrepro.simulator import EngineOptions, GridResult, Result, simulate, simulate_grid
from hexrepro.simulator.results import INSTANCE_COUNTS
from hexrepro.workload import arrival_times, generate
from hexrepro.workload.types import Workload
from tests.strategies import batching, clusters, dyadic, prefix_caching, pressed_runs, runs, workloads

EXAMPLES = int(os.environ.get("HEXREPRO_EXAMPLES", "40"))
POLICIES = {name: load_policy(name) for name in policy_names()}
FIRST_COME_FIRST_SERVED = [name for name, policy in POLICIES.items() if policy.queue == "fcfs"]
BASE_SLO_S = 8.0
CALL_TIMES = ("release_s", "admit_s", "first_token_s", "call_finish_s")
OF_A_CALL = (
    "stage",
    "input_tokens",
    "output_tokens",
    "template",
    "template_tokens",
    "context",
    "context_tokens",
)

any_run = st.one_of(runs(), pressed_runs())
any_policy = st.sampled_from(sorted(POLICIES))
# shrinking a failure is worth its time, explaining it is not
quick = settings(max_examples=EXAMPLES, deadline=None, phases=[p for p in Phase if p is not Phase.explain])


def run(drawn, policy: str | Policy, **options) -> Result:
    """Simulate what `runs` or `pressed_runs` drew."""
    workload, cluster, mode, caching = drawn
    policy = POLICIES[policy] if isinstance(policy, str) else policy
    return simulate(
        workload, cluster, policy, base_slo=BASE_SLO_S, engine=EngineOptions(mode, caching), **options
    )


def prerequisites(workload: Workload) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in range(workload.n_calls)]
    for call in range(workload.n_calls):
        for successor in workload.successors[workload.succ_offsets[call] : workload.succ_offsets[call + 1]]:
            before[successor].append(call)
    return before


def covered_s(begin_s: np.ndarray, end_s: np.ndarray) -> float:
    """Seconds in the union of the intervals from begin to end."""
    total, until = 0.0, -np.inf
    for begin, end in sorted(zip(begin_s.tolist(), end_s.tolist(), strict=True)):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


# -------------------------------------------------------------------------------------- what happens to every call


@given(drawn=any_run, policy=any_policy, estimator=st.sampled_from(ESTIMATORS))
@quick
def test_every_call_finishes_once_and_ends_its_query(drawn, policy: str, estimator: str) -> None:
    workload, cluster, _, _ = drawn
    result = run(drawn, policy, estimates=estimator)
    assert np.isfinite(result.call_finish_s).all()
    assert (result.finish_s == np.maximum.reduceat(result.call_finish_s, workload.query_offsets[:-1])).all()
    assert ((result.instance >= 0) & (result.instance < len(cluster))).all()


@given(drawn=any_run, policy=any_policy)
@quick
def test_every_token_is_computed_once_or_found_in_the_cache(drawn, policy: str) -> None:
    """Per instance: prompts = computed + cached, and all tokens but a call's first come of decode steps. A preemption adds
    prompt tokens, and each resumption yields one token that is not decoded.
    """
    workload, cluster, _, _ = drawn
    result = run(drawn, policy)
    for m in range(len(cluster)):
        mine = result.instance == m
        prompt, generated = workload.input_tokens[mine].sum(), (workload.output_tokens[mine] - 1).sum()
        prefilled, decoded = result.prefill_tokens[m] + result.cached_tokens[m], result.decode_tokens[m]
        assert result.preemptions[m] == result.call_preemptions[mine].sum()
        if result.preemptions[m] == 0:
            assert (prefilled, decoded) == (prompt, generated)
            assert result.cached_tokens[m] == result.call_cached_tokens[mine].sum()
        else:
            assert prefilled >= prompt
            assert generated - result.preemptions[m] <= decoded <= generated


@given(drawn=any_run, policy=any_policy)
@quick
def test_lifecycle(drawn, policy: str) -> None:
    """Released, then admitted, then the first token, then one step a token at least; a lone token is the last."""
    workload, cluster, _, _ = drawn
    result = run(drawn, policy)
    step_s = np.array([spec.latency.base_s for spec in cluster.instances])[result.instance]
    assert (result.release_s <= result.admit_s).all()
    assert (result.admit_s + step_s <= result.first_token_s).all()
    assert (result.first_token_s + step_s * (workload.output_tokens - 1) <= result.call_finish_s).all()
    lone = workload.output_tokens == 1
    assert (result.first_token_s[lone] == result.call_finish_s[lone]).all()
    assert (
        result.call_cached_tokens <= workload.input_tokens - 1
    ).all()  # the last prompt token is always computed


@given(drawn=any_run, policy=any_policy)
@quick
def test_a_call_is_released_when_its_prerequisites_end_plus_its_tool_time_once(drawn, policy: str) -> None:
    workload = drawn[0]
    result = run(drawn, policy)
    for call, before in enumerate(prerequisites(workload)):
        ready = result.call_finish_s[before].max() if before else workload.arrival_s[workload.query[call]]
        assert result.release_s[call] == ready + workload.tool_time_s[call]


# ------------------------------------------------------------------------------------------------- the instances


@given(drawn=any_run, policy=any_policy)
@quick
def test_kv_pool_holds_what_runs(drawn, policy: str) -> None:
    """The most blocks in use: no more than the pool has, no fewer than the largest call needs at its end."""
    workload, cluster, _, _ = drawn
    result = run(drawn, policy)
    for m, spec in enumerate(cluster.instances):
        tokens = (workload.input_tokens + workload.output_tokens - 1)[result.instance == m]
        needed = -(-tokens.max() // spec.block_size) if len(tokens) else 0
        assert needed <= result.peak_kv_blocks[m] <= spec.kv_blocks


@given(drawn=any_run, policy=any_policy)
@quick
def test_no_instance_is_idle_while_it_has_a_call(drawn, policy: str) -> None:
    """Work conservation: the time inside steps is the time during which a released call is not finished there."""
    _, cluster, _, _ = drawn
    result = run(drawn, policy)
    for m in range(len(cluster)):
        mine = result.instance == m
        assert result.busy_s[m] == covered_s(result.release_s[mine], result.call_finish_s[mine])


@given(drawn=runs(), policy=any_policy)
@quick
def test_no_slot_stays_empty_while_a_call_waits(drawn, policy: str) -> None:
    """With memory and budget for all: while a call waits, every step that begins has `max_num_seqs` calls in it."""
    workload, cluster, _, caching = drawn
    ample = tuple(replace(spec, kv_blocks=2**20, max_num_batched_tokens=2**20) for spec in cluster.instances)
    result = run((workload, Cluster("ample", ample), "chunked", caching), policy)
    for call in range(workload.n_calls):
        same = result.instance == result.instance[call]
        slots = cluster.instances[result.instance[call]].max_num_seqs
        ends = result.call_finish_s[same]  # each is a step boundary
        for boundary in ends[(ends > result.release_s[call]) & (ends < result.admit_s[call])]:
            running = same & (result.admit_s <= boundary) & (result.call_finish_s > boundary)
            assert running.sum() == slots


# ---------------------------------------------------------------------------------------------- what the rules see

MOST_CALLS = 100  # of a drawn run
WIDTH = 1 + 4 * 7  # of a row of the record: the time, then seven numbers of each of up to four instances


@dispatch_rule(**{f"record_{i}": 0.0 for i in range(MOST_CALLS * WIDTH)})
def recorder(call, t_comp_s, instances, params):
    """Writes what it sees into its own parameters, and spreads the calls unevenly."""
    at = call.sequence * WIDTH
    params[at] = call.now_s
    for m in range(len(instances)):
        i = at + 1 + 7 * m
        params[i] = instances[m].running
        params[i + 1] = instances[m].waiting
        params[i + 2] = instances[m].outstanding_s
        params[i + 3] = instances[m].dispatched_s
        params[i + 4] = instances[m].prefill_tokens
        params[i + 5] = instances[m].output_tokens
        params[i + 6] = instances[m].kv_tokens
    return (call.sequence * call.sequence + call.query) % len(instances)


@given(drawn=any_run, queue=st.sampled_from(["fcfs", "urgency", "vtc"]))
@quick
def test_rules_see_the_state_of_that_moment(drawn, queue: str) -> None:
    """The clock of the decisions never turns back, and each decision sees what the results say of that moment."""
    workload, cluster, mode, caching = drawn
    record = np.zeros((1, MOST_CALLS * WIDTH))
    result = simulate_grid(
        workload,
        cluster,
        Policy("recorder", f"{__name__}:recorder", queue),
        arrivals_s=workload.arrival_s[None],
        dispatch_params=record,
        base_slo=BASE_SLO_S,
        engine=EngineOptions(mode, caching),
        detail=True,
    ).run(0)
    beliefs = estimate(workload, instance_views(cluster), prefix_caching=caching)
    order = np.lexsort((np.arange(workload.n_calls), result.release_s))
    rows = record.reshape(MOST_CALLS, WIDTH)[: workload.n_calls]
    assert (rows[:, 0] == result.release_s[order]).all()  # which are sorted, so the clock is monotone
    before = np.zeros(workload.n_calls, bool)
    for call, row in zip(order, rows, strict=True):
        now = row[0]
        for m in range(len(cluster)):
            running, waiting, outstanding_s, dispatched_s, prefill, output, kv = row[1 + 7 * m :][:7]
            sent = before & (result.instance == m)
            here = sent & (result.call_finish_s > now)
            assert running + waiting == here.sum()
            assert outstanding_s == pytest.approx(result.estimate_s[here].sum(), abs=1e-9)
            assert dispatched_s == pytest.approx(result.estimate_s[sent].sum(), abs=1e-9)
            assert output == pytest.approx(beliefs.output_tokens[here].sum(), abs=1e-9)
            assert kv == pytest.approx((workload.input_tokens + beliefs.output_tokens)[here].sum(), abs=1e-9)
            if result.preemptions[m] == 0:
                assert running == (here & (result.admit_s < now)).sum()
                unread = here & (result.first_token_s > now)
                assert prefill == (workload.input_tokens - beliefs.cached_tokens)[unread].sum()
        before[call] = True


def test_rules_are_shown_no_true_length() -> None:
    """All that a rule can see. `output_tokens` are estimates in both; a new field needs a look at where it comes from."""
    assert set(CALL.names) == {
        "sequence", "query", "tenant", "stage", "input_tokens", "cached_tokens", "output_tokens", "now_s", "arrival_s",
        "slo_s", "stage_mean_s", "remaining_s", "budget_s", "draw", "instance", "t_comp_s",
    }  # fmt: skip
    assert set(INSTANCE.names) == {
        "running", "waiting", "waiting_s", "outstanding_s", "dispatched_s", "prefill_tokens", "output_tokens", "kv_tokens",
        "base_s", "prefill_token_s", "prefill_context_s", "sequence_s", "kv_token_s", "max_num_seqs",
        "max_num_batched_tokens", "block_size", "kv_capacity_tokens", "load_weight", "kind",
    }  # fmt: skip


@st.composite
def scrambled(draw: st.DrawFn):
    """A run, and the same with other true output lengths; the cluster can hold either."""
    workload = draw(workloads())
    length = st.integers(1, 24)
    others = np.array(draw(st.lists(length, min_size=workload.n_calls, max_size=workload.n_calls)))
    other = replace(workload, output_tokens=others)
    longer = replace(workload, output_tokens=np.maximum(workload.output_tokens, others))
    return workload, other, draw(clusters(longer)), draw(batching), draw(prefix_caching)


@given(drawn=scrambled(), policy=any_policy, window=st.sampled_from([0, 1, 3]))
@quick
def test_no_decision_depends_on_a_length_that_is_not_known_yet(drawn, policy: str, window: int) -> None:
    """The oracle boundary: same beliefs, other true lengths. Until the first call ends that is longer or shorter than
    in the other run, both runs are the same in everything. `window` > 0: beliefs that learn from finished calls.
    """
    workload, other, cluster, mode, caching = drawn
    beliefs = estimate(workload, instance_views(cluster), prefix_caching=caching)
    beliefs = replace(beliefs, window=window)
    one = run((workload, cluster, mode, caching), policy, estimates=beliefs)
    two = run((other, cluster, mode, caching), policy, estimates=beliefs)
    changed = workload.output_tokens != other.output_tokens
    until = np.inf
    if changed.any():
        until = min(one.call_finish_s[changed].min(), two.call_finish_s[changed].min())
    for name in CALL_TIMES:
        assert (np.minimum(getattr(one, name), until) == np.minimum(getattr(two, name), until)).all()
    decided = one.release_s < until
    for name in ("instance", "budget_s", "estimate_s"):
        assert (getattr(one, name)[decided] == getattr(two, name)[decided]).all()


# --------------------------------------------------------------------------------------- runs that must be equal


def assert_same(one: GridResult | Result, two: GridResult | Result, but: tuple[str, ...] = ()) -> None:
    """Equal to the bit in every array."""
    for field in fields(one):
        if field.name not in but:
            np.testing.assert_array_equal(
                getattr(one, field.name), getattr(two, field.name), err_msg=field.name
            )


@pytest.fixture(scope="module")
def grid():
    """grid(policy, which runs, ...): runs of a small Trace 1 on Hetero-1, eleven seeds."""
    workload, cluster = generate("trace1", n_queries=8), load_cluster("hetero1", "silicon")
    seeds = np.arange(100, 111)
    arrivals_s = np.stack([arrival_times("poisson", 8, 1.0, seed=seed) for seed in range(len(seeds))])

    def grid(policy: str, which=slice(None), **options) -> GridResult:
        return simulate_grid(
            workload,
            cluster,
            policy,
            arrivals_s=arrivals_s[which],
            seeds=seeds[which],
            detail=True,
            **options,
        )

    return grid


@pytest.mark.parametrize("estimator", ["median", "history"])
@pytest.mark.parametrize("policy", ["hexgen_flow", "random", "ray", "vtc"])
def test_results_are_the_same_to_the_bit(policy: str, estimator: str, grid) -> None:
    """Run after run, with one thread or two or more than there are runs, whole or in parts, in any order."""
    once = grid(policy, estimates=estimator, workers=1)
    for workers in (1, 2, 5, 16):
        assert_same(once, grid(policy, estimates=estimator, workers=workers))
    for part in (slice(0, 3), slice(3, 11), slice(4, 5), slice(None, None, -1)):
        sliced = GridResult(**{name: values[part] for name, values in vars(once).items()})
        assert_same(sliced, grid(policy, part, estimates=estimator, workers=2))


def test_seeds_decide_where_a_rule_draws_and_nowhere_else(grid) -> None:
    """Same arrivals, other seeds: `random` changes, `hexgen_flow` does not."""
    first = np.zeros(2, int)
    for policy, differs in (("random", True), ("hexgen_flow", False)):
        one, two = grid(policy, first).run(0), grid(policy, first).run(1)
        assert_same(one, two)
        workload, cluster = generate("trace1", n_queries=8), load_cluster("hetero1", "silicon")
        workload = workload.with_arrivals(one.arrival_s)
        other = simulate(workload, cluster, policy, seed=7)
        assert (one.instance != other.instance).any() == differs


@given(drawn=any_run, policy=any_policy)
@quick
def test_nothing_is_left_over_from_the_run_before(drawn, policy: str) -> None:
    """The runs of a slice share their memory: a run after another equals the run alone."""
    workload, cluster, mode, caching = drawn
    busy = np.zeros_like(workload.arrival_s)  # all at once
    arrivals_s = np.stack([busy, workload.arrival_s, busy, workload.arrival_s])
    result = simulate_grid(
        workload,
        cluster,
        POLICIES[policy],
        arrivals_s=arrivals_s,
        seeds=np.array([3, 0, 3, 0]),
        base_slo=BASE_SLO_S,
        engine=EngineOptions(mode, caching),
        workers=1,
        detail=True,
    )
    alone = run(drawn, policy)
    assert_same(result.run(1), alone)
    assert_same(result.run(3), alone)
    assert_same(result.run(0), result.run(2))


@dispatch_rule(**{f"call_{i}": 0.0 for i in range(MOST_CALLS)})
def as_recorded(call, t_comp_s, instances, params):
    """The instance that the record names for the i-th call."""
    return int(params[call.sequence])


@given(drawn=any_run, policy=st.sampled_from(FIRST_COME_FIRST_SERVED))
@quick
def test_replay_of_a_record_gives_the_run_again(drawn, policy: str) -> None:
    """Take of a run only when each call was issued and where it went; as queries of one call each it is the same run."""
    workload, cluster, mode, caching = drawn
    result = run(drawn, policy)
    order = np.lexsort((np.arange(workload.n_calls), result.release_s))
    n = workload.n_calls
    flat = replace(
        workload,
        **{name: getattr(workload, name)[order] for name in OF_A_CALL},
        tool_time_s=np.zeros(n),
        succ_offsets=np.zeros(n + 1, np.int32),
        successors=np.zeros(0, np.int32),
        query_offsets=np.arange(n + 1),
        arrival_s=result.release_s[order],
        tenant=workload.tenant[workload.query[order]],
        slo_scale=workload.slo_scale[workload.query[order]],
    )
    where = {f"call_{i}": float(m) for i, m in enumerate(result.instance[order])}
    again = run((flat, cluster, mode, caching), Policy("replay", f"{__name__}:as_recorded", "fcfs", where))
    for name in ("instance", *CALL_TIMES, "call_cached_tokens", "call_preemptions"):
        assert (getattr(again, name) == getattr(result, name)[order]).all(), name
    for name in ("busy_s", *INSTANCE_COUNTS):
        assert (getattr(again, name) == getattr(result, name)).all(), name


# ---------------------------------------------------------------------------------------------------- symmetries

MOMENTS = {"arrival_s", "finish_s", *CALL_TIMES}
TIMES = MOMENTS | {"slo_s", "busy_s", "budget_s", "estimate_s"}


@given(
    drawn=any_run, policy=any_policy.filter(lambda name: name != "qlm"), poll_s=st.sampled_from([0.0, 1 / 8])
)
@quick
def test_time_has_no_unit(drawn, policy: str, poll_s: float) -> None:
    """With all times doubled, results are doubled to the bit. (QLM's groups of 10 s are a time of the policy's own.)"""
    workload, cluster, mode, caching = drawn
    slow = replace(workload, arrival_s=2 * workload.arrival_s, tool_time_s=2 * workload.tool_time_s)
    slow_cluster = Cluster(
        "slow",
        tuple(
            replace(spec, latency=type(spec.latency)(*(2 * spec.latency.coefficients).tolist()))
            for spec in cluster.instances
        ),
    )
    once, twice = (
        simulate(
            w,
            c,
            POLICIES[policy],
            base_slo=s * BASE_SLO_S,
            engine=EngineOptions(mode, caching, True, s * poll_s),
        )
        for s, w, c in ((1, workload, cluster), (2, slow, slow_cluster))
    )
    for field in fields(Result):
        factor = 2 if field.name in TIMES else 1
        assert (getattr(twice, field.name) == factor * getattr(once, field.name)).all(), field.name


@given(drawn=any_run, policy=st.sampled_from(FIRST_COME_FIRST_SERVED), later_s=dyadic(1, 2**20))
@quick
def test_time_has_no_origin(drawn, policy: str, later_s: float) -> None:
    """With all arrivals later, everything is as much later. (Keys in seconds are rounded elsewhere then: FCFS only.)"""
    workload, cluster, mode, caching = drawn
    one = run(drawn, policy)
    two = run((workload.with_arrivals(workload.arrival_s + later_s), cluster, mode, caching), policy)
    for field in fields(Result):
        moved = later_s if field.name in MOMENTS else 0
        if field.name != "budget_s":
            assert (getattr(two, field.name) == getattr(one, field.name) + moved).all(), field.name
