"""One run as a picture: which call was where and when, and the way of one query through it.

`call_graph` shows what a query asks for, `cluster_timeline` every call of a run on its instance, and `query_timeline` one
query call by call, with the budget that each call was given. A call is drawn as three bars: it waits from its release
until the engine first schedules it, its prompt is computed until its first token, and it decodes until it finishes (time
lost to a preemption lies in the bar in which it was lost).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.report.style import PAGE_IN, STYLE
from hexrepro.simulator.results import Result
from hexrepro.workload.dag import edges
from hexrepro.workload.types import Workload

PHASES = ("waiting", "prefill", "decode")
# the query that is followed, and all others; prefill is the darkest, because it is the shortest
_FOLLOWED = dict(zip(PHASES, ("#f6cfae", "#7a2d00", "#e3792b"), strict=True))
_OTHERS = dict(zip(PHASES, ("0.89", "0.4", "0.74"), strict=True))
_INK = "0.15"
_BUDGET = "#0173b2"


def lanes(begin_s: Sequence[float], end_s: Sequence[float]) -> np.ndarray:
    """int64[n]: a lane for each interval so that no two in one lane overlap; as few lanes as there can be.

    An interval takes the lowest lane that is free when it begins; one may begin at the very moment another ends.
    """
    begin_s, end_s = np.asarray(begin_s, np.float64), np.asarray(end_s, np.float64)
    lane = np.zeros(len(begin_s), np.int64)
    busy: list[tuple[float, int]] = []  # (end, lane)
    free: list[int] = []
    used = 0
    for i in np.lexsort((end_s, begin_s)):
        while busy and busy[0][0] <= begin_s[i]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane[i] = heapq.heappop(free)
        else:
            lane[i], used = used, used + 1
        heapq.heappush(busy, (float(end_s[i]), int(lane[i])))
    return lane


def call_graph(workload: Workload, query: int) -> Figure:
    """The calls of one query from left to right, each with its input and output tokens; an arrow means "waits for"."""
    first, end = _calls_of(workload, query)
    before, after = _dependencies(workload, first, end)
    depth, row = np.zeros(end - first, np.int64), np.zeros(end - first)
    for a, b in zip(before, after, strict=True):  # prerequisites come first in a workload
        depth[b] = max(depth[b], depth[a] + 1)
    for d in range(depth.max() + 1):
        here = np.flatnonzero(depth == d)
        row[here] = np.arange(len(here)) - (len(here) - 1) / 2
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_IN, 0.9 + 0.3 * (np.ptp(row) + 1)), layout="constrained")
        ax = figure.subplots()
        for a, b in zip(before, after, strict=True):
            _arrow(ax, (depth[a] + 0.4, row[a]), (depth[b] - 0.4, row[b]), "0.5")
        boxes = [_box(d - 0.4, d + 0.4, y, 0.72) for d, y in zip(depth, row, strict=True)]
        ax.add_collection(PolyCollection(boxes, facecolor="0.94", edgecolor="0.5", lw=0.6, zorder=2))
        for call, (d, y) in enumerate(zip(depth, row, strict=True), first):
            tokens = f"{workload.input_tokens[call]}\n→ {workload.output_tokens[call]}"
            ax.text(d, y, tokens, ha="center", va="center", fontsize=5.5, color=_INK, zorder=3)
        _name_stages(ax, [workload.stage_names[s] for s in workload.stage[first:end]], depth, row.max() + 0.6)
        ax.set_xlim(-0.55, depth.max() + 0.55)
        ax.set_ylim(row.max() + 1.5, row.min() - 0.5)
        ax.set_axis_off()
        ax.set_title(
            f"Query {query}: {end - first} LLM calls (in each box input → output tokens)", loc="left"
        )
    return figure


def _name_stages(ax: Axes, stage: Sequence[str], depth: np.ndarray, y: float) -> None:
    """Each stage's name under its columns, once for columns side by side."""
    at = [stage[int(np.argmax(depth == d))] for d in range(depth.max() + 1)]
    begin = 0
    for d in range(1, len(at) + 1):
        if d == len(at) or at[d] != at[begin]:
            calls = int(np.sum((depth >= begin) & (depth < d)))
            name = at[begin].replace("_", "\n") + (f" ×{calls}" if calls > 1 else "")
            ax.plot([begin - 0.4, d - 0.6], [y - 0.05] * 2, color="0.5", lw=0.8)
            ax.text((begin + d - 1) / 2, y + 0.05, name, ha="center", va="top", fontsize=6.5, color=_INK)
            begin = d


def cluster_timeline(
    workload: Workload,
    cluster: Cluster,
    result: Result,
    query: int,
    *,
    window_s: tuple[float, float] | None = None,
    title: str = "",
) -> Figure:
    """Every call of a run as a bar on its instance's track, and one query's calls in colour with their dependencies.

    A track is as high as the most calls that the instance holds at once. `window_s`: the time shown, in seconds; from
    shortly before the query's arrival to shortly after its end if None.
    """
    first, end = _calls_of(workload, query)
    if window_s is None:
        window_s = _span(result, query, margin=0.02)
    if not window_s[0] < window_s[1]:
        raise InputError(f"timeline: window_s={window_s} must be a time and a later one, in seconds")
    calls, y, tracks = _place(result, window_s, len(cluster))
    followed = (calls >= first) & (calls < end)
    total = tracks[-1]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_IN, 0.9 + min(0.075 * total, 5.0)), layout="constrained")
        ax = figure.subplots()
        _bars(ax, result, calls[~followed], y[~followed], _OTHERS, height=0.86, edge=0.0)
        _bars(ax, result, calls[followed], y[followed], _FOLLOWED, height=0.86, edge=0.7)
        where = dict(zip(calls.tolist(), y.tolist(), strict=True))
        for a, b in zip(*_dependencies(workload, first, end), strict=True):
            if first + a in where and first + b in where:
                tail = (result.call_finish_s[first + a], where[first + a])
                _arrow(ax, tail, (result.release_s[first + b], where[first + b]), _INK)
        for boundary in tracks[1:-1]:
            ax.axhline(boundary - 0.5, color="0.3", lw=0.6)
        ax.set_yticks((tracks[:-1] + tracks[1:] - 1) / 2, [i.name for i in cluster.instances])
        ax.tick_params(axis="y", length=0)
        ax.set_xlim(window_s)
        ax.set_ylim(total - 0.5, -0.5)
        ax.set_xlabel("time (s)")
        ax.set_ylabel("instance (height: calls it holds at once)")
        ax.set_title(title or f"Query {query} in colour, all other calls in grey", loc="left")
        _legend(figure, [_FOLLOWED, _OTHERS])
        sns.despine(ax=ax)
    return figure


def _place(
    result: Result, window_s: tuple[float, float], instances: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The calls in the window int64[c], their heights float64[c], and where each instance's track begins int64[M + 1]."""
    seen = (result.release_s < window_s[1]) & (result.call_finish_s > window_s[0])
    calls, y, tracks = [], [], [0]
    for m in range(instances):
        here = np.flatnonzero(seen & (result.instance == m))
        lane = lanes(result.release_s[here], result.call_finish_s[here])
        calls.append(here)
        y.append(tracks[-1] + lane)
        tracks.append(
            tracks[-1] + max(int(lane.max(initial=0)) + 1, 2)
        )  # an idle one still has room for its name
    return np.concatenate(calls), np.concatenate(y).astype(np.float64), np.array(tracks)


def query_timeline(workload: Workload, cluster: Cluster, result: Result, query: int) -> Figure:
    """One query, a row for each call: on the left what it did when, on the right how long it took against its budget."""
    first, end = _calls_of(workload, query)
    calls, row = np.arange(first, end), np.arange(end - first, dtype=np.float64)
    took_s, budget_s = result.call_finish_s[calls] - result.release_s[calls], result.budget_s[calls]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_IN, 0.9 + 0.155 * len(calls)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2.1, 1])
        _bars(left, result, calls, row, _FOLLOWED, height=0.7, edge=0.4)
        for a, b in zip(*_dependencies(workload, first, end), strict=True):
            _arrow(
                left, (result.call_finish_s[first + a], row[a]), (result.release_s[first + b], row[b]), "0.5"
            )
        begin_s, end_s = _span(result, query, margin=0.02)
        for call, y in zip(calls, row, strict=True):
            name = cluster.instances[result.instance[call]].name
            late = (
                result.call_finish_s[call] > 0.2 * begin_s + 0.8 * end_s
            )  # no room for the name on the right
            x, align = (result.release_s[call], "right") if late else (result.call_finish_s[call], "left")
            left.annotate(
                name, (x, y), xytext=(-4 if late else 4, 0), textcoords="offset points", ha=align,
                va="center", fontsize=6, color="0.35", zorder=6,
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
        left.set_xlim(begin_s, end_s)
        left.set_ylim(len(calls) - 0.4, -0.6)
        left.set_yticks(row, [workload.stage_names[s].replace("_", " ") for s in workload.stage[calls]])
        left.tick_params(axis="y", length=0)
        left.set_xlabel("time (s)")
        left.set_title(f"Query {query}: when and where", loc="left")
        _legend(figure, [_FOLLOWED], _against_budget(right, row, took_s, budget_s))
        for ax in (left, right):
            sns.despine(ax=ax)
    return figure


def _against_budget(ax: Axes, row: np.ndarray, took_s: np.ndarray, budget_s: np.ndarray) -> list[Line2D]:
    """Draw what each call took and what it was allowed; a budget at or below 0 (the query is late already) at the left edge.

    Returns what the legend has to explain.
    """
    positive = budget_s > 0
    least_s = 0.6 * min([took_s[took_s > 0].min(), *budget_s[positive]])
    shown_s = np.where(positive, budget_s, least_s)
    ax.hlines(row, took_s, shown_s, color="0.8", lw=1.0, zorder=1)
    marks = ax.plot(took_s, row, "o", ms=4, color=_FOLLOWED["decode"], label="took")
    marks += ax.plot(shown_s[positive], row[positive], "|", ms=8, mew=1.8, color=_BUDGET, label="budget")
    if not positive.all():
        marks += ax.plot(
            shown_s[~positive], row[~positive], "<", ms=4, color=_BUDGET, label="budget spent before"
        )
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("from release to finish (s)")
    ax.set_title("Time of each call and budget", loc="left")
    ax.tick_params(axis="y", length=0)
    return marks


def _span(result: Result, query: int, margin: float) -> tuple[float, float]:
    """From the query's arrival to its end, and a margin on both sides (a share of the whole); seconds."""
    begin_s, end_s = float(result.arrival_s[query]), float(result.finish_s[query])
    return begin_s - margin * (end_s - begin_s), end_s + margin * (end_s - begin_s)


def _calls_of(workload: Workload, query: int) -> tuple[int, int]:
    """The first call of a query, and the one behind its last."""
    if not 0 <= query < workload.n_queries:
        raise InputError(
            f"timeline: query={query} does not exist; {workload.name!r} has queries 0 to {workload.n_queries - 1}"
        )
    return int(workload.query_offsets[query]), int(workload.query_offsets[query + 1])


def _dependencies(workload: Workload, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Prerequisite and dependent of each dependency between the calls first...end, counted from `first`."""
    offsets = workload.succ_offsets[first : end + 1].astype(np.int64)
    before, after = edges(offsets - offsets[0], workload.successors[offsets[0] : offsets[-1]])
    return before, after - first


def _bars(ax: Axes, result: Result, calls, y, colours: dict[str, str], *, height: float, edge: float) -> None:
    """Three bars a call, one collection a phase."""
    times = (result.release_s, result.admit_s, result.first_token_s, result.call_finish_s)
    for phase, begin_s, end_s in zip(PHASES, times[:-1], times[1:], strict=True):
        boxes = [_box(begin_s[c], end_s[c], at, height) for c, at in zip(calls, y, strict=True)]
        bars = PolyCollection(boxes, facecolor=colours[phase], edgecolor="none", zorder=3 if edge else 2)
        bars.set_gid(f"{phase} {'query' if edge else 'others'}")
        ax.add_collection(bars)
    if edge:  # an outline keeps calls visible that are shorter than a pixel
        boxes = [_box(times[0][c], times[-1][c], at, height) for c, at in zip(calls, y, strict=True)]
        ax.add_collection(
            PolyCollection(boxes, facecolor="none", edgecolor=colours["prefill"], lw=edge, zorder=4)
        )


def _box(begin: float, end: float, y: float, height: float) -> list[tuple[float, float]]:
    half = height / 2
    return [(begin, y - half), (end, y - half), (end, y + half), (begin, y + half)]


def _arrow(ax: Axes, tail: tuple[float, float], head: tuple[float, float], colour: str) -> None:
    ax.annotate(
        "",
        head,
        tail,
        arrowprops={
            "arrowstyle": "-|>,head_width=0.12,head_length=0.25",
            "color": colour,
            "lw": 0.6,
            "shrinkA": 0,
            "shrinkB": 0,
        },
        annotation_clip=False,
        zorder=5,
    )


def _legend(figure: Figure, kinds: Sequence[dict[str, str]], more: Sequence[Line2D] = ()) -> None:
    """The phases' colours, side by side for each kind of call, the arrow, and what else there is."""
    handles = [tuple(Patch(color=colours[phase]) for colours in kinds) for phase in PHASES]
    arrow = Line2D([], [], color=_INK, lw=0.6, marker=">", ms=3)
    figure.legend(
        [*handles, arrow, *more], [*PHASES, "waited for", *(str(line.get_label()) for line in more)],
        loc="outside lower center", ncols=4 + len(more), frameon=False,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, handlelength=2.2, columnspacing=1.4,
    )  # fmt: skip
