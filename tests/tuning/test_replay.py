"""The replay of a window: what is known stays, what is not is drawn from what was seen, and what it predicts comes true."""

from __future__ import annotations

import numpy as np
import pytest

from hexrepro.cluster.types import Cluster
from hexrepro.scheduling import load_policy
from hexrepro.simulator import EngineOptions, simulate_grid
from hexrepro.simulator.session import Simulation
from hexrepro.tuning.feed import Feed
from hexrepro.tuning.history import History
from hexrepro.tuning.online import OnlineTuner
from hexrepro.tuning.replay import BadWindow, Replay, make_replay, predicted_p95_s
from hexrepro.workload import Workload, arrival_times, generate
from hexrepro.workload.dag import edges
from tests.strategies import make_instance, make_workload
from tests.tuning.events_by_hand import chain, cluster_of, step, tell

POLICY = load_policy("hexgen_flow")
COLD = EngineOptions(prefix_caching="off")


def replay_of(
    history: History,
    now_s: float,
    instances: int = 2,
    seeds: int = 4,
    window_s: float = 100.0,
    seed: int = 0,
    step_s: float = 1.0,
    closed=None,
    **options,
) -> Replay:
    return make_replay(
        history,
        now_s,
        window_s=window_s,
        seeds=seeds,
        cluster=cluster_of(instances, step_s),
        closed=np.zeros(instances, bool) if closed is None else np.array(closed),
        rng=np.random.default_rng(seed),
        **options,
    )


def watched(workload: Workload, cluster, until_s: float) -> tuple[Simulation, History]:
    simulation = Simulation(workload, cluster, POLICY, base_slo=60.0, engine=COLD)
    feed = Feed(simulation, OnlineTuner(POLICY, cluster, engine=COLD))
    for now_s in np.linspace(0.0, until_s, 20):
        simulation.advance(now_s)
        feed.tell()
    return simulation, feed.tuner.history


def calls_of(w: Workload, query: int) -> slice:
    return slice(int(w.query_offsets[query]), int(w.query_offsets[query + 1]))


def dag_of(w: Workload, query: int) -> set[tuple[int, int]]:
    """The query's dependencies, calls counted from its first."""
    at = calls_of(w, query)
    before, after = edges(w.succ_offsets, w.successors)
    inside = (before >= at.start) & (before < at.stop)
    return {
        (int(a) - at.start, int(b) - at.start) for a, b in zip(before[inside], after[inside], strict=True)
    }


def stages_of(w: Workload, query: int) -> list[str]:
    return [w.stage_names[s] for s in w.stage[calls_of(w, query)]]


# --------------------------------------------------------------------------------------- against what was simulated


STEP_S = 1 / 16


@pytest.fixture(scope="module")
def busy():
    """Two instances with steps of 1/16 s in the middle of 24 queries; the simulation, what was told of it, and its replay."""
    workload = generate("trace1", n_queries=24).with_arrivals(arrival_times("poisson", 24, 0.2, seed=3))
    cluster = cluster_of(2, STEP_S)
    simulation, history = watched(workload, cluster, 90.0)
    return simulation, history, replay_of(history, 90.0, step_s=STEP_S, seeds=6)


def test_what_is_known_of_queries_under_way_stays(busy) -> None:
    simulation, history, replay = busy
    w, known = replay.workload, simulation.workload
    before, after = edges(known.succ_offsets, known.successors)
    assert len(history.open) >= 5
    for query, (name, record) in enumerate(history.open.items()):
        at = calls_of(w, query)
        calls = np.array(list(record.index))
        n = len(calls)
        assert n <= at.stop - at.start
        assert stages_of(w, query)[:n] == [known.stage_names[s] for s in known.stage[calls]]
        for field in ("input_tokens", "template", "template_tokens"):
            assert np.array_equal(getattr(w, field)[at][:n], getattr(known, field)[calls])
        done = np.isfinite(simulation.calls["finish_s"][calls])
        assert np.array_equal(w.output_tokens[at][:n][done], known.output_tokens[calls][done])
        index = {int(c): i for i, c in enumerate(calls)}
        true_dag = {
            (index[a], index[b])
            for a, b in zip(before.tolist(), after.tolist(), strict=True)
            if a in index and b in index
        }
        assert {(a, b) for a, b in dag_of(w, query) if b < n} == true_dag
        assert replay.arrivals_s[:, query].tolist() == [known.arrival_s[name]] * len(replay.arrivals_s)
        assert w.slo_scale[query] == simulation.slo_s[name]


def test_where_the_calls_stand(busy) -> None:
    """As the simulation has it: where they run or wait, how far they are (to a token), and with which key."""
    simulation, history, replay = busy
    calls, start = simulation.calls, replay.start
    assert start.at_s == 90.0
    assert start.warm
    of_replay = {}
    for query, record in enumerate(history.open.values()):
        for call, index in record.index.items():
            of_replay[int(replay.workload.query_offsets[query]) + index] = call
    assert sorted(start.calls["call"].tolist()) == sorted(of_replay)
    rows = [of_replay[c] for c in start.calls["call"].tolist()]
    for field in ("instance", "key", "estimate_s", "budget_s"):
        assert np.array_equal(start.calls[field], calls[field][rows])
    finished = np.isfinite(calls["finish_s"][rows])
    running = ~finished & np.isfinite(calls["first_token_s"][rows])
    waiting = ~finished & ~running
    assert min(finished.sum(), running.sum()) >= 5
    # in this order: the finished, the running by their first token, the waiting by their release
    assert np.array_equal(np.argsort(2 * waiting + running, kind="stable"), np.arange(len(rows)))
    assert (np.diff(calls["first_token_s"][rows][running]) >= 0).all()
    assert (np.diff(calls["release_s"][rows][waiting]) >= 0).all()
    outputs = replay.workload.output_tokens[start.calls["call"]]
    assert np.array_equal(start.calls["generated"][finished], outputs[finished])
    assert (start.calls["generated"][waiting] == 0).all()
    true_tokens = 1 + np.floor((90.0 - calls["first_token_s"][rows][running]) / STEP_S + 1e-9)
    assert np.abs(start.calls["generated"][running] - true_tokens).max() <= 1
    assert (outputs[running] > start.calls["generated"][running]).all()


def test_drawn_lengths_were_seen_and_exceed_what_was_generated(busy) -> None:
    _, history, replay = busy
    w, generated = replay.workload, dict(replay.start.calls[["call", "generated"]].tolist())
    seen: dict[str, set[int]] = {name: set() for name in w.stage_names}
    for record in history.finished:
        for s in record.steps:
            seen[w.stage_names[s["stage"]]].add(int(s["output_tokens"]))
    guessed = 0
    for query, record in enumerate(history.open.values()):
        at = calls_of(w, query)
        for i, c in enumerate(range(at.start, at.stop)):
            if i < len(record.calls) and record.calls[i].finish_s is not None:
                continue
            guessed += 1
            length, stage = int(w.output_tokens[c]), w.stage_names[w.stage[c]]
            assert length > generated.get(c, 0)
            if max(seen[stage], default=0) > generated.get(c, 0):
                assert length in seen[stage]
    assert guessed > 20


def test_the_window_comes_again(busy) -> None:
    """Queries that arrived in the window, finished or not, come once more, and then again to keep the cluster busy; what is
    guessed of those under way is the same."""
    simulation, history, replay = busy
    w, under_way, since_s = replay.workload, len(history.open), -10.0
    arrived = simulation.workload.arrival_s
    arrived = arrived[(arrived >= since_s) & (arrived <= 90.0)]
    n = len(arrived)
    assert w.n_queries - under_way == 2 * n
    assert replay.start.watched == under_way + n
    assert replay.arrivals_s[0, under_way : under_way + n] == pytest.approx(90.0 + arrived - since_s)
    assert replay.arrivals_s[0, under_way + n :] == pytest.approx(190.0 + arrived - since_s)
    open_arrivals = [q.arrival_s for q in history.open.values()]
    finished = {q.arrival_s: q for q in history.finished}
    for query in range(under_way, w.n_queries):
        arrival_s = arrived[(query - under_way) % n]
        if arrival_s in finished:
            source = finished[arrival_s]
            assert w.output_tokens[calls_of(w, query)].tolist() == source.steps["output_tokens"].tolist()
            assert dag_of(w, query) == set(map(tuple, source.edges.tolist()))
        else:
            twin = open_arrivals.index(arrival_s)
            for field in ("stage", "input_tokens", "output_tokens"):
                assert np.array_equal(
                    getattr(w, field)[calls_of(w, query)], getattr(w, field)[calls_of(w, twin)]
                )
            assert dag_of(w, query) == dag_of(w, twin)


def test_other_seeds_draw_the_gaps_and_shuffle_the_queries(busy) -> None:
    _, history, replay = busy
    future = replay.arrivals_s[:, len(history.open) :]
    n = future.shape[1] // 2
    gaps = np.diff(np.sort(future, axis=1), axis=1, prepend=90.0)
    recorded = gaps[0, :n]
    for row in gaps[1:]:
        assert np.abs(row[:, None] - recorded).min(axis=1).max() < 1e-9
        assert np.abs(np.sort(row) - np.sort(np.tile(recorded, 2))).max() > 1e-3  # with replacement
    assert (np.diff(future[0]) >= 0).all()
    for first in (0, n):  # all of them once, then all of them again
        orders = {tuple(np.argsort(row[first : first + n], kind="stable")) for row in future}
        assert len(orders) == len(future)
    assert (future[:, :n].max(axis=1) <= future[:, n:].min(axis=1)).all()


def test_the_same_draws_give_the_same_replay(busy) -> None:
    _, history, replay = busy
    again = replay_of(history, 90.0, step_s=STEP_S, seeds=6)
    assert again.workload.equals(replay.workload)
    assert np.array_equal(again.arrivals_s, replay.arrivals_s)
    assert np.array_equal(again.start.calls, replay.start.calls)
    other = replay_of(history, 90.0, step_s=STEP_S, seeds=6, seed=1)
    assert not np.array_equal(other.arrivals_s, replay.arrivals_s)


# ------------------------------------------------------------------------------------------ what it predicts comes true


def crowded_cluster() -> Cluster:
    """Two instances with steps of 62 ms and 4 ms more a sequence, which serve up to 8 calls at a time."""
    coefficients = (STEP_S, 0.0, 0.0, STEP_S / 16, 0.0)
    specs = [make_instance(f"i{m}", coefficients, 20_000, max_num_seqs=8) for m in range(2)]
    return Cluster("crowded", tuple(specs))


@pytest.mark.parametrize("closed", [(False, False), (False, True)])
@pytest.mark.parametrize("stop_s", [20.0, 35.0])
def test_prediction_comes_true_when_nothing_is_to_be_guessed(closed, stop_s: float) -> None:
    """All queries are equal, so the future is known but for arrivals, and none come any more: what is predicted for the queries
    under way is what happens to them, but for prompts that were half computed and for lengths by the clock. Many calls wait."""
    first, second = (
        dict(input_tokens=300, output_tokens=60),
        dict(input_tokens=200, output_tokens=40, after=[0], stage=1),
    )
    calls = [first, second, second, dict(input_tokens=100, output_tokens=80, after=[1, 2], stage=2)]
    queries = [dict(arrival_s=float(i), calls=calls) for i in range(36)]
    cluster = crowded_cluster()

    def go_on(workload: Workload, stops_s: list[float]) -> Feed:
        simulation = Simulation(workload, cluster, POLICY, base_slo=60.0, engine=COLD)
        feed = Feed(simulation, OnlineTuner(POLICY, cluster, engine=COLD))
        for until_s in stops_s:
            simulation.advance(until_s)
            feed.tell()
            if closed[1] and until_s == 10.0:
                simulation.close_instance(1)
        return feed

    history = go_on(make_workload(queries), [10.0, stop_s]).tuner.history
    replay = make_replay(
        history,
        stop_s,
        window_s=1000.0,
        seeds=1,
        cluster=cluster,
        closed=np.array(closed),
        rng=np.random.default_rng(0),
    )
    for query in range(len(history.open)):
        assert stages_of(replay.workload, query) == ["stage 0", "stage 1", "stage 1", "stage 2"]
        assert dag_of(replay.workload, query) == {(0, 1), (0, 2), (1, 3), (2, 3)}
    arrivals_s = replay.arrivals_s.copy()
    arrivals_s[:, len(history.open) :] = 1e5 + np.arange(replay.workload.n_queries - len(history.open))
    grid = simulate_grid(
        replay.workload,
        cluster,
        POLICY,
        arrivals_s=arrivals_s,
        base_slo=1.0,
        engine=COLD,
        start=replay.start,
        workers=1,
    )
    predicted_s = grid.latency_s[0, : len(history.open)]
    # what really happens if no more queries come
    under_way = list(history.open)
    gone = make_workload(queries[: 1 + max(under_way)])
    truth = go_on(gone, [10.0, stop_s, np.inf]).simulation
    true_s = (truth.finish_s - gone.arrival_s)[under_way]
    waiting = sum(c.first_token_s is None for q in history.open.values() for c in q.calls)
    assert len(under_way) >= 8
    assert waiting >= 3
    assert (true_s - (stop_s - gone.arrival_s[under_way])).max() > 10.0  # some have a long way to go
    error = np.abs(predicted_s / true_s - 1)
    assert error.max() < 0.12  # where a token more or less sends a call to the other instance
    assert np.quantile(error, 0.9) < 0.05
    assert np.median(error) < 0.01


def test_predicted_p95_is_that_of_separate_runs(busy) -> None:
    """Each (alpha, seed) on its own, in the order asked for."""
    _, _, replay = busy
    cluster, alphas = cluster_of(2, STEP_S), [0.7, 0.0]
    got = predicted_p95_s(replay, POLICY, cluster, alphas, engine=COLD, seeds=slice(1, 3))
    for a, alpha in enumerate(alphas):
        for s in range(2):
            grid = simulate_grid(
                replay.workload,
                cluster,
                POLICY.with_params(alpha=alpha),
                arrivals_s=replay.arrivals_s[1 + s : 2 + s],
                base_slo=1.0,
                engine=COLD,
                start=replay.start,
                workers=1,
            )
            latency_s = grid.latency_s[0, : replay.start.watched]
            assert (latency_s > 0).all()
            assert got[a, s] == pytest.approx(np.quantile(latency_s, 0.95), rel=1e-12)


# -------------------------------------------------------------------------------------------------------- by hand


def donors_by_hand() -> History:
    """Two long queries (read, write, mend, mend, judge) and a short one (read, write, judge)."""
    history = History()
    chain(history, "long", 10.0, "read", "write", "mend", "mend", "judge", output_tokens=10)
    chain(history, "longer", 20.0, "read", "write", "mend", "mend", "judge", output_tokens=20)
    chain(history, "short", 30.0, "read", "write", "judge", output_tokens=30)
    return history


def rest_drawn(history: History, now_s: float = 60.0) -> set[tuple[str, ...]]:
    """The stages that follow what is known of the only query under way, over many draws."""
    (record,) = history.open.values()
    found = set()
    for seed in range(40):
        replay = replay_of(history, now_s, seed=seed)
        found.add(tuple(stages_of(replay.workload, 0)[len(record.calls) :]))
        n = replay.workload.query_offsets[1]
        # a chain: each call waits for the one before it
        assert dag_of(replay.workload, 0) == {(i, i + 1) for i in range(n - 1)}
    return found


@pytest.mark.parametrize(
    ("stages", "rests"),
    [
        # nothing yet: any query
        ([], {("read", "write", "mend", "mend", "judge"), ("read", "write", "judge")}),
        (["read"], {("write", "mend", "mend", "judge"), ("write", "judge")}),
        (["read", "write"], {("mend", "mend", "judge"), ("judge",)}),
        # only the long ones were there; at the first and at the second of their mends
        (["read", "write", "mend"], {("mend", "judge")}),
        (["read", "write", "mend", "mend"], {("judge",)}),
        # nobody mended a third time: from where those stood that came furthest
        (["read", "write", "mend", "mend", "mend"], {("judge",)}),
        (["read", "write", "judge"], {()}),
        # nobody was ever there: nothing is known of what follows
        (["read", "dream"], {()}),
    ],
)
def test_what_follows_comes_from_a_query_at_the_same_place(stages: list[str], rests: set) -> None:
    history = donors_by_hand()
    n = len(stages)
    # of the calls all have finished but the last
    steps = [step(s, 50.0 + i, None if i == n - 1 else 51.0 + i) for i, s in enumerate(stages)]
    tell(history, "open", 50.0, steps)
    assert rest_drawn(history) == rests


def test_between_two_calls() -> None:
    """All calls that are known have finished, and the query has not: the rest begins at once. One of which nothing is to come
    has taken as long as it is old."""
    history = donors_by_hand()
    tell(history, "goes on", 50.0, [step("read", 50.0, 51.0)], ends=False)
    tell(history, "done", 52.0, [step("judge", 52.0, 53.0)], ends=False)
    replay = replay_of(history, 60.0)
    assert stages_of(replay.workload, 1) == ["judge"]
    grid = simulate_grid(
        replay.workload,
        cluster_of(2),
        POLICY,
        arrivals_s=replay.arrivals_s,
        base_slo=1.0,
        engine=COLD,
        start=replay.start,
        workers=1,
        detail=True,
    )
    n = replay.workload.query_offsets[1]
    assert (grid.release_s[:, 1] == 60.0).all()
    # its calls come one after the other, and those of queries to come later than the first of them
    lengths_s = replay.workload.output_tokens[1:n].sum()
    assert grid.latency_s[:, 0] == pytest.approx(10.0 + lengths_s, abs=1e-9)
    assert (grid.latency_s[:, 1] == 8.0).all()


def test_parallel_calls_are_one_step() -> None:
    """Of two parallel writes one has finished: what follows waits for both."""
    history = History()
    for i in range(2):
        at = 10.0 * i
        tell(
            history,
            f"q{i}",
            at,
            [step("write", at, at + 1), step("write", at, at + 2), step("judge", at + 2, at + 3)],
        )
    tell(history, "open", 30.0, [step("write", 30.0, 33.0), step("write", 30.0)])
    replay = replay_of(history, 40.0)
    assert stages_of(replay.workload, 0) == ["write", "write", "judge"]
    assert dag_of(replay.workload, 0) == {(0, 2), (1, 2)}
    # the finished one first; of the other nothing is known but that it was sent
    assert replay.start.calls[["call", "generated"]].tolist() == [(0, 10), (1, 0)]


def test_a_length_beyond_all_that_were_seen() -> None:
    """30 tokens at the most were seen; a call that has 45 gets one more."""
    history = donors_by_hand()
    tell(history, "open", 50.0, [step("read", 50.0, first_token_s=51.0)])
    history.open["open"].calls[0].output_tokens = 45
    replay = replay_of(history, 60.0)
    assert replay.workload.output_tokens[0] == 46
    assert replay.start.calls["generated"].tolist() == [45]
    history.open["open"].calls[0].output_tokens = 15
    drawn = {int(replay_of(history, 60.0, seed=s).workload.output_tokens[0]) for s in range(20)}
    assert drawn == {20, 30}


def test_progress_by_the_clock() -> None:
    """Steps of 1 s: 9 s after its first token a call has ten tokens, if its instance reports none."""
    history = donors_by_hand()
    tell(history, "open", 50.0, [step("read", 50.0, first_token_s=51.0, instance=1)])
    for now_s, tokens in ((51.0, 1), (51.5, 1), (60.0, 10), (60.5, 10)):
        assert replay_of(history, now_s).start.calls["generated"].tolist() == [tokens]


def test_only_the_window_comes_again() -> None:
    """Queries that arrived before the window give lengths and what follows, and do not come again."""
    history = donors_by_hand()
    tell(history, "open", 5.0, [step("read", 5.0)])
    replay = replay_of(history, 60.0, window_s=42.0)  # since 18 s: "longer" and "short"
    assert replay.arrivals_s[0].tolist() == [5.0, 62.0, 72.0, 104.0, 114.0]
    assert [len(stages_of(replay.workload, q)) for q in range(1, 5)] == [5, 3, 5, 3]
    assert replay.start.watched == 3
    assert (replay.arrivals_s[:, 0] == 5.0).all()


def test_bad_windows() -> None:
    history = History()
    with pytest.raises(BadWindow, match="no query has finished yet"):
        replay_of(history, 0.0)
    tell(history, "open", 1.0, [step("read", 1.0)])
    tell(history, "other", 2.0, [step("read", 2.0)])
    with pytest.raises(BadWindow, match="no query has finished yet"):
        replay_of(history, 50.0)
    history = History()
    chain(history, "only", 1.0, "read")
    with pytest.raises(BadWindow, match="1 queries arrived in the last 100 s, at least 2 are needed"):
        replay_of(history, 50.0)
    chain(history, "second", 2.0, "read")
    assert replay_of(history, 50.0).start.watched == 2
    with pytest.raises(BadWindow, match="0 queries arrived in the last 10 s"):
        replay_of(history, 50.0, window_s=10.0)
