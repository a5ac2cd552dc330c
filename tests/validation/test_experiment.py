"""`experiment=validation`: its statistics by hand, and from end to end against servers of known step times on real sockets."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numba
import numpy as np
import pandas as pd
import pytest
import yaml

from hexrepro.cli import main
from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.scheduling.views import instance_views
from hexrepro.serving.config import read_cluster
from hexrepro.serving.learning import Beliefs
from hexrepro.validation.lab import DIRECT, About, beliefs_of, names_of
from hexrepro.validation.launch import PYTHON_VARIABLE
from hexrepro.validation.others_cpu import OthersCpu
from hexrepro.validation.replay import Replay
from hexrepro.validation.report import Compared, queries, ranks, replays, spread, summary
from hexrepro.workload import generate
from tests.real_vllm import need_vllm
from tests.strategies import make_instance, make_workload
from tests.validation.paced_stub import PacedStub

# ---- the statistics ----------------------------------------------------------------------------------------

WORKLOAD = make_workload(
    [dict(arrival_s=float(i), calls=[dict(input_tokens=10, output_tokens=2)]) for i in range(2)]
)


def run(*latencies: float) -> Replay:
    """A replay (or a simulation) of two queries of one call with these latencies, in seconds."""
    end = WORKLOAD.arrival_s + np.array(latencies)
    return Replay(
        arrival_s=WORKLOAD.arrival_s, finish_s=end, release_s=WORKLOAD.arrival_s, sent_s=WORKLOAD.arrival_s + 0.001,
        first_token_s=end - 0.5, call_finish_s=end, instance=np.zeros(2, np.int32),
        call_cached_tokens=np.zeros(2, np.int32), errors={}, stopped=None,
    )  # fmt: skip


def compared(policy: str, measured: list[Replay], simulated: list[Replay], dispatch: str = "d") -> Compared:
    n = WORKLOAD.n_calls
    return Compared(
        setting="s", load="light", policy=policy, dispatch=dispatch, alpha=None, rate_qps=1.0, workload=WORKLOAD,
        replays=measured,
        about=[About("then", np.nan)] * len(measured), drawn=simulated, drawn_s=np.zeros((len(simulated), n)), placed=measured,
        placed_s=np.zeros((len(measured), n)),
    )  # fmt: skip


def test_errors_and_intervals_by_hand():
    # means of the replays 2 and 4: mean 3, relative deviations 1/3; the other policy 10 and 10
    a = compared("vllm", [run(1, 3), run(2, 6)], [run(3, 3.3)])
    b = compared("low", [run(10, 10), run(10, 10)], [run(9, 9)])
    rows = summary([a, b], {"query_mean_s": 0.06, "query_p95_s": 0.05}).set_index(["policy", "metric"])
    of = rows.loc["vllm", "query_mean_s"]
    assert of.measured == 3.0
    assert of.simulated == pytest.approx(3.15)
    assert of.error == pytest.approx(0.05)
    assert of.verdict == "met?"  # but the interval is wide
    assert of.noise == pytest.approx(np.sqrt(2) / 3)
    # pooled: variance (2 / 9 + 0) / 2, two degrees of freedom (t = 4.303), mean of two replays
    half = 4.303 * np.sqrt(1 / 9) / np.sqrt(2)
    assert of.measured_high == pytest.approx(3 * (1 + half), rel=1e-3)
    assert of.error_high - of.error == pytest.approx(1.05 * half, rel=1e-3)
    assert of.placed_error == 0.0
    assert rows.loc[("low", "query_mean_s")].verdict == "missed?"  # -10 %, but the noise is large
    # P95 of the replays: 2.9 and 5.8
    assert rows.loc[("vllm", "query_p95_s")].measured == pytest.approx(4.35)


def test_a_run_without_a_gateway_has_its_own_noise():
    loud = [run(1, 1), run(3, 3)]
    still = [run(2.0, 2.0), run(2.002, 2.002)]
    parts = [compared("vllm", loud, [run(2, 2)]), compared(DIRECT, still, [run(2.2, 2.2)], "by_query")]
    rows = summary(parts, {"query_mean_s": 0.03}).set_index(["policy", "metric"])
    assert rows.loc[(DIRECT, "query_mean_s")].verdict == "missed"
    assert rows.loc[(DIRECT, "query_mean_s")].error_low > 0.03
    assert set(ranks(parts).columns) == set() or len(ranks(parts)) == 0


def test_errors_one_by_one():
    # the "placed" simulations of the helper are the replays themselves; between these, 2 against 1 and 3 against 6
    rows = spread([compared("vllm", [run(1, 6), run(2, 3)], [run(1, 1)])]).set_index("of")
    assert rows.loc["queries", "mean_abs"] == 0.0
    assert rows.loc["queries", "repeat_mean_abs"] == pytest.approx((0.5 + 1.0) / 2)
    of = replace(compared("vllm", [run(1, 6)], [run(1, 1)]), placed=[run(1.1, 3)])
    rows = spread([of]).set_index("of")
    assert rows.loc["calls", "mean_abs"] == pytest.approx((0.1 + 0.5) / 2)
    assert rows.loc["queries", "p95_abs"] == pytest.approx(0.48)
    assert np.isnan(rows.loc["queries", "repeat_mean_abs"])


def test_ranks_only_where_the_difference_is_clear():
    def policy(name: str, latency: float, simulated: float) -> Compared:
        return compared(
            name, [run(latency, latency), run(1.01 * latency, 1.01 * latency)], [run(*[simulated] * 2)]
        )

    pairs = ranks([policy("a", 1.0, 1.0), policy("b", 1.005, 0.9), policy("c", 2.0, 0.95)])
    mean = pairs[pairs.metric == "query_mean_s"].set_index(["first", "second"])
    assert not mean.loc[("a", "b")].clear
    assert mean.loc[("a", "b")].agrees is None
    assert mean.loc[("a", "c")].clear
    assert mean.loc[("a", "c")].agrees is False  # 2 against 1 measured, 0.95 against 1 simulated
    assert mean.loc[("b", "c")].agrees is True
    assert mean.loc[("a", "c")].measured == pytest.approx(2.0)


def test_what_did_not_finish_in_one_replay_is_left_out():
    broken = run(1, 2)
    broken = replace(
        broken,
        finish_s=np.array([1.0, np.inf]),
        call_finish_s=np.array([1.0, np.inf]),
        errors={1: "HTTP 500"},
    )
    of = compared("vllm", [run(1, 50), broken], [run(1, 50)])
    rows = summary([of], {}).set_index("metric")
    assert rows.loc["query_mean_s"].error == 0.0
    assert list(queries([of])["query"]) == [0]
    assert list(replays([of])["failed_calls"]) == [0, 1]
    nothing = replace(broken, finish_s=np.full(2, np.inf))
    with pytest.raises(InputError, match="s, light, vllm: no query finished in every replay: 1 of 2 calls"):
        summary([compared("vllm", [nothing], [run(1, 1)])], {})


def test_names():
    assert names_of(["a100", "a100", "l40s"]) == ("a100a", "a100b", "l40s")


def test_others_on_this_machine_are_seen(tmp_path, monkeypatch):
    """Ours: this process, its child with a session of its own, and whatever is in that session. By hand, in ticks."""
    tick, us = os.sysconf("SC_CLK_TCK"), os.getpid()

    def write(total: int, **used: int) -> None:
        (tmp_path / "stat").write_text(f"cpu {total} 0 0 999 0\n")
        at = {
            "us": (us, 1, 7),
            "server": (us + 1, us, us + 1),
            "engine": (us + 2, us + 1, us + 1),
            "else": (us + 3, 1, 7),
        }
        for name, (number, parent, session) in at.items():
            (tmp_path / str(number)).mkdir(exist_ok=True)
            fields = [0] * 7 + [0, used[name], 0, 0, 0]
            line = f"{number} (a b) S {parent} 0 {session} " + " ".join(map(str, fields))
            (tmp_path / str(number) / "stat").write_text(line)

    now = iter([100.0, 110.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    write(1000, us=0, server=0, engine=0, **{"else": 0})
    others = OthersCpu(tmp_path)
    write(1000 + 20 * tick, us=2 * tick, server=3 * tick, engine=4 * tick, **{"else": 5 * tick})
    # 20 s in 10 s were used, 2 + 3 + 4 by us: 11 s were others'
    assert others.cores() == pytest.approx(1.1)


def test_the_gateway_believes_what_the_simulator_believes(tmp_path):
    workload = generate("tiny", seed=0)
    cluster = Cluster("c", (make_instance("one", (0.01, 1e-4, 0, 0, 0), 4096),))
    content = dict(
        name="c", model="llama-3.1-70b", instances=[dict(gpu="a100", url="http://h:1")],
        workflows={workload.name: beliefs_of(workload, cluster, "template")},
    )  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    found = read_cluster(tmp_path / "c.yaml").beliefs
    known = Beliefs.of(workload, instance_views(cluster))
    assert found.stages == {f"{workload.name}/{name}": lengths for name, lengths in known.stages.items()}
    assert found.remaining == known.remaining
    assert known.remaining


# ---- from end to end ---------------------------------------------------------------------------------------

SMALL = (
    "experiment=validation", "policy=hexgen_flow", "baseline=hexgen_flow", "prefix_caching=off", "workload=tiny",
    "workload.n_queries=3", "selection.alphas=[0.1]", "selection.seeds=1", "validation.repeats=1",
    "validation.simulations=3", "validation.capacity_queries=10", "validation.loads.light.times=0.3",
    "~validation.loads.overload",
    "validation.fixed_placement=true", "servers.endpoints.prompts=64", "servers.endpoints.outputs=8",
    "servers.endpoints.design={concurrency: [1, 3], contexts: [16, 200], decode_tokens: 16, "
    "prompts: [16, 64, 128, 240], repeats: 2, held_out: [], burst: 0}",
)  # fmt: skip


@pytest.fixture
def gateway_starts_fast(monkeypatch):
    """The gateway's process finds what is compiled, although the cache of cells is another."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", numba.config.CACHE_DIR)


def test_endpoints_measured_and_resumed(tmp_path, cell_cache, gateway_starts_fast, capfd):
    def go(name: str, *more: str) -> int:
        return main([*SMALL, where, f"hydra.run.dir={tmp_path}/{name}", *more])

    fast = PacedStub(base_s=0.004, prefill_token_s=2e-5, sequence_s=2e-4)
    slow = PacedStub(base_s=0.008, prefill_token_s=4e-5, sequence_s=4e-4)
    with fast, slow:
        where = f"endpoints=[{fast.url},{slow.url}]"
        assert go("plan", "dry_run=true") == 0
        said = capfd.readouterr().out
        assert f"server server1: {fast.url}" in said
        assert "2 replays: hexgen_flow, fixed placement; each light, 1 times" in said
        assert "rates: known after profiling" in said
        assert not (tmp_path / "plan").exists()
        assert fast.requests == []

        assert go("first") == 0
        asked = len(fast.requests) + len(slow.requests)
        profile = yaml.safe_load((tmp_path / "first" / "profile_endpoints.yaml").read_text())
        assert profile["gpus"]["server2"]["latency"]["base_s"] == pytest.approx(0.008, rel=0.2)
        assert "mape" in profile["gpus"]["server1"]["fit"]["all"]

        # the plan now knows the rates; a second repeat measures only what is new
        assert go("plan", "dry_run=true") == 0
        assert "queries/s" in capfd.readouterr().out
        assert go("second", "validation.repeats=2") == 0
        calls = pd.read_parquet(tmp_path / "second" / "calls.parquet")
        assert len(fast.requests) + len(slow.requests) == asked + len(calls) // 2
    done = tmp_path / "second"
    files = {file.name for file in done.iterdir()}
    assert {"summary.csv", "ranks.csv", "queries.csv", "replays.csv", "config.yaml", "tables.txt"} <= files
    assert {"agreement_endpoints.png", "agreement_endpoints.pdf"} <= files
    rows = pd.read_csv(done / "summary.csv").set_index(["policy", "metric"])
    assert set(rows.index.levels[0]) == {"hexgen_flow", "fixed"}
    for policy in ("hexgen_flow", "fixed"):
        assert abs(rows.loc[(policy, "query_mean_s"), "placed_error"]) < 0.25
    fixed = calls[calls.policy == "fixed"]
    assert (fixed.instance == fixed["query"] % 2).all()
    runs = pd.read_csv(done / "replays.csv")
    assert list(runs["repeat"]) == [0, 1, 0, 1]
    assert (runs["realised_qps"] / runs["asked_qps"]).between(0.9, 1.1).all()
    assert (runs["failed_calls"] == 0).all()

    # with all of it measured no server is needed
    assert go("third", "validation.repeats=2") == 0
    assert (tmp_path / "third" / "summary.csv").read_text() == (done / "summary.csv").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "endpoints=[] must be a list of the servers' base URLs"),
        (["endpoints=[http://a:1,http://a:1]"], "names a server twice"),
        (["endpoints=[http://a:1]", "setting=paced"], "setting=paced is unknown"),
        (
            ["endpoints=[http://a:1]", "validation.queue_mode=x"],
            "validation.queue_mode=x must be engine or gateway",
        ),
        (
            ["endpoints=[http://a:1]", "validation.loads.light.of=all"],
            "validation.loads.light.of=all must be least or most",
        ),
        (["endpoints=[http://a:1]", "validation.repeats=0"], "validation.repeats=0 must be a whole number"),
        (["endpoints=[http://a:1]", "policy=vtc"], "policy vtc: its queue needs counters at the instances"),
        (["endpoints=[http://a:1]", "dry_run=1"], "dry_run=1 must be true or false"),
        (
            ["endpoints=[http://a:1]", "servers.endpoints.api_key_env=NO_SUCH"],
            "servers.endpoints.api_key_env: 'NO_SUCH' must name an environment variable",
        ),
        (
            ["endpoints=[http://a:1]", "+servers.endpoints.design.length=3"],
            "servers.endpoints.design.length is no option",
        ),
        (["endpoints=[http://127.0.0.1:9]"], "profile of http://127.0.0.1:9: it does not answer"),
    ],
)
def test_a_mistake_is_one_line(argv, message, tmp_path, cell_cache, no_sweep, capsys):
    where = tmp_path / "run"
    assert main(["experiment=validation", "workload=tiny", f"hydra.run.dir={where}", *argv]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len([line for line in said.splitlines() if line.startswith("hexrepro:")]) == 1
    assert not where.exists()


def test_without_vllm_it_says_how_to_name_one(tmp_path, cell_cache, capsys, monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "none"))
    argv = ["experiment=validation_cpu", "setting=compute", f"hydra.run.dir={tmp_path}/run"]
    assert main(argv) == 2
    assert PYTHON_VARIABLE in capsys.readouterr().err


def test_the_plan_of_paced_servers_knows_the_rates(tmp_path, cell_cache, capsys):
    argv = [
        "experiment=validation_cpu",
        "dry_run=true",
        "workload.n_queries=4",
        f"hydra.run.dir={tmp_path}/run",
    ]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert said.count("launched, paced") == 4
    assert said.count("launched, computing") == 2
    assert "light: " in said
    assert "overload: " in said


@pytest.mark.vllm
def test_real_server(tmp_path, cell_cache, gateway_starts_fast):
    """A paced server that the experiment starts itself, a few queries. On a quiet machine fixed placement is within 1 %."""
    need_vllm()
    argv = [
        "experiment=validation_cpu", "setting=paced", "cluster.instances=[{gpu: a100}]",
        "workload=tiny", "workload.n_queries=4", "policy=hexgen_flow", "baseline=hexgen_flow", "selection.alphas=[0.1]",
        "validation.repeats=1", "validation.simulations=5", "~validation.loads.overload", "validation.loads.light.times=0.2",
        "servers.paced.design={concurrency: [1, 2, 4], contexts: [64, 800], decode_tokens: 30, "
        "prompts: [16, 256, 512, 528, 1024], repeats: 3, held_out: [], burst: 16}",
        f"hydra.run.dir={tmp_path}/run",
    ]  # fmt: skip
    assert main(argv) == 0
    rows = pd.read_csv(tmp_path / "run" / "summary.csv").set_index(["policy", "metric"])
    assert abs(rows.loc[("fixed", "query_mean_s"), "placed_error"]) < 0.08
    assert abs(rows.loc[("hexgen_flow", "query_mean_s"), "placed_error"]) < 0.15
    profile = yaml.safe_load((tmp_path / "run" / "profile_paced.yaml").read_text())
    assert {entry["max_num_seqs"] for entry in profile["gpus"].values()} == {4}
