"""The figures of the reproduction. `python -m paper_figures` runs what is missing and redraws all of them.

A module a figure: it says what it shows and which experiment it reads, and draws from that experiment's result files
alone. The results are kept in `results/`, so that everything can be redrawn without running anything.
"""

from __future__ import annotations

import importlib
from types import ModuleType

FIGURES = (
    "attainment",
    "latency",
    "throughput",
    "ablation",
    "alpha_sensitivity",
    "alpha_tuning",
    "high_load",
    "bursty",
    "multi_tenant",
    "mixed_load",
    "second_workflow",
    "scale",
    "prefill_matters",
)


def figure(name: str) -> ModuleType:
    """The module of a figure: EXPERIMENT (whose results it reads), TITLE, SEES (how to read it) and draw(results)."""
    return importlib.import_module(f"paper_figures.{name}")
