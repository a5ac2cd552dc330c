"""The figure that most comparisons come to: a row a policy, a dot a setting, panels by hardware view and by one column."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.figure import Figure

from hexrepro.report.charts import MARKERS, dots, marker_legend, plain_log
from hexrepro.report.results import views_in, where
from hexrepro.report.style import COLUMN_IN, PAGE_IN, drawing, empty, headline, line_of, name_of, row_label

ORDER = (
    "vllm", "ray", "vtc", "vtc_tenant", "qlm", "llf", "rr_pq", "wb_fcfs", "hexgen_flow", "eft", "low",
)  # fmt: skip


def policies_in(frame: pd.DataFrame) -> list[str]:
    """The policies of a frame: the known ones in their usual order, then others."""
    there = list(dict.fromkeys(frame["policy"]))
    return [p for p in ORDER if p in there] + [p for p in there if p not in ORDER]


def dot_figure(
    frame: pd.DataFrame,
    *,
    columns: str,
    series: Sequence[str],
    label: Callable[[Sequence], str],
    xlabel: str | Callable[[str], str],
    title: str,
    ties: bool = True,
    name: Callable[[str], str] = name_of,
    only_defaults: bool = True,
    logarithmic: bool = False,
) -> Figure:
    """Dots at `value` with intervals. frame: the label columns, value, ci_low, ci_high.

    A panel for each hardware view (down) and each value of `columns` (across); a marker for each combination of `series`,
    which `label` names. With `ties` the values are ratios: a line at 1, and hollow where the interval contains 1.
    """
    views = views_in(frame, only_defaults)
    across = list(dict.fromkeys(frame[columns]))
    policies = policies_in(frame)
    markers = list(dict.fromkeys(frame[list(series)].itertuples(index=False, name=None)))
    step = 0.11 + 0.022 * len(markers)
    narrow = len(across) == 1
    with drawing(
        COLUMN_IN if narrow else PAGE_IN,
        0.75 + 0.13 * -(-len(markers) // 4) + len(views) * max(1.15, 0.3 + step * len(policies)),
        len(views),
        len(across),
        sharex="col",
        sharey=True,
    ) as (figure, axes):
        for i, (profile, caching) in enumerate(views):
            for j, value in enumerate(across):
                ax = axes[i, j]
                part = where(frame, profile=profile, prefix_caching=caching, **{columns: value})
                if part.empty:
                    empty(ax)
                    continue
                for k, key in enumerate(markers):
                    these = where(part, **dict(zip(series, key, strict=True)))
                    these = these.set_index("policy").reindex(policies)
                    offset = 0.7 * (k / (len(markers) - 1) - 0.5) if len(markers) > 1 else 0.0
                    dots(
                        ax,
                        [y + offset for y in range(len(policies))],
                        these,
                        colours=[line_of(p)[0] for p in policies],
                        marker=MARKERS[k % len(MARKERS)],
                        ties=ties,
                        size=2.8,
                    )
                if logarithmic:
                    plain_log(ax, "x")
                if ties:
                    ax.axvline(1, color="0.4", lw=0.7, zorder=0)
                elif not logarithmic:
                    ax.set_xlim(left=0)
                for y in range(1, len(policies)):
                    ax.axhline(y - 0.5, color="0.92", lw=0.4, zorder=0)
                ax.set_yticks(range(len(policies)), [name_of(p) for p in policies])
                ax.set_ylim(len(policies) - 0.5, -0.5)
                ax.grid(axis="x", lw=0.3, color="0.85")
                if i == 0:
                    ax.set_title(name(str(value)))
                if j == 0:
                    row_label(ax, profile, caching)
                if i == len(views) - 1:
                    ax.set_xlabel(xlabel if isinstance(xlabel, str) else xlabel(str(value)))
        marker_legend(
            figure,
            [label(key) for key in markers] if len(markers) > 1 else [],
            tie=ties,
            columns=2 if narrow else 4,
        )
        headline(figure, title)
    return figure


def trace_and_rate(key: Sequence) -> str:
    """'Trace 1, 0.5/s' of (trace, rate)."""
    return f"{name_of(str(key[0]))}, {key[1]:g}/s"
