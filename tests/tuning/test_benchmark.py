"""The benchmarks of the tuners run; their figures are measurements and are not tested."""

from __future__ import annotations

from functools import partial

from hexrepro.benchmarks import online, tuning


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


def test_the_online_benchmark_runs(monkeypatch, capsys):
    monkeypatch.setattr(online, "ROUNDS", 1)
    monkeypatch.setattr(online, "RATES_QPS", (0.2,))
    monkeypatch.setattr(online, "WATCHED_S", 200.0)
    figures = online.run()
    assert set(figures) == {"ms a decision at 0.2/s", "race at 0.2/s"}
    assert all(value > 0 for value in figures.values())
    assert "the race saves" in capsys.readouterr().out
