"""Every experiment config runs, shrunk; and what the studies' options do to a comparison."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from hexrepro.cli import main
from hexrepro.experiments.tidy import LABELS
from hexrepro.paths import conf_dir
from hexrepro.report.metrics import jain_index, quantile

EXPERIMENTS = {
    f.stem: yaml.safe_load(f.read_text()) or {}
    for f in (conf_dir() / "experiment").glob("*.yaml")
    if not f.stem.startswith("validation")  # these want servers: test_validation.py
}
SHRUNK = (
    "seeds=2", "profile=[silicon]", "workload.n_queries=4", "workload.rate_qps=1", "selection.alphas=3", "selection.seeds=2",
    "calls=false", "queries=false", "figures=false",
)  # fmt: skip
# of runners with values of their own: what shrinks these
OWN = {
    "goodput": ("goodput.n_queries=4", "goodput.alphas=2", "goodput.slo_scales=[5]", "goodput.within=0.5"),
    "tune": ("tuning.sampler.trials=4", "tuning.sampler.batch=2", "tuning.sampler.spread=2", "tuning.curve=3"),
    "alpha_sensitivity": (
        "sensitivity.alphas=3", "sensitivity.also=[]", "sensitivity.heatmap.alphas=2", "sensitivity.heatmap.also=[]",
        "sensitivity.heatmap.rates_qps=[1.0]",
    ),
    "alpha_online": (
        "workers=1", "day.phases=[{duration_s:120,rate_qps:0.2,trace:tiny}]", "fixed=[0.0]",
        "day.changes=[{at_s:40,event:slow,instance:a100-0,factor:2.0}]", "hindsight.candidates=[0.0]",
    ),
    "plan": ("plan.gpus=[h100:1,b200:1]", "plan.trials=2", "plan.alphas=2"),
    "scale": (
        "policy=[vllm,hexgen_flow]", "scale.scale_outs=[1,2]", "scale.queries=3", "scale.in_flight=[3,5]", "scale.repeats=2",
    ),
}  # fmt: skip


@pytest.fixture
def run(tmp_path, cell_cache):
    """Run a command line; returns the directories of its jobs."""

    def run(*argv: str, name: str = "run"):
        where = tmp_path / name
        assert main([*argv, f"hydra.run.dir={where}/0", f"hydra.sweep.dir={where}"]) == 0
        return sorted(path for path in where.iterdir() if path.is_dir())

    return run


def last_of_each_axis(experiment: dict) -> list[str]:
    """One job of a sweep: each of its axes at its last value, which is seldom the default."""
    params = experiment.get("hydra", {}).get("sweeper", {}).get("params", {})
    overrides = []
    for key, values in params.items():
        override = OverridesParser.create().parse_override(f"{key}={values}")
        last = list(override.sweep_string_iterator())[-1] if override.is_sweep_override() else values
        overrides.append(f"{key}={last}")
    return overrides


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_shrunk(name, run):
    experiment = EXPERIMENTS[name]
    axes = last_of_each_axis(experiment)
    runner = next(
        (a.removeprefix("run=") for a in axes if a.startswith("run=")), experiment.get("run", "compare")
    )
    (job,) = run(f"experiment={name}", *axes, *SHRUNK, *OWN.get(runner, ()))
    tables = {file.stem: pd.read_csv(file) for file in job.glob("*.csv")}
    assert tables
    for table in tables.values():
        assert tuple(table.columns[: len(LABELS)]) == LABELS
        assert len(table) > 0
        assert set(table.experiment) == {name}
    if runner == "compare":
        curves = {"curves", "quantiles"} if experiment.get("curves", True) else set()
        assert set(tables) == {"summary", "samples"} | curves
        for column in experiment.get("axes", {}):
            assert column in tables["summary"]


def test_a_sweep_of_an_experiment_can_be_narrowed(run, fake_simulator):
    small = (*SHRUNK, "workload=trace1")
    two = run("experiment=ablation", "cluster=hetero2", "prefix_caching=off", *small, name="two")
    assert [path.name for path in two] == ["0_ablation", "1_ablation"]  # tenants=one, tenants=mixed
    one = run(
        "experiment=ablation", "cluster=hetero2", "prefix_caching=off", "tenants=mixed", *small, name="one"
    )
    assert len(one) == 1
    summary = pd.read_csv(one[0] / "summary.csv")
    assert set(summary.cluster) == {"hetero2"}
    assert set(summary.slo_mix) == {"mixed"}
    assert set(summary.tenant) == {"all", "tight", "medium", "loose"}
    fake_simulator.clear()
    run("experiment=ablation", "cluster=hetero2", "prefix_caching=off", *small, name="again")
    assert fake_simulator == []  # all cells were there


SMALL = ("experiment=hetero1", *SHRUNK, "workload=trace1", "policy=[vllm,eft]", "queries=true")


def test_tenants_and_their_metrics(run, fake_simulator):
    """The stand-in gives query i of each run 10 + 5 + i/100 s (no alpha); what follows is worked out from that."""
    (job,) = run(*SMALL, "tenants=mixed", "workload.n_queries=30", "slo_scale=0.2")
    queries = pd.read_parquet(job / "queries.parquet")
    of = queries[(queries.policy == "vllm") & (queries.seed == 0)]
    assert set(of.tenant.value_counts()) == {10}  # equal shares
    scale = of.tenant.astype(str).map({"tight": 1.0, "medium": 1.5, "loose": 2.0}).to_numpy(float)
    base_s = of.slo_s.to_numpy() / scale
    np.testing.assert_allclose(base_s, base_s[0])

    summary = pd.read_csv(job / "summary.csv")
    value = summary[summary.policy == "vllm"].set_index(["tenant", "metric"]).value
    met = (of.latency_s <= of.slo_s).to_numpy()
    shares = [met[of.tenant == name].mean() for name in ("tight", "medium", "loose")]
    assert min(shares) < max(shares)
    for name, share in zip(("tight", "medium", "loose"), shares, strict=True):
        assert value[name, "attainment"] == pytest.approx(share, rel=1e-5)
        latency_s = of.latency_s[of.tenant == name].to_numpy()
        assert value[name, "p95_s"] == pytest.approx(quantile(latency_s, 0.95), rel=1e-5)
    assert value["all", "attainment"] == pytest.approx(np.mean(shares), rel=1e-5)
    assert value["all", "jain_attainment"] == pytest.approx(jain_index(np.array(shares)), rel=1e-5)
    assert ("tight", "utilisation") not in value.index


def test_a_second_workload_beside_the_trace(run, fake_simulator):
    (job,) = run(*SMALL, "background=chat", "background.rate_qps=3", "workload.n_queries=40")
    queries = pd.read_parquet(job / "queries.parquet")
    of = queries[(queries.policy == "vllm") & (queries.seed == 0)]
    assert of.tenant.value_counts().to_dict() == {"chat": 120, "trace1": 40}
    # both are spread over the whole run, at the sum of the rates
    assert len(of) / of.arrival_s.max() == pytest.approx(4.0, rel=0.25)
    for _, part in of.groupby("tenant", observed=True):
        assert part.arrival_s.min() < 0.15 * of.arrival_s.max()
        assert part.arrival_s.max() > 0.85 * of.arrival_s.max()
    slo_s = of.groupby("tenant", observed=True).slo_s.first()
    assert slo_s["chat"] < 0.3 * slo_s["trace1"]  # each its own base SLO
    assert set(pd.read_csv(job / "summary.csv").tenant) == {"all", "chat", "trace1"}


def test_only_the_middle_queries_count_and_it_is_said(run, fake_simulator, capsys):
    (job,) = run(*SMALL, "workload.n_queries=30", "scored=10")
    assert "only the middle 10 queries count" in " ".join(capsys.readouterr().out.split())
    summary = pd.read_csv(job / "summary.csv")
    assert set(summary.scored) == {10}
    mean_s = summary[(summary.policy == "vllm") & (summary.metric == "mean_s")].value.item()
    assert mean_s == pytest.approx(15.0 + np.arange(10, 20).mean() / 100, rel=1e-6)


def test_a_cluster_many_times_over(run, fake_simulator):
    (job,) = run(*SMALL, "scale_out=3", "+axes.times=scale_out")
    names = pd.read_parquet(job / "instances.parquet").instance.unique()
    assert list(names[:6]) == ["a100-0", "a6000-0", "a100-1", "a6000-1", "a100-2", "a6000-2"]
    assert len(names) == 12
    assert set(pd.read_csv(job / "summary.csv").times) == {3}
    assert "hetero1 × 3" in (job / "tables.txt").read_text()


def test_cached_share_is_realised(run):
    shares = {}
    for asked in (0.0, 0.5, 0.9):
        (job,) = run(*SMALL, f"workload.cached_share={asked}", "workload.n_queries=30", name=f"at{asked}")
        summary = pd.read_csv(job / "summary.csv")
        shares[asked] = summary[(summary.policy == "vllm") & (summary.metric == "cached_share")].value.item()
    assert shares[0.0] < 0.02  # a preempted call may find its own blocks
    assert shares[0.5] == pytest.approx(0.5, abs=0.06)  # the first call of each kind finds nothing
    assert 0.75 < shares[0.9] <= 0.9


def test_recorded_arrivals_of_a_file_are_cut_into_runs(run, tmp_path, fake_simulator):
    file = tmp_path / "times.csv"
    file.write_text(
        "when,what\n" + "".join(f"2024-01-01 00:00:{s:04.1f},x\n" for s in (0, 1, 2, 4, 10, 12, 16, 17, 30))
    )
    argv = ("workload.arrivals=recorded", f"workload.arrivals_file={file}")
    (job,) = run(*SMALL, *argv, "seeds=5", name="stretched")
    queries = pd.read_parquet(job / "queries.parquet")
    of = queries[queries.policy == "vllm"]
    # 8 gaps in 30 s become 8 gaps in 8 s; two runs of four queries, the ninth time is left over
    assert list(of[of.seed == 0].arrival_s) == pytest.approx(np.array([0, 1, 2, 4]) * 8 / 30)
    assert list(of[of.seed == 1].arrival_s) == pytest.approx(np.array([0, 2, 6, 7]) * 8 / 30)
    assert set(pd.read_csv(job / "summary.csv").arrivals) == {"recorded"}


@pytest.mark.parametrize(
    ("group", "name"),
    [(None, "poisson"), ("gamma_cv2", "gamma_cv2"), ("onoff", "onoff"), ("modulated", "modulated")],
)
def test_the_name_of_the_arrivals(group, name, run, fake_simulator):
    (job,) = run(*SMALL, *([f"arrivals={group}"] if group else []))
    assert set(pd.read_csv(job / "summary.csv").arrivals) == {name}
