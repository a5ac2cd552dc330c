"""What is committed belongs together: the pages say what the kept results say, and every picture is there."""

from __future__ import annotations

import re

import pytest

from hexrepro.report import reproduction, results
from paper_figures import FIGURES, pages, runs

everything = {d.name: results.read(d) for d in sorted(runs.RESULTS.glob("[!.]*")) if d.is_dir()}
pytestmark = pytest.mark.skipif(not everything, reason="no results are committed")


def test_the_verdicts_are_those_of_the_results():
    page = (pages.HERE / "REPRODUCTION.md").read_text(encoding="utf-8")
    for claim, verdict, _ in reproduction.answers(everything, {}):
        row = next(line for line in page.splitlines() if line.startswith(f"| {claim.text} |"))
        word = {"reproduced": "shown", "not": "not shown"}.get(verdict, verdict) if claim.own else verdict
        assert f"| **{word}**: turns on" in row


def test_every_picture_that_a_page_shows_is_there():
    for name in ("README.md", "REPRODUCTION.md"):
        for address in re.findall(r"\]\((out/[^)]*)\)", (pages.HERE / name).read_text(encoding="utf-8")):
            assert (pages.HERE / address).exists(), f"{name} shows {address}"
            assert (pages.HERE / address).with_suffix(".pdf").exists()


def test_every_figure_has_a_section():
    readme = (pages.HERE / "README.md").read_text(encoding="utf-8")
    assert all(f"`python -m paper_figures {name}`" in readme for name in FIGURES)
