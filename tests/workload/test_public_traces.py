"""The public traces, where samples of them are at hand (see test_published), against counts made in another way."""

from __future__ import annotations

import csv
import json
from datetime import datetime

import numpy as np
import pytest

from hexrepro.workload import read
from hexrepro.workload.formats.prefixes import unbounded_hits
from tests.workload.test_published import SHARED

PUBLIC = SHARED / "data" / "public_traces"

pytestmark = pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")


@pytest.mark.parametrize("name", ["AzureLLMInferenceTrace_code.csv", "AzureLLMInferenceTrace_conv_head.csv"])
def test_azure(name):
    with (PUBLIC / name).open() as file:
        rows = list(csv.DictReader(file))
    w = read(PUBLIC / name, strict=True).workload
    assert w.n_queries == w.n_calls == len(rows)
    assert w.input_tokens.sum() == sum(int(row["ContextTokens"]) for row in rows)
    assert w.output_tokens.sum() == sum(int(row["GeneratedTokens"]) for row in rows)
    first, last = (datetime.fromisoformat(rows[i]["TIMESTAMP"][:26]) for i in (0, -1))
    assert w.arrival_s[-1] == pytest.approx((last - first).total_seconds(), abs=1e-5)


def test_mooncake():
    path = PUBLIC / "mooncake_conversation_head.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    loaded = read(path, strict=True)
    w = loaded.workload
    assert w.n_queries == len(rows)
    assert w.input_tokens.tolist() == [row["input_length"] for row in rows]
    assert w.arrival_s.tolist() == [row["timestamp"] / 1000 for row in rows]
    assert loaded.report.notes[0] == "512 tokens a hash id (found from the lengths)"
    # the blocks that an earlier prompt had
    seen: set[int] = set()
    found = []
    for row in rows:
        known = [block in seen for block in row["hash_ids"]]
        found.append(min(512 * sum(known), row["input_length"] - 1))
        seen.update(row["hash_ids"])
    hits = unbounded_hits(w.template, w.template_tokens, w.context, w.context_tokens)
    assert np.all(hits <= found)
    assert hits.sum() > 0.99 * sum(found)
