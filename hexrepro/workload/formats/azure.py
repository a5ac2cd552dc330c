"""Azure LLM inference traces: a CSV file with TIMESTAMP, ContextTokens and GeneratedTokens, a row a call.

Each call is a query of its own, of the stage ``call``. Times are dates; arrivals are seconds from the first. Nothing is
known of prompts, so nothing is shared. Source: AzureLLMInferenceDataset2023.md and AzureLLMInferenceDataset2024.md in
github.com/Azure/AzurePublicDataset (the 2024 files give a time zone, the 2023 files none).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hexrepro.workload.formats.build import Calls, build
from hexrepro.workload.formats.csv_table import read_csv
from hexrepro.workload.formats.report import Report
from hexrepro.workload.formats.rows import Field, trace_name
from hexrepro.workload.types import Workload

FIELDS = {
    "TIMESTAMP": Field("time", "a date and time of day"),
    "ContextTokens": Field("int", "a whole number of tokens from 1"),
    "GeneratedTokens": Field("int", "a whole number of tokens from 1"),
}


def read(path: Path, report: Report, block_tokens: int | None = None) -> Workload:
    """The reader of the registry."""
    rows = read_csv(path, report, FIELDS)
    n = len(rows)
    arrival_s = rows.number("TIMESTAMP")
    none = np.zeros(0, np.int64)
    calls = Calls(
        query=np.arange(n),
        stage_names=("call",),
        stage=np.zeros(n, np.int64),
        input_tokens=rows.whole("ContextTokens"),
        output_tokens=rows.whole("GeneratedTokens"),
        arrival_s=arrival_s,
        before=none,
        after=none,
        tool_time_s=np.zeros(n),
    )
    workload = build(trace_name(path), rows, calls)
    return workload.with_arrivals(workload.arrival_s - workload.arrival_s[0])
