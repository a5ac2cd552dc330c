"""Charts: what is drawn is what was given, ties are hollow, and labels do not overlap."""

from __future__ import annotations

import numpy as np
import pandas as pd

from hexrepro.report.charts import bands, dots, label_ends, spread
from hexrepro.report.style import drawing, line_of


def frame(**columns) -> pd.DataFrame:
    return pd.DataFrame(columns)


def test_spread_moves_as_little_as_can_be():
    np.testing.assert_allclose(spread(np.array([0.0, 10.0, 20.0]), 8.0), [0, 10, 20])
    np.testing.assert_allclose(spread(np.array([0.0, 0.0, 50.0]), 8.0), [-4, 4, 50])
    placed = spread(np.array([0.0, 7.0, 8.0, 9.0]), 8.0)
    assert np.all(np.diff(placed) >= 8 - 1e-9)
    np.testing.assert_allclose(placed.mean(), 6.0)  # one pool: least squares keeps the centre


def test_a_tie_is_hollow_and_a_difference_is_full():
    rows = frame(value=[0.8, 0.98, 1.2], ci_low=[0.7, 0.95, 1.1], ci_high=[0.9, 1.01, 1.3])
    with drawing(3, 2) as (_, axes):
        dots(axes[0, 0], [0, 1, 2], rows, colours=["blue"] * 3)
        marks = [line for line in axes[0, 0].lines if line.get_marker() == "o"]
        spans = [line for line in axes[0, 0].lines if line.get_marker() == "None"]
    assert [m.get_markerfacecolor() == "white" for m in marks] == [False, True, False]
    assert [m.get_xdata()[0] for m in marks] == [0.8, 0.98, 1.2]
    assert [list(s.get_xdata()) for s in spans] == [[0.7, 0.9], [0.95, 1.01], [1.1, 1.3]]


def test_a_band_is_its_rows_in_order():
    rows = frame(
        policy=["vllm"] * 3,
        x=[3.0, 1.0, 2.0],
        value=[30.0, 10.0, 20.0],
        ci_low=[29.0, 9, 19],
        ci_high=[31.0, 11, 21],
    )
    with drawing(3, 2) as (_, axes):
        ends = bands(axes[0, 0], rows, "x")
        line = axes[0, 0].lines[0]
        area = axes[0, 0].collections[0].get_paths()[0].vertices
        label_ends(axes[0, 0], ends)
    assert line.get_xydata().tolist() == [[1, 10], [2, 20], [3, 30]]
    assert line.get_color() == line_of("vllm")[0]
    assert {9.0, 11.0, 19.0, 21.0, 29.0, 31.0} <= set(area[:, 1])
    assert [t.get_text() for t in axes[0, 0].texts] == ["vLLM"]
