"""What hexrepro/serving/README.md shows is tried: its files are taken from its text, and its commands are run as they stand,
but for the ports."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hexrepro.cluster import load_cluster
from hexrepro.paths import conf_dir
from hexrepro.serving.coordinator import Coordinator
from hexrepro.serving.metrics import Metrics

PAGE = (Path(__file__).parents[2] / "hexrepro" / "serving" / "README.md").read_text(encoding="utf-8")


def block(marker: str) -> str:
    found = re.search(rf"<!-- {re.escape(marker)} -->\n```\w*\n(.*?)```", PAGE, re.S)
    assert found, f"the page has no block {marker!r}"
    return found[1]


def free_pair() -> int:
    """A port that is free, as is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path) -> None:
    unit = block("file: hexrepro-gateway.service").replace(
        "/opt/hexrepro/bin/hexrepro-gateway", sys.executable
    )
    path = tmp_path / "hexrepro-gateway.service"
    path.write_text(unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert path.name not in done.stderr  # no warning of it either
    most = re.search(r"drain_s: (\d+)", (conf_dir() / "serving" / "gateway.yaml").read_text())
    assert int(re.search(r"TimeoutStopSec=(\d+)", unit)[1]) > int(most[1])


def test_the_metrics_that_it_names_are_those_there_are() -> None:
    metrics = Metrics(Coordinator(load_cluster("hetero2", "silicon"), "hexgen_flow"))
    there = {f.name: f.type for f in metrics.registry.collect()}
    suffixes = {"counter": ("_total",), "histogram": ("", "_bucket"), "gauge": ("",)}
    names = {name + suffix for name, kind in there.items() for suffix in suffixes[kind]}
    said = set(re.findall(r"\bhexrepro_\w+", PAGE))
    short = re.search(r"`hexrepro_instance_up`, (.*?) \|", PAGE)[1]  # the others of the row
    said |= {f"hexrepro_instance{name}" for name in re.findall(r"`(_\w+)`", short)}
    assert said <= names
    assert set(there) <= {re.sub("_(total|bucket)$", "", name) for name in said}
    alerts = yaml.safe_load(block("file: alerts.yml"))["groups"][0]["rules"]
    assert len({a["alert"] for a in alerts}) == len(alerts) == 6
    assert yaml.safe_load(block("file: prometheus.yml"))["scrape_configs"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_commands_of_the_page(tmp_path) -> None:
    stubs, own = free_pair(), free_pair()

    def here(text: str) -> str:
        text = text.replace("9001", str(stubs)).replace("9002", str(stubs + 1)).replace("8080", str(own))
        return text.replace("python ", f"{sys.executable} ").replace(" \\\n", " ")

    for name in re.findall(r"<!-- file: (\S+) -->", PAGE):
        (tmp_path / name).write_text(here(block(f"file: {name}")))

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(command: str) -> subprocess.Popen:
        words = command.removesuffix("&").split()
        return subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    (stub_command,) = here(block("stub command")).splitlines()
    check, serve, curl = here(block("gateway commands")).splitlines()
    stub = start(stub_command)
    try:
        assert str(stubs) in stub.stdout.readline()
        assert "a100" in run(check)
        gateway = start(f"{serve.removesuffix('&')} port={own}")
        try:
            assert gateway.stdout.readline().startswith("hexrepro gateway on")
            assert json.loads(run(curl))["usage"]["completion_tokens"] == 8
            assert run(here("python ask.py")).split() == ["link", "8", "draft", "8", "pick", "8"]
            health, metrics = here(block("look commands")).splitlines()
            assert json.loads(run(health))["status"] == "ok"
            assert 'hexrepro_answers_total{status="200"} 4.0' in run(metrics)
        finally:
            gateway.send_signal(signal.SIGTERM)
            assert gateway.wait(20) == 0
        tail, inspect, timeline = here(block("log commands")).splitlines()
        assert '"ended":"done"' in run(tail).replace(" ", "")
        assert "queries, calls" in run(inspect)
        assert "4 calls of" in run(timeline)
        assert (tmp_path / "calls.timeline.json").is_file()
        log = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
        assert [(r["query"], r["stage"]) for r in log] == [
            ("q1", "draft"), ("q2", "chess/link"), ("q2", "chess/draft"), ("q2", "chess/pick"),
        ]  # fmt: skip
        assert [len(r["after"]) for r in log] == [0, 0, 1, 1]
    finally:
        stub.terminate()
        stub.wait(10)
