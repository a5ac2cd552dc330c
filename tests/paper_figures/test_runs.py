"""Which experiments run, what is kept of them, and what Ctrl-C and a failure do. No experiment is run here."""

from __future__ import annotations

import pandas as pd
import pytest

from hexrepro.errors import InputError
from hexrepro.report import results
from paper_figures import runs


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A repository of its own with one experiment; nothing of the real one is touched."""
    conf = tmp_path / "conf"
    for group in ("experiment", "cluster"):
        (conf / group).mkdir(parents=True)
    (conf / "config.yaml").write_text("seeds: 2\n")
    (conf / "experiment" / "small.yaml").write_text("a: 1\n")
    (conf / "cluster" / "here.yaml").write_text("b: 1\n")
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "conf_dir", lambda: conf)
    monkeypatch.setattr(runs, "data_dir", lambda: tmp_path / "data")
    return tmp_path


def rows(value: float) -> pd.DataFrame:
    columns = {"cluster": "hetero1", "prefix_caching": "off", "metric": "p95_s", "value": value, "seeds": 2}
    return pd.DataFrame([columns])


@pytest.fixture
def experiment(places, monkeypatch):
    """Replaces the process: writes two jobs' files, as a sweep does. Set `status` and `says` to change its end."""
    told = {"status": 0, "says": "trace1: 4/4 cells done in 1.0 s, 2 of them cached", "argv": []}

    def watch(argv, log, tell):
        told["argv"].append(argv)
        log.write_text(f"first\n{told['says']}\n\n")
        for i in (10, 2):
            job = places / runs.RUN_DIR / "small" / f"{i}_small"
            job.mkdir()
            rows(i + 0.12345678).to_csv(job / "summary.csv", index=False)
        return told["status"]

    monkeypatch.setattr(runs, "_watch", watch)
    return told


def test_missing_then_fresh_then_stale(places, experiment, monkeypatch):
    kept = places / "results"
    assert runs.state("small", kept) == "missing"
    stamp = runs.run("small", directory=kept)
    assert runs.state("small", kept) == "fresh"
    assert (stamp.clusters, stamp.seeds, stamp.cached) == (["hetero1"], 2, True)
    assert stamp.command == "python -m hexrepro experiment=small"

    (places / "conf" / "experiment" / "other.yaml").write_text("c: 1\n")
    assert runs.state("small", kept) == "fresh"  # another experiment does not concern it
    for file, text in (
        ("experiment/small.yaml", "a: 2\n"),
        ("cluster/here.yaml", "b: 2\n"),
        ("config.yaml", "s: 3\n"),
    ):
        old = (places / "conf" / file).read_text()
        (places / "conf" / file).write_text(text)
        assert runs.state("small", kept) == "stale", file
        (places / "conf" / file).write_text(old)
    assert runs.state("small", kept) == "fresh"
    monkeypatch.setattr(runs, "source_digest", lambda: "another")
    assert runs.state("small", kept) == "stale"


def test_jobs_are_merged_in_order_with_six_digits(places, experiment):
    runs.run("small", directory=places / "results")
    frame = results.read(places / "results" / "small")["summary"]
    assert frame["value"].tolist() == [2.12346, 10.1235]
    assert frame["prefix_caching"].tolist() == ["off", "off"]  # not False


def test_results_of_an_earlier_run_do_not_stay(places, experiment):
    runs.run("small", directory=places / "results")
    (places / "results" / "small" / "old.csv").write_text("a\n1\n")
    stale_job = places / runs.RUN_DIR / "small" / "99_small"
    stale_job.mkdir()
    rows(99.0).to_csv(stale_job / "summary.csv", index=False)
    runs.run("small", directory=places / "results")
    frames = results.read(places / "results" / "small")
    assert list(frames) == ["summary"]
    assert len(frames["summary"]) == 2


def test_a_failure_keeps_the_old_results_and_says_why(places, experiment):
    kept = places / "results"
    runs.run("small", directory=kept)
    experiment.update(status=2, says="hexrepro: seeds=0 must be at least 1")
    with pytest.raises(InputError, match="experiment small failed: hexrepro: seeds=0 must be at least 1"):
        runs.run("small", directory=kept)
    assert runs.state("small", kept) == "fresh"


def test_an_interrupted_run_is_an_interrupt(places, experiment):
    experiment["status"] = 130
    with pytest.raises(KeyboardInterrupt):
        runs.run("small", directory=places / "results")
    assert runs.state("small", places / "results") == "missing"


def test_only_the_named_rows_are_kept(places, monkeypatch):
    monkeypatch.setitem(
        runs.KEPT, "small", {"summary": lambda f: f["value"] > 5, "long": lambda f: f["value"] > 99}
    )
    job = places / "run"
    job.mkdir()
    for stem in ("summary", "long", "whole"):
        pd.concat([rows(1.0), rows(9.0)]).to_csv(job / f"{stem}.csv", index=False)
    runs.keep("small", job, places / "kept")
    frames = results.read(places / "kept")
    assert {stem: frame["value"].tolist() for stem, frame in frames.items()} == {
        "summary": [9.0],
        "whole": [1.0, 9.0],
    }


def test_an_unknown_experiment(places):
    with pytest.raises(InputError, match=r"conf/experiment/nosuch\.yaml is missing"):
        runs.run("nosuch", directory=places / "results")


def test_a_run_without_results(places):
    (places / "empty").mkdir()
    with pytest.raises(InputError, match="no result file"):
        runs.keep("small", places / "empty", places / "kept")
