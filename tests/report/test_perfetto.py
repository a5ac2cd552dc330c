"""Timelines for Perfetto: calls written down by hand, the Trace Event Format's rules, a simulated run, and a call log."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from hexrepro.cluster import load_cluster
from hexrepro.experiments.cells import Cell, Setting, get
from hexrepro.report import perfetto
from hexrepro.report.__main__ import main
from hexrepro.report.perfetto import Span, trace_events
from hexrepro.report.spans import from_run
from hexrepro.scheduling import load_policy
from hexrepro.serving.call_log import CallLog, CallRecord
from hexrepro.simulator import EngineOptions
from hexrepro.workload import generate
from hexrepro.workload.dag import edges


def span(
    query: str, call: int, times: tuple[float | None, ...], instance: str = "a", after=(), **more
) -> Span:
    release, start, first, finish = times
    given = dict(input_tokens=100, output_tokens=8) | more
    return Span(
        query, call, f"stage{call}", instance, release, start, first, finish, after=tuple(after), **given
    )


# query 0: call 0 on a, then 1 (b) and 2 (a) together, then 3; query 1 waits behind call 0
BY_HAND = [
    span("0", 0, (0.0, 0.0, 0.5, 2.0)),
    span("0", 1, (2.0, 2.5, 3.0, 4.0), "b", after=[0]),
    span("0", 2, (2.0, 2.0, 2.5, 3.0), after=[0]),
    span("0", 3, (4.0, 4.0, 4.0, 5.0), after=[1, 2]),
    span("1", 0, (1.0, 2.0, 2.25, 6.0)),
]


def check_format(trace: dict) -> None:
    """What the Trace Event Format demands: the fields of each kind of event, slices of a track that nest, arrows that begin
    once and end inside a slice, and counters in order of time."""
    tracks, arrows, counters = defaultdict(list), defaultdict(list), defaultdict(list)
    names: dict[tuple, str] = {}
    assert isinstance(trace["traceEvents"], list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
            assert set(event["args"]) == {event["name"].split("_", 1)[1]}
            assert names.setdefault((event["pid"], event["tid"], event["name"]), event) is event, (
                "named twice"
            )
            continue
        assert isinstance(event["ts"], int)
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
        elif event["ph"] in "sf":
            assert event["ph"] == "s" or event["bp"] == "e"
            arrows[event["cat"], event["id"]].append((event["ph"], event["ts"], event["pid"], event["tid"]))
        else:
            assert event["ph"] == "C"
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
            counters[event["pid"], event["name"]].append(event["ts"])
    for slices in tracks.values():
        open_ends: list[int] = []
        for begin, less in sorted(slices):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or begin - less <= open_ends[-1], (
                "two slices of a track overlap and do not nest"
            )
            open_ends.append(begin - less)
    for ends in arrows.values():
        (_, leaves, *tail), (_, arrives, *head) = sorted(ends, key=lambda end: end[0] == "f")
        assert [end[0] for end in sorted(ends, key=lambda end: end[0] == "f")] == ["s", "f"]
        assert leaves <= arrives
        for at, track in ((leaves, tail), (arrives, head)):
            assert any(b <= at <= b - less for b, less in tracks[tuple(track)]), "an arrow hangs in the air"
    for times in counters.values():
        assert times == sorted(set(times))


def slices(trace: dict, name: str | None = None, category: str | None = None) -> list[tuple]:
    return [
        (e["pid"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in trace["traceEvents"]
        if e["ph"] == "X" and name in (None, e["name"]) and category in (None, e["cat"])
    ]


def test_every_slice_arrow_and_counter_by_hand() -> None:
    trace = trace_events(BY_HAND, ["a", "b", "idle"])
    check_format(trace)
    named = {e["args"]["name"]: e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    a, b = named["a"], named["b"]
    assert {"a", "b", "idle"} < set(named)
    assert slices(trace, "wait") == [(a, 1.0, 2.0), (b, 2.0, 2.5)]
    assert sorted(slices(trace, category="run")) == [(a, 0, 2), (a, 2, 3), (a, 2, 6), (a, 4, 5), (b, 2.5, 4)]
    assert (b, 2.5, 3.0) in slices(trace, "prefill")
    assert (b, 3.0, 4.0) in slices(trace, "decode")
    assert sorted(slices(trace, category="query")) == [(1, 0.0, 5.0), (1, 1.0, 6.0)]
    begins = sorted((e["ts"], e["pid"]) for e in trace["traceEvents"] if e["ph"] == "s")
    ends = sorted((e["ts"], e["pid"]) for e in trace["traceEvents"] if e["ph"] == "f")
    assert begins == [(1_999_999, a), (1_999_999, a), (2_999_999, a), (3_999_999, b)]
    assert ends == [(2_000_000, a), (2_500_000, b), (4_000_000, a), (4_000_000, a)]
    calls = {
        e["ts"] / 1e6: e["args"]
        for e in trace["traceEvents"]
        if e["ph"] == "C" and e["pid"] == a and e["name"] == "calls"
    }
    assert calls[1.0] == {"waiting": 1, "running": 1}
    assert calls[2.0] == {"waiting": 0, "running": 2}
    assert calls[6.0] == {"waiting": 0, "running": 0}
    kv = {
        e["ts"] / 1e6: e["args"]["tokens"]
        for e in trace["traceEvents"]
        if e["name"] == "KV tokens" and e["pid"] == b
    }
    # 100 prompt tokens, then 8 generated in quarters of the second from 3 to 4
    assert kv == {2.0: 0, 2.5: 100, 3.0: 102, 3.25: 104, 3.5: 106, 3.75: 108, 4.0: 0}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> tuple[Path, object]:
    """A run directory with a simulated run's calls, and the workload."""
    workload = generate("trace1", n_queries=6)
    cluster = load_cluster("hetero1", "silicon")
    arrivals = np.cumsum(np.full((1, 6), 4.0), axis=1)
    setting = Setting(
        profile="silicon", trace="trace1", arrivals="poisson", rate_qps=0.25, workload=workload, cluster=cluster,
        scale_out=1, engine=EngineOptions(), estimator="median", base_slo_s=46.0, slo_scale=5.0, arrivals_s=arrivals,
        seeds=np.arange(1), selection_arrivals_s=arrivals, selection_seeds=np.arange(1),
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("run")
    calls = pq.read_table(get(Cell(setting, load_policy("vllm")), directory).files["calls"]).to_pandas()
    parts = [
        calls.assign(profile="silicon", prefix_caching="template", trace="trace1", rate_qps=0.25, policy=p)
        for p in ("vllm", "eft")
    ]
    import pandas as pd
    import pyarrow as pa

    whole = pd.concat(parts, ignore_index=True)
    whole["policy"] = whole["policy"].astype("category")
    pq.write_table(pa.Table.from_pandas(whole, preserve_index=False), directory / "calls.parquet")
    return directory, workload


def test_a_simulated_run(simulated, capsys) -> None:
    directory, workload = simulated
    assert main(["timeline", str(directory), "policy=eft"]) == 0
    assert "policy=eft" in capsys.readouterr().out
    trace = json.loads((directory / "timeline.json").read_text())
    check_format(trace)
    assert len(slices(trace, category="run")) == workload.n_calls
    assert len(slices(trace, category="query")) == 6


def test_what_a_call_waited_for_is_found_again(simulated) -> None:
    """The file does not hold it; the workload does."""
    directory, workload = simulated
    before, after = edges(workload.succ_offsets, workload.successors)
    first = workload.query_offsets[workload.query]
    expected = {
        (int(workload.query[b]), int(b - first[b]), int(a - first[a]))
        for b, a in zip(before, after, strict=True)
    }
    found = {(int(s.query), b, s.call) for s in from_run(directory, {}).spans for b in s.after}
    assert found == expected


RECORDS = [
    CallRecord("q", 1, (), "plan", "t", 9.0, "m", 1000.0, 1000.5, 1001.0, 50, 16, 4, "gpu-0"),
    CallRecord("q", 2, (1,), "write", "t", 9.0, "m", 1001.0, None, 1003.0, 60, None, 0, "gpu-1", "failed"),
    CallRecord("r", 3, (), "plan", "t", None, "m", 1000.2, None, 1000.2, 50, None, 0, None, "rejected"),
]


def test_a_live_run(tmp_path, capsys) -> None:
    file = tmp_path / "calls.jsonl"
    with CallLog(file) as log:
        log.write(RECORDS)
    with file.open("a") as cut:
        cut.write(json.dumps(asdict(RECORDS[0]), separators=(",", ":"))[:40])  # the gateway was killed here,
    with CallLog(file) as log:
        log.write(RECORDS[2:])  # started again,
    with file.open("a") as cut:
        cut.write('{"query":"q","ca')  # and killed
    assert main(["timeline", str(file), "-o", str(tmp_path / "t.json.gz")]) == 0
    assert "4 calls" in capsys.readouterr().out
    trace = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    check_format(trace)
    named = {e["args"]["name"]: e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert slices(trace, "wait and prefill") == [(named["gpu-0"], 0.0, 0.5)]
    assert (named["gpu-1"], 1.0, 3.0) in slices(trace, category="run")
    assert sum(e["ph"] == "s" for e in trace["traceEvents"]) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["timeline", "nowhere"], ("nowhere", "no such file")),
        (["timeline", "empty"], ("calls.parquet", "calls=true")),
        (["timeline", "."], ("several runs", "take one of them: bad")),
        (["timeline", "bad.parquet"], ("bad.parquet", "not a call log", "give the directory")),
        (["timeline", "bad"], ("calls.parquet", "not the calls of a run")),
        (["timeline", "bad.jsonl"], ("bad.jsonl", "line 1")),
        (["timeline", "bad.jsonl", "policy=eft"], ("policy=eft", "holds one run")),
        (["timeline", "empty", "eft"], ("eft", "NAME=VALUE")),
        (["timeline", "empty", "--poliy"], ("--poliy",)),
        (["timelime", "empty"], ("timelime", "timeline RUN_DIR")),
        (["html", "empty"], ("empty", "config.yaml")),
        (["html"], ("required: run",)),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], words: tuple[str, ...], tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "calls.parquet").write_text("no parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1\xb5")
    (tmp_path / "bad.jsonl").write_text('{"query": "q"}\n{"query": "r"}\n')
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("hexrepro: ")
    assert error.count("\n") == 1
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("policy=low", ("policy=low", "vllm, eft")), ("polcy=eft", ("polcy=eft", "one of: profile"))],
)
def test_a_run_that_is_not_there(wanted: str, words: tuple[str, ...], simulated, capsys) -> None:
    assert main(["timeline", str(simulated[0]), wanted]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


def test_nothing_ran() -> None:
    check_format(trace_events([], ["a"]))
    assert perfetto.trace_events([])["traceEvents"]
