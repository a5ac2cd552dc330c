"""The benchmark command's manners; its figures are measurements and are not tested."""

import json

import pytest

from hexrepro.benchmarks import __main__ as command
from hexrepro.benchmarks import simulator


def test_a_directory_that_is_not_there_is_refused_before_anything_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(simulator, "run", lambda: pytest.fail("ran"))
    monkeypatch.setattr("sys.argv", ["benchmarks", "simulator", "--json", str(tmp_path / "no" / "b.json")])
    assert command.main() == 2
    assert "no such directory" in capsys.readouterr().err


def test_an_unknown_benchmark_names_those_there_are(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks", "gatewey"])
    with pytest.raises(SystemExit) as exit_:
        command.main()
    assert exit_.value.code == 2
    assert "simulator" in capsys.readouterr().err


def test_figures_are_written_as_json(monkeypatch, tmp_path):
    monkeypatch.setattr(simulator, "run", lambda: {"calls_per_s_one_core": 1.0})
    monkeypatch.setattr("sys.argv", ["benchmarks", "simulator", "--json", str(tmp_path / "b.json")])
    assert command.main() == 0
    assert json.loads((tmp_path / "b.json").read_text()) == {"calls_per_s_one_core": 1.0}


def test_the_measured_processes_run(capsys, monkeypatch):
    """Each measurement once, as short as it gets."""
    monkeypatch.setattr(simulator, "ROUNDS", 1)
    monkeypatch.setattr(simulator, "SECONDS", 0.001)
    monkeypatch.setattr(simulator, "QUERIES", 100)
    monkeypatch.setattr(simulator, "ALPHAS", 2)
    simulator.first_run()
    simulator.throughput()
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["calls_per_s"] > 0 for row in rows)
    assert rows[0]["ratio"] == [1.0, 1.0, 1.0]
    simulator.alpha_sweep()
    assert json.loads(capsys.readouterr().out)["wall_s"] > 0
