"""Generated traces against the published ones, where these are at hand.

Their files are not part of the project. They are looked for in the folder that HEXREPRO_SHARED names, or in
``shared`` beside the repository.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hexrepro.workload import describe, load
from tests.workload.samples import named_correlations, traces

SHARED = Path(os.environ.get("HEXREPRO_SHARED", Path(__file__).resolve().parents[2].parent / "shared"))
TRACES = SHARED / "data" / "released_traces"
PUBLISHED = {"trace1": "trace1.json", "trace2": "trace2.json", "financial": "financial_unbalanced.json"}

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not here")


@pytest.fixture(scope="module", params=PUBLISHED)
def pair(request):
    """The published trace, and generated ones."""
    return load(TRACES / PUBLISHED[request.param]), traces(request.param)


def test_totals(pair):
    """Distinct queries the same; calls and input tokens within 2 %, output tokens within 2.5 %."""
    published, generated = pair
    wanted = describe(published)
    for w in generated:
        found = describe(w)
        assert found["queries"] == wanted["queries"]
        assert found["distinct_queries"] == wanted["distinct_queries"]
        for field, tolerance in (
            ("calls_per_query", 0.02), ("input_tokens_per_query", 0.02), ("output_tokens_per_query", 0.025)
        ):  # fmt: skip
            assert found[field] == pytest.approx(wanted[field], rel=tolerance)


def test_quantiles_of_every_stage(pair):
    """Least and greatest the same; quartiles, on the mean of five seeds, within 2.5 % (inputs) and 12 %
    (outputs)."""
    published, generated = pair
    wanted = describe(published)["stages"]
    found = [describe(w)["stages"] for w in generated]
    for stage, of_stage in wanted.items():
        for side, tolerance in (("input", 0.025), ("output", 0.12)):
            quantiles = np.array([list(f[stage][side].values()) for f in found])
            target = np.array(list(of_stage[side].values()))
            assert np.all(quantiles[:, [0, 4]] == target[[0, 4]]), (stage, side)
            assert quantiles.mean(axis=0) == pytest.approx(target, rel=tolerance), (stage, side)


def test_calls_by_query(pair):
    """As many queries with each number of revisions; other counts within one in eight of the queries."""
    published, generated = pair
    wanted = describe(published)["stages"]
    for w in generated:
        found = describe(w)["stages"]
        assert found["revise"]["queries_by_calls"] == wanted["revise"]["queries_by_calls"]
        for stage, of_stage in wanted.items():
            for calls, queries in of_stage["queries_by_calls"].items():
                assert (
                    abs(found[stage]["queries_by_calls"].get(calls, 0) - queries) <= published.n_queries / 8
                )


def test_correlations(pair):
    """Over the distinct queries, on the mean of five seeds, within 0.2 (0.25 for successive revisions'
    outputs)."""
    published, generated = pair
    wanted = named_correlations(published)
    found = np.mean([named_correlations(w) for w in generated], axis=0)
    assert np.all(np.abs(found - wanted)[:6] <= 0.2), (found, wanted)
    assert abs(found[6] - wanted[6]) <= 0.25


def test_structure_is_read_as_it_is_generated(pair):
    """Templates, and what is shared behind them: the mean shared part of every stage within 5 %."""
    published, generated = pair
    wanted, found = describe(published)["stages"], describe(generated[0])["stages"]
    assert set(wanted) == set(found)
    for stage, of_stage in wanted.items():
        assert found[stage]["shared_tokens"] == pytest.approx(of_stage["shared_tokens"], rel=0.05)
    assert set(np.unique(published.template_tokens)) == set(np.unique(generated[0].template_tokens))
