"""What `inspect` prints: a workload in two tables, and what became of the file's rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hexrepro.workload.formats import Loaded
from hexrepro.workload.formats.report import counted
from hexrepro.workload.survey import Stage, Survey


def tables(loaded: Loaded, found: Survey) -> Iterator[RenderableType]:
    """Parts to print one after the other."""
    report = loaded.report
    yield Text(f"{report.path}: {report.format}", overflow="fold", style="bold")
    yield _facts(found)
    yield Text()
    yield _stages(found)
    for line in report.lines():
        yield Text(line, overflow="fold")


def _facts(found: Survey) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("queries, calls", f"{found.queries:,}, {found.calls:,}")
    table.add_row("calls of a query", _range(found.calls_per_query))
    table.add_row("depth, width", f"{_range(found.depth)}; {_range(found.width)}")
    a = found.arrivals
    if a is None:
        table.add_row("arrivals", "none: give a rate")
    else:
        alike = "all at once" if found.queries > 1 else "of one query: no rate"
        table.add_row("arrivals", f"{a.rate_qps:.4g} queries/s over {_time(a.span_s)}" if a.span_s else alike)
        if np.isfinite(a.gap_cv):
            table.add_row("burstiness", _burstiness(found))
    segments = f"{counted(found.templates, 'template')} and {counted(found.contexts, 'context')}"
    table.add_row(
        "shared prefixes",
        f"{found.shared_share:.1%} of the prompt tokens, by {segments}; a cache without limit finds {found.found_share:.1%}",
    )
    if len(found.tenants) > 1:
        shown = ", ".join(f"{name} ({queries:,})" for name, queries in found.tenants[:6])
        table.add_row(
            "tenants", shown + (f" and {len(found.tenants) - 6} more" if len(found.tenants) > 6 else "")
        )
    if len(found.slo_scales) > 1 or found.slo_scales[0] != 1:
        table.add_row("SLO scales", f"{found.slo_scales[0]:.3g} to {found.slo_scales[-1]:.3g}")
    return table


def _burstiness(found: Survey) -> str:
    a = found.arrivals
    parts = [f"CV of the gaps {a.gap_cv:.2f}"]
    if a.dispersion:
        windows = ", ".join(f"{value:.2f} in {_time(window_s)}" for window_s, value in a.dispersion.items())
        parts.append(f"dispersion of the counts {windows}")
    return "; ".join(parts) + " (Poisson: 1)"


def _stages(found: Survey) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage", no_wrap=True, min_width=8, overflow="ellipsis")
    for name in ("calls", "a query"):
        table.add_column(name, justify="right", no_wrap=True)
    with_tools = found.total.tool_s[-1] > 0
    names = ["input", "output", "shared prefix"] + (["tool time, s"] if with_tools else [])
    for name in names:
        table.add_column(f"{name}\nP5 / P50 / P95 / max", justify="right", no_wrap=True)
    for stage in (*found.stages, *([found.total] if len(found.stages) > 1 else [])):
        row = [stage.name, f"{stage.calls:,}", f"{stage.calls / found.queries:.2f}", *_lengths(stage)]
        table.add_row(*row, *([" / ".join(f"{t:.3g}" for t in stage.tool_s)] if with_tools else []))
    return table


def _lengths(stage: Stage) -> list[str]:
    return [" / ".join(f"{int(t):,}" for t in q) for q in (stage.input, stage.output, stage.shared)]


def _range(values: np.ndarray) -> str:
    least, most = int(values.min()), int(values.max())
    return f"{least}" if least == most else f"{least} to {most:,}, mean {values.mean():.1f}"


def _time(seconds: float) -> str:
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"
