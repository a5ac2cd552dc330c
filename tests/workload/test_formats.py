"""Every reader against a file written by hand, and every writer by reading back."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields as fields_of

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from hexrepro.errors import InputError
from hexrepro.serving.call_log import CallLog, CallRecord
from hexrepro.workload import FORMATS, Workload, generate, load, read, write
from hexrepro.workload.formats import agentic_mooncake, call_log, detect
from hexrepro.workload.formats.prefixes import unbounded_hits
from tests.workload import traces_by_hand as by_hand
from tests.workload.samples import fields, workloads
from tests.workload.traces_by_hand import AGENTIC, AZURE, LOG, MOONCAKE, WORKFLOW_STEPS, calls, record

BY_HAND = {
    "azure": ("azure.csv", AZURE),
    "mooncake": ("mooncake.jsonl", MOONCAKE),
    "agentic_mooncake": ("agentic.jsonl", AGENTIC),
    "call_log": ("log.jsonl", LOG),
    "workflow_csv": ("steps.csv", by_hand.workflow_csv({"Text2SQLRequest_1": WORKFLOW_STEPS})),
    "released_json": (
        "trace.json",
        json.dumps(
            [
                {
                    "Text2SQLRequest": [
                        {"step": s, "input_length": i, "output_length": o} for s, i, o in WORKFLOW_STEPS
                    ]
                }
            ]
        ),
    ),
}


@pytest.fixture(params=BY_HAND)
def trace(request, tmp_path):
    """A format's name, its file's name and content."""
    return request.param, *BY_HAND[request.param]


# ---- which format, and what a file may look like -----------------------------------------------------------


def test_a_format_is_told_by_looking_into_the_file(trace, tmp_path):
    name, file, content = trace
    path = by_hand.write(tmp_path / file, content)
    assert detect(path) == name
    loaded = read(path)
    assert loaded.report.format == name
    assert loaded.report.complete
    assert loaded.workload.name == file.split(".")[0]
    assert loaded.workload.equals(read(path, format=name, strict=True).workload)
    assert loaded.workload.equals(load(path))


@pytest.mark.parametrize("change", ["zipped", "byte-order mark", "CRLF", "no last line end", "blank lines"])
def test_how_text_is_wrapped_does_not_matter(trace, tmp_path, change):
    _, file, content = trace
    plain = by_hand.write(tmp_path / file, content)
    data = plain.read_bytes()
    other = tmp_path / ("other_" + file + (".gz" if change == "zipped" else ""))
    if change == "byte-order mark":
        data = b"\xef\xbb\xbf" + data
    elif change == "CRLF":
        data = data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    elif change == "no last line end":
        data = data.rstrip()
    elif change == "blank lines" and file.endswith("jsonl"):
        data = data.replace(b"\n", b"\n\n")
    loaded = read(by_hand.write(other, data))
    assert loaded.report.complete
    assert loaded.workload.renamed("x").equals(load(plain).renamed("x"))


def test_a_file_of_no_known_format_names_those_there_are(tmp_path):
    for content in ("query,stage\n1,2\n", "{}\n", '{"a": 1}\n', "hello", b"\x00\x01\x02"):
        path = by_hand.write(tmp_path / "it", content)
        with pytest.raises(InputError, match="in none of the formats parquet, released_json") as caught:
            load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="format 'mooncak' is unknown; known are"):
        read(path, format="mooncak")


def test_a_gzip_file_of_several_members_with_padding(tmp_path):
    parts = [gzip.compress(f"{line}\n".encode()) for line in AZURE.splitlines()]
    path = by_hand.write(tmp_path / "a.csv", b"".join(parts) + b"\0" * 100)
    assert load(path).equals(load(by_hand.write(tmp_path / "a.csv", AZURE)))


def test_dependencies_further_down_than_one_looks_to_tell_the_format(tmp_path):
    firsts = [
        {"request_id": f"{i}", "timestamp": i, "input_length": 9, "output_length": 1} for i in range(60)
    ]
    last = {"request_id": "z", "wait_for": ["7"], "input_length": 8, "output_length": 1}
    path = by_hand.write(tmp_path / "a.jsonl", [*firsts, last])
    loaded = read(path, strict=True)
    assert loaded.report.format == "agentic_mooncake"
    assert calls(loaded.workload)[8] == dict(query=7, stage="call", tokens=(8, 1), tool_s=0, after=[7])
    with pytest.raises(InputError, match="has wait_for, which is agentic_mooncake's"):
        read(path, format="mooncake")


def test_rows_with_an_empty_session_are_no_session(tmp_path):
    rows = [MOONCAKE[i] | {"session_id": session} for i, session in enumerate(["", " ", "?", "?"])]
    assert load(by_hand.write(tmp_path / "m.jsonl", rows)).n_queries == 3
    rows = [row | {"request_id": str(i), "wait_for": []} for i, row in enumerate(rows)]
    assert load(by_hand.write(tmp_path / "a.jsonl", rows)).n_queries == 3


def test_a_trace_is_called_as_its_file_but_for_markup_and_formulas(tmp_path):
    assert load(by_hand.write(tmp_path / "a[b]$c$.d.csv.gz", AZURE)).name == "a_b__c_.d"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_is_there_stays_until_all_is_written(tmp_path, monkeypatch, error):
    def half(workload, path, **options):
        path.write_text("{")
        raise error

    path = by_hand.write(tmp_path / "it.jsonl", AGENTIC)
    before = path.read_bytes()
    monkeypatch.setattr(agentic_mooncake, "write_agentic_mooncake", half)
    with pytest.raises((KeyboardInterrupt, InputError)):
        write(generate("tiny"), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_writing_tells_the_format_by_the_files_end(tmp_path):
    w = generate("tiny")
    for name in FORMATS:
        if FORMATS[name].writer:
            for suffix in FORMATS[name].suffixes:
                assert write(w, tmp_path / f"it{suffix}") == name
                assert read(tmp_path / f"it{suffix}").report.format == name
    with pytest.raises(InputError, match=r"it\.txt: no format is written to such a file"):
        write(w, tmp_path / "it.txt")
    with pytest.raises(InputError, match="'azure' is not written; those are parquet"):
        write(w, tmp_path / "it.csv", format="azure")
    with pytest.raises(InputError, match=r"it\.jsonl: cannot be written \(No such file"):
        write(w, tmp_path / "none" / "it.jsonl")


# ---- each reader -------------------------------------------------------------------------------------------


def test_azure(tmp_path):
    w = load(by_hand.write(tmp_path / "a.csv", AZURE))
    assert (
        load(by_hand.write(tmp_path / "b.csv", AZURE.replace("18:17:05.4", "18:18:03.9"))).arrival_s[2] == 60
    )
    assert w.input_tokens.tolist() == [4808, 3180, 110]
    assert w.output_tokens.tolist() == [10, 8, 27]
    assert w.arrival_s == pytest.approx([0, 0.052, 1.5], abs=1e-12)
    assert w.stage_names == ("call",)
    assert w.n_queries == 3
    assert len(w.successors) == 0


def test_azure_of_2024_has_a_zone_and_rows_may_come_late(tmp_path):
    text = AZURE.splitlines()[0] + (
        "\n2024-05-10 00:00:01.5+00:00,7,1\n2024-05-10 02:00:00+02:00,8,1\n2024-05-10T00:00:02Z,9,1\n"
    )
    w = load(by_hand.write(tmp_path / "a.csv", text))
    assert w.input_tokens.tolist() == [8, 7, 9]
    assert w.arrival_s.tolist() == [0, 1.5, 2]


def test_mooncake(tmp_path):
    loaded = read(by_hand.write(tmp_path / "m.jsonl", MOONCAKE))
    w = loaded.workload
    assert w.arrival_s.tolist() == [0, 0.5, 2, 2]
    assert w.input_tokens.tolist() == [1100, 1500, 600, 300]
    assert w.output_tokens.tolist() == [50, 60, 70, 80]
    assert w.template.tolist() == [0, 0, 0, -1]
    assert w.template_tokens.tolist() == [512, 512, 512, 0]
    assert w.context.tolist() == [0, 0, -1, -1]
    assert w.context_tokens.tolist() == [512, 512, 0, 0]
    # of 3,500 prompt tokens the second row finds two blocks of the first, the third one
    assert loaded.report.notes == [
        "512 tokens a hash id (found from the lengths)",
        "a cache without limit would find 43.9% of the prompt tokens by hash_ids",
    ]


def test_mooncake_under_the_other_names_and_without_prompt_lengths(tmp_path):
    rows = [
        {"created_time": 100.5, "output_tokens": 5, "hash_ids": [9, 2**64 - 1]},
        {"created_time": 200, "output_tokens": 6, "hash_ids": [9], "input_tokens": 7},
    ]
    w = read(by_hand.write(tmp_path / "m.jsonl", rows), block_tokens=16).workload
    assert w.input_tokens.tolist() == [32, 7]
    assert w.arrival_s.tolist() == [0.1005, 0.2]
    assert w.template_tokens.tolist() == [6, 6]  # a prompt's last token is never shared


def test_mooncake_sessions_are_queries_whose_turns_wait(tmp_path):
    rows = [
        {"session_id": "s", "timestamp": 1000, "input_length": 10, "output_length": 1},
        {"session_id": "t", "timestamp": 1500, "input_length": 11, "output_length": 1},
        {"session_id": "s", "timestamp": 3000, "input_length": 12, "output_length": 1},
        {"session_id": "s", "delay": 250, "input_length": 13, "output_length": 1},
        {"timestamp": 1200, "input_length": 14, "output_length": 1},
    ]
    w = load(by_hand.write(tmp_path / "m.jsonl", rows))
    assert w.arrival_s.tolist() == [1, 1.2, 1.5]
    assert calls(w) == [
        dict(query=0, stage="call", tokens=(10, 1), tool_s=0, after=[]),
        dict(query=0, stage="call", tokens=(12, 1), tool_s=2, after=[0]),
        dict(query=0, stage="call", tokens=(13, 1), tool_s=0.25, after=[1]),
        dict(query=1, stage="call", tokens=(14, 1), tool_s=0, after=[]),
        dict(query=2, stage="call", tokens=(11, 1), tool_s=0, after=[]),
    ]


def test_agentic_mooncake(tmp_path):
    loaded = read(by_hand.write(tmp_path / "a.jsonl", AGENTIC))
    w = loaded.workload
    assert w.arrival_s.tolist() == [0.25, 1]
    assert calls(w) == [
        dict(query=0, stage="call", tokens=(16, 7), tool_s=0, after=[]),
        dict(query=1, stage="call", tokens=(20, 3), tool_s=0, after=[]),
        dict(query=1, stage="call", tokens=(24, 4), tool_s=0.25, after=[1]),
        dict(query=1, stage="call", tokens=(17, 5), tool_s=0, after=[1]),
        dict(query=1, stage="call", tokens=(8, 6), tool_s=0.5, after=[2, 3]),
    ]
    assert w.template_tokens.tolist() == [0, 16, 16, 16, 0]
    assert loaded.report.notes[0] == "8 tokens a hash id (found from the lengths)"


def test_agentic_mooncake_in_any_order_and_with_several_starts(tmp_path):
    rows = [
        {"request_id": "z", "wait_for": ["x", "y"], "input_length": 3, "output_length": 1},
        {"request_id": "y", "timestamp": 700, "input_length": 2, "output_length": 1},
        {"request_id": "x", "timestamp": 500, "delay": 9, "input_length": 1, "output_length": 1},
    ]
    loaded = read(by_hand.write(tmp_path / "a.jsonl", rows))
    assert loaded.workload.arrival_s.tolist() == [0.5]
    assert calls(loaded.workload) == [
        dict(query=0, stage="call", tokens=(2, 1), tool_s=0.2, after=[]),
        dict(query=0, stage="call", tokens=(1, 1), tool_s=0, after=[]),
        dict(query=0, stage="call", tokens=(3, 1), tool_s=0, after=[0, 1]),
    ]
    assert "a delay counts for nothing in 1 row that waits for nothing" in loaded.report.notes[-1]


def test_agentic_mooncake_of_version_2_is_refused_by_name(tmp_path):
    path = by_hand.write(
        tmp_path / "a.jsonl", [{"schema": "dynamo.agentic_mooncake", "version": 2}, *AGENTIC]
    )
    with pytest.raises(InputError, match="version 2"):
        load(path)


def test_workflow_csv_is_read_as_the_released_json(tmp_path):
    steps = WORKFLOW_STEPS
    table = by_hand.workflow_csv({"r1": steps, "r2": steps[:1], "r3": steps})
    entries = [
        {"Text2SQLRequest": [{"step": s, "input_length": i, "output_length": o} for s, i, o in calls]}
        for calls in (steps, steps[:1], steps)
    ]
    a = load(by_hand.write(tmp_path / "t.csv", table))
    b = load(by_hand.write(tmp_path / "t.json", json.dumps(entries)))
    assert a.equals(b)
    # other texts of the same lengths are other texts
    lines = table.split("\r\n")
    changed = [line.replace("hi", "ho") if "r3" in line else line for line in lines]
    c = load(by_hand.write(tmp_path / "t.csv", "\r\n".join(changed)))
    assert c.context.max() == b.context.max() + 1


# ---- the call log ------------------------------------------------------------------------------------------


def test_call_log(tmp_path):
    w = load(by_hand.write(tmp_path / "log.jsonl", LOG))
    assert w.arrival_s.tolist() == [0, 0.5]
    assert [w.tenant_names[t] for t in w.tenant] == ["x", "y"]
    assert calls(w) == [
        dict(query=0, stage="plan", tokens=(101, 11), tool_s=0, after=[]),
        dict(query=0, stage="write", tokens=(103, 13), tool_s=0.25, after=[0]),
        dict(query=0, stage="write", tokens=(104, 14), tool_s=0, after=[0]),
        dict(query=0, stage="write", tokens=(105, 15), tool_s=1, after=[1, 2]),
        dict(query=1, stage="plan", tokens=(102, 12), tool_s=0, after=[]),
    ]


def test_what_the_gateway_writes_is_what_is_read(tmp_path):
    assert set(call_log.FIELDS) <= {f.name for f in fields_of(CallRecord)}
    assert {f.name for f in fields_of(CallRecord)} == set(LOG[0])
    with CallLog(tmp_path / "log.jsonl") as log:
        log.write(CallRecord(**row | {"after": tuple(row["after"])}) for row in LOG)
    written = load(tmp_path / "log.jsonl")
    assert written.equals(load(by_hand.write(tmp_path / "log.jsonl", LOG)))


def test_ids_of_queries_are_a_tenants_own(tmp_path):
    w = load(by_hand.write(tmp_path / "log.jsonl", [LOG[0], LOG[1] | {"query": "q"}]))
    assert w.n_queries == 2


def test_a_log_may_go_on_after_a_restart(tmp_path):
    again = [row | {"query": f"{row['query']}2"} for row in LOG]  # the numbers begin anew
    w = load(by_hand.write(tmp_path / "log.jsonl", [*LOG, *again]))
    assert w.n_queries == 4
    assert [c["after"] for c in calls(w)] == [[], [0], [0], [1, 2], [], [4], [4], [5, 6], [], []]


def test_a_failed_call_of_a_query_that_went_on_is_taken_out(tmp_path):
    rows = [
        record("q", 1, 0.0, 1.0),
        record("q", 2, 1.5, 2.0, after=[1], ended="broken", output_tokens=0, input_tokens=0),
        record("q", 3, 2.5, 3.0, after=[2], ended="rejected"),
        record("q", 4, 4.0, 5.0, after=[3]),
    ]
    loaded = read(by_hand.write(tmp_path / "log.jsonl", rows))
    assert loaded.report.complete
    assert "2 failed calls of queries that went on" in loaded.report.notes[0]
    assert [(c["tokens"], c["tool_s"], c["after"]) for c in calls(loaded.workload)] == [
        ((101, 11), 0, []),
        ((104, 14), 3, [0]),
    ]


def test_a_query_that_ended_in_failure_is_left_out_and_counted(tmp_path):
    rows = [
        *LOG,
        record("u", 6, 1001.0, 1002.0),
        record("u", 7, 1003.0, 1004.0, after=[6], ended="cancelled"),
    ]
    loaded = read(by_hand.write(tmp_path / "log.jsonl", rows))
    report = loaded.report
    assert loaded.workload.n_queries == 2
    assert (report.rows, report.left_rows, report.left_queries, report.left_calls) == (7, 1, 1, 1)
    assert "line 7: ended is 'cancelled'" in report.lines()[1]
    with pytest.raises(InputError, match="ended is 'cancelled'"):
        load(loaded.report.path)


def test_a_log_that_lacks_the_end_of_its_last_line_is_fine_and_said(tmp_path):
    text = by_hand.jsonl(LOG)
    for cut in (1, 20, 200):
        loaded = read(by_hand.write(tmp_path / "log.jsonl", text[: -1 - cut]), strict=True)
        assert loaded.report.notes == ["the last line, 5, is cut off; it is left out"]
        assert loaded.workload.n_calls == 4


def test_slos_keep_their_ratios_and_cached_tokens_become_templates(tmp_path):
    rows = [
        record("a", 1, 0.0, 1.0, slo_s=10, cached_tokens=0),
        record("b", 2, 1.0, 2.0, slo_s=20, cached_tokens=64),
        record("c", 3, 2.0, 3.0, slo_s=40, cached_tokens=80, input_tokens=64),
        record("d", 4, 3.0, 4.0, cached_tokens=16, stage="plan"),
    ]
    w = load(by_hand.write(tmp_path / "log.jsonl", rows))
    assert w.slo_scale.tolist() == [0.5, 1, 2, 1]
    assert w.template_tokens.tolist() == [64, 64, 0, 16]  # the third prompt is no longer than the template
    assert len(set(w.template.tolist())) == 3


def test_a_call_issued_before_its_prerequisite_ended_is_said(tmp_path):
    rows = [record("q", 1, 0.0, 2.0), record("q", 2, 1.5, 3.0, after=[1])]
    loaded = read(by_hand.write(tmp_path / "log.jsonl", rows))
    assert loaded.workload.tool_time_s.tolist() == [0, 0]
    assert "1 call issued before the end of what it waited for, by up to 0.5 s" in loaded.report.notes[0]


# ---- writing and reading back ------------------------------------------------------------------------------


def same_but_for_prefixes(a: Workload, b: Workload) -> None:
    """The same queries; stages and tenants may be numbered otherwise, times differ in the last digit."""
    for field in (
        "input_tokens",
        "output_tokens",
        "succ_offsets",
        "successors",
        "query_offsets",
        "slo_scale",
    ):
        assert np.array_equal(getattr(a, field), getattr(b, field)), field
    assert [a.stage_names[s] for s in a.stage] == [b.stage_names[s] for s in b.stage]
    assert [a.tenant_names[t] for t in a.tenant] == [b.tenant_names[t] for t in b.tenant]
    np.testing.assert_allclose(a.tool_time_s, b.tool_time_s, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(a.arrival_s, b.arrival_s, rtol=1e-12)


def found(w: Workload) -> list[int]:
    return unbounded_hits(w.template, w.template_tokens, w.context, w.context_tokens).tolist()


@given(workloads())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_agentic_mooncake_gives_back_what_was_written(tmp_path, w):
    """With blocks of one token sharing is exact: every prompt finds as much in a cache as before."""
    free = w.n_predecessors == 0  # see the next test
    w = Workload(
        **{f.name: getattr(w, f.name) for f in fields_of(w)}
        | {"tool_time_s": np.where(free, 0, w.tool_time_s)}
    )
    write(w, tmp_path / "it.jsonl", block_tokens=1)
    loaded = read(tmp_path / "it.jsonl", strict=True, block_tokens=1)
    same_but_for_prefixes(w, loaded.workload)
    assert found(loaded.workload) == found(w)


def test_a_first_calls_tool_time_is_written_as_its_start(tmp_path):
    w = Workload(**fields(tool_time_s=[0.0, 0.5, 0.0, 0.25, 0.0, 0.0]))
    write(w, tmp_path / "it.jsonl")
    back = load(tmp_path / "it.jsonl")
    assert back.arrival_s.tolist() == [0, 1.75]
    assert back.tool_time_s.tolist() == [0, 0.5, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["trace1", "trace4", "chat"])
def test_generated_traces_survive_agentic_mooncake(tmp_path, name):
    """Whole blocks of the shared prefixes survive; the workload is otherwise the same."""
    w = generate(name, n_queries=60)
    write(w, tmp_path / "it.jsonl.gz", block_tokens=16)
    loaded = read(tmp_path / "it.jsonl.gz", strict=True)
    same_but_for_prefixes(w, loaded.workload)
    before, after = np.array(found(w)), np.array(found(loaded.workload))
    assert np.all(after <= before)
    assert np.all(after > before - 16)
    if after.any():
        assert loaded.report.notes[0] == "16 tokens a hash id (found from the lengths)"


def test_what_dynosim_reads_is_written(tmp_path):
    """Names, units and blocks as docs/dynosim/trace-formats.md has them."""
    write(Workload(**fields()), tmp_path / "it.jsonl", block_tokens=50)
    rows = [json.loads(line) for line in (tmp_path / "it.jsonl").read_text().splitlines()]
    assert [row["request_id"] for row in rows] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    assert [row["wait_for"] for row in rows] == [[], ["0.0"], ["0.1"], [], ["1.0"], ["1.0"]]
    assert [row.get("timestamp") for row in rows] == [0, None, None, 1500, None, None]
    assert [row.get("tool_wait_ms") for row in rows] == [None, 500, 0, None, 0, 0]
    for row, w_input in zip(rows, [100, 200, 300, 100, 250, 260], strict=True):
        assert row["input_length"] == w_input
        assert len(row["hash_ids"]) == -(-w_input // 50)
    # the first calls share a template of 50 tokens, one block; the writers of a query 140 and 170, two and three
    ids = [row["hash_ids"] for row in rows]
    assert ids[0][0] == ids[3][0]
    assert ids[1][:2] == ids[2][:2]
    assert ids[4][:3] == ids[5][:3]
    assert ids[1][:1] == ids[4][:1]
    assert ids[1][1] != ids[4][1]
    # of the 25 blocks 7 have come before: 1 of the first template, 3 of the second, 1 and 2 of the contexts
    assert sum(map(len, ids)) == 25
    assert len({i for row in ids for i in row}) == 25 - 7
