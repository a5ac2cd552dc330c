"""Small traces written by hand, one for each format, and how the calls of a workload are looked up in them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from hexrepro.workload import Workload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.4799600,110,27
"""

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 500, "input_length": 1500, "output_length": 60, "hash_ids": [0, 1, 3]},
    {"timestamp": 2000, "input_length": 600, "output_length": 70, "hash_ids": [0, 4]},
    {"timestamp": 2000, "input_length": 300, "output_length": 80, "hash_ids": [5]},
]

# one query of four calls (plan, two side by side, join), and one of a single call that comes before it
AGENTIC = [
    {"request_id": "a", "timestamp": 1000.0, "input_length": 20, "output_length": 3, "hash_ids": [1, 2, 3]},
    {
        "request_id": "b",
        "wait_for": ["a"],
        "delay": 10.0,
        "tool_wait_ms": 240.0,
        "input_length": 24,
        "output_length": 4,
        "hash_ids": [1, 2, 4],
    },
    {
        "request_id": "c",
        "wait_for": ["a"],
        "timestamp": 7.0,
        "input_length": 17,
        "output_length": 5,
        "hash_ids": [1, 2, 5],
    },
    {
        "request_id": "d",
        "wait_for": ["c", "b"],
        "tool_wait_ms": 500,
        "input_length": 8,
        "output_length": 6,
        "hash_ids": [6],
    },
    {"request_id": "e", "timestamp": 250.0, "input_length": 16, "output_length": 7, "hash_ids": [7, 8]},
]


def record(query: str, call: int, issued_s: float, finished_s: float, after=(), **changed) -> dict:
    """A line of a call log."""
    return {
        "query": query,
        "call": call,
        "after": list(after),
        "stage": "write",
        "tenant": "x",
        "slo_s": None,
        "model": "m",
        "issued_s": issued_s,
        "first_token_s": None,
        "finished_s": finished_s,
        "input_tokens": 100 + call,
        "cached_tokens": None,
        "output_tokens": 10 + call,
        "instance": "i",
        "ended": "done",
    } | changed


LOG = [  # as the gateway writes it: in the order in which calls end
    record("q", 1, 1000.0, 1001.0, stage="plan"),
    record("p", 2, 1000.5, 1002.0, stage="plan", tenant="y"),
    record("q", 3, 1001.25, 1003.0, after=[1]),
    record("q", 4, 1001.0, 1003.5, after=[1]),
    record("q", 5, 1004.5, 1006.0, after=[3, 4]),
]

WORKFLOW_STEPS = [
    ("Information Retriever", 301, 5),
    ("generate_candidate_llama-agent", 8000, 500),
    ("generate_candidate_llama-agent", 12000, 800),
    ("revise", 3000, 80),
    ("evaluate", 900, 22),
    ("evaluate", 901, 22),
    ("unit_tester", 278, 4),
]


def workflow_csv(requests: dict[str, list[tuple]], text: str = 'say "hi", then\\n{}') -> str:
    """The authors' CSV: every cell quoted, quotes doubled, line ends written out."""
    header = [
        "Text2SQLRequest_id",
        "step_name",
        "input_content",
        "output_content",
        "input_length",
        "output_length",
    ]
    rows = [header]
    for name, steps in requests.items():
        rows += [[name, step, text.format(step), "out", i, o] for step, i, o in steps]
    quoted = [[f'"{str(cell).replace(chr(34), chr(34) * 2)}"' for cell in row] for row in rows]
    return "\r\n".join(",".join(row) for row in quoted) + "\r\n"


def jsonl(rows: list) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def write(path: Path, content: str | bytes | list) -> Path:
    """A file with this content (a list is written as JSON lines), zipped if its name says so."""
    data = jsonl(content) if isinstance(content, list) else content
    data = data.encode() if isinstance(data, str) else data
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def calls(w: Workload) -> list[dict]:
    """The calls as dictionaries; ``after`` are the places, in the workload, of what each waits for."""
    before = np.repeat(np.arange(w.n_calls), np.diff(w.succ_offsets))
    return [
        dict(
            query=int(w.query[i]),
            stage=w.stage_names[w.stage[i]],
            tokens=(int(w.input_tokens[i]), int(w.output_tokens[i])),
            tool_s=float(w.tool_time_s[i]),
            after=sorted(before[w.successors == i].tolist()),
        )
        for i in range(w.n_calls)
    ]
