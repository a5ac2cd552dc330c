"""A page of panels that show a workload: when queries come, how long calls are, and how queries are built."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hexrepro.errors import InputError
from hexrepro.report import style
from hexrepro.workload.survey import Survey
from hexrepro.workload.types import Workload

MOST_STAGES = 10  # rows of the length panels; rarer stages are taken together
SUFFIXES = (".png", ".pdf", ".svg")


def draw(workload: Workload, found: Survey, path: str | Path) -> None:
    """Write the figure of a workload and its `survey` to a .png, .pdf or .svg file."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise InputError(f"--figure {path}: it must end in {', '.join(SUFFIXES)}")
    names, of_call = _few_stages(workload)
    shared = workload.template_tokens.astype(np.int64) + workload.context_tokens
    dated = found.arrivals is not None and found.arrivals.span_s > 0
    rows, columns = (2, 3) if dated else (1, 4)
    height = 2.15 * rows + 0.13 * max(0, len(names) - 4)
    with style.drawing(style.PAGE_IN, height, rows=rows, columns=columns) as (figure, axes):
        panels = list(axes.ravel())
        style.headline(figure, f"{_plain(workload.name)}: {found.queries:,} queries, {found.calls:,} calls")
        if dated:
            _rate(panels.pop(0), workload)
            _gaps(panels.pop(0), workload, found)
        if found.calls_per_query.max() > 1:
            _counts(panels[0], found)
        else:
            _longer(panels[0], workload)
        _lengths(panels[1], names, of_call, workload.input_tokens, "prompt, tokens", style.BLUE)
        _lengths(panels[2], names, of_call, workload.output_tokens, "output, tokens", style.ORANGE)
        _shares(panels[3], names, of_call, shared, workload.input_tokens)
        for ax in panels[2:]:
            ax.set_yticklabels([])
    try:
        with mpl.rc_context(style.STYLE):
            figure.savefig(path, dpi=200)
    except OSError as error:
        raise InputError(f"--figure {path}: it cannot be written ({error.strerror})") from None


def _few_stages(w: Workload) -> tuple[list[str], np.ndarray]:
    """Names and int64[n], each call's number among them: the stages with the most calls, the rest as one."""
    calls = np.bincount(w.stage, minlength=len(w.stage_names))
    used = [s for s in range(len(calls)) if calls[s]]
    if len(used) > MOST_STAGES:
        most = sorted(np.argsort(-calls, kind="stable")[: MOST_STAGES - 1].tolist())
        names = [w.stage_names[s] for s in most] + [f"{len(used) - len(most)} others"]
    else:
        most, names = used, [w.stage_names[s] for s in used]
    number = np.full(len(calls), len(names) - 1)
    number[most] = np.arange(len(most))
    return [_plain(name if len(name) <= 20 else name[:19] + "…") for name in names], number[w.stage]


def _plain(name: str) -> str:
    """A name as matplotlib shows it as it is: between two dollar signs it looks for a formula."""
    return name.replace("$", r"\$")


def _rate(ax: Axes, w: Workload) -> None:
    """Queries a second over time, in some 60 windows."""
    span_s = float(w.arrival_s[-1] - w.arrival_s[0])
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    unit_s, unit = next((pair for pair in units if span_s >= 3 * pair[0]), units[-1])
    counts, edges = np.histogram(w.arrival_s - w.arrival_s[0], bins=min(60, max(4, w.n_queries // 5)))
    ax.stairs(counts / np.diff(edges), edges / unit_s, color=style.BLUE, fill=True, alpha=0.35, linewidth=0)
    ax.stairs(counts / np.diff(edges), edges / unit_s, color=style.BLUE, linewidth=1)
    ax.axhline((w.n_queries - 1) / span_s, color=style.BLACK, linewidth=0.8, linestyle=":")
    ax.set_ylim(0)
    ax.set_xlabel(f"time, {unit}")
    ax.set_ylabel("queries/s")


def _gaps(ax: Axes, w: Workload, found: Survey) -> None:
    """The share of gaps longer than t, against Poisson's."""
    if not np.isfinite(found.arrivals.gap_cv):
        style.empty(ax)
        return
    gaps = np.sort(np.diff(w.arrival_s)) * found.arrivals.rate_qps
    longer = 1 - np.arange(1, len(gaps) + 1) / len(gaps)
    if len(gaps) > 5000:  # a line needs no more points than it has pixels, but for its end
        picked = np.unique(np.linspace(0, len(gaps) - 1, 4000).astype(int))
        picked = np.union1d(picked, np.arange(len(gaps) - 500, len(gaps)))
        gaps, longer = gaps[picked], longer[picked]
    heavy = gaps[-1] > 30
    some = (longer > 0) & ((gaps > 0) | (not heavy))
    gaps, longer = np.append(0.0, gaps[some]), np.append(1.0, longer[some])
    t = (
        np.geomspace(1e-2, np.log(w.n_queries) + 1, 60)
        if heavy
        else np.linspace(0, np.log(w.n_queries) + 1, 60)
    )
    ax.plot(t, np.exp(-t), color=style.BLACK, linestyle=":", linewidth=0.8, label="Poisson")
    first = int(heavy)  # a logarithmic axis has no 0
    label = f"trace, CV {found.arrivals.gap_cv:.2f}"
    ax.step(gaps[first:], longer[first:], where="post", color=style.BLUE, label=label)
    ax.set_yscale("log")
    if heavy:
        ax.set_xscale("log")
        ax.set_xlim(1e-2, gaps[-1] * 1.5)
    else:
        ax.set_xlim(0, max(t[-1], gaps[-1]) * 1.02)
    ax.set_xlabel("gap between queries, in mean gaps")
    ax.set_ylabel("share of longer gaps")
    ax.legend(frameon=False, handlelength=1.2, loc="lower left")


def _longer(ax: Axes, w: Workload) -> None:
    """Of queries of one call: the share of calls with longer prompts, and with longer outputs."""
    for name, tokens, colour in (
        ("prompt", w.input_tokens, style.BLUE),
        ("output", w.output_tokens, style.ORANGE),
    ):
        length, calls = np.unique(tokens, return_counts=True)
        more = np.append(1.0, 1 - np.cumsum(calls) / len(tokens))
        ax.step(np.append(length[0], length), more, where="post", color=colour, label=name)
    ax.set_xscale("log")
    ax.set_ylim(0, 1.03)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_xlabel("tokens")
    ax.set_ylabel("calls with more")
    _legend_above(ax)


def _counts(ax: Axes, found: Survey) -> None:
    """Calls, depth and width of the queries, as shares of at least so many."""
    lines = (
        ("calls", found.calls_per_query, style.BLACK, "-"),
        ("depth", found.depth, style.BLUE, "-"),
        ("width", found.width, style.ORANGE, "--"),
    )
    for name, values, colour, dash in lines:
        number, queries = np.unique(values, return_counts=True)
        at_least = np.cumsum(queries[::-1])[::-1] / found.queries
        ax.step([0, *number], [1, *at_least], where="pre", color=colour, linestyle=dash, label=name)
        ax.plot([number[-1], number[-1]], [at_least[-1], 0], color=colour, linestyle=dash)
    ax.set_ylim(0, 1.03)
    ax.set_xlim(0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_xlabel("calls of a query")
    ax.set_ylabel("queries with as many")
    _legend_above(ax)


def _legend_above(ax: Axes) -> None:
    place = dict(loc="lower center", bbox_to_anchor=(0.5, 0.97), ncols=3, borderpad=0)
    ax.legend(frameon=False, handlelength=1.2, handletextpad=0.4, columnspacing=0.8, **place)


def _rows(ax: Axes, names: list[str]) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)


def _lengths(
    ax: Axes, names: list[str], of_call: np.ndarray, tokens: np.ndarray, label: str, colour: style.Colour
) -> None:
    """A row a stage: least to most as a line, the middle 90 % thick, the median as a dot."""
    for row in range(len(names)):
        least, low, middle, high, most = np.quantile(tokens[of_call == row], (0, 0.05, 0.5, 0.95, 1))
        ax.plot([least, most], [row, row], color=colour, linewidth=0.8)
        ax.plot([low, high], [row, row], color=colour, linewidth=4, alpha=0.45, solid_capstyle="butt")
        ax.plot([middle], [row], "o", color=colour, markersize=3.5)
    ax.set_xscale("log")
    ax.set_xlabel(label)
    ax.grid(axis="x", linewidth=0.3, alpha=0.6)
    _rows(ax, names)


def _shares(ax: Axes, names: list[str], of_call: np.ndarray, shared: np.ndarray, tokens: np.ndarray) -> None:
    """How much of the stage's prompt tokens is template and context."""
    total = np.bincount(of_call, tokens, len(names))
    share = np.bincount(of_call, shared, len(names)) / total
    ax.barh(range(len(names)), share, color=style.GREEN, height=0.55, alpha=0.7)
    for row, value in enumerate(share):
        ax.text(value + 0.02, row, f"{value:.0%}", va="center", fontsize=6.5)
    ax.set_xlim(0, 1.3)
    ax.set_xticks((0, 0.5, 1))
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_xlabel("prompt in a shared prefix")
    _rows(ax, names)
