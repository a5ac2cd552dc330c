"""`describe` on a workload small enough to count by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hexrepro.workload import Workload, describe, distinct_queries
from tests.workload.samples import fields


def test_counts_quantiles_and_rate():
    found = describe(Workload(**fields()))
    assert (found["queries"], found["distinct_queries"], found["calls"]) == (2, 2, 6)
    assert found["calls_per_query"] == 3
    assert found["input_tokens_per_query"] == (600 + 610) / 2
    assert found["output_tokens_per_query"] == (35 + 75) / 2
    assert found["rate_qps"] == pytest.approx(1 / 1.5)
    write = found["stages"]["write"]
    assert write["calls_per_query"] == 2
    assert write["queries_by_calls"] == {2: 2}
    assert write["input"] == {0: 200, 25: 237.5, 50: 255, 75: 270, 100: 300}
    assert write["output_mean"] == 25
    assert write["shared_tokens"] == (140 + 140 + 170 + 170) / 4


def test_correlations():
    inputs, outputs = [200, 300, 250, 260], [10, 20, 30, 40]
    found = describe(Workload(**fields()))["correlations"]
    assert found["input_output"]["write"] == pytest.approx(np.corrcoef(inputs, outputs)[0, 1])
    assert math.isnan(found["input_output"]["plan"])  # it never varies
    assert math.isnan(found["successive_outputs"]["write"])  # two pairs are too few


def test_a_repeat_is_not_distinct_but_another_graph_is():
    w = Workload(**fields())
    assert distinct_queries(w.take(np.array([0, 1, 0, 1, 1]))).tolist() == [
        0,
        0,
        2,
        2,
        2,
    ]  # sorted by arrival
    chain = fields(
        input_tokens=[100, 200, 300] * 2, output_tokens=[5, 10, 20] * 2, context_tokens=[0, 60, 60] * 2
    )
    assert distinct_queries(Workload(**chain)).tolist() == [0, 1]
    same = chain | {"succ_offsets": [0, 1, 2, 2, 3, 4, 4], "successors": [1, 2, 4, 5]}
    assert distinct_queries(Workload(**same)).tolist() == [0, 0]
