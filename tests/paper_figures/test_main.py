"""The command: what it draws anew, what it leaves, and what it says of mistakes. No experiment is run."""

from __future__ import annotations

import pytest
import yaml

from hexrepro.errors import InputError
from paper_figures import FIGURES, __main__, figure, pages, runs
from tests import made_up


@pytest.fixture
def place(tmp_path):
    """Results of `bursty`, made up."""
    gains = {p: made_up.GAINS[p] for p in ("vllm", "hexgen_flow")}
    kept = tmp_path / "results" / "bursty"
    kept.mkdir(parents=True)
    for stem, frame in made_up.study("bursty", [dict(arrivals="onoff")], gains).items():
        frame.to_csv(kept / f"{stem}.csv", index=False)
    stamp = runs.Stamp(
        "python -m hexrepro experiment=bursty", ["hetero1"], 4, 61.0, False, "2026-01-01", "a", "b"
    )
    (kept / runs.STAMP).write_text(yaml.safe_dump(vars(stamp)))
    return tmp_path


def test_only_what_changed_is_drawn_anew(place):
    here = dict(directory=place / "results", out=place / "out")
    assert __main__.draw(["bursty", "scale"], **here) == ["bursty"]  # of scale there are no results
    assert sorted(f.name for f in (place / "out").iterdir()) == ["bursty.pdf", "bursty.png", "drawn.yaml"]
    assert __main__.draw(["bursty"], **here) == []
    assert __main__.draw(["bursty"], again=True, **here) == ["bursty"]
    (place / "out" / "bursty.pdf").unlink()
    assert __main__.draw(["bursty"], **here) == ["bursty"]
    summary = place / "results" / "bursty" / "summary.csv"
    summary.write_text(summary.read_text().replace("0.6", "0.5"))
    assert __main__.draw(["bursty"], **here) == ["bursty"]


def test_the_pages_say_how_each_figure_came_about(place):
    (place / "out").mkdir()
    (place / "out" / "bursty.png").write_bytes(b"")
    front = place / "front.md"
    front.write_text("before\n<!-- verdicts -->\nold\n<!-- end -->\nafter\n")
    pages.write(place, place / "results", front)
    assert front.read_text().startswith("before\n<!-- verdicts -->\n| claim | paper | verdict |\n")
    assert "old" not in front.read_text()
    assert front.read_text().endswith("<!-- end -->\nafter\n")
    readme = (place / "README.md").read_text()
    section = readme.split("## Bursty arrivals")[1].split("\n## ")[0]
    assert "`python -m hexrepro experiment=bursty`; Hetero-1; 4 seeds; 1 min 1 s." in section
    assert "![bursty](out/bursty.png)" in section
    assert readme.count("not run yet") == len(FIGURES) - 1
    row = next(
        x for x in (place / "REPRODUCTION.md").read_text().splitlines() if x.startswith("| Robust in bursts")
    )
    assert "[figure](out/bursty.png)" in row


def test_an_unknown_figure(capsys):
    assert __main__.main(["atainment"]) == 2
    assert "no figure atainment; did you mean attainment" in capsys.readouterr().err


def test_list_names_every_figure(capsys):
    assert __main__.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in FIGURES)


def test_a_failed_experiment_does_not_stop_the_others(monkeypatch, capsys):
    ran = []

    def run(experiment, _tell):
        ran.append(experiment)
        if experiment == "bursty":
            raise InputError("experiment bursty failed: no")
        return runs.Stamp("", [], 2, 1.0, False, "", "", "")

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(runs, "state", lambda _: "missing")
    monkeypatch.setattr(__main__, "draw", lambda *_, **__: None)
    monkeypatch.setattr(pages, "write", lambda: None)
    assert __main__.main([]) == 1
    assert ran == list(dict.fromkeys(figure(name).EXPERIMENT for name in FIGURES))
    assert "experiment bursty failed: no" in capsys.readouterr().err
