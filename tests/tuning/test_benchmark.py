"""The benchmark of the search runs; its figures are measurements and are not tested."""

from __future__ import annotations

from functools import partial

from hexrepro.benchmarks import tuning


def test_the_benchmark_runs(monkeypatch, capsys):
    monkeypatch.setattr(tuning, "ROUNDS", 1)
    monkeypatch.setattr(tuning, "SEEDS", 2)
    monkeypatch.setattr(tuning, "SAMPLERS", ("tpe", "grid"))
    monkeypatch.setattr(tuning, "STORAGES", {"a journal file": "journal:{}/tune.log"})
    monkeypatch.setattr(tuning, "CLUSTERS", ("hetero2",))
    monkeypatch.setattr(tuning, "TRACES", ("trace1",))
    monkeypatch.setattr(tuning, "problem", partial(tuning.problem, n_queries=4))
    figures = tuning.run()
    assert set(figures) == {
        "overhead α, dense, without Optuna", "overhead α, tpe", "overhead α, grid", "overhead α, tpe, in a journal file",
        "overhead the joint space, tpe", "agreeing", "worst P95 against dense",
    }  # fmt: skip
    assert 0 <= figures["agreeing"] <= 1
    assert figures["worst P95 against dense"] < 1.2
    assert "hetero2, trace1, 1/s" in capsys.readouterr().out
