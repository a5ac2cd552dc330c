"""The compiled engine equals the oracle, call by call, over drawn workloads, clusters, batching modes and
policies.

What a policy believes (estimates) is taken from hexrepro.scheduling, for a plain oracle has no opinion on
beliefs; what it decides from them is decided again here, by the plain-Python twins in tests/oracle.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests import oracle as plain
from tests.oracle import Oracle, OracleInstance, OracleResult, VirtualTokenCounter
from tests.strategies import dyadic, make_instance, make_workload, pressed_runs, runs

simulator = pytest.importorskip("hexrepro.simulator")
scheduling = pytest.importorskip("hexrepro.scheduling")
if not hasattr(simulator, "simulate"):
    pytest.skip("the engine does not exist yet", allow_module_level=True)

from hexrepro.cluster.types import Cluster  # noqa: E402
from hexrepro.scheduling.views import instance_views  # noqa: E402
from hexrepro.workload.types import Workload  # noqa: E402

EXAMPLES = int(os.environ.get("HEXREPRO_EXAMPLES", "25"))  # a long search: HEXREPRO_EXAMPLES=2000


# shrinking a failure is worth its time, explaining it is not: a run takes tens of milliseconds
WITHOUT_EXPLAIN = [phase for phase in Phase if phase is not Phase.explain]


class Beliefs:
    """What the policies believe about each call: lists over calls (and instances), in seconds."""

    def __init__(self, workload: Workload, cluster: Cluster, prefix_caching: str, base_slo_s: float) -> None:
        believed = scheduling.estimate(workload, instance_views(cluster), prefix_caching=prefix_caching)
        instances = [OracleInstance.from_spec(spec) for spec in cluster.instances]
        self.workload, self.base_slo_s = workload, base_slo_s
        self.query = [int(q) for q in workload.query]
        self.t_comp = [
            [plain.solo_latency(i, int(n), float(cached), float(out)) for i in instances]
            for n, cached, out in zip(
                workload.input_tokens, believed.cached_tokens, believed.output_tokens, strict=True
            )
        ]
        self.stage_mean = [float(x) for x in believed.stage_mean_s]
        self.remaining = [float(x) for x in believed.remaining_s]
        self.load_weight = [spec.load_weight for spec in cluster.instances]
        self.slo = [float(workload.slo_scale[q]) * base_slo_s for q in self.query]

    @property
    def budget(self) -> Callable:
        return plain.slo_budget(self.workload, self.query, self.base_slo_s, self.stage_mean, self.remaining)


@dataclass(frozen=True)
class Twin:
    """A policy of the engine, and the same in plain Python."""

    policy: str | dict[str, Any]
    dispatch: Callable[[Beliefs], Callable] = lambda b: plain.round_robin
    key: Callable[[Beliefs], Callable] = lambda b: plain.first_come
    options: dict[str, Any] = field(default_factory=dict)


def balanced(alpha: float, waiting_only: bool = False) -> Callable[[Beliefs], Callable]:
    return lambda b: plain.workload_balanced(b.t_comp, b.stage_mean, alpha, waiting_only=waiting_only)


def urgent(b: Beliefs) -> Callable:
    return plain.urgency(b.t_comp, b.budget)


def wb(alpha: float, queue: str, **params: float) -> dict[str, Any]:
    params = dict(alpha=alpha, **params)
    return dict(name=f"wb {alpha}", dispatch="workload_balanced", queue=queue, dispatch_params=params)


FAIR = dict(fair=partial(VirtualTokenCounter, 1.0, 2.0))
VTC = dict(name="vtc", dispatch="round_robin", queue="vtc")
TWINS = {
    "vllm": Twin("vllm"),
    "rr_pq": Twin("rr_pq", key=urgent),
    "low": Twin("low", lambda b: plain.least_outstanding(b.t_comp)),
    "llf": Twin("llf", key=lambda b: plain.least_laxity(b.t_comp, b.slo)),
    "deadline groups": Twin(
        dict(name="groups", dispatch="round_robin", queue="request_groups"),
        key=lambda b: plain.request_groups(b.slo),
    ),
    "as_released": Twin(
        dict(name="r", dispatch="as_released", queue="urgency", dispatch_params=dict(alpha=0.25)),
        lambda b: plain.as_released(b.t_comp, b.load_weight, 0.25),
        urgent,
    ),
    "wb_fcfs": Twin(wb(0.5, "fcfs"), balanced(0.5)),
    "hexgen_flow": Twin(wb(0.25, "urgency"), balanced(0.25), urgent),
    "wb waiting": Twin(wb(0.25, "urgency", waiting_only=1.0), balanced(0.25, waiting_only=True), urgent),
    "wb queue only": Twin(wb(0.0, "urgency"), balanced(0.0), urgent),
    "wb speed only": Twin(wb(1.0, "fcfs"), balanced(1.0)),
    "vtc by tenant": Twin(dict(VTC, client="tenant"), options=dict(FAIR, client="tenant")),
    "vtc by query": Twin(dict(VTC, client="query"), options=dict(FAIR, client="query")),
}


def both(twin: Twin, workload: Workload, cluster: Cluster, base_slo_s: float, **options: Any):
    """The engine's result and the oracle's. Options: batching, prefix_caching, idle_poll_s, decode_blocks."""
    beliefs = Beliefs(workload, cluster, options["prefix_caching"], base_slo_s)
    instances = [OracleInstance.from_spec(spec) for spec in cluster.instances]
    dispatch, key = twin.dispatch(beliefs), twin.key(beliefs)
    expected = Oracle(workload, instances, dispatch, key, **options, **twin.options).run()
    engine = simulator.EngineOptions(**options)
    policy = scheduling.load_policy(twin.policy)
    return simulator.simulate(workload, cluster, policy, base_slo=base_slo_s, engine=engine), expected


def assert_equal(result: Any, expected: OracleResult) -> None:
    """Which instance first (dispatch), then times in the order in which they come about, then counts."""

    def same(what: str, got, want, tolerance: float = 1e-9) -> None:
        got, want = [float(x) for x in got], [float(x) for x in want]
        assert len(got) == len(want), what
        wrong = [i for i, (g, w) in enumerate(zip(got, want, strict=True)) if not abs(g - w) <= tolerance]
        assert not wrong, (
            f"{what} of {wrong}: engine {[got[i] for i in wrong]}, oracle {[want[i] for i in wrong]}"
        )

    same("instance of call", result.instance, expected.instance)
    same("dispatch of call", result.release_s, expected.dispatch_s)
    same("admission of call", result.admit_s, expected.admit_s)
    same("cached tokens of call", result.call_cached_tokens, expected.cached_tokens)
    same("preemptions of call", result.call_preemptions, expected.preemptions)
    same("first token of call", result.first_token_s, expected.first_token_s)
    same("finish of call", result.call_finish_s, expected.finish_s)
    same("finish of query", result.finish_s, expected.query_finish_s)


def assert_instances_equal(result: Any, expected: OracleResult) -> None:
    instances = range(len(expected.peak_kv_blocks))
    mine = [[step for step in expected.steps if step.instance == i] for i in instances]
    preempted = [sum(len(p.preempted) for p in expected.passes if p.instance == i) for i in instances]
    assert list(result.steps) == [len(steps) for steps in mine]
    assert list(result.preemptions) == preempted
    assert list(result.prefill_tokens) == [sum(step.prefill_tokens for step in steps) for steps in mine]
    assert list(result.decode_tokens) == [sum(step.decodes for step in steps) for steps in mine]
    assert list(result.peak_kv_blocks) == expected.peak_kv_blocks
    busy = [float(sum(step.end_s - step.start_s for step in steps)) for steps in mine]
    assert list(result.busy_s) == pytest.approx(busy, abs=1e-9)


# -------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", TWINS)
@given(drawn=runs(max_queries=8, max_calls=6), base_slo_s=dyadic(1, 4096, 64))
@settings(max_examples=EXAMPLES, deadline=None)
def test_engine_equals_oracle(name: str, drawn, base_slo_s: float) -> None:
    workload, cluster, batching, prefix_caching = drawn
    options = dict(batching=batching, prefix_caching=prefix_caching)
    result, expected = both(TWINS[name], workload, cluster, base_slo_s, **options)
    assert_equal(result, expected)
    assert_instances_equal(result, expected)


@pytest.mark.parametrize("name", ["vllm", "rr_pq", "vtc by tenant"])
@given(drawn=pressed_runs())
@settings(max_examples=150, deadline=None, phases=WITHOUT_EXPLAIN)
def test_engine_equals_oracle_under_memory_pressure(name: str, drawn) -> None:
    workload, cluster, batching, prefix_caching = drawn
    options = dict(batching=batching, prefix_caching=prefix_caching)
    result, expected = both(TWINS[name], workload, cluster, 8.0, **options)
    assert_equal(result, expected)
    assert_instances_equal(result, expected)


def test_a_call_that_sits_out_a_step_keeps_what_its_client_was_charged() -> None:
    """Found by search: at 0.297 s calls come while a decoding call waits for a block, in a step without it."""
    lengths = [(9, 13), (19, 13), (21, 11), (19, 2), (3, 1), (3, 1), (3, 1), (20, 40)]
    shared = dict(template=0, template_tokens=1, context=0, context_tokens=1)
    queries = [
        dict(
            arrival_s=k / 64,
            tenant=tenant,
            calls=[dict(stage=0, input_tokens=prompt, output_tokens=output, **shared)],
        )
        for (prompt, output), k, tenant in zip(
            lengths, (0, 2, 5, 8, 14, 19, 19, 19), (1, 0, 0, 1, 0, 2, 0, 2), strict=True
        )
    ]
    workload = make_workload(queries, n_tenants=3)
    cluster = Cluster("one", (make_instance("one", (1 / 64, 1 / 4096, 0.0, 0.0, 0.0), 76, 1, 3, 8),))
    options = dict(batching="prefill_first", prefix_caching="full")
    result, expected = both(TWINS["vtc by tenant"], workload, cluster, 8.0, **options)
    assert_equal(result, expected)
    assert_instances_equal(result, expected)


@given(
    drawn=runs(max_queries=8, max_calls=6),
    poll_s=st.sampled_from([0.0, 1 / 64, 0.25, 3.0]),
    grows=st.booleans(),
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_options_of_the_released_engine(drawn, poll_s: float, grows: bool) -> None:
    """Idle polling, and generated tokens that take no KV blocks."""
    workload, cluster, batching, prefix_caching = drawn
    options = dict(batching=batching, prefix_caching=prefix_caching, idle_poll_s=poll_s, decode_blocks=grows)
    result, expected = both(TWINS["rr_pq"], workload, cluster, 8.0, **options)
    assert_equal(result, expected)


@pytest.mark.parametrize("batching", ["chunked", "prefill_first"])
def test_fair_queue_under_memory_pressure(batching: str) -> None:
    """Preempted calls go back to the fair queue: no charge for their input again, and no lift, for they do not arrive anew."""
    preemptions = 0
    for seed in range(20):
        rnd = random.Random(seed)
        queries = []
        for i in range(14):
            call = dict(input_tokens=rnd.randint(1, 40), output_tokens=rnd.randint(1, 40))
            queries.append(dict(arrival_s=(i // 2) / 8, tenant=rnd.randrange(4), calls=[call]))
        cluster = Cluster("one", (make_instance("one", (1 / 64, 1 / 4096, 0.0, 0.0, 0.0), 24, 4, 6, 32),))
        workload = make_workload(queries, n_tenants=4)
        options = dict(batching=batching, prefix_caching="off")
        result, expected = both(TWINS["vtc by tenant"], workload, cluster, 8.0, **options)
        assert_equal(result, expected)
        preemptions += sum(expected.preemptions)
    assert preemptions > 20


@pytest.mark.parametrize("batching", ["chunked", "prefill_first"])
@pytest.mark.parametrize("prefix_caching", ["off", "template", "full"])
def test_long_decodes_between_arrivals(batching: str, prefix_caching: str) -> None:
    """Many decode steps between two events, and arrivals on a step boundary, just before and just after one."""
    base_s = 1 / 64
    shared = dict(template=0, template_tokens=40, context=1, context_tokens=24)
    queries = []
    for i, offset in enumerate([0.0, 1 / 4096, base_s, base_s - 1 / 4096, base_s + 1 / 4096, 0.5]):
        calls = [
            dict(input_tokens=100 + i, output_tokens=500 + 7 * i, **shared),
            dict(input_tokens=70, output_tokens=300, after=[0], tool_time_s=base_s * i, **shared),
        ]
        queries.append(dict(arrival_s=64 * base_s * i + offset, calls=calls))
    workload = make_workload(queries)
    for coefficients in [(base_s, 0.0, 0.0, 0.0, 0.0), (base_s, 1 / 8192, 1 / 65536, 1 / 4096, 1 / 65536)]:
        cluster = Cluster("two", tuple(make_instance(f"i{m}", coefficients, 60, 16, 8, 64) for m in range(2)))
        options = dict(batching=batching, prefix_caching=prefix_caching)
        result, expected = both(TWINS["hexgen_flow"], workload, cluster, 8.0, **options)
        assert_equal(result, expected)
        assert_instances_equal(result, expected)
        assert sum(expected.preemptions) > 0
