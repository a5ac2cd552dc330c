"""One look for all figures: a policy keeps its colour and its name everywhere, sizes fit a paper's columns."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Colour = tuple[float, float, float]

BLUE, ORANGE, GREEN, RED, PINK, BROWN, ROSE, GREY, YELLOW, SKY = sns.color_palette("colorblind")
BLACK = (0.0, 0.0, 0.0)
LINES: dict[str, tuple[Colour, str]] = {
    "hexgen_flow": (BLUE, "-"),
    "vllm": (BLACK, "-"),
    "eft": (GREEN, "-"),
    "wb_fcfs": (SKY, "--"),
    "rr_pq": (GREY, "--"),
    "low": (BROWN, "-"),
    "ray": (ORANGE, "-"),
    "qlm": (RED, "-"),
    "vtc": (PINK, "-"),
    "vtc_tenant": (PINK, "--"),
    "llf": (PINK, ":"),
    "as_released": (YELLOW, "-"),
    "random": (GREY, ":"),
}
OTHERS = sns.color_palette("husl", 12)
NAMES = {
    "hexgen_flow": "HexGen-Flow",
    "vllm": "vLLM",
    "eft": "EFT",
    "wb_fcfs": "WB+FCFS",
    "rr_pq": "RR+PQ",
    "low": "least work",
    "ray": "Ray Serve",
    "qlm": "QLM",
    "vtc": "VTC",
    "vtc_tenant": "VTC by tenant",
    "llf": "LLF",
    "as_released": "as released",
    "hetero1": "Hetero-1",
    "hetero2": "Hetero-2",
    "homo": "Homo",
    "trace1": "Trace 1",
    "trace2": "Trace 2",
    "trace3": "Trace 3",
    "trace4": "Trace 4",
    "poisson": "Poisson",
    "onoff": "on–off",
    "gamma_cv2": "gamma gaps, cv 2",
    "gamma_cv4": "gamma gaps, cv 4",
    "modulated": "wandering rate",
    "financial": "financial",
    "formula_1": "formula 1",
    "hetero1_p2p": "Hetero-1, A6000 as L40S",
    "hetero1_allreduce": "Hetero-1, A6000 as L40S, slow all-reduce",
}
SHADES = sns.color_palette("viridis", 5)[:4]
"""For lines that are no policies: traces, settings."""
STRONG = ("hexgen_flow", "vllm")
COLUMN_IN, PAGE_IN = 3.5, 7.2

STYLE = {
    **sns.axes_style("ticks"),
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "lines.linewidth": 1.2,
    "errorbar.capsize": 0,
    "pdf.fonttype": 42,
    "svg.hashsalt": "hexrepro",
}


def line_of(policy: str) -> tuple[Colour, str]:
    """Colour and line style of a policy; a policy of the user's own gets one by its name."""
    return LINES.get(policy) or (OTHERS[zlib.crc32(policy.encode()) % len(OTHERS)], "-.")


def name_of(thing: str) -> str:
    """How a policy, cluster or trace is written in a figure; itself when it has no other name."""
    return NAMES.get(thing, thing)


def view_of(profile: str, prefix_caching: str) -> str:
    """How a hardware view is written in a figure."""
    cached = {"off": "no prefix caching", "template": "template cached", "full": "template and schema cached"}
    return f"{profile} step times, {cached.get(prefix_caching, prefix_caching)}"


@contextmanager
def drawing(
    width_in: float, height_in: float, rows: int = 1, columns: int = 1, **subplots
) -> Iterator[tuple[Figure, object]]:
    """A figure in the style and its axes as an array [rows, columns]; whatever is drawn inside keeps the style."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **subplots)
        yield figure, axes
        for ax in figure.axes:
            if ax.get_label() != "<colorbar>":
                sns.despine(ax=ax)


def headline(figure: Figure, text: str) -> None:
    """The title of a whole figure, at the left."""
    figure.suptitle(text, fontsize=8.5, x=0.01, ha="left")


def views_line(views) -> str:
    """'silicon: template cached; measured: no prefix caching': what the short names of the views stand for."""
    return "; ".join(view_of(*view).replace(" step times,", ":") for view in views)


def row_label(ax: Axes, profile: str, prefix_caching: str) -> None:
    """The hardware view of a row of panels, left of its first panel."""
    view, cached = view_of(profile, prefix_caching).split(", ")
    ax.set_ylabel(f"{view.removesuffix(' step times')},\n{cached}")


def empty(ax: Axes) -> None:
    """A place in the grid for which there is nothing to draw."""
    ax.set_axis_off()


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write STEM.png (200 dpi) and STEM.pdf; the same figure gives the same bytes."""
    files = [stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.pdf")]
    with mpl.rc_context(STYLE):
        figure.savefig(files[0], dpi=200, metadata={"Software": None})
        figure.set_layout_engine("none")  # keep the places just found: finding them takes as long as drawing
        figure.savefig(files[1], metadata={"CreationDate": None})
    return files
