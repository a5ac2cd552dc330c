"""The log of calls keeps whole lines, also behind one that was cut off."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from hexrepro.errors import InputError
from hexrepro.serving.call_log import CallLog, CallRecord

RECORD = CallRecord("q", 0, (), "stage", "", None, "m", 1.0, None, 2.0, 3, None, 4, None)


def test_a_line_that_was_cut_off_does_not_swallow_the_next(tmp_path) -> None:
    path = tmp_path / "new" / "calls.jsonl"
    with CallLog(path) as log:
        log.write([RECORD, RECORD])
    path.write_bytes(path.read_bytes()[:-10])
    for _ in range(2):
        with CallLog(path) as log:
            log.write([RECORD])
    whole, cut, *rest = path.read_text().splitlines()
    assert cut == whole[:-9]
    assert [json.loads(line) for line in (whole, *rest)] == [asdict(RECORD) | {"after": []}] * 3


def test_a_place_that_cannot_be_written_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"call log .*file/calls\.jsonl: it cannot be written"):
        CallLog(tmp_path / "file" / "calls.jsonl")
