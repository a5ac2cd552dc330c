"""The day of the online tuner as an experiment: recovery by hand, and a finished seed is not run again."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd

from hexrepro.cli import main
from hexrepro.experiments import alpha_online
from hexrepro.experiments.day import Change, Day, Phase

SHORT = (
    "experiment=alpha_online", "seeds=1", "workers=1", "fixed=[0.0,1.0]", "hindsight.candidates=[0.0,0.5]",
    "day.phases=[{duration_s:200,rate_qps:0.2,trace:tiny}]",
    "day.changes=[{at_s:60,event:slow,instance:a100-0,factor:3.0},{at_s:140,event:leave,instance:a6000-0}]",
)  # fmt: skip


def test_recovery_by_hand():
    """Samples every 20 s; hindsight has 10 s throughout, so that above 12.5 s counts. After the slow-down at 50 s the tail is
    last above it at 100 s, 50 s later; what is above before, and the recovery itself at 130 s, do not count; after the
    instance leaves at 170 s it never is."""
    changes = (
        Change(50.0, "slow", "a", factor=2.0),
        Change(130.0, "slow", "a", factor=1.0),
        Change(170.0, "leave", "a"),
    )
    day = Day((Phase(200.0, 1.0, "tiny"),), changes, ())
    plan = SimpleNamespace(day=day, recovered_at=1.25)
    tail_s = [None, 20.0, 11.0, 13.0, 14.0, 12.5, 30.0, 30.0, 12.0, 10.0]
    assert alpha_online._recovery_s(plan, tail_s, [10.0] * 10) == [50.0, 0.0]


def test_a_finished_day_is_not_run_again(tmp_path, cell_cache, monkeypatch):
    assert main([*SHORT, f"hydra.run.dir={tmp_path / 'once'}"]) == 0
    monkeypatch.setattr(alpha_online, "run_seed", None)
    assert main([*SHORT, f"hydra.run.dir={tmp_path / 'again'}"]) == 0
    once, again = (pd.read_csv(tmp_path / name / "alpha_online.csv") for name in ("once", "again"))
    pd.testing.assert_frame_equal(once, again)
    assert set(once.policy) == {"fixed", "paper", "continuous", "hindsight"}
    best = once[(once.metric == "p95_s_ratio") & (once.policy == "fixed")].value.min()
    assert best == 1.0
    timeline = pd.read_csv(tmp_path / "once" / "timeline.csv")
    assert timeline.time_s.max() == 200.0
    assert set(timeline.event.dropna()) == {"a100-0 3 × slower", "a6000-0 leaves"}
