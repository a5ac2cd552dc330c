"""The benchmark runs, as short as it gets; its figures are measurements and are not tested."""

from __future__ import annotations

import shutil

from hexrepro.benchmarks import gateway


def test_the_gateways_benchmark_runs(capsys, monkeypatch) -> None:
    for name, value in dict(RATES=(100,), ROUNDS=1, SECONDS=0.2, DECISIONS=50).items():
        monkeypatch.setattr(gateway, name, value)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    figures = gateway.run()
    out = capsys.readouterr().out
    assert "One decision" in out
    for kind in ("whole", "stream"):
        assert f"gateway, 100/s, {kind}: added P50 ms" in figures
