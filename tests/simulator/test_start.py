"""A run that begins on a busy cluster goes on as the run does from whose middle it was taken, and what can't be is refused."""

from __future__ import annotations

import numpy as np
import pytest

from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.scheduling import load_policy
from hexrepro.simulator import EngineOptions, GridResult, simulate, simulate_grid
from hexrepro.simulator.engine import Start
from hexrepro.simulator.session import Simulation
from hexrepro.simulator.state import STARTED
from hexrepro.workload import Workload, arrival_times, generate
from tests.strategies import make_instance, make_workload

STEP_S = 1 / 64


def call(input_tokens: int = 10, output_tokens: int = 10, **more) -> dict:
    return dict(input_tokens=input_tokens, output_tokens=output_tokens, **more)


def cluster_of(instances: int, step_s: float = 1.0, kv_blocks: int = 10_000, **sizes: int) -> Cluster:
    """Instances whose steps all take `step_s`."""
    specs = [
        make_instance(f"i{m}", (step_s, 0.0, 0.0, 0.0, 0.0), kv_blocks, **sizes) for m in range(instances)
    ]
    return Cluster("alike", tuple(specs))


def begun(workload: Workload, cluster: Cluster, start: Start, policy="hexgen_flow", caching="off", **options):
    """One run from `start`, with the detail of each call."""
    grid = simulate_grid(
        workload,
        cluster,
        policy,
        arrivals_s=workload.arrival_s[None],
        base_slo=60.0,
        engine=EngineOptions(prefix_caching=caching, **options),
        start=start,
        workers=1,
        detail=True,
    )
    return grid.run(0)


def started(*rows: tuple, key: float = 0.0, estimate_s: float = 1.0) -> np.ndarray:
    """STARTED[k] from (call, instance, generated[, key])."""
    return np.array([(*row[:3], row[3] if len(row) > 3 else key, estimate_s, 1.0) for row in rows], STARTED)


# --------------------------------------------------------------------------------- the rest of a run that went before


def start_of(simulation: Simulation) -> Start | None:
    """Where a run stands, if all its instances have just ended a step or have none, and no prompt is half computed."""
    now_s, memory, w = simulation.now_s, simulation._memory, simulation.workload
    calls, engines = memory.calls, memory.engines
    if ((engines["start_s"] != now_s) & engines["busy"]).any() or engines["preempted"].any():
        return None
    here = [
        (c, calls["instance"][c], w.output_tokens[c], *calls[c][["key", "estimate_s", "budget_s"]])
        for c in np.flatnonzero(calls["finish_s"] <= now_s)
    ]
    under_way = np.flatnonzero((calls["instance"] >= 0) & np.isnan(calls["finish_s"]))
    running, waiting = [], []
    for c in under_way:
        m = calls["instance"][c]
        rest = calls[c][["key", "estimate_s", "budget_s"]]
        decoding = memory.slots["call"][m, : engines["decoding"][m]]
        if c in decoding:
            left = calls["finish_step"][c] - engines["steps"][m]
            running.append((calls["admitted"][c], (c, m, w.output_tokens[c] - left, *rest)))
        elif calls["admit_s"][c] < now_s:
            return None
        else:  # it waits, or is admitted to the step that begins now
            waiting.append((calls["seq"][c], (c, m, 0, *rest)))
    rows = [row for _, row in sorted(running)] + [row for _, row in sorted(waiting)]
    return Start(now_s, np.array(here + rows, STARTED))


def stops(workload, cluster, policy, options, between=(0.2, 0.8)):
    """Simulations stopped where `start_of` can tell where they stand, with that."""
    whole = simulate(workload, cluster, policy, base_slo=60.0, engine=EngineOptions(**options))
    ends_s = np.unique(np.concatenate([whole.first_token_s, whole.call_finish_s]))
    simulation = Simulation(workload, cluster, policy, base_slo=60.0, engine=EngineOptions(**options))
    first, last = np.quantile(ends_s, between)
    for until_s in ends_s[(ends_s > first) & (ends_s < last)]:
        simulation.advance(float(until_s))
        if (start := start_of(simulation)) is not None:
            yield whole, simulation, start


def assert_goes_on(whole, simulation: Simulation, got) -> None:
    now_s = simulation.now_s
    later = ~(whole.call_finish_s <= now_s)
    assert np.array_equal(got.instance[later], whole.instance[later])
    assert got.call_finish_s[later] == pytest.approx(whole.call_finish_s[later], abs=1e-9)
    ends_later = whole.finish_s > now_s
    assert got.finish_s[ends_later] == pytest.approx(whole.finish_s[ends_later], abs=1e-9)
    fresh = whole.release_s > now_s
    for name in ("release_s", "admit_s", "first_token_s", "estimate_s", "budget_s"):
        assert getattr(got, name)[fresh] == pytest.approx(getattr(whole, name)[fresh], abs=1e-9), name
    assert np.array_equal(got.call_cached_tokens[fresh], whole.call_cached_tokens[fresh])
    engines = simulation._memory.engines
    # steps are counted when they end, so that the two runs share none
    assert got.decode_tokens == pytest.approx(whole.decode_tokens - engines["decode_tokens"])
    assert got.steps == pytest.approx(whole.steps - engines["engine_steps"])
    assert got.busy_s == pytest.approx(whole.busy_s - engines["busy_s"], abs=1e-6)
    assert np.array_equal(got.preemptions, whole.preemptions)
    for m, peak in enumerate(whole.peak_kv_blocks):
        if engines["peak_blocks"][m] < peak:  # it comes later
            assert got.peak_kv_blocks[m] == peak


@pytest.mark.parametrize("caching", ["off", "template"])
@pytest.mark.parametrize("policy", ["hexgen_flow", "vllm"])
def test_one_instance_goes_on(caching: str, policy: str) -> None:
    """At the end of any step; with prefix caching, once all templates are in the cache, which holds them all."""
    workload = generate("trace1", n_queries=10)
    workload = workload.with_arrivals(arrival_times("poisson", 10, 0.1, seed=1))
    instance = make_instance("one", (0.03, 3e-5, 1e-9, 1e-4, 1e-7), 8000, max_num_seqs=6)
    cluster = Cluster("one", (instance,))
    between = (0.2, 0.8) if caching == "off" else (0.5, 0.9)
    waiting = running = checked = 0
    options = dict(prefix_caching=caching)
    for i, (whole, simulation, start) in enumerate(stops(workload, cluster, policy, options, between)):
        if i % 4:
            continue
        assert_goes_on(whole, simulation, begun(workload, cluster, start, policy, caching))
        under_way = start.calls["generated"] < workload.output_tokens[start.calls["call"]]
        running += (start.calls["generated"][under_way] > 0).sum()
        waiting += (start.calls["generated"][under_way] == 0).sum()
        checked += 1
    assert checked >= 10
    assert min(waiting, running) > checked


def aligned(n: int, seed: int, **sizes) -> Workload:
    """Chains and fans of short calls that arrive on step boundaries."""
    rng = np.random.default_rng(seed)
    queries = []
    for i in range(n):
        lengths = [(int(a), int(b)) for a, b in rng.integers(1, [[40, 40]] * 4)]
        after = [[], [0], [0], [1, 2]]
        calls = [call(*x, after=a, **sizes) for x, a in zip(lengths, after, strict=True)]
        queries.append(dict(arrival_s=int(rng.integers(8)) / 64 + i / 8, calls=calls))
    queries.sort(key=lambda q: q["arrival_s"])
    return make_workload(queries)


@pytest.mark.parametrize("policy", ["hexgen_flow", "low"])
def test_two_instances_go_on(policy: str) -> None:
    """All steps take 1/64 s and calls arrive at multiples of that, so that both instances end their steps at the same times."""
    workload, cluster = aligned(30, 0), cluster_of(2, STEP_S, max_num_seqs=4, budget=64)
    checked = 0
    for i, (whole, simulation, start) in enumerate(
        stops(workload, cluster, policy, dict(prefix_caching="off"))
    ):
        if i % 4 == 0:
            assert_goes_on(whole, simulation, begun(workload, cluster, start, policy))
            checked += len(np.unique(start.calls["instance"])) == 2
    assert checked >= 5


def test_memory_that_runs_out_later() -> None:
    """Taken before the first preemption; the rest preempts as the whole did, so the blocks of the running calls are counted."""
    preempted = checked = 0
    for seed in range(6):
        queries = [
            dict(arrival_s=i * STEP_S, calls=[call(8 + (7 * i + seed) % 23, 30 + (5 * i) % 17)])
            for i in range(12)
        ]
        workload = make_workload(queries)
        cluster = cluster_of(1, STEP_S, kv_blocks=40, block_size=4, max_num_seqs=6, budget=64)
        for whole, simulation, start in stops(
            workload, cluster, "vllm", dict(prefix_caching="off"), (0, 0.6)
        ):
            assert_goes_on(whole, simulation, begun(workload, cluster, start, "vllm"))
            preempted += whole.preemptions[0]
            checked += 1
    assert checked >= 6
    assert preempted > checked


def test_peak_counts_what_runs_at_the_start() -> None:
    """One call with 20 prompt tokens and 5 of 13 generated, blocks of 4: 24 tokens in the cache now, 32 at its end."""
    workload = make_workload([dict(arrival_s=0.0, calls=[call(20, 13)])])
    start = Start(10.0, started((0, 0, 5)))
    got = begun(workload, cluster_of(1, block_size=4, kv_blocks=9), start)
    assert got.call_finish_s[0] == 18.0
    assert got.peak_kv_blocks[0] == 8
    assert got.prefill_tokens[0] == 0


def test_what_does_not_fit_waits() -> None:
    """Two calls that are said to run hold more than the memory: the second waits for the first, and computes its prompt and
    the four tokens before its newest again."""
    workload = make_workload(
        [dict(arrival_s=0.0, calls=[call(20, 13)]), dict(arrival_s=0.0, calls=[call(20, 13)])]
    )
    start = Start(10.0, started((0, 0, 5), (1, 0, 5)))
    got = begun(workload, cluster_of(1, block_size=4, kv_blocks=10), start, "vllm")
    assert got.call_finish_s.tolist() == [18.0, 27.0]  # 8 steps; then a prompt step and 8
    assert got.prefill_tokens[0] == 24


# ------------------------------------------------------------------------------------------------------ what it means


def test_finished_calls_release_their_successors() -> None:
    """0 -> 1 -> 2 and 0, 3 -> 4. Call 0 has finished, 1 waits, 3 has a token to go: 2 follows 1, and 4 follows 3."""
    calls = [call(), call(10, 3, after=[0]), call(10, 2, after=[1]), call(10, 6), call(10, 4, after=[0, 3])]
    workload = make_workload([dict(arrival_s=2.0, calls=calls), dict(arrival_s=103.0, calls=[call(10, 1)])])
    start = Start(100.0, started((0, 0, 10), (3, 0, 5), (1, 0, 0)))
    got = begun(workload, cluster_of(1), start)
    # call 1's prompt and the last token of 3 take one step
    assert got.call_finish_s[1:].tolist() == [103.0, 105.0, 101.0, 105.0, 104.0]
    assert got.release_s[[2, 4, 5]].tolist() == [103.0, 101.0, 103.0]
    assert got.finish_s.tolist() == [105.0, 104.0]


@pytest.mark.parametrize("arrival_s", [2.0, 99.0])
def test_nothing_happens_before_the_start(arrival_s: float) -> None:
    """Calls whose tool runs at the start, first calls and later ones: they come after it, when the tool has run at the most
    once more; and queries that arrived and of whose calls none was dispatched, at once."""
    queries = [
        dict(arrival_s=arrival_s, calls=[call(), call(10, 3, after=[0], tool_time_s=6.0)]),
        dict(arrival_s=arrival_s, calls=[call(10, 2, tool_time_s=6.0)]),
        dict(arrival_s=arrival_s, calls=[call(10, 2)]),
    ]
    got = begun(make_workload(queries), cluster_of(2), Start(100.0, started((0, 0, 10))))
    assert ((got.release_s[1:3] >= 100.0) & (got.release_s[1:3] <= 106.0)).all()
    assert got.admit_s[1:3].tolist() == got.release_s[1:3].tolist()
    assert (got.release_s[3], got.call_finish_s[3]) == (100.0, 102.0)


def test_a_query_that_has_finished_ends_at_the_start() -> None:
    workload = make_workload([dict(arrival_s=1.0, calls=[call()]), dict(arrival_s=2.0, calls=[call()])])
    for rows, ends_s in (([(0, 0, 10)], [100.0, 110.0]), ([(0, 0, 10), (1, 0, 10)], [100.0, 100.0])):
        for at_s in (100.0, 100):  # a whole number of seconds is a time as well
            got = begun(workload, cluster_of(1), Start(at_s, started(*rows)))
            assert got.finish_s.tolist() == ends_s
            assert got.finish_s.dtype == np.float64


def test_waiting_calls_are_served_by_their_keys() -> None:
    """One at a time, 10 steps each; equal keys in the order given."""
    workload = make_workload([dict(arrival_s=0.0, calls=[call()]) for _ in range(5)])
    start = Start(
        50.0, started((4, 0, 3, 9.0), (0, 0, 0, 3.0), (1, 0, 0, 1.0), (3, 0, 0, 2.0), (2, 0, 0, 2.0))
    )
    got = begun(workload, cluster_of(1, max_num_seqs=1), start)
    assert got.call_finish_s.tolist() == [97.0, 67.0, 87.0, 77.0, 57.0]


def test_what_waits_counts_as_load() -> None:
    """Least outstanding work: instance 0 is believed to have 3 s of work, 1 has 2 s."""
    queries = [dict(arrival_s=0.0, calls=[call()]) for _ in range(2)] + [
        dict(arrival_s=51.0, calls=[call(1, 1)])
    ]
    workload = make_workload(queries)
    for estimates_s, chosen in (((3.0, 2.0), 1), ((2.0, 3.0), 0)):
        rows = np.concatenate([started((m, m, 4), estimate_s=estimates_s[m]) for m in range(2)])
        got = begun(workload, cluster_of(2), Start(50.0, rows), "low")
        assert got.instance.tolist() == [0, 1, chosen]


def test_closed_instances_get_nothing() -> None:
    """They finish what they have: calls that run and calls that wait."""
    queries = [dict(arrival_s=0.0, calls=[call(), call(5, 2, after=[0])]) for _ in range(3)]
    queries += [dict(arrival_s=60.0 + i, calls=[call()]) for i in range(6)]
    workload = make_workload(queries)
    rows = started((0, 1, 4), (2, 1, 0), (4, 0, 2))
    for policy in ("vllm", "hexgen_flow", "ray"):
        start = Start(50.0, rows, closed=np.array([False, True, False]))
        got = begun(workload, cluster_of(3), start, policy)
        assert got.instance[[0, 2, 4]].tolist() == [1, 1, 0]
        others = np.setdiff1d(np.arange(workload.n_calls), [0, 2, 4])
        assert set(got.instance[others].tolist()) == {0, 2}
        assert np.isfinite(got.finish_s).all()
        assert got.call_finish_s[[0, 2]].tolist() == [56.0, 60.0]


@pytest.mark.parametrize(
    ("warm", "caching", "hit"), [(True, "template", 64), (False, "template", 0), (True, "off", 0)]
)
def test_templates_are_warm_or_cold(warm: bool, caching: str, hit: int) -> None:
    """70 tokens of template, of which four whole blocks of 16 are cached, on each instance; without room for it, none."""
    shared = dict(template=0, template_tokens=70)
    queries = [dict(arrival_s=60.0, calls=[call(100, 2, **shared), call(90, 2, **shared)])]
    workload = make_workload(queries)
    start = Start(50.0, started(), warm=warm)
    got = begun(workload, cluster_of(2), start, "vllm", caching)
    assert got.instance.tolist() == [0, 1]
    assert got.call_cached_tokens.tolist() == [hit, hit]
    assert got.prefill_tokens.tolist() == [100 - hit, 90 - hit]


@pytest.mark.parametrize("watched", [1, 5, 11, 12])
def test_a_run_ends_with_the_queries_that_are_watched(watched: int) -> None:
    """These end as they do when all are; the others keep the cluster busy, and count as not finished."""
    workload = aligned(12, 1)
    cluster = cluster_of(2, STEP_S, max_num_seqs=4, budget=64)
    rows = started((0, 0, 1), (4, 1, 0))
    whole = begun(workload, cluster, Start(0.0, rows))
    got = begun(workload, cluster, Start(0.0, rows, watched=watched))
    assert np.array_equal(got.finish_s[:watched], whole.finish_s[:watched])
    assert np.isinf(got.finish_s[watched:]).all()
    early = np.isfinite(got.call_finish_s)
    assert np.array_equal(early, whole.call_finish_s <= whole.finish_s[:watched].max())
    assert (got.busy_s <= whole.busy_s).all()


def test_a_run_from_an_idle_cluster() -> None:
    """Nothing has started and nothing is warm: as without a start."""
    workload = generate("tiny").with_arrivals(50.0 + arrival_times("poisson", 12, 2.0))
    cluster = cluster_of(2, STEP_S)
    got = begun(workload, cluster, Start(50.0, started(), warm=False), caching="template")
    expected = simulate(workload, cluster, "hexgen_flow", base_slo=60.0)
    assert np.array_equal(got.finish_s, expected.finish_s)
    assert np.array_equal(got.instance, expected.instance)


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(at_s=np.nan), r"start: at_s=nan must be a finite time"),
        (dict(at_s=np.inf), r"start: at_s=inf must be a finite time"),
        (dict(calls=started((2, 0, 0))), r"start: calls\['call'\] must lie in 0 to 1"),
        (dict(calls=started((-1, 0, 0))), r"start: calls\['call'\] must lie in 0 to 1"),
        (dict(calls=started((0, 2, 0))), r"start: calls\['instance'\] must lie in 0 to 1"),
        (dict(calls=started((0, -1, 0))), r"start: calls\['instance'\] must lie in 0 to 1"),
        (
            dict(calls=started((0, 0, 3), (1, 0, 11))),
            r"call 1 has generated 11 tokens, .* 0 to its output of 10",
        ),
        (dict(calls=started((0, 0, -1))), r"call 0 has generated -1 tokens, .* 0 to its output of 10"),
        (dict(closed=np.array([True, True])), r"start: closed=.* some of the 2 instances, not all of them"),
        (dict(watched=0), "start: watched=0 must lie in 1 to 2 queries"),
        (dict(watched=3), "start: watched=3 must lie in 1 to 2 queries"),
        (dict(closed=np.array([True])), r"start: closed=.* some of the 2 instances, not all of them"),
    ],
)
def test_what_cannot_be_is_refused(change: dict, message: str) -> None:
    workload = make_workload([dict(arrival_s=0.0, calls=[call()]) for _ in range(2)])
    start = Start(**(dict(at_s=5.0, calls=started((0, 0, 3))) | change))
    with pytest.raises(InputError, match=message):
        begun(workload, cluster_of(2), start)


# --------------------------------------------------------------------------------------------- arrivals in any order


@pytest.mark.parametrize("policy", ["hexgen_flow", "vllm", "ray", "eft"])
def test_arrivals_in_any_order(policy: str) -> None:
    """The queries may stand in any order: each has the same fate. Its SLO goes with it.

    Instances serve one call at a time, for calls of several queries that end in one step are told apart by their order.
    """
    queries, runs = 12, 3
    rng = np.random.default_rng(0)
    workload = generate("tiny").with_tenants(np.zeros(queries, int), ["all"], rng.uniform(1, 3, queries))
    arrivals_s = np.stack([arrival_times("poisson", queries, 3.0, seed=s) for s in range(runs)])
    cluster = Cluster(
        "two",
        tuple(
            make_instance(f"i{m}", (s, 1e-5, 0.0, 1e-4, 1e-7), 2000, max_num_seqs=1)
            for m, s in enumerate((0.01, 0.03))
        ),
    )
    rule = load_policy(policy)

    def finish_s(workload: Workload, arrivals_s: np.ndarray) -> GridResult:
        return simulate_grid(workload, cluster, rule, arrivals_s=arrivals_s, base_slo=8.0, workers=1)

    expected = finish_s(workload, arrivals_s)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(queries)
        got = finish_s(workload.take(order), arrivals_s[:, order])
        assert np.array_equal(got.finish_s, expected.finish_s[:, order])
        assert np.array_equal(got.latency_s, expected.latency_s[:, order])
    assert len(np.unique(expected.finish_s)) == expected.finish_s.size
