"""Parquet and the released JSON: round trips, and files that are damaged in every way we could think of."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hexrepro.errors import InputError
from hexrepro.workload import generate, load, read_parquet, write_parquet, write_released_json
from tests.workload.samples import workloads

CALLS = [
    {"step": "Information Retriever", "input_length": 301, "output_length": 5},
    {"step": "generate_candidate_llama-agent", "input_length": 8000, "output_length": 500},
    {"step": "generate_candidate_llama-agent", "input_length": 12000, "output_length": 800},
    {"step": "revise", "input_length": 3000, "output_length": 80},
    {"step": "evaluate", "input_length": 900, "output_length": 22},
    {"step": "evaluate", "input_length": 901, "output_length": 22},
    {"step": "unit_tester", "input_length": 278, "output_length": 4},
]


def refusal(path) -> str:
    with pytest.raises(InputError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


# ---- Parquet -----------------------------------------------------------------------------------------------


@given(workloads())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parquet_gives_back_what_was_written(tmp_path, w):
    write_parquet(w, tmp_path / "it.parquet")
    assert load(tmp_path / "it.parquet").equals(w)


@pytest.mark.parametrize("name", ["trace1", "trace4"])
def test_generated_traces_survive_both_formats(tmp_path, name):
    w = generate(name)
    write_parquet(w, tmp_path / "it.parquet")
    assert load(tmp_path / "it.parquet").equals(w)
    write_released_json(w, tmp_path / f"{name}.json")
    back = load(tmp_path / f"{name}.json")
    # the JSON holds no context ids; they are found again, in order of first appearance
    same = (
        "stage",
        "input_tokens",
        "output_tokens",
        "template_tokens",
        "context_tokens",
        "successors",
        "succ_offsets",
    )
    for field in same:
        assert np.array_equal(getattr(back, field), getattr(w, field)), field
    pairs = set(zip(w.context.tolist(), back.context.tolist(), strict=True))
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


ROWS = {
    "query": ["b", "b", "a", "b"],
    "stage": ["plan", "write", "plan", "write"],
    "input_tokens": [100, 200, 110, 210],
    "output_tokens": [5, 6, 7, 8],
}


def test_a_plain_table_needs_four_columns(tmp_path):
    """Queries in order of their first row, each call after the one before it."""
    file = tmp_path / "plain.parquet"
    pq.write_table(pa.table(ROWS), file)
    w = load(file)
    assert w.name == "plain"
    assert w.stage_names == ("plan", "write")
    assert w.query_offsets.tolist() == [0, 3, 4]
    assert w.input_tokens.tolist() == [100, 200, 210, 110]
    assert w.successors.tolist() == [1, 2]
    assert not w.has_arrivals
    assert (w.template == -1).all()
    assert (w.slo_scale == 1).all()


def test_calls_in_any_order_are_put_prerequisites_first(tmp_path):
    file = tmp_path / "it.parquet"
    pq.write_table(pa.table(ROWS | {"wait_for": [[1, 2], [], [], [1]]}), file)
    w = load(file)  # b's calls: 0 waits for 1 and 2, 2 waits for 1
    assert w.input_tokens.tolist() == [200, 210, 100, 110]
    assert w.succ_offsets.tolist() == [0, 2, 3, 3, 3]
    assert w.successors.tolist() == [1, 2, 2]


def column(name: str, values: object) -> dict:
    return {name: values}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            column("input_tokens", [100, 0, 110, 210]),
            ["row 1 (query b call 1)", "input_tokens is 0", "from 1"],
        ),
        (column("input_tokens", [100, 200, 110, -5]), ["row 3 (query b call 2)", "input_tokens is -5"]),
        (column("output_tokens", [5.0, 6.5, 7.0, 8.0]), ["row 1", "output_tokens is 6.5"]),
        (column("output_tokens", [5.0, float("nan"), 7.0, 8.0]), ["row 1", "output_tokens is nan"]),
        (column("output_tokens", [5, None, 7, 8]), ["row 1", "output_tokens is missing"]),
        (column("output_tokens", ["5", "6", "7", "8"]), ["output_tokens holds string"]),
        (column("output_tokens", [5, 6, 7, 2**40]), ["row 3", str(2**40)]),
        (column("query", ["b", None, "a", "b"]), ["row 1", "query is missing"]),
        (column("stage", ["plan", None, "plan", "write"]), ["row 1", "stage is missing"]),
        (column("stage", ["plan", "", "plan", "write"]), ["row 1", "stage is empty"]),
        (column("stage", [1, 2, 3, 4]), ["column stage holds int64", "text"]),
        (column("tool_time_s", [0.0, -1.0, 0.0, 0.0]), ["row 1", "tool_time_s is -1.0"]),
        (
            column("tool_time_s", [0.0, 0.0, float("inf"), 0.0]),
            ["row 2 (query a call 0)", "tool_time_s is inf"],
        ),
        (column("arrival_s", [0.0, 0.0, float("inf"), 0.0]), ["row 2", "arrival_s is inf"]),
        (
            column("arrival_s", [0.0, 1.0, 2.0, 0.0]),
            ["row 1", "arrival_s is 1.0 but 0.0", "all rows of a query"],
        ),
        (column("arrival_s", [0.0, 0.0, None, 0.0]), ["query 1", "arrival_s is missing"]),
        (column("arrival_s", [5.0, 5.0, 2.0, 5.0]), ["query 1", "arrival_s is 2.0, before query 0's 5.0"]),
        (column("slo_scale", [1.0, 1.0, 0.0, 1.0]), ["row 2", "slo_scale is 0.0"]),
        (column("tenant", ["x", "y", "x", "x"]), ["row 1", "tenant is y but x"]),
        (column("template", [0, 0, -2, 0]), ["row 2", "template is -2"]),
        (column("wait_for", [[], [2], [], [1]]), ["query 0", "cycle"]),
        (column("wait_for", [[], [3], [], []]), ["row 1", "wait_for holds 3", "calls 0 to 2"]),
        (column("wait_for", [[], [-1], [], []]), ["row 1", "wait_for holds -1"]),
        (column("wait_for", [[], [0, 0], [], []]), ["row 1", "wait_for holds 0 twice"]),
        (column("wait_for", [[], [None], [], []]), ["row 1", "missing value"]),
        (column("wait_for", [[], None, [], []]), ["row 1", "wait_for is missing"]),
        (column("wait_for", [1, 2, 3, 4]), ["column wait_for holds int64"]),
        (column("wait_for", [["0"], [], [], []]), ["column wait_for holds list"]),
    ],
)
def test_wrong_parquet_is_refused_with_its_place(tmp_path, columns, words):
    file = tmp_path / "wrong.parquet"
    pq.write_table(pa.table(ROWS | columns), file)
    message = refusal(file)
    for word in words:
        assert word in message


def test_parquet_without_a_column_rows_or_an_end_is_refused(tmp_path):
    file = tmp_path / "wrong.parquet"
    pq.write_table(pa.table({k: v for k, v in ROWS.items() if k != "stage"}), file)
    assert "column stage is missing" in refusal(file)
    pq.write_table(pa.table({k: pa.array(v)[:0] for k, v in ROWS.items()}), file)
    assert "no rows" in refusal(file)
    pq.write_table(pa.table(ROWS), file)
    whole = file.read_bytes()
    for end in (4, 20, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:end])
        assert "not a readable Parquet file" in refusal(file)
    with pytest.raises(InputError, match="no such file"):
        read_parquet(tmp_path / "none.parquet")


def test_a_damaged_note_is_refused(tmp_path):
    file = tmp_path / "wrong.parquet"
    pq.write_table(pa.table(ROWS).replace_schema_metadata({b"hexrepro.workload": b"{"}), file)
    assert "metadata is damaged" in refusal(file)


# ---- the released JSON -------------------------------------------------------------------------------------


def test_released_json(tmp_path):
    file = tmp_path / "small.json"
    file.write_text(
        json.dumps([{"Text2SQLRequest": CALLS}, {"Text2SQLRequest": CALLS[:1]}, {"Text2SQLRequest": CALLS}])
    )
    w = load(file)
    assert w.name == "small"
    assert w.n_queries == 3
    successors = [w.successors[w.succ_offsets[i] : w.succ_offsets[i + 1]].tolist() for i in range(7)]
    assert successors == [[1, 2], [3], [3], [4, 5], [6], [6], []]
    # the longer candidate prompt has the longer template; a revision shorter than its template shares nothing
    assert w.template_tokens[:7].tolist() == [213, 5292, 9158, 0, 261, 261, 213]
    assert w.context_tokens[:7].tolist() == [80, 2707, 2841, 0, 607, 607, 57]
    # the third query is the first again, the second is another text
    assert np.array_equal(w.context[:7], w.context[8:])
    assert w.context[7] != w.context[0]


def test_the_other_workflows_names_are_known(tmp_path):
    file = tmp_path / "small.json"
    calls = [
        {"step": s, "input_length": 2000, "output_length": 9} for s in ("Selector", "decomposer", "refiner")
    ]
    file.write_text(json.dumps([{"Text2SQLRequest": calls}]))
    assert load(file).stage_names == ("selector", "decomposer", "refiner")


def damaged(**changed: object) -> list:
    call = {key: value for key, value in (CALLS[0] | changed).items() if value is not ...}
    return [{"Text2SQLRequest": CALLS}, {"Text2SQLRequest": [CALLS[0], call]}]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (damaged(input_length=...), ["query 1 call 1", "input_length is missing"]),
        (damaged(output_length=...), ["query 1 call 1", "output_length is missing"]),
        (damaged(step=...), ["query 1 call 1", "step is missing"]),
        (damaged(step="revize"), ["query 1 call 1", "step is 'revize'", "Information Retriever", "revise"]),
        (damaged(step="decomposer"), ["query 1 call 1", "step is 'decomposer'", "steps of chess"]),
        (damaged(step=7), ["query 1 call 1", "step is 7"]),
        (damaged(input_length=0), ["query 1 call 1", "input_length is 0", "from 1"]),
        (damaged(input_length=-4), ["input_length is -4"]),
        (damaged(input_length=1.5), ["input_length is 1.5"]),
        (damaged(input_length="301"), ["input_length is '301'"]),
        (damaged(input_length=None), ["input_length is missing"]),
        (damaged(input_length=True), ["input_length is True"]),
        (damaged(input_length=float("nan")), ["input_length is nan"]),
        (damaged(input_length=float("inf")), ["input_length is inf"]),
        (damaged(output_length=10**400), ["output_length is 1000"]),
        (damaged(output_length=[1]), ["output_length is [1]"]),
        ([{"Text2SQLRequest": CALLS}, {"Text2SQLRequest": []}], ["query 1", "empty"]),
        (
            [{"Text2SQLRequest": CALLS}, {"Text2SQLRequest": {}}],
            ["query 1", "object"],
        ),
        ([{"Text2SQLRequest": [3]}], ["query 0 call 0 is a number"]),
        ([{"calls": CALLS}], ["query 0", "Text2SQLRequest is missing"]),
        ([CALLS], ["query 0 is a list"]),
        ([], ["holds no queries"]),
        ({"Text2SQLRequest": CALLS}, ["JSON object", "list of queries"]),
    ],
)
def test_wrong_json_is_refused_with_its_place(tmp_path, entries, words):
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(entries))
    message = refusal(file)
    for word in words:
        assert word in message


def test_files_that_are_no_trace_at_all(tmp_path):
    file = tmp_path / "wrong.json"
    file.write_bytes(b"")
    assert "empty" in refusal(file)
    file.write_bytes(b" \n")
    assert "empty" in refusal(file)
    file.write_bytes(b"query,stage\n1,2\n")
    assert "in none of the formats" in refusal(file)
    file.write_bytes(b'[{"Text2SQLRequest": "\xff\xfe"}]')
    assert "not UTF-8" in refusal(file)
    file.write_text("[" * 200_000)
    assert "nested too deeply" in refusal(file) or "not valid JSON" in refusal(file)
    file.write_text(f'[{{"Text2SQLRequest": [{{"step": "revise", "input_length": {"9" * 5000}}}]}}]')
    assert "a number is too long" in refusal(file)
    with pytest.raises(InputError, match=r"none\.json: cannot be read"):
        load(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path)


@given(st.integers(1, 700))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_cut_off_anywhere_is_refused(tmp_path, end):
    file = tmp_path / "cut.json"
    whole = json.dumps([{"Text2SQLRequest": CALLS}])
    file.write_text(whole[: min(end, len(whole) - 1)])
    assert "cut off" in refusal(file)
