"""What the README shows is tried: its files are taken from its text, and its commands are run, shrunk."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from hexrepro.cli import main

README = Path(__file__).parents[1] / "README.md"
SHRUNK = ["seeds=2", "workload=trace1", "workload.n_queries=4", "workload.rate_qps=1", "selection.seeds=2"]


def block(marker: str) -> str:
    """The code block behind `<!-- marker -->`."""
    found = re.search(
        rf"<!-- {re.escape(marker)} -->\n```\w*\n(.*?)```", README.read_text(encoding="utf-8"), re.S
    )
    assert found, f"README has no block {marker!r}"
    return found[1]


@pytest.fixture
def files_of_the_readme(tmp_path, monkeypatch, cell_cache):
    for name in re.findall(r"<!-- file: (\S+) -->", README.read_text(encoding="utf-8")):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block(f"file: {name}"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def test_a_policy_of_one_s_own(files_of_the_readme):
    python, module, name, *argv = shlex.split(block("own policy command"))
    assert (python, module, name) == ("python", "-m", "hexrepro")
    assert main([*argv, *SHRUNK, "hydra.run.dir=run"]) == 0
    summary = pd.read_csv("run/summary.csv")
    assert set(summary.policy) == {"vllm", "hexgen_flow", "fast_first"}


def test_an_edited_rule_is_not_taken_from_the_cache(files_of_the_readme):
    argv = [
        "experiment=hetero1",
        "--config-dir",
        "mine",
        "policy=fast_first",
        *SHRUNK,
        "profile=silicon",
        "figures=false",
    ]
    assert main([*argv, "hydra.run.dir=first"]) == 0
    own = Path("my_rules.py")
    own.write_text(own.read_text().replace("patience=3.0", "patience=0.0"))
    cells = len(list(Path("cache/cells").glob("*.queries.parquet")))
    assert main([*argv, "hydra.run.dir=second"]) == 0
    assert len(list(Path("cache/cells").glob("*.queries.parquet"))) == cells + 1


def test_a_cluster_of_one_s_own(files_of_the_readme):
    argv = ["experiment=hetero1", "--config-dir", "mine", "cluster=ours", "policy=vllm", *SHRUNK]
    assert main([*argv, "hydra.run.dir=run"]) == 0
    instances = pd.read_parquet("run/instances.parquet")
    assert set(instances.instance) == {"a100-0", "l40s-0", "l40s-1", "l40s-2"}


@pytest.mark.parametrize("marker", ["main command", "test command"])
def test_the_two_commands_are_one_line_each(marker):
    command = block(marker).strip()
    assert "\n" not in command
    assert command.startswith("python3 -m venv .venv && ")
