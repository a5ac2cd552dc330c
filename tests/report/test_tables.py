"""Tables: numbers as a reader sees them."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from hexrepro.report import tables
from hexrepro.report.intervals import Interval


@pytest.mark.parametrize(
    ("interval", "digits", "scale", "shown"),
    [
        (Interval(12.34, 12.0, 12.8), 1, 1.0, "12.3 ±0.4"),
        (Interval(0.955, 0.945, 0.965), 1, 100.0, "95.5 ±1.0"),
        (Interval(np.inf, np.inf, np.inf), 1, 1.0, "never"),
        (Interval(np.nan, np.nan, np.nan), 1, 1.0, "–"),
        (Interval(3.0, -np.inf, np.inf), 2, 1.0, "3.00"),
    ],
)
def test_value_with_half_width(interval, digits, scale, shown):
    assert tables.with_half_width(interval, digits, scale) == shown


def test_factor():
    assert tables.factor(Interval(1.71, 1.65, 1.78)) == "1.71 × (1.65–1.78)"
    assert tables.factor(Interval(1.01, 0.98, 1.04)) == "1.01 × (0.98–1.04) tie"
    assert tables.factor(Interval(1.5, -np.inf, np.inf)) == "1.50 ×"
    assert tables.factor(Interval(np.nan, np.nan, np.nan)) == "–"


def test_factors_turned_round_of_one_run_and_of_few():
    def turned(*interval: float) -> str:
        return tables.factor(tables._inverse(Interval(*interval)))

    assert turned(0.5, 0.4, 0.8) == "2.00 × (1.25–2.50)"
    assert turned(0.5, -np.inf, np.inf) == "2.00 ×"
    assert turned(0.5, -0.1, 1.25) == "2.00 × (0.80–∞) tie"


def rows() -> list[tables.Row]:
    same = {c.metric: Interval(2.0, 1.9, 2.1) for c in tables.columns(5.0)}
    better = dict.fromkeys(same, Interval(0.5, 0.4, 0.6))
    tie = dict.fromkeys(same, Interval(0.99, 0.9, 1.1))
    return [
        tables.Row("vllm", None, same, None),
        tables.Row("hexgen_flow", 0.85, same, better),
        tables.Row("ray", None, same, tie),
    ]


@pytest.mark.parametrize("width", [120, 160])
def test_comparison_fits_and_marks_ties(width):
    console = Console(width=width)
    with console.capture() as captured:
        console.print(tables.comparison_table("title", rows(), tables.columns(5.0)))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert text.count("×0.50 ±0.10") == 8
    assert text.count("≈0.99 ±0.10") == 8
    assert "α = 0.85" in text
    assert "baseline" in text
