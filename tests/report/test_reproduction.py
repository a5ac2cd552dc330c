"""REPRODUCTION.md from made-up results: its verdicts, its numbers, and what is missing."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from hexrepro.report import claims, reproduction
from hexrepro.report.results import DEFAULTS, inverse, paired_ratio, where
from hexrepro.report.verdicts import Grade
from tests import made_up


def attainment(conditions=DEFAULTS, **gains) -> dict[str, pd.DataFrame]:
    settings = [
        dict(cluster=cluster, profile=profile, prefix_caching=caching, trace="trace1", rate_qps=rate)
        for profile, caching in conditions
        for cluster in ("hetero1", "hetero2", "homo")
        for rate in (0.5, 1.0)
    ]
    return made_up.study("attainment", settings, made_up.GAINS | gains, seeds=6)


def claim(name: str) -> claims.Claim:
    return next(c for c in claims.claims() if c.name == name)


def verdict(name: str, everything) -> str:
    return reproduction.row(claim(name), everything, {})[0]


@pytest.fixture(scope="module")
def usual() -> dict:
    return {"attainment": attainment()}


def test_verdicts_follow_the_results(usual):
    assert verdict("p95_vllm", usual) == "reproduced"
    assert verdict("p95_vllm", {"attainment": attainment(hexgen_flow=1.0)}) == "not"
    assert verdict("p95_vllm", {"attainment": attainment(hexgen_flow=3.0)}) == "partly"
    assert verdict("p95_strongest", usual) == "not"  # QLM is as good
    weak = dict.fromkeys(("ray", "vtc", "qlm", "llf"), 0.99)
    assert verdict("p95_strongest", {"attainment": attainment(**weak)}) == "reproduced"
    assert verdict("trace1_scale", usual) == "reproduced"
    assert verdict("v1_deadline", usual) == "reproduced"
    assert verdict("no_mix", usual) == "not"  # the made-up gain is the same on Homo


def test_one_view_is_not_enough(usual):
    one = {"attainment": attainment(conditions=DEFAULTS[:1])}
    other = attainment(conditions=DEFAULTS[1:], hexgen_flow=1.0)
    both = {"attainment": {k: pd.concat([one["attainment"][k], other[k]]) for k in other}}
    assert verdict("p95_vllm", both) == "partly"


def test_a_cell_shows_the_gain_and_its_interval(usual):
    cell, judgement = claim("p95_vllm").measure(usual, DEFAULTS[0])
    ratio = where(
        usual["attainment"]["summary"],
        cluster="hetero1", profile="silicon", policy="hexgen_flow", metric="p95_s_ratio", rate_qps=0.5,
    ).iloc[0]  # fmt: skip
    assert judgement.grade == Grade.HOLDS
    assert (
        f"Hetero-1: {1 / ratio['value']:.2f} × ({1 / ratio['ci_high']:.2f}–{1 / ratio['ci_low']:.2f})" in cell
    )


def test_the_strongest_rival_is_chosen_in_each_setting(usual):
    samples = where(usual["attainment"]["samples"], profile="silicon")
    rows = claims.over_strongest(samples, "p95_s")
    assert set(rows["rival"]) == {"qlm"}
    np.testing.assert_allclose(rows["value"], 1.55 / 1.56, rtol=0.03)
    rows = claims.over_strongest(samples, "throughput_qps")
    np.testing.assert_allclose(rows["value"], 1.55 / 1.56, rtol=0.03)
    mixed = samples.copy()
    here = (mixed["cluster"] == "hetero2") & (mixed["policy"] == "ray")
    mixed.loc[here, "value"] /= 10
    rows = claims.over_strongest(mixed, "p95_s").set_index("cluster")
    assert set(rows.loc["hetero1", "rival"]) == {"qlm"}
    assert set(rows.loc["hetero2", "rival"]) == {"ray"}
    assert rows.loc["hetero2", "value"].max() < 0.2


def robust(name: str, rows: list[dict]) -> str:
    """The verdict from ratios of HexGen-Flow's P95 (or SLO scale) to vLLM's, in both default conditions."""
    metric = "scale_at_95_ratio" if name == "multi_tenant" else "p95_s_ratio"
    records = [
        made_up.labels(name, policy="hexgen_flow", profile=profile, prefix_caching=caching)
        | dict(metric=metric, ci_low=row["value"] - 0.05, ci_high=row["value"] + 0.05)
        | row
        for profile, caching in DEFAULTS
        for row in rows
    ]
    return verdict(name, {name: {"summary": pd.DataFrame(records)}})


def test_the_robust_claims_look_at_the_right_rows():
    assert robust("high_load", [dict(rate_qps=30, value=0.7), dict(rate_qps=60, value=1.0)]) == "reproduced"
    assert robust("high_load", [dict(rate_qps=30, value=1.0), dict(rate_qps=60, value=0.7)]) == "not"
    burst = dict(arrivals="onoff", value=0.7)
    assert robust("bursty", [burst, dict(arrivals="poisson", value=1.2)]) == "reproduced"
    assert robust("bursty", [burst, dict(arrivals="gamma_cv4", value=1.2)]) == "partly"
    everyone = dict(tenant="all", value=0.7)
    assert robust("multi_tenant", [everyone, dict(tenant="tight", value=1.2)]) == "reproduced"
    beside = [dict(tenant="trace1", chat_qps=2, value=0.7), dict(tenant="chat", chat_qps=2, value=0.7)]
    assert robust("mixed_load", [*beside, dict(tenant="all", chat_qps=0, value=1.2)]) == "reproduced"
    assert robust("mixed_load", [beside[0], beside[1] | dict(value=1.2)]) == "partly"


def test_a_ratio_that_may_be_nothing_is_a_gain_without_an_upper_end():
    rows = claims.as_gains(
        inverse(pd.DataFrame([made_up.labels("x") | dict(value=0.5, ci_low=-0.1, ci_high=1.1)]))
    )
    assert (rows[0].value, rows[0].high) == (2.0, np.inf)
    assert claims.factor(rows[0]) == "2.00 × (0.91–∞) tie"


def test_seeds_are_paired():
    seeds = range(6)
    slow = [dict(seed=s, policy="a", value=10.0 * (1 + s)) for s in seeds]
    fast = [dict(seed=s, policy="b", value=5.0 * (1 + s)) for s in reversed(seeds)]
    samples = pd.DataFrame([made_up.labels("x") | dict(metric="p95_s") | row for row in slow + fast])
    ratio = paired_ratio(samples, "p95_s", "a", "b").iloc[0]
    assert ratio["value"] == pytest.approx(2.0)
    assert (ratio["ci_low"], ratio["ci_high"]) == pytest.approx((2.0, 2.0))


def test_the_page(usual):
    page = reproduction.page(reproduction.answers(usual, {"latency_p95": "out/latency_p95.png"}))
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) == len(claims.claims()) + 2
    assert len({line.count(" | ") for line in rows}) == 1  # every row has every column
    first = rows[1]
    assert "1.42–1.56 × [A]" in first
    assert "**reproduced**: turns on" in first
    assert "[figure](out/latency_p95.png)" in first
    assert "`python -m paper_figures latency`" in first
    theirs = [c for c in claims.claims() if not c.own]
    counts = re.search(rf"Of the paper's {len(theirs)} claims: (.*)\.", page)[1]
    assert sum(int(n) for n in re.findall(r"\d+", counts)) == len(theirs)
    assert "not run" in counts


def test_nothing_run_yet():
    page = reproduction.page(reproduction.answers({}, {}))
    assert page.count("**not run**") == len(claims.claims())


def test_every_claim_names_a_figure_and_carries_a_tag():
    from paper_figures import FIGURES

    names = [c.name for c in claims.claims()]
    assert len(set(names)) == len(names)
    for c in claims.claims():
        assert c.shows in FIGURES
        assert c.picture == c.shows or c.picture.startswith(f"{c.shows}_")
        assert c.tag in claims.TAGS
