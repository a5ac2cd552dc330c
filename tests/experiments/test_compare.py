"""The main job: its files hold what they promise, and finished cells are not run again."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from hexrepro.cli import main
from hexrepro.experiments import cells
from hexrepro.experiments.tidy import LABELS

SHRUNK = ("seeds=2", "workload.n_queries=4", "selection.alphas=3", "selection.seeds=2")
FILES = {
    "attainment_measured.pdf", "attainment_measured.png", "attainment_silicon.pdf", "attainment_silicon.png",
    "calls.parquet", "config.yaml", "curves.csv", "instances.parquet", "quantiles.csv", "queries.parquet", "samples.csv",
    "summary.csv", "tables.txt",
}  # fmt: skip
METRICS = {
    "mean_s", "p50_s", "p95_s", "p99_s", "throughput_qps", "goodput_qps", "attainment", "scale_at_95", "scale_at_99",
    "utilisation", "preemptions", "cached_share", "cost_per_1000",
}  # fmt: skip


@pytest.fixture
def run(tmp_path, cell_cache, no_sweep):
    """Run an experiment; returns its run directory."""

    def run(*argv: str, name: str = "run"):
        run_dir = tmp_path / name
        assert main([*argv, f"hydra.run.dir={run_dir}"]) == 0
        return run_dir

    return run


def test_the_main_job_shrunk(run, capsys):
    run_dir = run("experiment=hetero1", *SHRUNK)
    assert {f.name for f in run_dir.iterdir()} == FILES

    config = OmegaConf.load(run_dir / "config.yaml")
    policies = set(config.policy)
    summary = pd.read_csv(run_dir / "summary.csv")
    assert list(summary.columns) == [*LABELS, "metric", "value", "ci_low", "ci_high", "seeds"]
    assert set(summary.policy) == policies
    assert set(summary.experiment) == {"hetero1"}
    assert set(summary.arrivals) == {"poisson"}
    assert set(summary.tenant) == {"all"}
    assert set(zip(summary.profile, summary.prefix_caching, strict=True)) == {
        ("silicon", "template"),
        ("measured", "off"),
    }
    assert set(summary.seeds) == {2}
    measured = summary[~summary.metric.str.endswith("_ratio")]
    assert set(measured.metric) == METRICS
    assert len(measured) == len(policies) * len(METRICS) * 2 * 3 * 2  # views, traces, rates
    assert (measured.ci_low <= measured.value * (1 + 1e-5) + 1e-12).all()  # six digits
    assert (measured.value * (1 - 1e-5) <= measured.ci_high + 1e-12).all()
    assert set(summary[summary.metric.str.endswith("_ratio")].policy) == policies - {"vllm"}
    assert summary[summary.policy == "hexgen_flow"].alpha.isin([0.0, 0.5, 1.0]).all()

    printed = capsys.readouterr().out
    for trace in ("trace1", "trace2", "trace3"):
        assert f"{trace}, 0.5 queries/s" in printed
    assert "What hexgen_flow gains over vllm" in printed


def test_rows_agree_with_the_summary(run):
    run_dir = run(
        "experiment=hetero1",
        *SHRUNK,
        "workload=trace1",
        "profile=silicon",
        "policy=[vllm,hexgen_flow]",
        "workload.rate_qps=0.7",
        "figures=false",
    )
    queries, calls = pd.read_parquet(run_dir / "queries.parquet"), pd.read_parquet(run_dir / "calls.parquet")
    instances = pd.read_parquet(run_dir / "instances.parquet")
    assert len(queries) == 2 * 2 * 4  # policies, seeds, queries
    assert set(queries.rate_qps) == {0.7}
    assert len(instances) == 2 * 2 * 4  # policies, seeds, instances

    summary = pd.read_csv(run_dir / "summary.csv").set_index(["policy", "metric"]).value
    for policy, rows in queries.groupby("policy", observed=True):
        np.testing.assert_allclose(rows.latency_s, rows.finish_s - rows.arrival_s)
        by_seed = rows.groupby("seed")
        assert summary[policy, "mean_s"] == pytest.approx(by_seed.latency_s.mean().mean(), rel=1e-5)
        span_s = by_seed.finish_s.max() - by_seed.arrival_s.min()
        assert summary[policy, "throughput_qps"] == pytest.approx((4 / span_s).mean(), rel=1e-5)
        assert summary[policy, "attainment"] == pytest.approx((rows.latency_s <= rows.slo_s).mean(), rel=1e-5)

    # the other tables say the same
    samples = pd.read_csv(run_dir / "samples.csv")
    curves, quantiles = pd.read_csv(run_dir / "curves.csv"), pd.read_csv(run_dir / "quantiles.csv")
    for policy in ("vllm", "hexgen_flow"):
        of = samples[samples.policy == policy]
        assert set(of.seed) == {0, 1}
        assert of[of.metric == "p95_s"].value.mean() == pytest.approx(summary[policy, "p95_s"], rel=1e-5)
        quantile = quantiles[(quantiles.policy == policy) & (quantiles.p == 0.95)]
        assert quantile.latency_s.item() == pytest.approx(summary[policy, "p95_s"], rel=1e-5)
        curve = curves[curves.policy == policy]
        at_5 = np.interp(5.0, curve.scale, curve.attainment)
        assert at_5 == pytest.approx(summary[policy, "attainment"], abs=0.13)  # a query of the eight
        assert (np.diff(curve.attainment) >= 0).all()

    # a query ends with its last call; a call's times are in order
    keys = ["policy", "seed", "query"]
    last = calls.groupby(keys, observed=True).finish_s.max()
    np.testing.assert_array_equal(last, queries.set_index(keys).finish_s.loc[last.index])
    for before, after in (
        ("release_s", "admit_s"),
        ("admit_s", "first_token_s"),
        ("first_token_s", "finish_s"),
    ):
        assert (calls[before] <= calls[after]).all()
    assert set(calls.instance) <= {"a100-0", "a100-1", "a6000-0", "a6000-1"}

    # paired: both policies saw the same arrivals
    first, second = (rows.arrival_s.to_numpy() for _, rows in queries.groupby("policy", observed=True))
    np.testing.assert_array_equal(first, second)


# ---- with a stand-in for the simulator -----------------------------------------------------------------------------

QUICK = (
    "experiment=hetero1", *SHRUNK, "workload=trace1", "profile=silicon", "workload.rate_qps=1", "figures=false",
)  # fmt: skip


def test_alpha_is_the_candidate_with_the_least_p95_on_other_seeds(run, fake_simulator):
    run_dir = run(*QUICK, "policy=[vllm,hexgen_flow]", "selection.alphas=11", "selection.seeds=3")
    # 3 selection seeds x 11 candidates in one call, then the two reported seeds
    assert fake_simulator == [("vllm", 2), ("hexgen_flow", 33), ("hexgen_flow", 2)]
    summary = pd.read_csv(run_dir / "summary.csv")
    assert set(summary[summary.policy == "hexgen_flow"].alpha) == {0.3}
    assert summary[summary.policy == "vllm"].alpha.isna().all()


def test_alpha_can_be_given(run, fake_simulator):
    run_dir = run(*QUICK, "policy=[vllm,hexgen_flow]", "alpha=0.65")
    assert fake_simulator == [("vllm", 2), ("hexgen_flow", 2)]
    summary = pd.read_csv(run_dir / "summary.csv")
    assert set(summary[summary.policy == "hexgen_flow"].alpha) == {0.65}


def test_finished_cells_are_not_run_again(run, fake_simulator):
    first = run(*QUICK, "policy=[vllm,eft]", "figures=true", name="first")
    assert len(fake_simulator) == 2
    again = run(*QUICK, "policy=[vllm,eft]", "figures=true", name="again")
    assert len(fake_simulator) == 2
    for name in ("summary.csv", "calls.parquet", "queries.parquet", "attainment_silicon.png"):
        assert (first / name).read_bytes() == (again / name).read_bytes()
    run(*QUICK, "policy=[vllm,eft,low]", name="more")
    assert fake_simulator[2:] == [("low", 2)]


CHANGES = (
    "slo_scale=4", "seeds=3", "workload.rate_qps=2", "workload.trace_seed=1", "prefix_caching=off", "estimator=oracle",
    "cluster=hetero2", "engine=released", "policy.eft.queue=fcfs", "workload.arrivals=deterministic",
)  # fmt: skip


def test_whatever_changes_a_result_changes_the_cell(run, fake_simulator):
    for done, change in enumerate(("seeds=2", *CHANGES)):  # the first changes nothing
        run(*QUICK, "policy=[eft]", "baseline=eft", change, name=f"run{done}")
        assert len(fake_simulator) == done + 1, f"{change} was answered from the cell of other options"


def test_what_only_changes_the_report_keeps_the_cells(run, fake_simulator):
    run(*QUICK, "policy=[vllm,eft]", name="first")
    run(*QUICK, "policy=[vllm,eft]", "confidence=0.9", "baseline=eft", "workers=1", name="changed")
    assert len(fake_simulator) == 2


def test_ctrl_c_loses_no_finished_cell(run, tmp_path, fake_simulator, monkeypatch, capsys):
    whole, seen = cells.get, []

    def interrupted_at_the_third(*args):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(args)
        return whole(*args)

    monkeypatch.setattr(cells, "get", interrupted_at_the_third)
    argv = [*QUICK, "policy=[vllm,eft,low,ray]", f"hydra.run.dir={tmp_path / 'cut'}"]
    assert main(argv) == 130
    assert not (tmp_path / "cut").exists()
    monkeypatch.setattr(cells, "get", whole)
    assert main(argv) == 0
    assert [name for name, _ in fake_simulator] == ["vllm", "eft", "low", "ray"]


def test_a_cell_cut_short_while_it_is_written_is_not_taken_for_finished(
    run, tmp_path, fake_simulator, monkeypatch, cell_cache
):
    write = cells.pq.write_table

    def cut(table, where, **options):
        write(table, where, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(cells.pq, "write_table", cut)
    assert main([*QUICK, "policy=[vllm]", f"hydra.run.dir={tmp_path / 'cut'}"]) == 130
    assert list(cell_cache.iterdir()) == []


def test_a_damaged_cell_is_computed_anew(run, fake_simulator, cell_cache):
    run(*QUICK, "policy=[vllm]", name="first")
    for file in cell_cache.glob("*.queries.parquet"):
        file.write_bytes(b"PAR1 but no more")
    run(*QUICK, "policy=[vllm]", name="again")
    assert [name for name, _ in fake_simulator] == ["vllm", "vllm"]


def test_a_failure_while_results_are_written_leaves_nothing(run, tmp_path, fake_simulator, monkeypatch):
    from hexrepro.experiments import outputs

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(outputs, "attainment_figure", fail)
    assert main([*QUICK, "policy=[vllm]", "figures=true", f"hydra.run.dir={tmp_path / 'cut'}"]) == 130
    assert not (tmp_path / "cut").exists()


def test_the_baseline_is_run_though_not_asked_for(run, fake_simulator):
    run_dir = run(*QUICK, "policy=eft")
    summary = pd.read_csv(run_dir / "summary.csv")
    assert set(summary.policy) == {"vllm", "eft"}
    ratio = summary[(summary.policy == "eft") & (summary.metric == "mean_s_ratio")]
    assert ratio.value.item() == pytest.approx(1.0)


def test_a_trace_of_one_s_own(run, tmp_path, fake_simulator):
    rows = {
        "query": [0, 0, 1],
        "stage": ["plan", "write", "plan"],
        "input_tokens": [9, 90, 9],
        "output_tokens": [5, 50, 5],
    }
    pd.DataFrame(rows).to_parquet(tmp_path / "mine.parquet")
    file = ("workload=file", f"workload.path={tmp_path / 'mine.parquet'}")
    run_dir = run("experiment=hetero1", "seeds=3", "policy=vllm", *file, "workload.rate_qps=2", name="rate")
    queries = pd.read_parquet(run_dir / "queries.parquet")
    assert set(queries.trace) == {"mine"}
    assert len(queries) == 2 * 3 * 2  # views, seeds, queries

    pd.DataFrame(rows | {"arrival_s": [1.0, 1.0, 4.5]}).to_parquet(tmp_path / "mine.parquet")
    argv = ("experiment=hetero1", "seeds=3", "policy=[vllm,hexgen_flow]", "figures=false")
    run_dir = run(*argv, *file, name="recorded")
    queries = pd.read_parquet(run_dir / "queries.parquet")
    one = queries[(queries.profile == "silicon") & (queries.policy == "vllm")]
    assert list(one.arrival_s) == [0.0, 3.5]  # one run, as recorded, from the first arrival on
