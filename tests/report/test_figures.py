"""Figures: one colour a policy, the same bytes each time, and what is written beside the lines is true."""

from __future__ import annotations

import numpy as np

from hexrepro.report import figures, style


def panels() -> dict:
    rng = np.random.default_rng(0)
    slow, fast = rng.uniform(4.0, 10.0, (5, 40)), rng.uniform(1.0, 5.0, (5, 40))
    return {
        ("1 queries/s", trace): {"vllm": slow, "hexgen_flow": fast, "mine": slow + 1} for trace in ("a", "b")
    }


def test_marks_say_where_95_percent_attain():
    curves = panels()
    figure = figures.attainment_figure(curves, title="t", baseline="vllm")
    for ax, policies in zip(figure.axes, curves.values(), strict=True):
        written = [text.get_text() for text in ax.texts]
        for policy in ("vllm", "hexgen_flow"):
            at_95 = np.sort(policies[policy], axis=1)[:, 37].mean()  # the 38th of 40
            assert f"{at_95:.1f}" in written
        assert ax.get_xlabel() == "SLO scale (× base SLO)"
    assert figure.axes[0].get_ylabel() == "SLO attainment (%)"


def test_a_line_is_the_share_of_queries_that_attain():
    figure = figures.attainment_figure(panels(), title="t", baseline="vllm")
    line = next(line for line in figure.axes[0].lines if line.get_color() == style.line_of("vllm")[0])
    scales, shares = line.get_data()
    values = panels()["1 queries/s", "a"]["vllm"]
    expected = [100 * np.mean(values <= s) for s in scales]
    np.testing.assert_allclose(shares, expected)


def test_a_policy_keeps_its_colour():
    known = {style.line_of(p) for p in style.LINES}
    assert len(known) == len(style.LINES)
    assert style.line_of("mine") == style.line_of("mine")


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    saved = []
    for name in ("one", "two"):
        figure = figures.attainment_figure(panels(), title="t", baseline="vllm")
        (tmp_path / name).mkdir()
        saved.append([f.read_bytes() for f in figures.save(figure, tmp_path / name / "figure")])
    assert saved[0] == saved[1]


def test_policies_that_never_attain_do_not_break_it(tmp_path):
    never = {("1 queries/s", "a"): {"vllm": np.full((3, 10), np.inf), "eft": np.ones((3, 10))}}
    figure = figures.attainment_figure(never, title="t", baseline="vllm")
    assert all(f.stat().st_size > 0 for f in figures.save(figure, tmp_path / "figure"))
