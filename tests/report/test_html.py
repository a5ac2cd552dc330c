"""The page of a run: it says what the result files say, and needs nothing from elsewhere."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from hexrepro.report.__main__ import main
from hexrepro.report.html import run_directories
from tests.made_up import study

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are closed in order; keeps texts, tags and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.addresses, self.cells = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and self.open[-1] in ("td", "th", "small"):
            self.cells[-1] += f" {data}" if self.cells[-1] else data


@pytest.fixture
def run(tmp_path) -> Path:
    """The files that a comparison leaves, with made-up numbers, a name that must be escaped, and one without an end."""
    directory = tmp_path / "0_hetero1"
    directory.mkdir()
    files = study(
        "hetero1",
        [dict(trace="trace1"), dict(trace="trace2", rate_qps=1.0)],
        {"vllm": 1.0, "hexgen_flow": 1.5, "<mine>": 0.9},
    )
    summary = files["summary"]
    cost = summary[(summary.metric == "p95_s") & (summary.trace == "trace2")].assign(
        metric="cost_per_1000", value=12.345
    )
    files["summary"] = summary = pd.concat([summary, cost], ignore_index=True)
    summary.loc[
        (summary.policy == "<mine>") & (summary.metric == "scale_at_99"), ["value", "ci_low", "ci_high"]
    ] = float("inf")
    for stem, frame in files.items():
        frame.to_csv(directory / f"{stem}.csv", index=False)
    (directory / "config.yaml").write_text("# python -m hexrepro experiment=hetero1\nseeds: 4 # <few>\n")
    (directory / "tables.txt").write_text("the table & what it says\n")
    return directory


def test_the_page_of_a_run(run, capsys) -> None:
    assert main(["html", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    text = (run / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert text.count("<table") == 2  # a setting each
    assert "python -m hexrepro experiment=hetero1" in text
    assert "seeds: 4 # &lt;few&gt;" in text
    assert "the table &amp; what it says" in text
    mine = page.cells.index("<mine>")
    assert page.cells[mine + 1].startswith("221.9 ±")  # P95: 200 s / 0.9, and the seeds' noise
    assert page.cells.count("$ per 1 000 queries") == 1  # where the prices are known
    assert "×0.67" in page.cells[page.cells.index("HexGen-Flow α = 0.2") + 1]
    assert any(cell.startswith("never") for cell in page.cells)
    assert "svg" in page.tags  # no picture was there: it is drawn from the curves
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert headings(text) == [1, 2, 2, 2]
    assert not re.search(r"(@import|url\((?!#)|<script|<link)", text)


def headings(text: str) -> list[int]:
    return [int(level) for level in re.findall(r"<h(\d)>", text)]


def test_pictures_of_the_run_are_taken_as_they_are(run) -> None:
    (run / "attainment_silicon.png").write_bytes(b"\x89PNG picture")
    assert main(["html", str(run), "-o", str(run / "other" / "page.html")]) == 0
    page = Page((run / "other" / "page.html").read_text())
    assert page.addresses == ["data:image/png;base64,iVBORyBwaWN0dXJl"]
    assert "svg" not in page.tags


def test_the_page_of_a_sweep_and_of_another_experiment(run) -> None:
    for name in ("10_tune", "2_tune"):
        other = run.parent / name
        other.mkdir()
        (other / "config.yaml").write_text("run: tune\n")
        (other / "tables.txt").write_text("α* = 0.1\n")
        (other / "alpha.csv").write_text("parameter,value\nalpha,0.123456789\n" + "alpha,0.5\n" * 300)
    assert [d.name for d in run_directories(run.parent)] == ["0_hetero1", "2_tune", "10_tune"]
    assert main(["html", str(run.parent)]) == 0
    text = (run.parent / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert text.index("0_hetero1") < text.index("2_tune") < text.index("10_tune")
    assert "α* = 0.1" in text
    assert "0.123457" in page.cells
    assert "and 101 more rows" in text
    levels = headings(text)
    assert levels[:2] == [1, 2]
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("summary.csv", b"\xff\xfe\x00", ("summary.csv", "not a result file")),
        ("config.yaml", b"\xff\xfe\x00", ("config.yaml", "cannot be read")),
    ],
)
def test_a_damaged_file_is_named(name: str, content: bytes, words: tuple[str, ...], run, capsys) -> None:
    (run / name).write_bytes(content)
    assert main(["html", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words), error
