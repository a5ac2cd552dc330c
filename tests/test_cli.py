"""The command line: help, and one clear line for each kind of mistake."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from hexrepro.cli import GROUPS, describe, help_text, main
from hexrepro.paths import conf_dir

SMALL = (
    "seeds=2", "profile=silicon", "workload=trace1", "workload.n_queries=4", "figures=false", "policy=[vllm,eft]",
)  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, cell_cache, fake_simulator):
    """Run a command line in an empty directory; returns (exit code, stdout, stderr)."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        return code, *capsys.readouterr()

    run.directory = work
    return run


# ---- help ---------------------------------------------------------------------------------------------------------


def test_help_lists_every_experiment_and_option_with_its_description():
    text = help_text(conf_dir())
    for group in ("experiment", *GROUPS):
        for file in (conf_dir() / group).glob("[!_]*.yaml"):
            assert describe(file), f"{file.name} has no description in its first comment"
            assert re.search(rf"^  {file.stem}\s+{re.escape(describe(file))}$", text, re.M)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"], []])
def test_help_succeeds(argv, capsys):
    assert main(argv) == 0
    assert "experiment=hetero1" in capsys.readouterr().out


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from hexrepro.cli import main; main(['--help']);"
        "heavy = {'numpy', 'numba', 'pandas', 'hydra', 'omegaconf', 'scipy', 'matplotlib', 'pyarrow', 'rich', 'yaml'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"hexrepro \d+\.\d+\.\d+\n", capsys.readouterr().out)


# ---- mistakes -----------------------------------------------------------------------------------------------------

MISTAKES = {
    "no experiment": (["seeds=3"], ["experiment=NAME", "hetero1", "homo"]),
    "unknown experiment": (["experiment=hetro1"], ["experiment=hetro1", "did you mean hetero1"]),
    "unknown policy": (
        ["experiment=hetero1", "policy=hexgenflow"],
        ["policy=hexgenflow", "hexgen_flow", "vllm"],
    ),
    "unknown policy in a list": (
        ["experiment=hetero1", "policy=[vllm,etf]"],
        ["policy=etf", "did you mean eft"],
    ),
    "unknown cluster": (["experiment=hetero1", "cluster=hetero3"], ["cluster=hetero3", "hetero2"]),
    "unknown workload": (["experiment=hetero1", "workload=trace9"], ["workload=trace9", "trace1"]),
    "unknown trace": (
        ["experiment=hetero1", "workload.traces=[trac1]"],
        ["workload.traces", "trac1", "trace1"],
    ),
    "unknown option": (["experiment=hetero1", "sedes=3"], ["sedes", "did you mean seeds"]),
    "unknown nested option": (
        ["experiment=hetero1", "workload.rate=3"],
        ["workload.rate", "workload.rate_qps"],
    ),
    "option at the wrong level": (["experiment=hetero1", "rate_qps=3"], ["rate_qps", "workload.rate_qps"]),
    "unknown flag": (["experiment=hetero1", "--seed", "3"], ["--seed", "--help"]),
    "no equals sign": (["hetero1"], ["hetero1", "NAME=VALUE"]),
    "negative rate": (
        ["experiment=hetero1", "workload.rate_qps=-1"],
        ["workload.rate_qps=-1", "above 0", "queries/s"],
    ),
    "rate of zero in a list": (
        ["experiment=hetero1", "workload.rate_qps=[1,0]"],
        ["workload.rate_qps=0", "above 0"],
    ),
    "rate that is no number": (
        ["experiment=hetero1", "workload.rate_qps=fast"],
        ["workload.rate_qps=fast", "number"],
    ),
    "infinite rate": (["experiment=hetero1", "workload.rate_qps=inf"], ["workload.rate_qps=inf"]),
    "no seeds": (["experiment=hetero1", "seeds=0"], ["seeds=0", "at least 1"]),
    "seeds as text": (["experiment=hetero1", "seeds=many"], ["seeds=many", "whole number"]),
    "unknown profile": (["experiment=hetero1", "profile=gold"], ["gold"]),
    "unknown prefix caching": (
        ["experiment=hetero1", "prefix_caching=on"],
        ["prefix_caching=on", "template"],
    ),
    "negative SLO scale": (["experiment=hetero1", "slo_scale=-2"], ["slo_scale=-2", "above 0"]),
    "alpha above one": (["experiment=hetero1", "alpha=1.5"], ["alpha=1.5", "at most 1"]),
    "unknown estimator": (["experiment=hetero1", "estimator=mean"], ["estimator", "mean", "median"]),
    "unknown arrivals": (
        ["experiment=hetero1", "workload.arrivals=burst"],
        ["workload.arrivals=burst", "onoff"],
    ),
    "option of other arrivals": (["experiment=hetero1", "workload.cv=2"], ["cv", "poisson"]),
    "unknown engine": (["experiment=hetero1", "engine=vllm"], ["engine=vllm", "vllm_v1"]),
    "unknown batching": (["experiment=hetero1", "engine.batching=static"], ["batching", "static", "chunked"]),
    "unknown baseline": (["experiment=hetero1", "baseline=vlm"], ["vlm", "vllm"]),
    "unknown runner": (["experiment=hetero1", "run=compere"], ["run=compere", "compare"]),
    "selection overlaps": (
        ["experiment=hetero1", "selection.first_seed=5"],
        ["selection.first_seed=5", "seeds=20"],
    ),
    "alpha where there is none": (["experiment=hetero1", "selection.policies=[vllm]"], ["vllm", "alpha"]),
    "no file": (["experiment=hetero1", "workload=file"], ["workload.path"]),
    "missing file": (["experiment=hetero1", "workload=file", "workload.path=none.json"], ["none.json"]),
    "background without a rate": (
        ["experiment=hetero1", "background.rate_qps=1"],
        ["background.workload", "background=chat"],
    ),
    "unknown background": (
        ["experiment=hetero1", "background=chat", "background.workload=chess"],
        ["background.workload=chess", "chat"],
    ),
    "too few SLO scales": (
        ["experiment=hetero1", "tenants=mixed", "tenants.slo_scales=[1,2]"],
        ["tenants.slo_scales=[1, 2]", "3 numbers"],
    ),
    "negative share": (
        ["experiment=hetero1", "tenants=mixed", "tenants.shares=[1,1,-1]"],
        ["tenants.shares=-1", "above 0"],
    ),
    "cached share above one": (
        ["experiment=hetero1", "workload.cached_share=1.5"],
        ["workload.cached_share=1.5", "at most 1"],
    ),
    "no cluster": (["experiment=hetero1", "scale_out=0"], ["scale_out=0", "at least 1"]),
    "no scored queries": (["experiment=hetero1", "scored=0"], ["scored=0", "at least 1"]),
    "an axis that is not there": (["experiment=hetero1", "+axes.x=seed"], ["axes.x=seed", "one value"]),
    "a file for other arrivals": (
        ["experiment=hetero1", "workload.arrivals_file=a.csv"],
        ["workload.arrivals_file=a.csv", "workload.arrivals=recorded"],
    ),
    "no file of arrivals": (
        ["experiment=hetero1", "workload.arrivals=recorded", "workload.arrivals_file=none.csv"],
        ["none.csv", "cannot be read"],
    ),
    "goodput without its values": (
        ["experiment=hetero1", "run=goodput"],
        ["goodput", "experiment=throughput"],
    ),
    "scale without its values": (["experiment=hetero1", "run=scale"], ["scale", "experiment=scale"]),
    "a mistake in a sweep's config": (["experiment=ablation", "slo_scale=0"], ["slo_scale=0", "above 0"]),
    "confidence of one": (["experiment=hetero1", "confidence=1"], ["confidence=1", "below 1"]),
    "missing config directory": (["experiment=hetero1", "--config-dir", "nowhere"], ["nowhere"]),
}


@pytest.mark.parametrize(("argv", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_leaves_nothing_behind(argv, says, run, fake_simulator, request):
    if "experiment=ablation" not in argv:
        request.getfixturevalue("no_sweep")
    code, out, err = run(*argv)
    assert code == 2
    assert out == ""
    assert err.startswith("hexrepro: ")
    assert err.count("\n") == 1, err
    assert len(err) < 400, err
    for words in says:
        assert words in err
    assert list(run.directory.iterdir()) == []
    assert fake_simulator == []


def test_a_run_directory_that_cannot_be_made(run):
    (run.directory / "taken").write_text("a file, not a directory")
    code, _, err = run("experiment=hetero1", *SMALL, "hydra.run.dir=taken/here")
    assert code == 2
    assert "taken" in err
    assert "hydra.run.dir" in err
    assert err.count("\n") == 1


def test_a_cache_directory_that_cannot_be_made(run, monkeypatch):
    (run.directory / "taken").write_text("a file, not a directory")
    monkeypatch.setenv("HEXREPRO_CACHE", str(run.directory / "taken"))
    code, _, err = run("experiment=hetero1", *SMALL)
    assert code == 2
    assert "HEXREPRO_CACHE" in err
    assert err.count("\n") == 1
    assert [p.name for p in run.directory.iterdir()] == ["taken"]


def test_a_trace_row_with_a_mistake_is_named(run):
    (run.directory / "trace.json").write_text(
        '[{"Text2SQLRequest": [{"step": "Selector", "input_length": -5}]}]'
    )
    code, _, err = run(
        "experiment=hetero1", "workload=file", "workload.path=trace.json", "workload.rate_qps=1"
    )
    assert code == 2
    assert "trace.json" in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(run, monkeypatch):
    monkeypatch.setenv("HEXREPRO_DEBUG", "1")
    with pytest.raises(ValueError, match="seeds=0"):
        main(["experiment=hetero1", "seeds=0"])


def test_ctrl_c_says_how_to_go_on(run, monkeypatch):
    from hexrepro.experiments import cells

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "get", interrupted)
    code, _, err = run("experiment=hetero1", *SMALL)
    assert code == 130
    assert "the same command goes on" in err
    assert list(run.directory.iterdir()) == []


# ---- what works ---------------------------------------------------------------------------------------------------


def test_a_run_writes_where_hydra_users_expect(run):
    code, out, _ = run("experiment=hetero1", *SMALL)
    assert code == 0
    (run_dir,) = (run.directory / "outputs" / "hetero1").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", run_dir.name)
    assert str(run_dir) in out


def test_multirun_makes_a_run_each(run):
    code, *_ = run("experiment=hetero1", *SMALL, "prefix_caching=off,template", "-m")
    assert code == 0
    found = sorted(p.parent.name for p in run.directory.glob("outputs/sweeps/*/*/summary.csv"))
    assert found == ["0_hetero1", "1_hetero1"]


def test_a_mistake_inside_a_sweep_is_one_line_too(run):
    code, _, err = run("experiment=hetero1", *SMALL, "workload.rate_qps=1,-1", "-m")
    assert code == 2
    progress, mistake = err.splitlines()  # the first run of the sweep went well
    assert "2/2 cells done" in progress
    assert mistake.startswith("hexrepro: workload.rate_qps=-1")


def test_config_is_shown_without_running(run):
    code, out, _ = run("experiment=hetero2", "--cfg", "job")
    assert code == 0
    assert "name: hetero2" in out
    assert list(run.directory.iterdir()) == []


def test_policies_of_one_s_own_come_from_a_config_directory(run):
    own = run.directory / "mine" / "policy"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# mine\nname: mine\ndispatch: uniform_random\nqueue: urgency\n")
    code, out, _ = run("experiment=hetero1", *SMALL[:-1], "--config-dir", "mine", "policy=[mine,eft]")
    assert code == 0
    assert "mine" in out
