"""Each figure draws the numbers it is given. Result files are made up and small; nothing is written to disk."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from hexrepro.report.results import DEFAULTS, where
from hexrepro.report.style import line_of
from paper_figures import FIGURES, figure
from paper_figures.__main__ import drawn_by
from tests import made_up

SOME = {p: made_up.GAINS[p] for p in ("vllm", "qlm", "wb_fcfs", "hexgen_flow")}


def settings(clusters=("hetero1",), traces=("trace1",), rates=(0.5,), **axes) -> list[dict]:
    return [
        dict(cluster=c, profile=p, prefix_caching=x, trace=t, rate_qps=r, **axes)
        for p, x in DEFAULTS
        for c in clusters
        for t in traces
        for r in rates
    ]


def interval(value: float, half: float = 0.05) -> dict:
    return dict(value=value, ci_low=value * (1 - half), ci_high=value * (1 + half), seeds=4)


def alpha_results() -> dict[str, pd.DataFrame]:
    """P95 of 1 + (α - 0.2)², the best α at 0.2, the authors' at 0.1 and 0."""
    alphas, rates = (0.0, 0.1, 0.2, 0.5, 1.0), (0.5, 0.75, 1.0)
    same = made_up.labels("alpha_sensitivity", policy="hexgen_flow")
    rows, warm, theirs = [], [], []
    for setting in settings(rates=rates):
        rate = setting["rate_qps"]
        for alpha in alphas:
            here, worse = same | setting | dict(alpha=alpha), 1 + (alpha - 0.2) ** 2
            warm.append(here | dict(metric="p95_s_ratio_best") | interval(worse))
            if rate != 0.75:
                rows.append(here | dict(metric="p95_s") | interval(100 * rate * worse))
        warm.append(same | setting | dict(alpha=0.2, metric="best") | interval(0.2))
        if rate != 0.75:
            paper = 0.1 if rate == 0.5 else 0.0
            ratio = 1 + (paper - 0.2) ** 2
            theirs.append(
                same | setting
                | dict(alpha=0.2, paper_alpha=paper, p95_ratio=ratio, ratio_low=ratio - 0.02, ratio_high=ratio + 0.02)
            )  # fmt: skip
    return {
        "alpha": pd.DataFrame(rows),
        "alpha_rate": pd.DataFrame(warm),
        "paper_alpha": pd.DataFrame(theirs),
    }


def goodput_rows() -> pd.DataFrame:
    return pd.DataFrame(
        made_up.labels("throughput", policy=policy)
        | setting
        | dict(
            slo_scale=5.0,
            attainment=0.95,
            rate_at_qps=0.1 * gain,
            ci_low=0.09 * gain,
            ci_high=0.11 * gain,
            seeds=4,
        )
        | dict(ratio=gain, ratio_ci_low=0.97 * gain, ratio_ci_high=1.03 * gain)
        for setting in settings()
        for policy, gain in SOME.items()
    )


def day_results() -> dict[str, pd.DataFrame]:
    """Ten minutes of two phases with one event; fixed α of 0 and 1, one tuner, hindsight."""
    totals, timeline = [], []
    for policy, alpha, p95 in (("fixed", 0.0, 100.0), ("fixed", 1.0, 300.0), ("continuous", np.nan, 90.0),
                               ("hindsight", np.nan, 80.0)):  # fmt: skip
        same = made_up.labels("alpha_online", trace="day", arrivals="day", policy=policy, alpha=alpha)
        totals.append(same | dict(metric="p95_s") | interval(p95))
        totals.append(same | dict(metric="p95_s_ratio") | interval(p95 / 100.0))
        for i, time_s in enumerate(range(30, 601, 30)):
            timeline.append(
                same
                | dict(
                    seed=0, time_s=time_s, used_alpha=0.5 if np.isnan(alpha) else alpha, p95_window_s=p95 + i
                )
                | dict(
                    load_qps=0.2 if time_s <= 300 else 0.4,
                    phase_trace="trace1" if time_s <= 300 else "trace2",
                )
                | dict(event="a100-0 leaves" if i == 7 else "")
            )
    return {"alpha_online": pd.DataFrame(totals), "timeline": pd.DataFrame(timeline)}


def study(name: str, **where_) -> dict[str, pd.DataFrame]:
    return made_up.study(name, settings(**where_), SOME)


def made_up_results() -> dict[str, dict[str, pd.DataFrame]]:
    """Result files for each figure, a setting or two."""
    prefill = [study("prefill_matters", cached_share=share)["summary"] for share in (0.0, 0.5, 1.0)]
    return {
        "attainment": study("attainment", clusters=("hetero1", "homo")),
        "latency": study("attainment"),
        "throughput": study("throughput") | {"goodput": goodput_rows()},
        "ablation": {"summary": pd.concat(study("ablation", slo_mix=m)["summary"] for m in ("mixed", "one"))},
        "multi_tenant": {"summary": tenants()},
        "mixed_load": {"summary": beside_chat()},
        "alpha_sensitivity": alpha_results(),
        "alpha_tuning": day_results(),
        "high_load": study("high_load", rates=(15.0, 30.0, 45.0)),
        "bursty": {
            "summary": pd.concat(study("bursty", arrivals=a)["summary"] for a in ("onoff", "gamma_cv4"))
        },
        "second_workflow": study(
            "second_workflow", clusters=("hetero1", "hetero2"), traces=("trace4",), rates=(2.5, 5.0)
        ),
        "prefill_matters": {"summary": pd.concat(prefill)},
    }


def tenants() -> pd.DataFrame:
    """The tight tenant attains 50 %, the loose one 100 %; Jain's index of that is 0.9."""
    parts = []
    for setting in settings():
        for policy in SOME:
            same = made_up.labels("multi_tenant", policy=policy) | setting | dict(slo_mix="mixed")
            parts += [
                same | dict(tenant=t, metric="attainment") | interval(x)
                for t, x in (("tight", 0.5), ("loose", 1.0))
            ]
            parts.append(same | dict(metric="jain_attainment") | interval(0.9))
    return pd.DataFrame(parts)


def beside_chat() -> pd.DataFrame:
    """Text-to-SQL takes 100 s and 10 s more for each chat call per second; a chat call 20 s."""
    parts = []
    for setting in settings():
        for policy in SOME:
            for chat_qps in (0, 2):
                same = (
                    made_up.labels("mixed_load", policy=policy)
                    | setting
                    | dict(chat_qps=chat_qps, metric="p95_s")
                )
                parts.append(same | interval(100.0 if chat_qps == 0 else 60.0))
                if chat_qps:
                    parts += [
                        same | dict(tenant="trace1") | interval(120.0),
                        same | dict(tenant="chat") | interval(20.0),
                    ]
    return pd.DataFrame(parts)


def grown() -> dict[str, pd.DataFrame]:
    """4 and 16 instances, 10 and 100 queries in flight; a decision takes 1 µs an instance."""
    summary, timings = [], []
    for policy in SOME:
        for scale_out in (1, 4):
            same = made_up.labels("scale", policy=policy) | dict(scale_out=scale_out)
            summary.append(same | dict(metric="p95_s") | interval(100.0))
            timed = same | dict(instances=4 * scale_out)
            timings.append(timed | dict(in_flight=np.nan, metric="decision_s") | interval(4e-6 * scale_out))
            for queries in (10, 100):
                timings.append(
                    timed | dict(in_flight=queries, metric="wall_s") | interval(0.01 * queries * scale_out)
                )
                timings.append(
                    timed | dict(in_flight=queries, metric="decisions_per_s") | interval(1e6 / scale_out)
                )
    return {"summary": pd.DataFrame(summary), "timings": pd.DataFrame(timings)}


RESULTS = made_up_results() | {"scale": grown()}


@pytest.fixture(scope="module", params=sorted(RESULTS))
def drawn(request) -> tuple[str, dict[str, Figure]]:
    return request.param, drawn_by(figure(request.param), RESULTS[request.param])


def test_every_panel_is_drawn_and_labelled(drawn):
    name, figures = drawn
    assert figures
    for stem, page in figures.items():
        assert stem == name or stem.startswith(f"{name}_")
        assert page.get_suptitle()
        visible = [ax for ax in page.axes if ax.axison]
        assert visible
        assert any(ax.get_xlabel() for ax in visible)
        assert any(ax.get_ylabel() or [t.get_text() for t in ax.get_yticklabels()] for ax in visible)
        for ax in visible:
            assert ax.lines or ax.patches or ax.collections, f"{stem} has an empty panel"


def marks(ax, policy: str) -> list[float]:
    """x of the dots in a policy's colour."""
    colour = line_of(policy)[0]
    return [
        line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o" and line.get_color() == colour
    ]


def test_dots_are_the_ratios():
    page = figure("latency").p95(RESULTS["latency"]["summary"])
    for ax, (profile, caching) in zip(page.axes, DEFAULTS, strict=True):
        here = where(
            RESULTS["latency"]["summary"], profile=profile, prefix_caching=caching, metric="p95_s_ratio"
        )
        for policy in ("qlm", "wb_fcfs", "hexgen_flow"):
            assert marks(ax, policy) == where(here, policy=policy)["value"].tolist()


def test_attainment_lines_are_the_curves():
    figures = figure("attainment").draw(RESULTS["attainment"])
    ax = figures["attainment_hetero1_silicon"].axes[0]
    curve = where(RESULTS["attainment"]["curves"], cluster="hetero1", profile="silicon", policy="vllm")
    line = next(
        line for line in ax.lines if line.get_color() == line_of("vllm")[0] and len(line.get_xdata()) > 1
    )
    np.testing.assert_allclose(line.get_xdata(), curve["scale"])
    np.testing.assert_allclose(line.get_ydata(), 100 * curve["attainment"])
    summary = where(RESULTS["attainment"]["summary"], cluster="hetero1", profile="silicon", policy="vllm")
    at_95 = where(summary, metric="scale_at_95")["value"].iloc[0]
    assert f"{at_95:.1f}" in [t.get_text() for t in ax.texts]


def test_the_heat_map_is_relative_to_the_best_alpha_of_its_rate():
    page = figure("alpha_sensitivity").draw(alpha_results())["alpha_sensitivity_rates"]
    mesh = page.axes[0].collections[0]
    expected = np.tile([1 + (a - 0.2) ** 2 for a in (0.0, 0.1, 0.2, 0.5, 1.0)], (3, 1))
    np.testing.assert_allclose(np.ma.getdata(mesh.get_array()).reshape(3, 5), expected)
    circles, dots = (line for line in page.axes[0].lines if line.get_marker() == "o")
    assert dots.get_xdata().tolist() == [0.2, 0.2, 0.2]
    assert circles.get_xydata().tolist() == [
        [a, y] for y in range(3) for a in (0.0, 0.1, 0.2)
    ]  # 1 is in the interval
    stars = [line.get_xydata().tolist() for line in page.axes[0].lines if line.get_marker() == "*"]
    assert stars == [[[0.1, 0]], [[0.0, 2]]]  # the authors', Hetero-1 and Trace 1, at 0.5 and 1.0 queries/s


def test_each_tenant_has_its_column_and_fairness_too():
    page = figure("multi_tenant").draw(RESULTS["multi_tenant"])["multi_tenant_hetero1"]
    top = page.axes[:3]
    assert [ax.get_title() for ax in top] == ["tight SLO", "loose SLO", "fairness"]
    assert [marks(ax, "vllm") for ax in top] == [[50.0], [100.0], [0.9]]


def test_beside_chat_the_queries_are_not_mixed_with_the_chat_calls():
    figures = figure("mixed_load").draw(RESULTS["mixed_load"])
    for stem, expected in (("mixed_load", [100.0, 120.0]), ("mixed_load_chat", [20.0])):
        line = next(x for x in figures[stem].axes[0].lines if x.get_color() == line_of("vllm")[0])
        assert line.get_ydata().tolist() == expected


def test_ablation_shows_one_slo_beside_mixed_ones():
    axes = figure("ablation").draw(RESULTS["ablation"]).axes
    assert [ax.get_title() for ax in axes[:2]] == ["Hetero-1, one SLO", "Hetero-1, mixed SLOs"]


def test_scale_against_instances_and_queries():
    latency, decision, speed, drain = figure("scale").draw(RESULTS["scale"]).axes
    for ax, expected in ((latency, [100.0, 100.0]), (decision, [4.0, 16.0]), (speed, [1.0, 0.25])):
        line = next(line for line in ax.lines if line.get_color() == line_of("vllm")[0])
        np.testing.assert_allclose(line.get_xydata(), np.array([[4, 16], expected]).T)
    assert [t.get_text() for t in drain.texts] == ["4 instances", "16 instances"]
    np.testing.assert_allclose(drain.lines[1].get_xydata(), [[10, 0.4], [100, 4.0]])


def test_the_day_is_the_timeline():
    results = day_results()
    assert figure("alpha_tuning").fixed_ends(results["alpha_online"]) == {
        "best fixed": 0.0,
        "worst fixed": 1.0,
    }
    load, chosen, tail = figure("alpha_tuning").draw(results)["alpha_tuning"].axes
    assert [t.get_text() for t in load.texts] == ["Trace 1", "Trace 2"]
    assert any(t.get_text() == "a100-0 leaves" for t in tail.texts)
    rows = where(results["timeline"], policy="continuous")
    line = next(line for line in tail.lines if line.get_color() == line_of("hexgen_flow")[0])
    np.testing.assert_allclose(line.get_xdata(), rows["time_s"] / 60)
    np.testing.assert_allclose(line.get_ydata(), rows["p95_window_s"])
    steps = next(line for line in chosen.lines if line.get_color() == line_of("hexgen_flow")[0])
    assert set(steps.get_ydata()) == {0.5}


def test_prefill_lines_are_gains_over_vllm():
    page = figure("prefill_matters").draw(RESULTS["prefill_matters"])
    rows = where(
        RESULTS["prefill_matters"]["summary"], profile="silicon", policy="hexgen_flow", metric="p95_s_ratio"
    )
    line = next(line for line in page.axes[0].lines if len(line.get_xdata()) == 3)
    np.testing.assert_allclose(line.get_xdata(), [0, 50, 100])
    np.testing.assert_allclose(line.get_ydata(), 1 / rows["value"])


def test_all_figures_have_a_module():
    for name in FIGURES:
        module = figure(name)
        assert module.__doc__
        assert module.TITLE
        assert module.SEES
        assert not re.search(r"\d\.\d|\d ?×", module.SEES), "a result typed by hand"
        assert callable(module.draw)
