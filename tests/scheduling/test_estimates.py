"""What the scheduler believes: t_comp, stage medians, what comes after a call, its budget, the base SLO."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexrepro.cluster import load_cluster
from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.scheduling import Policy, base_slo_s, estimate
from hexrepro.scheduling.estimates import CHESS_STANDARD, budget_s, make_plan, solo_latency_s
from hexrepro.scheduling.rules import dispatch_rule
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator import EngineOptions, simulate, simulate_grid
from hexrepro.workload import generate
from hexrepro.workload.types import Workload
from tests.scheduling.views_by_hand import instances
from tests.strategies import clusters, make_instance, make_workload, workloads

A, B, C = 0, 1, 2  # stages


def call(stage: int, after=(), input_tokens: int = 10, output_tokens: int = 5, **fields) -> dict:
    return dict(
        stage=stage, after=list(after), input_tokens=input_tokens, output_tokens=output_tokens, **fields
    )


def by_hand() -> Workload:
    """Two queries: a, then two b in parallel, then c; and a, b, b, c in a row. Output lengths differ call by call."""
    lengths = iter([3, 10, 20, 7, 5, 30, 40, 9])

    def drawn(stage: int, after=()) -> dict:
        return call(stage, after, output_tokens=next(lengths))

    parallel = [drawn(A), drawn(B, [0]), drawn(B, [0]), drawn(C, [1, 2])]
    in_a_row = [drawn(A), drawn(B, [0]), drawn(B, [1]), drawn(C, [2])]
    return make_workload([dict(arrival_s=0.0, calls=parallel), dict(arrival_s=1.0, calls=in_a_row)])


# ---------------------------------------------------------------------------------------------------------- t_comp


@given(workloads(), st.data())
@settings(max_examples=25, deadline=None)
def test_t_comp_is_the_latency_of_the_call_alone(workload: Workload, data) -> None:
    """In the scheduler as in the latency model, and as the simulator has it (see tests/cluster for the model itself)."""
    cluster = data.draw(clusters(workload))
    views = instance_views(cluster)
    for view, spec in zip(views, cluster.instances, strict=True):
        for i, o, t in zip(
            workload.input_tokens, workload.output_tokens, workload.template_tokens, strict=True
        ):
            expected = spec.latency.solo_latency_s(i, t, o, spec.max_num_batched_tokens)
            assert solo_latency_s(view, i, t, o) == pytest.approx(expected, rel=1e-12)


def test_t_comp_by_hand() -> None:
    """250 prompt tokens of which 50 are cached, 100 a step: 2 steps, then 9 of decoding over contexts 250 to 258."""
    views = instances(
        1,
        base_s=1.0,
        prefill_token_s=0.1,
        prefill_context_s=0.001,
        sequence_s=0.5,
        kv_token_s=0.01,
        max_num_batched_tokens=100,
    )
    context = 100 * 50 + 100 * 100 / 2 + 100 * 150 + 100 * 100 / 2
    expected = 11 * 1.5 + 200 * 0.1 + 0.001 * context + 0.01 * sum(range(250, 259))
    assert solo_latency_s(views[0], 250, 50, 10) == pytest.approx(expected, rel=1e-12)


def test_half_a_token_is_half_a_step() -> None:
    """Medians of an even number of calls can be fractions."""
    view = instances(1)[0]
    assert solo_latency_s(view, 10, 0, 4.5) == 4.5


# -------------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("slo_s", "elapsed_s", "stage_s", "remaining_s", "budget"),
    [
        (60, 0, 5, 25, 10),  # 60 * 5 / 30
        (60, 10, 5, 20, 10),  # 50 * 5 / 25
        (60, 10, 5, 0, 50),  # the last stage has all that is left
        (60, 40, 5, 20, 4),  # overrun: what is left is divided as before
        (60, 60, 5, 20, 0),
        (60, 70, 5, 20, -2),  # late: no budget, and less the later
    ],
)
def test_budget(slo_s, elapsed_s, stage_s, remaining_s, budget: float) -> None:
    assert budget_s(float(slo_s), float(elapsed_s), float(stage_s), float(remaining_s)) == budget


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=15), st.floats(1, 1000))
def test_stages_that_keep_their_budgets_use_up_the_slo(stages_s, slo_s: float) -> None:
    elapsed_s = 0.0
    for i, stage_s in enumerate(stages_s):
        elapsed_s += budget_s(slo_s, elapsed_s, stage_s, sum(stages_s[i + 1 :]))
    assert elapsed_s == pytest.approx(slo_s, rel=1e-9)


def test_budgets_in_the_simulator() -> None:
    """One slot, steps of 1 s; a takes 2 s, b 6 s, c 4 s; the SLO is 24 s. The first query keeps its budgets (4 of 24; of the
    22 s that are left 13.2; 16), the second waits 12 s before its a: of the 10 s left after that b gets 6 and c gets 4.
    """
    calls = [call(A, output_tokens=2), call(B, [0], output_tokens=6), call(C, [1], output_tokens=4)]
    cluster = Cluster("one", (make_instance("one", (1.0, 0, 0, 0, 0), 1000, max_num_seqs=1),))
    workload = make_workload([dict(arrival_s=0.0, calls=calls), dict(arrival_s=0.0, calls=calls)])
    # FCFS serves a a b b c c, so tool times hold the second query's calls back
    tools = np.array([0, 0, 0, 12, 0, 0], float)
    result = simulate(replace(workload, tool_time_s=tools), cluster, "vllm", base_slo=24.0)
    assert result.release_s.tolist() == [0, 2, 8, 12, 14, 20]
    assert result.budget_s.tolist() == pytest.approx([4, 22 * 0.6, 16, 12 * 2 / 12, 10 * 0.6, 4])


def test_parallel_siblings_each_get_the_budget_of_the_stage() -> None:
    cluster = Cluster("one", (make_instance("one", (1.0, 0, 0, 0, 0), 1000),))
    result = simulate(by_hand(), cluster, "vllm", base_slo=100.0)
    assert result.budget_s[1] == result.budget_s[2]


# --------------------------------------------------------------------------------------------------------- medians


def test_median_estimator() -> None:
    """Outputs of a 3 5, of b 10 20 30 40, of c 7 9; all prompts have 10 tokens, and a step takes 1 s or 3 s."""
    believed = estimate(by_hand(), instances(base_s=[1.0, 3.0]))
    assert believed.output_median.tolist() == [4, 25, 8]
    assert believed.input_median.tolist() == [10, 10, 10]
    assert believed.output_tokens.tolist() == [4, 25, 25, 8] * 2
    assert believed.stage_mean_s.tolist() == [2 * x for x in (4, 25, 25, 8)] * 2
    assert believed.window == 0


def test_a_stage_without_calls_does_not_matter() -> None:
    workload = by_hand()
    more = replace(workload, stage_names=(*workload.stage_names, "never"))
    assert (
        estimate(more, instances(1)).remaining_s.tolist()
        == estimate(workload, instances(1)).remaining_s.tolist()
    )


def test_a_template_is_believed_to_be_cached_where_caching_is_on() -> None:
    calls = [
        call(A, input_tokens=100, template=0, template_tokens=60, context=0, context_tokens=20),
        call(A, [0], 50),
    ]
    workload = make_workload([dict(arrival_s=0.0, calls=calls)])
    for caching, cached in (("off", 0), ("template", 60), ("full", 60)):
        assert estimate(workload, instances(1), prefix_caching=caching).cached_tokens.tolist() == [cached, 0]


# ---------------------------------------------------------------------------------------------- what comes after


def test_plan() -> None:
    """After the first a: one b or two, 1.5 on average, and c. After the first b: none or one more; after the second only c."""
    workload = by_hand()
    plan = make_plan(workload)
    after_a, after_b, after_second_b, after_c = [0, 1.5, 1], [0, 0.5, 1], [0, 0, 1], [0, 0, 0]
    expected = [after_a, after_b, after_b, after_c, after_a, after_b, after_second_b, after_c]
    assert plan.remaining[plan.position].tolist() == expected


def test_remaining_time_is_the_plan_at_the_medians() -> None:
    """Stages take 4, 25 and 8 s."""
    believed = estimate(by_hand(), instances(1))
    assert believed.remaining_s.tolist() == [
        1.5 * 25 + 8,
        12.5 + 8,
        12.5 + 8,
        0,
        1.5 * 25 + 8,
        12.5 + 8,
        8,
        0,
    ]


def test_oracle_knows_lengths_and_the_longest_way_to_the_end() -> None:
    believed = estimate(by_hand(), instances(1), estimator="oracle")
    assert believed.output_tokens.tolist() == [3, 10, 20, 7, 5, 30, 40, 9]
    assert believed.stage_mean_s.tolist() == [3, 10, 20, 7, 5, 30, 40, 9]
    assert believed.remaining_s.tolist() == [27, 7, 7, 0, 79, 49, 9, 0]


@given(workloads())
@settings(max_examples=25, deadline=None)
def test_beliefs_of_any_workload_are_sane(workload: Workload) -> None:
    for estimator in ("median", "history", "oracle"):
        believed = estimate(workload, instances(2), estimator=estimator)
        assert (believed.stage_mean_s > 0).all()
        assert (believed.remaining_s >= 0).all()
        assert (believed.output_tokens >= 1).all()
    last = np.diff(workload.succ_offsets) == 0
    assert (believed.remaining_s[last] == 0).all()  # the oracle's


# ------------------------------------------------------------------------------------------------- running medians

CALLS = 300  # at most, in the test below


@dispatch_rule(**{f"seen_{i}": 0.0 for i in range(3 * CALLS)})
def recorder(call, t_comp_s, instances, params):
    """Writes what is believed of each call into its own parameters."""
    params[3 * call.sequence] = call.output_tokens
    params[3 * call.sequence + 1] = call.stage_mean_s
    params[3 * call.sequence + 2] = call.remaining_s
    return call.sequence % len(instances)


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_history_moves_with_the_calls_that_finish(window: int) -> None:
    """Against a replay in plain Python: the medians of the last `window` finished calls of a stage, once there are 5 of them
    (or as many as the window holds); before, the workload's.
    """
    rng = np.random.default_rng(window)

    def drawn(stage: int, after=()) -> dict:
        return call(stage, after, *rng.integers([1, 1], [200, 60]).tolist())

    arrivals = np.cumsum(rng.exponential(12.0, 60))
    queries = [
        dict(
            arrival_s=t,
            calls=[drawn(A), drawn(B, [0]), drawn(B, [0]), drawn(C, [1, 2])][: rng.integers(2, 5)],
        )
        for t in arrivals
    ]
    workload = make_workload(queries)
    models = ((0.5, 0.01, 0, 0.1, 0), (1.1, 0.02, 0, 0.05, 0))
    cluster = Cluster("two", tuple(make_instance(f"i{m}", model, 10_000) for m, model in enumerate(models)))
    views = instance_views(cluster)
    believed = estimate(workload, views, estimator="history", window=window, prefix_caching="off")
    record = np.zeros((1, 3 * CALLS))
    result = simulate_grid(
        workload,
        cluster,
        Policy("recorder", f"{__name__}:recorder", "fcfs"),
        arrivals_s=workload.arrival_s[None],
        dispatch_params=record,
        base_slo=100.0,
        engine=EngineOptions(prefix_caching="off"),
        estimates=believed,
        detail=True,
    ).run(0)

    # calls that finish in the same step are remembered in the order of their admission
    finished = np.lexsort((result.release_s, result.admit_s, result.instance, result.call_finish_s))
    moved = 0
    for sequence, c in enumerate(np.lexsort((np.arange(workload.n_calls), result.release_s))):
        medians = []
        for stage in (A, B, C):
            of_stage = [
                f
                for f in finished
                if workload.stage[f] == stage and result.call_finish_s[f] <= result.release_s[c]
            ]
            recent = of_stage[-window:]
            lengths = (believed.input_median[stage], believed.output_median[stage])
            if len(recent) >= min(5, window):
                lengths = tuple(
                    median(column[recent].tolist())
                    for column in (workload.input_tokens, workload.output_tokens)
                )
            medians.append(lengths)
        means_s = [np.mean([solo_latency_s(view, i, 0, o) for view in views]) for i, o in medians]
        stage = workload.stage[c]
        output, stage_mean_s, remaining_s = record[0, 3 * sequence :][:3]
        assert output == medians[stage][1]
        assert stage_mean_s == pytest.approx(means_s[stage], rel=1e-12)
        assert remaining_s == pytest.approx(
            believed.plan.remaining[believed.plan.position[c]] @ means_s, rel=1e-12
        )
        moved += output != believed.output_median[stage]
    assert moved > workload.n_calls / 4


def test_a_table_of_stage_and_instance_overrides_t_comp() -> None:
    workload = by_hand()
    cluster = Cluster("two", tuple(make_instance(f"i{m}", (1.0, 0, 0, 0, 0), 1000) for m in range(2)))
    table = np.array([[1.0, 2.0], [30.0, 40.0], [5.0, 6.0]])
    believed = replace(estimate(workload, instance_views(cluster)), stage_s=table)
    result = simulate(workload, cluster, "vllm", base_slo=100.0, estimates=believed)
    assert result.estimate_s.tolist() == table[workload.stage, result.instance].tolist()


def test_an_estimator_by_name_or_its_beliefs_are_the_same_run() -> None:
    workload = by_hand()
    cluster = Cluster("one", (make_instance("one", (1.0, 0, 0, 0, 0), 1000, max_num_seqs=1),))
    for estimator in ("median", "history", "oracle"):
        believed = estimate(workload, instance_views(cluster), estimator=estimator)
        one, two = (
            simulate(workload, cluster, "hexgen_flow", base_slo=50.0, estimates=e)
            for e in (estimator, believed)
        )
        assert (one.call_finish_s == two.call_finish_s).all()
        assert (one.budget_s == two.budget_s).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(estimator="mean"), "estimator='mean' is unknown (one of: median, history, oracle)"),
        (dict(estimator="history", window=0), "window=0 must be at least 1 call"),
    ],
)
def test_refuses_in_one_line(options: dict, words: str) -> None:
    with pytest.raises(InputError) as refused:
        estimate(by_hand(), instances(1), **options)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


# -------------------------------------------------------------------------------------------------------- base SLO


@pytest.mark.parametrize(("cluster", "published_s"), [("homo", 47.8), ("hetero1", 60.2), ("hetero2", 58.9)])
def test_base_slo_as_published(cluster: str, published_s: float) -> None:
    """On latencies measured by the authors, which have the cached prefix in them: no caching on top."""
    views = instance_views(load_cluster(cluster, "measured"))
    workload = generate("trace1", n_queries=10)
    assert base_slo_s(workload, views, prefix_caching="off") == pytest.approx(published_s, rel=0.01)


def test_base_slo_by_hand() -> None:
    """Steps of 1 or 2 s and nothing else, 2048 prompt tokens a step: per call chunks of the prompt + output - 1 steps, times
    how often: 4 * 5 + 45 + (6 + 677) + 4 * (3 + 78) + 3 * 4 + 103 + 22 = 1209, at 1.5 s on average.
    """
    workload = generate("trace1", n_queries=3)
    assert set(workload.stage_names) == set(CHESS_STANDARD)
    assert base_slo_s(workload, instances(base_s=[1.0, 2.0]), prefix_caching="off") == pytest.approx(1813.5)


def test_base_slo_of_another_workflow_is_its_own_mean_query() -> None:
    """a once, b one step or two (parallel calls are one), c once; medians 4, 25, 8 steps."""
    assert base_slo_s(by_hand(), instances(1)) == pytest.approx(4 + 1.5 * 25 + 8)
