"""The workflow CSV that the authors' log script writes: a row a call, with its texts and their lengths in tokens.

Columns: Text2SQLRequest_id, step_name, input_content, output_content, input_length, output_length; the two texts may be
missing. Calls of a request stand in the order in which they were made. Steps are those of the workflow that knows their
names (see `steps`); requests with the same steps, lengths and prompts ask the same text. A length is 0 where the log
lacked one half of a call; such a request is left out. Source: the authors' script that makes ``text2sql_trace.csv`` from
CHESS logs (github.com/Relaxed-System-Lab/Hexgen-Flow).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hexrepro.workload.formats.build import lost_queries, nothing_left
from hexrepro.workload.formats.csv_table import read_csv
from hexrepro.workload.formats.report import Report
from hexrepro.workload.formats.rows import Field, trace_name
from hexrepro.workload.formats.steps import plain, workflow_of, workload_of_steps
from hexrepro.workload.types import Workload

FIELDS = {
    "Text2SQLRequest_id": Field("text", "the id of the row's request"),
    "step_name": Field("text", "the name of a step"),
    "input_length": Field("int", "a whole number of tokens from 1"),
    "output_length": Field("int", "a whole number of tokens from 1"),
    "input_content": Field("text", "the prompt"),
}


def read(path: Path, report: Report, block_tokens: int | None = None) -> Workload:
    """The reader of the registry."""
    rows = read_csv(path, report, FIELDS, optional=("input_content",), group="Text2SQLRequest_id")
    _, request = rows.words("Text2SQLRequest_id")  # numbered in order of first row
    step_names, step = rows.words("step_name")
    _, prompt = rows.words("input_content", default="")
    workflow, stage_of = workflow_of(map(plain, step_names))
    stage = np.array([stage_of.get(plain(name), -1) for name in step_names], np.int64)[step]
    right = f"a step of {workflow.name}: {', '.join(workflow.released_names.values())}"
    rows.refuse(stage < 0, "step_name", right)
    input_tokens, output_tokens = rows.whole("input_length"), rows.whole("output_length")
    kept = np.flatnonzero(~lost_queries(rows, request)[request]) if len(rows) else np.zeros(0, np.int64)
    if len(kept) == 0:
        raise nothing_left(report)

    kept = kept[np.argsort(request[kept], kind="stable")]
    calls_each = np.bincount(request[kept])
    calls_each = calls_each[calls_each > 0]
    columns = (values[kept] for values in (stage, input_tokens, output_tokens))
    return workload_of_steps(trace_name(path), workflow, *columns, calls_each, prompt[kept])
