"""Damaged files: every row that cannot be used is counted and named, and takes its query with it; the rest is read."""

from __future__ import annotations

import gzip
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hexrepro.errors import InputError
from hexrepro.workload import read
from tests.workload import traces_by_hand as by_hand
from tests.workload.traces_by_hand import AGENTIC, AZURE, LOG, MOONCAKE, WORKFLOW_STEPS, record

STEPS = {"r1": WORKFLOW_STEPS, "r2": WORKFLOW_STEPS[:3]}


def damaged(path, content, calls: int, says: list[str], rows: int = 1, queries: int = 0) -> None:
    """The file is read without ``rows`` rows and ``queries`` queries more, and its report says so; --strict refuses it."""
    loaded = read(by_hand.write(path, content))
    report = loaded.report
    lines = report.lines()
    assert loaded.workload.n_calls == calls, lines
    assert (report.left_rows, report.left_queries) == (rows, queries), lines
    assert report.rows == calls + report.left_rows + report.left_calls
    for words in says:
        assert words in "\n".join(lines)
    with pytest.raises(InputError) as caught:
        read(path, strict=True)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 400
    for words in says:
        assert words in message


# ---- CSV ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("2023-11-16 18:17:06,-5,10", ["row 5: ContextTokens is -5", "a whole number of tokens from 1"]),
        ("2023-11-16 18:17:06,0,10", ["row 5: ContextTokens is 0"]),
        ("2023-11-16 18:17:06,many,10", ["row 5: ContextTokens is 'many'"]),
        ("2023-11-16 18:17:06,1.5,10", ["row 5: ContextTokens is '1.5'"]),
        ("2023-11-16 18:17:06,NaN,10", ["row 5: ContextTokens is 'NaN'"]),
        ("2023-11-16 18:17:06,inf,10", ["row 5: ContextTokens is 'inf'"]),
        ("2023-11-16 18:17:06,1e30,10", ["row 5: ContextTokens is '1e30'"]),
        ("2023-11-16 18:17:06,4294967296,10", ["row 5: ContextTokens is 4294967296"]),
        ("2023-11-16 18:17:06,,10", ["row 5: ContextTokens is missing"]),
        ("2023-11-16 18:17:06,5,0", ["row 5: GeneratedTokens is 0"]),
        ("yesterday,5,10", ["row 5: TIMESTAMP is 'yesterday'", "a date and time"]),
        (",5,10", ["row 5: TIMESTAMP is missing"]),
        ("2023-13-16 18:17:06,5,10", ["row 5: TIMESTAMP is '2023-13-16"]),
        ("2023,5,10", ["row 5: TIMESTAMP is '2023'"]),  # a number, not a year
        ("2023-11-16 18:17:06,5", ["row 5: it has 2 columns", "3 columns, as in the header"]),
        ("2023-11-16 18:17:06,5,10,3", ["row 5: it has 4 columns"]),
    ],
)
def test_azure_rows(tmp_path, row, says):
    damaged(tmp_path / "a.csv", AZURE + row + "\n", 3, says)
    above = AZURE.splitlines()
    above.insert(1, row)
    damaged(tmp_path / "a.csv", "\n".join(above), 3, [says[0].replace("row 5", "row 2")])


def test_a_date_too_far_off_for_nanoseconds(tmp_path):
    rows = [AZURE.splitlines()[0], "2500-01-01 00:00:00,5,10", "2023-11-16 18:17:06,5,10"]
    damaged(tmp_path / "a.csv", "\n".join(rows), 1, ["row 2: TIMESTAMP is '2500-01-01 00:00:00'"])


def test_text_that_is_not_utf_8_in_a_csv_file(tmp_path):
    damaged(
        tmp_path / "a.csv", AZURE.encode() + b"2023-11-16 18:17:06,\xff\xfe,10\n", 3, ["row 5: ContextTokens"]
    )


def test_other_columns_may_hold_anything(tmp_path):
    lines = [line + f",{i if i < 3 else 'text'}" for i, line in enumerate(AZURE.splitlines())]
    lines[0] = lines[0].replace("ContextTokens", " ContextTokens ")
    assert read(by_hand.write(tmp_path / "a.csv", "\n".join(lines)), strict=True).workload.n_calls == 3


def test_csv_without_a_column_rows_or_anything(tmp_path):
    for content, words in (
        (
            "TIMESTAMP,ContextTokens\n2023-11-16 18:17:06,5\n",
            "column GeneratedTokens is missing; the header has TIM",
        ),
        (AZURE.splitlines()[0] + "\n", "holds no calls"),
        ("", "the file is empty"),
        (b"\xef\xbb\xbf\n", "the file is empty"),
        (AZURE.splitlines()[0] + "\nx,y,z\n1,2,3,4\n", "row 3: it has 4 columns"),
        (
            "TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\nx,1,2,3\n",
            "column ContextTokens is there twice",
        ),
    ):
        with pytest.raises(InputError, match=words):
            read(by_hand.write(tmp_path / "a.csv", content))


def test_a_row_of_another_size_takes_its_request_with_it(tmp_path):
    lines = by_hand.workflow_csv(STEPS, text="x").split("\r\n")
    lines[5] = lines[5].rsplit(",", 1)[0]
    damaged(tmp_path / "s.csv", "\n".join(lines), 3, ["row 6: it has 5 columns", "6 columns"], queries=1)


def test_a_quote_that_is_not_closed(tmp_path):
    """It costs its row where rows are a line each; where texts may go over lines, the lines that it takes are said."""
    rows = AZURE.splitlines()
    for row in ('"2023-11-16 18:17:04.0319600,5,10', '2023-11-16 18:17:04.0319600,5,"10'):
        damaged(tmp_path / "a.csv", "\n".join([rows[0], row, *rows[1:]]), 3, ["row 2: "])
    table = "Text2SQLRequest_id,step_name,input_length,output_length\na,revise,9,5\n"
    table += 'b,"revise,9,5\nc,revise,9,5\nd,revise,9,5\n'
    damaged(tmp_path / "s.csv", table, 1, ["row 3: it has 2 columns over 3 lines, a quote open?"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("revise", 3000, 0), ["row 5: output_length is 0"]),
        (("revise", 0, 80), ["row 5: input_length is 0"]),
        (("revize", 3000, 80), ["row 5: step_name is 'revize'", "a step of chess: Information Retriever"]),
        (("", 3000, 80), ["row 5: step_name is ''"]),
    ],
)
def test_workflow_csv_rows_take_their_request_with_them(tmp_path, change, says):
    steps = list(WORKFLOW_STEPS)
    steps[3] = change
    table = by_hand.workflow_csv(STEPS | {"r1": steps}, text="x")
    damaged(tmp_path / "s.csv", table, 3, says, queries=1)


# ---- JSON lines --------------------------------------------------------------------------------------------

TOKENS = "a whole number of tokens from 1"
WRONG = [
    ("input_length", -4, TOKENS),
    ("input_length", 0, TOKENS),
    ("input_length", 1.5, TOKENS),
    ("input_length", "301", TOKENS),
    ("input_length", True, TOKENS),
    ("input_length", math.nan, TOKENS),
    ("input_length", 10**400, TOKENS),
    ("input_length", [1], TOKENS),
    ("output_length", None, TOKENS),
    ("output_length", 2**31, TOKENS),
    ("timestamp", -1, "milliseconds, finite and not negative"),
    ("timestamp", math.inf, "milliseconds, finite and not negative"),
    ("timestamp", "now", "milliseconds, finite and not negative"),
    ("timestamp", None, "given, as in other rows that begin a query"),
    ("hash_ids", [1, -1], "a list of block ids"),
    ("hash_ids", [1, None], "a list of block ids"),
    ("hash_ids", [1.5], "a list of block ids"),
    ("hash_ids", 7, "a list of block ids"),
]


def as_shown(value: object) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@pytest.mark.parametrize(("field", "value", "right"), WRONG)
def test_mooncake_rows(tmp_path, field, value, right):
    row = MOONCAKE[1] | {field: value}
    says = [f"line 2: {field} is {as_shown(value)}", right]
    damaged(tmp_path / "m.jsonl", [MOONCAKE[0], row, *MOONCAKE[2:]], 3, says)


def test_whole_numbers_may_be_written_with_a_point(tmp_path):
    rows = [row | {"input_length": float(row["input_length"])} for row in MOONCAKE]
    assert read(by_hand.write(tmp_path / "m.jsonl", rows), strict=True).workload.input_tokens[0] == 1100


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "it is not valid JSON"),
        ('{"timestamp": 1, "input_length": 7', "it is not valid JSON"),
        ("hello", "it is not valid JSON"),
        ("[1, 2]", "it is list"),
        ("7", "it is int"),
        ("[" * 100_000, "it is not valid JSON"),
        ('{"timestamp": 1}{"timestamp": 2}', "it is not valid JSON"),
    ],
)
def test_lines_that_are_no_object(tmp_path, line, says):
    damaged(tmp_path / "m.jsonl", [MOONCAKE[0], line, *MOONCAKE[1:]], 4, [f"line 2: {says}", "a JSON object"])


def test_text_that_is_not_utf_8_in_json_lines(tmp_path):
    text = by_hand.jsonl(MOONCAKE).encode()
    damaged(tmp_path / "m.jsonl", text + b'{"session_id": "\xff"}\n', 4, ["line 5: it is not valid JSON"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({1: {"delay": -3}}, ["line 2: delay is -3"]),
        ({0: {"delay": 5}}, ["line 1: delay is 5", "0 or missing in the first turn"]),
        ({1: {"timestamp": 400}, 2: {"timestamp": 300}}, ["line 3: timestamp is 300", "turn before"]),
    ],
)
def test_a_wrong_turn_takes_its_session_with_it(tmp_path, changes, says):
    rows = [MOONCAKE[i] | {"session_id": "s"} | changes.get(i, {}) for i in range(3)]
    damaged(tmp_path / "m.jsonl", [*rows, MOONCAKE[3]], 1, says, queries=1)


@pytest.mark.parametrize(
    ("at", "changed", "says", "rows"),
    [
        (
            3,
            {"wait_for": ["b", "nobody"]},
            ["line 4: wait_for is ['nobody']", "request_ids of usable rows"],
            1,
        ),
        (0, {"wait_for": ["d"]}, ["line 1: wait_for is ['d']", "free of cycles"], 4),
        (3, {"wait_for": ["d"]}, ["line 4: wait_for is ['d']", "free of cycles"], 1),
        (2, {"request_id": "b"}, ["line 3: request_id is 'b'", "no other row has"], 2),
        (3, {"request_id": ""}, ["line 4: request_id is ''"], 1),
        (3, {"wait_for": "b"}, ["line 4: wait_for is 'b'"], 1),
        (3, {"wait_for": ["b", None]}, ["line 4: wait_for is ['b', None]"], 1),
        (3, {"tool_wait_ms": -1}, ["line 4: tool_wait_ms is -1"], 1),
        (3, {"delay": math.nan}, ["line 4: delay is nan"], 1),
        (3, {"output_length": 0}, ["line 4: output_length is 0"], 1),
        (3, {"slo_scale": 0}, ["line 4: slo_scale is 0"], 1),
        (0, {"timestamp": None}, ["line 1: timestamp is missing"], 1),
        (3, {"tenant": "x"}, ["line 4: tenant is 'x'", "the same in all rows of a query"], 1),
        (3, {"slo_scale": 2}, ["line 4: slo_scale is 2", "the same in all rows of a query"], 1),
    ],
)
def test_agentic_rows_take_their_query_with_them(tmp_path, at, changed, says, rows):
    """Of the two queries the single call is left; what is behind a cycle is named as well."""
    content = list(AGENTIC)
    content[at] = content[at] | changed
    loose = at == 3 and changed.get("wait_for") in ("b", ["d"])  # d hangs together with nothing
    left = read(by_hand.write(tmp_path / "a.jsonl", content))
    assert left.workload.n_calls == (4 if loose else 1)
    damaged(tmp_path / "a.jsonl", content, 4 if loose else 1, says[:1], rows, 0 if loose or rows == 4 else 1)
    assert any(says[-1] in line for line in left.report.lines())


@pytest.mark.parametrize(
    ("at", "changed", "says", "calls", "rows"),
    [
        (4, {"after": [3, 99]}, ["line 5: after is [3, 99]", "usable calls of the same query"], 1, 1),
        (4, {"after": [2]}, ["line 5: after is [2]", "of the same query"], 1, 1),
        (0, {"after": [5]}, ["line 1: after is [5]", "free of cycles"], 1, 4),
        (4, {"call": 3}, ["line 5: call is 3", "no other call of its query"], 1, 1),
        (4, {"call": None}, ["line 5: call is missing"], 1, 1),
        (4, {"issued_s": None}, ["line 5: issued_s is missing"], 1, 1),
        (4, {"finished_s": math.nan}, ["line 5: finished_s is nan"], 1, 1),
        (4, {"finished_s": 1000.0}, ["line 5: finished_s is 1000.0", "no earlier than issued_s"], 1, 1),
        (4, {"input_tokens": -1}, ["line 5: input_tokens is -1"], 1, 1),
        (4, {"output_tokens": 0}, ["line 5: output_tokens is 0"], 1, 1),
        (1, {"query": None}, ["line 2: query is missing"], 4, 1),
        (1, {"query": {}}, ["line 2: query is {}"], 4, 1),
        (1, {"slo_s": 0}, ["line 2: slo_s is 0"], 4, 1),
        (1, {"ended": "failed"}, ["line 2: ended is 'failed'", "last call of its query"], 4, 1),
    ],
)
def test_call_log_rows_take_their_query_with_them(tmp_path, at, changed, says, calls, rows):
    content = list(LOG)
    content[at] = content[at] | changed
    damaged(tmp_path / "l.jsonl", content, calls, says, rows, 0 if calls == 4 or rows == 4 else 1)


def test_a_log_of_failures_only_says_so(tmp_path):
    path = by_hand.write(tmp_path / "l.jsonl", [record("q", 1, 0.0, 1.0, ended="failed")])
    with pytest.raises(InputError, match="line 1: ended is 'failed'"):
        read(path)


def test_many_wrong_rows_are_counted_and_the_first_are_named(tmp_path):
    rows = [row | {"output_length": -i} for i in range(1, 8) for row in MOONCAKE[:1]]
    report = read(by_hand.write(tmp_path / "m.jsonl", [*rows, *MOONCAKE])).report
    assert report.lines()[0].endswith("m.jsonl: left out, 7 of 11 lines that cannot be used:")
    assert report.lines()[1] == (
        "  line 1: output_length is -1; line 2: output_length is -2; line 3: output_length is -3 and 4 more: "
        "it must be a whole number of tokens from 1"
    )


# ---- cut off, or changed at any place ----------------------------------------------------------------------

WHOLE = {
    "azure.csv": AZURE * 3,
    "mooncake.jsonl": by_hand.jsonl(MOONCAKE * 3),
    "agentic.jsonl": by_hand.jsonl(AGENTIC),
    "log.jsonl": by_hand.jsonl(LOG),
    "steps.csv": by_hand.workflow_csv(STEPS),
    "trace.json": json.dumps(
        [{"Text2SQLRequest": [{"step": "revise", "input_length": 7, "output_length": 8}]}] * 5
    ),
}


@given(st.sampled_from(sorted(WHOLE)), st.floats(0, 1), st.binary(max_size=3), st.booleans(), st.booleans())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_refused_in_one_line_or_accounted_for(tmp_path, name, where, put, cut, zipped):
    """A file cut off at any byte, or with others put in there: no traceback, and every row is used or in the report."""
    data = WHOLE[name].encode()
    at = int(where * len(data))
    data = data[:at] + put + (b"" if cut else data[at + len(put) :])
    if zipped:
        data = gzip.compress(data)
    path = tmp_path / name
    path.write_bytes(data)
    try:
        loaded = read(path)
    except InputError as error:
        message = str(error)
    else:
        report = loaded.report
        assert report.rows == loaded.workload.n_calls + report.left_rows + report.left_calls
        return
    assert str(path) in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["mooncake.jsonl", "azure.csv"])
def test_a_gzip_file_that_is_cut_off(tmp_path, name):
    whole = gzip.compress(WHOLE[name].encode())
    path = by_hand.write(tmp_path / name, whole[: len(whole) * 3 // 4])
    loaded = read(path)
    assert "the gzip file is cut off; what it holds up to there is used" in loaded.report.notes
    assert 0 < loaded.workload.n_calls < 12
    with pytest.raises(InputError):
        read(path, strict=True)
    path.write_bytes(whole + b"garbage")
    with pytest.raises(InputError, match="a damaged gzip file"):
        read(path)
    path.write_bytes(whole[:30] + b"\xff" * 20 + whole[50:])
    with pytest.raises(InputError, match="a damaged gzip file"):
        read(path)
