"""What the pages for researchers show is tried: their files are taken from their text, and their commands are run in order,
those that simulate shrunk. (The README has tests of its own, and so has the operators' page.)"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
PAGES = {name: HERE / "hexrepro" / name / "README.md" for name in ("workload", "cluster", "experiments")}
SHRUNK = (
    "seeds=2", "workload.n_queries=3", "selection.seeds=2", "selection.alphas=[0.0,0.5]", "figures=false", "workers=1",
)  # fmt: skip
SMALL_PLAN = ("plan.gpus=[a100:2,h100:1]", "plan.trials=2", "plan.n_queries=3", "plan.slo_s=400")
# What is not run here, and why
ELSEWHERE = {
    "experiments": "settings of the experiments' own tests",
    "tune": "tests/tuning",
    "joblib": "tests/experiments/test_elsewhere.py",
    "shared-tune": "tests/experiments/test_elsewhere.py",
    "package": "needs pip; tests/scheduling/test_installed.py",
    "html": "of a run of `package`; tests/report/test_html.py",
    "timeline": "of a run of `package`; tests/report/test_perfetto.py",
}


class Block:
    """A command block of a page: its name, the remark in brackets, its text, and the output that is shown behind it."""

    def __init__(self, page: str, found: re.Match) -> None:
        self.page, self.name, self.remark, self.text, self.output = page, *found.groups("")

    def __repr__(self) -> str:
        return f"{self.page}: {self.name}"

    @property
    def is_run(self) -> bool:
        return self.name not in ELSEWHERE and "needs" not in self.remark


def blocks(page: str) -> list[Block]:
    pattern = r"<!-- commands: (\S+)(?: \((.*?)\))? -->\n```sh\n(.*?)```(?:\n\n```text\n(.*?)```)?"
    text = PAGES[page].read_text(encoding="utf-8")
    return [Block(page, found) for found in re.finditer(pattern, text, re.S)]


def statements(text: str) -> list[str]:
    """The commands of a block, those that go over several lines whole."""
    return re.findall(r"(?:[^\n]*<<'END'\n.*?^END\n|(?:[^\n]*\\\n)*[^\n]+\n)", text, re.S | re.M)


def run(statement: str, capsys: pytest.CaptureFixture) -> tuple[int, str]:
    """(exit code, what it printed). Ours run in this process."""
    words = (
        []
        if "<<" in statement or "||" in statement
        else shlex.split(statement.replace("\\\n", " "), comments=True)
    )
    if words[:2] != ["python", "-m"]:
        shell = statement.replace("python ", f"{shlex.quote(sys.executable)} ")
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr
    module, argv = words[2], words[3:]
    if module == "hexrepro":
        named = {word.partition("=")[0] for word in argv}
        argv += [word for word in SHRUNK if word.partition("=")[0] not in named - {"seeds"}]
        if "experiment=plan" in argv:
            argv += SMALL_PLAN
        if "workload=file" in argv:
            argv = [word for word in argv if not word.startswith("workload.n_queries")]
    main = importlib.import_module("hexrepro.cli" if module == "hexrepro" else f"{module}.__main__").main
    capsys.readouterr()
    code = main(argv)
    return code, "".join(capsys.readouterr())


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_the_page(page, tmp_path, monkeypatch, capsys, cell_cache, no_sweep) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    for name, content in re.findall(r"<!-- file: (\S+) -->\n```\w*\n(.*?)```", text, re.S):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for block in filter(lambda b: b.is_run, blocks(page)):
        printed = []
        for statement in statements(block.text):
            code, said = run(statement, capsys)
            wanted = int(re.search(r"exit code (\d)", block.remark)[1]) if "exit code" in block.remark else 0
            assert code == wanted, f"{statement}\n{said}"
            printed.append(said)
        if "experiment=" not in block.text:
            there = {" ".join(line.split()) for line in "".join(printed).splitlines()}
            shown = [
                " ".join(line.split())
                for line in block.output.splitlines()
                if line.strip() not in ("", "...")
            ]
            assert [line for line in shown if line not in there and not varies(line)] == [], block


def varies(line: str) -> bool:
    """Rules are timed, and rows of long tables are cut short."""
    return line.startswith("ok cost") or set(line) == {"─"}


def test_every_block_is_run_here_or_accounted_for() -> None:
    everything = [block for page in PAGES for block in blocks(page)]
    names = [block.name for block in everything]
    assert len(set(names)) == len(names) > 15
    assert set(ELSEWHERE) <= set(names)
    assert sum(block.is_run for block in everything) >= 9


@pytest.mark.parametrize(
    "page", [*PAGES.values(), HERE / "README.md", HERE / "hexrepro" / "serving" / "README.md"], ids=str
)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        place = (page.parent / file).resolve() if file else page
        assert place.exists(), target
        if anchor:
            place = place / "README.md" if place.is_dir() else place
            headings = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, target
