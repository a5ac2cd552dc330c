"""The experiments `tune` and `alpha_sensitivity` from the command line, with a stand-in for the simulator: best alpha 0.3."""

from __future__ import annotations

import pandas as pd
import pytest
import yaml
from omegaconf import OmegaConf

from hexrepro.cli import main
from hexrepro.errors import InputError
from hexrepro.experiments.alpha_sensitivity import read_sensitivity
from hexrepro.experiments.tune import read_tuning
from hexrepro.paths import conf_dir

LABELS = [
    "experiment", "cluster", "profile", "prefix_caching", "trace", "arrivals", "rate_qps", "policy", "alpha", "tenant",
]  # fmt: skip
NUMBERS = ["metric", "value", "ci_low", "ci_high", "seeds"]
SMALL = ("seeds=3", "selection.seeds=2", "workload.n_queries=4", "workload.rate_qps=0.5")


@pytest.fixture
def run(tmp_path, cell_cache, fake_simulator, request):
    """Run an experiment; returns its run directory."""

    def run(*argv: str, name: str = "run"):
        if "experiment=tune" in argv:
            request.getfixturevalue("no_sweep")
        where = "hydra.sweep.dir" if "experiment=alpha_sensitivity" in argv else "hydra.run.dir"
        assert main([*argv, f"{where}={tmp_path / name}"]) == 0
        return tmp_path / name

    run.calls = fake_simulator
    return run


def tune(*argv: str):
    return ("experiment=tune", *SMALL, "profile=silicon", *argv)


def test_tune_finds_alpha_and_says_how_sure(run, capsys):
    run_dir = run(*tune())
    assert {f.name for f in run_dir.iterdir()} == {
        "alpha.csv", "best.yaml", "config.yaml", "policy", "tables.txt", "trials.csv",
    }  # fmt: skip
    (answer,) = yaml.safe_load((run_dir / "best.yaml").read_text()).values()
    best = answer["params"]["alpha"]
    assert best == pytest.approx(0.3, abs=0.02)
    assert answer["command"] == (
        "python -m hexrepro experiment=hetero1 cluster=hetero1 workload=trace1 workload.traces=[trace1]"
        f" workload.rate_qps=0.5 profile=silicon prefix_caching=template policy=[vllm,hexgen_flow] alpha={best:g}"
    )

    curve = pd.read_csv(run_dir / "alpha.csv")
    assert list(curve.columns) == [*LABELS, *NUMBERS, "parameter"]
    p95 = curve[curve.metric == "p95_s"]
    # the stand-in: 10 s, 10 s for each unit of |alpha - 0.3|, and 0.01 s a query (P95 of four: 2.85)
    expected = 10.0 + 10.0 * (p95.alpha - 0.3).abs() + 0.0285
    assert p95.value.to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-5)
    assert {0.0, 0.5, 1.0, round(best, 6)} <= set(p95.alpha)
    rows = curve.set_index("metric")
    assert rows.loc["best", ["value", "ci_low", "ci_high"]].tolist() == [best] * 3  # no noise
    low, high = rows.loc["best_flat", ["ci_low", "ci_high"]]
    assert (
        low <= best <= high <= best + 0.011 + 0.02
    )  # 1 % of 10 s is 0.01 of alpha; the distance of best to 0.3 twice
    assert rows.loc["best", "seeds"] == 2
    assert (p95.seeds == 3).all()

    trials = pd.read_csv(run_dir / "trials.csv")
    assert list(trials.columns) == [*LABELS, "trial", "p95_s"]
    assert trials.trial.tolist() == list(range(48))
    assert trials.p95_s.min() == pytest.approx(10.0285 + 10 * abs(best - 0.3), rel=1e-5)
    printed = capsys.readouterr().out
    assert "best mean p95_s" in printed
    assert "paired bootstrap" in printed


def test_the_same_command_simulates_nothing_again(run):
    first = run(*tune(), name="first")
    calls = len(run.calls)
    assert calls == 4  # three batches of 16, and the curve on the reported seeds
    second = run(*tune(), name="second")
    assert len(run.calls) == calls
    for name in ("alpha.csv", "trials.csv", "best.yaml"):
        assert (first / name).read_text() == (second / name).read_text()


def test_alpha_is_chosen_on_other_seeds_than_those_reported(run, monkeypatch):
    from hexrepro.experiments import tune as module

    seen = []
    evaluator = module.evaluator

    def spy(setting, *args, reported, **options):
        found = evaluator(setting, *args, reported=reported, **options)
        seen.append((reported, found.problem.seeds.tolist()))
        return found

    monkeypatch.setattr(module, "evaluator", spy)
    run(*tune())
    assert seen == [(False, [1000000, 1000001]), (True, [0, 1, 2])]


def test_the_tuned_policy_can_be_run(run):
    run_dir = run(*tune("tuning/space=alpha_beta", "tuning.sampler.trials=24"), name="tuned")
    (file,) = (run_dir / "policy").iterdir()
    (answer,) = yaml.safe_load((run_dir / "best.yaml").read_text()).values()
    assert f"policy=[vllm,{file.stem}]" in answer["command"]
    policy = yaml.safe_load(file.read_text())
    assert policy["dispatch_params"]["alpha"] == answer["params"]["alpha"]
    compared = run(*answer["command"].split()[3:], "seeds=2", "workload.n_queries=4")
    assert set(pd.read_csv(compared / "summary.csv").policy) == {"vllm", file.stem}


def test_a_joint_search_is_one_file(run, capsys):
    run_dir = run(*tune("tuning/space=joint", "tuning.sampler.trials=32"))
    curve = pd.read_csv(run_dir / "alpha.csv")
    assert set(curve.parameter) == {"alpha", "beta", "waiting_only", "queue", "window"}
    assert set(curve[(curve.parameter == "queue") & (curve.metric == "p95_s")].queue) == {
        "urgency", "fcfs", "least_laxity", "request_groups",
    }  # fmt: skip
    (answer,) = yaml.safe_load((run_dir / "best.yaml").read_text()).values()
    assert answer["not_in_the_policy"] == ["window"]
    assert "request_groups" in capsys.readouterr().out


def test_several_objectives_give_a_front(run):
    run_dir = run(*tune("tuning.objective=[p95,attainment@3]", "tuning/sampler=nsga2"))
    front = pd.read_csv(run_dir / "pareto.csv")
    assert list(front.columns) == [*LABELS, *NUMBERS]
    assert set(front.metric) == {"p95_s", "attainment@3"}
    assert front.alpha.nunique() == 1  # every alpha attains, so the least P95 is the front


def test_a_storage_keeps_the_trials(run, tmp_path):
    import optuna

    run(*tune(f"tuning.storage=sqlite:///{tmp_path}/tune.db"))
    (study,) = optuna.get_all_study_summaries(f"sqlite:///{tmp_path}/tune.db")
    assert study.n_trials == 48
    assert study.study_name.startswith("trace1 0.5 hetero1 silicon tpe")


MISTAKES = {
    "unknown sampler": (["tuning/sampler=tep"], ["tuning/sampler=tep", "tpe"]),
    "unknown space": (["tuning/space=alfa"], ["tuning/space=alfa", "alpha"]),
    "unknown parameter": (["+tuning.space.gamma={low: 0, high: 1}"], ["tuning.space.gamma", "alpha, beta"]),
    "storage elsewhere": (["tuning.storage=journal:/no/where/x.log"], ["journal:/no/where/x.log"]),
}


@pytest.mark.parametrize(("argv", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line(argv, says, cell_cache, fake_simulator, tmp_path, capsys):
    assert main([*tune(*argv), f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("hexrepro: ")
    assert err.count("\n") == 1, err
    for words in says:
        assert words in err
    assert fake_simulator == []
    assert not (tmp_path / "run").exists()


TUNING_MISTAKES = {
    "unknown objective": ({"objective": "p96"}, ["objective p96", "p95"]),
    "an objective twice": ({"objective": ["p95", "p95"]}, ["tuning.objective", "twice"]),
    "no objective": ({"objective": []}, ["tuning.objective", "at least one"]),
    "unknown sampler field": ({"sampler": {"name": "tpe", "size": 3}}, ["tuning.sampler.size", "batch"]),
    "negative seed": ({"seed": -1}, ["seed=-1"]),
    "curve of one": ({"curve": 1}, ["tuning.curve=1"]),
    "flat of two": ({"flat": 2}, ["tuning.flat=2"]),
    "storage as a number": ({"storage": 3}, ["tuning.storage=3", "sqlite"]),
}


@pytest.mark.parametrize(("change", "says"), TUNING_MISTAKES.values(), ids=TUNING_MISTAKES.keys())
def test_a_mistake_in_the_tuning_is_named(change, says):
    cfg = OmegaConf.load(conf_dir() / "experiment" / "tune.yaml")
    cfg = OmegaConf.merge(
        {"policy": {"hexgen_flow": "hexgen_flow"}, "slo_scale": 5.0},
        {"tuning": {**cfg.tuning, "space": {}, "sampler": {"name": "tpe", "trials": 8}}},
    )
    read_tuning(cfg)
    cfg.tuning = {**cfg.tuning, **change}
    with pytest.raises(InputError) as error:
        read_tuning(cfg)
    for words in says:
        assert words in str(error.value)


def test_one_policy_is_tuned():
    with pytest.raises(InputError, match=r"one policy.*tuning\.space\.policy"):
        read_tuning(OmegaConf.create({"policy": {"vllm": {}, "hexgen_flow": {}}}))


# ---- alpha_sensitivity ----------------------------------------------------------------------------------------------

SENSITIVITY = (
    "experiment=alpha_sensitivity", "seeds=3", "selection.seeds=2", "workload.n_queries=4", "sensitivity.alphas=11",
    "sensitivity.also=[0.03]", "sensitivity.heatmap.alphas=3", "sensitivity.heatmap.also=[]",
    "sensitivity.heatmap.rates_qps=[0.2,0.9]", "prefix_caching=template",
)  # fmt: skip


def test_alpha_sensitivity_covers_the_settings_of_the_authors(run):
    run_dir = run(*SENSITIVITY, "profile=silicon")
    found = {name: sorted(run_dir.glob(f"*/{name}.csv")) for name in ("alpha", "alpha_rate", "paper_alpha")}
    assert [len(files) for files in found.values()] == [
        4,
        2,
        4,
    ]  # clusters × (paper, trace4); maps on Trace 1 only
    alpha, rate, paper = (pd.concat(map(pd.read_csv, files)) for files in found.values())

    assert list(alpha.columns) == [*LABELS, *NUMBERS]
    assert list(rate.columns) == [*LABELS, *NUMBERS]
    axes = ["cluster", "profile", "trace", "rate_qps", "policy"]
    curves = alpha[alpha.metric == "p95_s"].groupby(axes)
    assert len(curves) == 2 * (3 * 2 + 2) * 2  # clusters, traces and rates, policies
    for _, curve in curves:
        assert sorted(curve.alpha) == sorted([*(i / 10 for i in range(11)), 0.03])
        assert curve.value.to_numpy() == pytest.approx(
            10.0285 + 10 * (curve.alpha - 0.3).abs().to_numpy(), rel=1e-5
        )
    best = alpha[alpha.metric == "best"]
    assert len(best) == len(curves)
    assert (best.value == 0.3).all()
    assert (best.ci_low == 0.3).all()

    # the authors' α, and P95 there against that at 0.3
    assert len(paper) == len(curves)
    ours = paper.set_index(["cluster", "trace", "rate_qps"]).paper_alpha
    assert set(ours["hetero2", "trace3", 0.5]) == {0.4}
    assert set(ours["hetero1", "trace4", 5.0]) == {0.2}
    assert paper.p95_ratio.to_numpy() == pytest.approx(
        (10.0285 + 10 * (paper.paper_alpha - 0.3).abs().to_numpy()) / 10.0285, rel=1e-5
    )
    # the stand-in adds no noise: whatever is not 0.3 is worse
    assert set(paper[paper.paper_alpha != 0.3].verdict) == {"theirs is worse"}
    assert set(paper[paper.paper_alpha == 0.3].verdict) == {"tie"}

    # the map: relative to the best α of its rate
    assert set(rate.rate_qps) == {0.2, 0.9}
    assert set(rate.trace) == {"trace1"}
    ratio = rate[rate.metric == "p95_s_ratio_best"]
    assert ratio.value.min() == 1.0
    assert set(ratio.alpha) == {0.0, 0.5, 1.0}


def test_alpha_sensitivity_runs_from_its_cache(run):
    narrow = ("cluster=hetero1", "workload=trace1", "profile=silicon")
    first = run(*SENSITIVITY, *narrow, name="first")
    calls = len(run.calls)
    assert calls == (2 * 2 + 2) * 2  # curves and maps, on reported and on other seeds
    second = run(*SENSITIVITY, *narrow, name="second")
    assert len(run.calls) == calls
    (a,), (b,) = (list(d.glob("*/alpha.csv")) for d in (first, second))
    assert a.read_text() == b.read_text()


SENSITIVITY_MISTAKES = {
    "one alpha": ({"alphas": 1}, "sensitivity.alphas=1"),
    "alpha above one": ({"also": [1.5]}, "sensitivity.also=1.5"),
    "rate of zero": ({"heatmap": {"rates_qps": [0]}}, "rates_qps=0"),
    "unknown metric": ({"metrics": ["p97"]}, "objective p97"),
    "half an entry": ({"paper_alpha": [{"trace": "trace1"}]}, "sensitivity.paper_alpha[0]"),
    "flat of two": ({"flat": 2}, "sensitivity.flat=2"),
}


@pytest.mark.parametrize(("change", "says"), SENSITIVITY_MISTAKES.values(), ids=SENSITIVITY_MISTAKES.keys())
def test_a_mistake_in_the_sensitivity_is_named(change, says):
    cfg = OmegaConf.load(conf_dir() / "experiment" / "alpha_sensitivity.yaml")
    traces = ("trace1",)
    assert read_sensitivity(cfg, traces).heat_traces == traces
    with pytest.raises(InputError) as error:
        read_sensitivity(OmegaConf.merge(cfg, {"sensitivity": change}), traces)
    assert says in str(error.value)
