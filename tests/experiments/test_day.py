"""The changing day: its config, its arrivals, and what happens to the cluster meanwhile."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.experiments.day import (
    Change,
    ClusterClock,
    Day,
    Phase,
    believed_cluster,
    day_workload,
    read_day,
    sliding,
    traces_of,
)
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator.session import Simulation
from hexrepro.workload import generate
from tests.strategies import make_instance, make_workload

STEP_S = 1 / 64
COEFFICIENTS = (STEP_S, 1e-5, 1e-9, 1e-4, 1e-8)


def cluster_of(*names: str) -> Cluster:
    return Cluster("three", tuple(make_instance(name, COEFFICIENTS, 9000) for name in names))


CLUSTER = cluster_of("a", "b", "c")
PHASES = [
    dict(duration_s=100, rate_qps=0.5, trace="trace1"),
    dict(duration_s=50.0, rate_qps=4.0, trace="tiny"),
    dict(duration_s=200, rate_qps=1.0, trace="trace1"),
]


def day_of(*changes: dict, away=(), phases=PHASES) -> Day:
    return read_day(dict(phases=phases, changes=list(changes), away=away), CLUSTER)


# ----------------------------------------------------------------------------------------------------- from config


def test_a_day_from_its_config() -> None:
    leave = dict(at_s=200, event="leave", instance="b")
    slow = dict(at_s=10.0, event="slow", instance="a", factor=2.5)
    day = day_of(leave, slow, away=["c"])
    assert day.phases[0] == Phase(100, 0.5, "trace1")
    assert day.changes == (
        Change(10.0, "slow", "a", 2.5, 60.0),
        Change(200, "leave", "b"),
    )  # in order of time
    assert day.away == ("c",)
    assert day.length_s == 350.0
    assert day.starts_s() == [0.0, 100.0, 150.0]
    assert [day.rate_qps(t) for t in (0.0, 99.9, 100.0, 149.9, 150.0, 349.9, 350.0)] == [
        0.5,
        0.5,
        4.0,
        4.0,
        1.0,
        1.0,
        0.0,
    ]
    assert traces_of(day) == ["trace1", "tiny"]
    labels = [
        Change(0, "slow", "a", 2.5).label,
        Change(0, "slow", "a").label,
        Change(0, "leave", "b").label,
        Change(0, "join", "b").label,
    ]
    assert labels == ["a 2.5 × slower", "a recovers", "b leaves", "b joins"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (dict(phases=[]), "day.phases is empty; at least one phase is needed"),
        (dict(), "day.phases is empty"),
        (
            dict(phases=["trace1"]),
            r"day.phases\[0\]='trace1' must hold the fields duration_s, rate_qps, trace",
        ),
        (
            dict(phases=[PHASES[0], dict(PHASES[1], rate=3)]),
            r"day.phases\[1\].rate is no field; did you mean .*rate_qps",
        ),
        (
            dict(phases=[dict(duration_s=1, trace="tiny")]),
            r"day.phases\[0\]: missing 1 required .*'rate_qps'",
        ),
        (
            dict(phases=[dict(PHASES[0], trace="trace9")]),
            r"day.phases\[0\].trace=trace9 is unknown; did you mean trace",
        ),
        (
            dict(phases=[dict(PHASES[0], duration_s=0)]),
            r"day.phases\[0\].duration_s=0 must be a positive number",
        ),
        (
            dict(phases=[dict(PHASES[0], rate_qps="high")]),
            r"day.phases\[0\].rate_qps='high' must be a positive number",
        ),
        (
            dict(phases=[dict(PHASES[0], rate_qps=np.inf)]),
            r"day.phases\[0\].rate_qps=inf must be a positive number",
        ),
        (dict(changes=["b"]), r"day.changes\[0\]='b' must hold the fields at_s, event, instance, factor"),
        (dict(changes=[dict(at_s=1, event="burn", instance="a")]), r"day.changes\[0\].event=burn is unknown"),
        (dict(changes=[dict(at_s=1, event="leaves", instance="a")]), "did you mean leave"),
        (
            dict(changes=[dict(at_s=1, event="leave", instance="d")]),
            r"day.changes\[0\].instance: cluster three has no instance d",
        ),
        (dict(changes=[dict(at_s=1, event="leave")]), r"day.changes\[0\]: missing 1 required .*'instance'"),
        (
            dict(changes=[dict(at_s=-1, event="leave", instance="a")]),
            r"day.changes\[0\].at_s=-1 must be 0 or more seconds",
        ),
        (
            dict(changes=[dict(at_s=np.nan, event="leave", instance="a")]),
            r"day.changes\[0\].at_s=nan must be 0 or more",
        ),
        (
            dict(changes=[dict(at_s="noon", event="leave", instance="a")]),
            r"day.changes\[0\].at_s=.*noon.* must be 0 or more",
        ),
        (
            dict(changes=[dict(at_s=1, event="slow", instance="a", factor=0)]),
            r"day.changes\[0\].factor=0 must be a positive number",
        ),
        (
            dict(changes=[dict(at_s=1, event="slow", instance="a", learned_after_s=-5)]),
            r"day.changes\[0\].learned_after_s=-5 must be 0 or more seconds",
        ),
        (dict(away=["a", "z"]), "day.away: cluster three has no instance z"),
        (dict(phases=[dict(PHASES[0], trace=3)]), r"day.phases\[0\].trace=3 is unknown"),
        (dict(changes=[dict(at_s=1, event=5, instance="a")]), r"day.changes\[0\].event=5 is unknown"),
        (
            dict(changes=[dict(at_s=1, event="leave", instance=2)]),
            r"day.changes\[0\].instance: cluster three has no instance 2",
        ),
    ],
)
def test_mistakes_are_named(spec: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_day(dict(phases=PHASES) | spec if spec else spec, CLUSTER)


# -------------------------------------------------------------------------------------------------------- arrivals


def test_each_phase_has_its_rate_and_its_trace() -> None:
    """Poisson: over 60 days the mean count of each phase is within 4 standard errors of rate times length, and the variance
    over days is that of a Poisson count."""
    day, days = day_of(), 60
    counts = np.zeros((days, 3))
    for seed in range(days):
        workload = day_workload(day, seed)
        assert (np.diff(workload.arrival_s) >= 0).all()
        assert workload.arrival_s[-1] < day.length_s
        counts[seed] = np.histogram(workload.arrival_s, [0.0, 100.0, 150.0, 350.0])[0]
    expected = np.array([50.0, 200.0, 200.0])
    assert (np.abs(counts.mean(axis=0) - expected) < 4 * np.sqrt(expected / days)).all()
    dispersion = counts.var(axis=0, ddof=1) / expected
    assert (
        (dispersion > 0.4) & (dispersion < 1.9)
    ).all()  # 99.9 % of a chi-square with 59 degrees of freedom
    correlation = np.corrcoef(counts, rowvar=False)[np.triu_indices(3, 1)]
    assert np.abs(correlation).max() < 0.45


def calls_of_queries(workload) -> list[tuple]:
    columns = np.stack([workload.input_tokens, workload.output_tokens, workload.template_tokens])
    return [
        tuple(map(tuple, columns[:, a:b].tolist()))
        for a, b in zip(workload.query_offsets[:-1], workload.query_offsets[1:], strict=True)
    ]


def test_queries_come_from_the_phase_s_trace_in_random_order() -> None:
    """Each query of the trace comes once before any comes again, in another order each day."""
    day, traces = day_of(), {name: Counter(calls_of_queries(generate(name))) for name in ("trace1", "tiny")}
    orders = []
    for seed in range(2):
        workload = day_workload(day, seed)
        queries = calls_of_queries(workload)
        for (first_s, last_s), trace in (
            ((0.0, 100.0), "trace1"),
            ((100.0, 150.0), "tiny"),
            ((150.0, 350.0), "trace1"),
        ):
            inside = (workload.arrival_s >= first_s) & (workload.arrival_s < last_s)
            got = [queries[i] for i in np.flatnonzero(inside)]
            size = traces[trace].total()
            for i in range(0, len(got) - size + 1, size):
                assert Counter(got[i : i + size]) == traces[trace]
            assert not Counter(got[len(got) // size * size :]) - traces[trace]
        orders.append(queries[:30])
    assert orders[0] != orders[1]
    assert day_workload(day, 0).equals(day_workload(day, 0))
    # the same prompt template in two phases of one trace, and another in another trace
    assert len(np.unique(day_workload(day, 0).template)) >= len(np.unique(generate("trace1").template))


def test_a_day_on_which_nothing_comes() -> None:
    with pytest.raises(InputError, match="no query arrives in the whole day; raise a rate or a duration"):
        day_workload(day_of(phases=[dict(duration_s=1e-3, rate_qps=1e-3, trace="tiny")]), 0)


# --------------------------------------------------------------------------------------------------------- changes


def steady() -> Simulation:
    """A call of 10 steps every second, in turn to a, b, c."""
    queries = [dict(arrival_s=float(i), calls=[dict(input_tokens=8, output_tokens=10)]) for i in range(300)]
    plain = tuple(make_instance(n, (STEP_S, 0.0, 0.0, 0.0, 0.0), 9000) for n in "abc")
    return Simulation(make_workload(queries), Cluster("plain", plain), "vllm", base_slo=60.0)


@pytest.mark.parametrize("piece_s", [0.5, 7.0, 1000.0])
def test_changes_happen_at_their_times(piece_s: float) -> None:
    """However long the pieces are in which the day is gone through."""
    day = day_of(
        dict(at_s=50.5, event="slow", instance="a", factor=4.0, learned_after_s=30.0),
        dict(at_s=100.5, event="leave", instance="b"),
        dict(at_s=150.5, event="join", instance="c"),
        dict(at_s=200.75, event="slow", instance="a"),
        away=["c"],
    )
    simulation = steady()
    clock = ClusterClock(day, CLUSTER)
    clock.begin(simulation)
    assert simulation.is_open.tolist() == [True, True, False]
    changed_in = []
    while simulation.now_s < 300.0:
        before_s = simulation.now_s
        if clock.advance(simulation, before_s + piece_s):
            changed_in.append((before_s, simulation.now_s))
    for at_s in (50.5, 80.5, 100.5, 150.5, 200.75, 260.75):
        assert any(a < at_s <= b for a, b in changed_in)
    if piece_s < 10.0:
        assert len(changed_in) == 6
    calls = simulation.calls
    there = [("ab", 100.5), ("a", 150.5), ("ac", 300.0)]
    for i, m in enumerate(calls["instance"]):
        names = next(names for names, until_s in there if i < until_s)
        assert "abc"[m] == names[i % len(names)]
    took = np.rint((calls["finish_s"] - calls["release_s"]) / STEP_S)
    slow = (calls["instance"] == 0) & (calls["release_s"] > 50.5) & (calls["release_s"] < 200.75)
    assert set(took[slow]) == {40.0}
    assert set(took[~slow]) == {10.0}
    # what the scheduler reckons with, once it has been told
    estimates = np.rint(calls["estimate_s"] / STEP_S)
    known = (calls["instance"] == 0) & (calls["release_s"] > 80.5) & (calls["release_s"] < 260.75)
    assert set(estimates[known]) == {40.0}
    assert set(estimates[~known]) == {10.0}


def test_a_copied_clock_goes_its_own_way() -> None:
    day = day_of(dict(at_s=10.5, event="leave", instance="a"), dict(at_s=20.5, event="join", instance="a"))
    simulation, clock = steady(), ClusterClock(day, CLUSTER)
    clock.advance(simulation, 5.0)
    fork, other = simulation.fork(), clock.copy()
    assert other.advance(fork, 15.0)
    assert (fork.is_open.tolist(), simulation.is_open.tolist()) == ([False, True, True], [True, True, True])
    assert clock.advance(simulation, 15.0)
    assert not clock.advance(simulation, 16.0)
    assert clock.advance(simulation, 30.0)
    assert (fork.is_open.tolist(), simulation.is_open.tolist()) == ([False, True, True], [True, True, True])


def test_not_all_can_be_away() -> None:
    clock = ClusterClock(day_of(away=["a", "b", "c"]), CLUSTER)
    with pytest.raises(InputError, match="instance 2 is the last that takes calls"):
        clock.begin(steady())


def test_the_cluster_as_it_is_believed_to_be() -> None:
    simulation = Simulation(day_workload(day_of(), 0), CLUSTER, "hexgen_flow", base_slo=60.0)
    assert believed_cluster(CLUSTER, simulation) == CLUSTER
    simulation.slow_down(0, 9.0)  # which nobody knows
    assert believed_cluster(CLUSTER, simulation) == CLUSTER
    simulation.believe(1, 3.0)
    believed = believed_cluster(CLUSTER, simulation)
    assert [spec.name for spec in believed.instances] == ["a", "b", "c"]
    assert believed.instances[0] == CLUSTER.instances[0]
    assert believed.instances[1].latency.coefficients == pytest.approx(3 * np.array(COEFFICIENTS), rel=1e-12)
    fields = ["base_s", "prefill_token_s", "prefill_context_s", "sequence_s", "kv_token_s", "kind"]
    for field in fields:
        assert np.array_equal(instance_views(believed)[field], simulation.instances[field]), field


# --------------------------------------------------------------------------------------------------- sliding tails


def test_sliding_by_hand() -> None:
    """Ten queries that finish at 10, 20, ..., 100 s after 1, 2, ..., 10 s, told in another order; windows of 50 s."""
    order = np.array([3, 0, 9, 5, 1, 7, 2, 8, 4, 6])
    finish_s, latency_s = 10.0 * (order + 1), 1.0 * (order + 1)
    times_s = np.array([0.0, 40.0, 50.0, 55.0, 60.0, 100.0, 110.0, 111.0, 500.0])
    got = sliding(times_s, finish_s, latency_s, 50.0, p=0.5)
    #   at 50: 1..5; at 55: 1..5; at 60: 1..6, for 10 s is still within; at 100: 5..10; at 110: 6..10; at 111: 7..10, too few
    assert got == pytest.approx([np.nan, np.nan, 3.0, 3.0, 3.5, 7.5, 8.0, np.nan, np.nan], nan_ok=True)
    assert sliding(np.array([100.0]), finish_s, latency_s, 1e3)[0] == pytest.approx(9.55)


def test_sliding_leaves_out_what_never_finishes() -> None:
    finish_s = np.array([1.0, 2.0, 3.0, 4.0, 5.0, np.inf])
    got = sliding(np.array([5.0, 1e9]), finish_s, finish_s, 1e12, p=1.0)
    assert got.tolist() == [5.0, 5.0]
