"""Timelines of a run that is written down here by hand: every bar, lane and arrow is where the times say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexrepro.cluster import load_cluster
from hexrepro.errors import InputError
from hexrepro.report import timeline
from hexrepro.simulator import Result
from hexrepro.workload import Workload

CLUSTER = load_cluster("hetero1", "silicon")
# call            0     1     2     3    4     calls 0-3 are query 0: 0 before 1 and 2, those before 3; call 4 is query 1
RELEASE_S = [0.0, 2.0, 2.0, 7.0, 1.0]
ADMIT_S = [0.5, 2.0, 4.0, 7.5, 1.0]
FIRST_S = [1.0, 3.0, 4.5, 8.0, 1.5]
FINISH_S = [2.0, 6.0, 7.0, 9.0, 8.5]
INSTANCE = [0, 0, 1, 0, 0]
BUDGET_S = [3.0, 4.0, 4.0, -1.0, 9.0]


def workload() -> Workload:
    n, none = 5, np.zeros(5, int)
    return Workload(
        name="by hand",
        stage_names=("plan", "draft_it", "check"),
        stage=np.array([0, 1, 1, 2, 0]),
        input_tokens=np.array([10, 20, 30, 40, 50]),
        output_tokens=np.array([1, 2, 3, 4, 5]),
        template=none - 1,
        template_tokens=none,
        context=none - 1,
        context_tokens=none,
        tool_time_s=np.zeros(n),
        succ_offsets=np.array([0, 2, 3, 4, 4, 4]),
        successors=np.array([1, 2, 3, 3]),
        query_offsets=np.array([0, 4, 5]),
        arrival_s=np.array([0.0, 1.0]),
        tenant=np.zeros(2, int),
        tenant_names=("all",),
        slo_scale=np.ones(2),
    )


def result() -> Result:
    per_instance, per_call = np.zeros(4), np.zeros(5, int)
    return Result(
        arrival_s=np.array([0.0, 1.0]),
        finish_s=np.array([9.0, 8.5]),
        slo_s=np.full(2, 10.0),
        **dict.fromkeys(
            ("busy_s", "steps", "preemptions", "prefill_tokens", "decode_tokens", "cached_tokens"),
            per_instance,
        ),
        peak_kv_blocks=per_instance,
        release_s=np.array(RELEASE_S),
        admit_s=np.array(ADMIT_S),
        first_token_s=np.array(FIRST_S),
        call_finish_s=np.array(FINISH_S),
        budget_s=np.array(BUDGET_S),
        estimate_s=np.ones(5),
        instance=np.array(INSTANCE),
        call_cached_tokens=per_call,
        call_preemptions=per_call,
    )


def bars(ax, gid: str) -> set[tuple[float, float, float]]:
    """(begin, end, middle height) of every bar of a phase."""
    (collection,) = (c for c in ax.collections if c.get_gid() == gid)
    corners = [path.vertices[:4] for path in collection.get_paths()]
    return {(float(c[0, 0]), float(c[1, 0]), float(c[:, 1].mean().round(6))) for c in corners}


def arrows(ax) -> set[tuple[tuple[float, float], tuple[float, float]]]:
    """(tail, head) of every arrow."""
    found = [a for a in ax.texts if getattr(a, "arrow_patch", None) is not None]
    return {(tuple(map(float, a.xyann)), tuple(map(float, a.xy))) for a in found}


def written(ax) -> list[str]:
    return [text.get_text() for text in ax.texts if text.get_text()]


def test_cluster_timeline_puts_every_call_on_its_instance():
    (ax,) = timeline.cluster_timeline(workload(), CLUSTER, result(), 0).axes
    # instance 0: calls 0, 1 and 3 follow each other in lane 0, call 4 runs beside them in lane 1; instance 1 begins at 2
    assert bars(ax, "waiting query") == {(0.0, 0.5, 0.0), (2.0, 2.0, 0.0), (2.0, 4.0, 2.0), (7.0, 7.5, 0.0)}
    assert bars(ax, "prefill query") == {(0.5, 1.0, 0.0), (2.0, 3.0, 0.0), (4.0, 4.5, 2.0), (7.5, 8.0, 0.0)}
    assert bars(ax, "decode query") == {(1.0, 2.0, 0.0), (3.0, 6.0, 0.0), (4.5, 7.0, 2.0), (8.0, 9.0, 0.0)}
    assert bars(ax, "waiting others") == {(1.0, 1.0, 1.0)}
    assert bars(ax, "prefill others") == {(1.0, 1.5, 1.0)}
    assert bars(ax, "decode others") == {(1.5, 8.5, 1.0)}
    assert arrows(ax) == {
        ((2.0, 0.0), (2.0, 0.0)),
        ((2.0, 0.0), (2.0, 2.0)),
        ((6.0, 0.0), (7.0, 0.0)),
        ((7.0, 2.0), (7.0, 0.0)),
    }
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [i.name for i in CLUSTER.instances]
    assert list(ax.get_yticks()) == [0.5, 2.5, 4.5, 6.5]


def test_cluster_timeline_shows_the_window_only():
    (ax,) = timeline.cluster_timeline(workload(), CLUSTER, result(), 0, window_s=(6.5, 8.0)).axes
    assert ax.get_xlim() == (6.5, 8.0)
    assert {begin for begin, _, _ in bars(ax, "decode query")} == {4.5, 8.0}  # calls 2 and 3
    assert len(arrows(ax)) == 1  # from 2 to 3


def test_query_timeline_has_a_row_a_call_and_its_budget():
    left, right = timeline.query_timeline(workload(), CLUSTER, result(), 0).axes
    assert bars(left, "decode query") == {(1.0, 2.0, 0.0), (3.0, 6.0, 1.0), (4.5, 7.0, 2.0), (8.0, 9.0, 3.0)}
    assert len(arrows(left)) == 4
    assert [label.get_text() for label in left.get_yticklabels()] == ["plan", "draft it", "draft it", "check"]
    assert written(left) == [CLUSTER.instances[m].name for m in (0, 0, 1, 0)]
    lines = {line.get_label(): line.get_xydata().tolist() for line in right.lines}
    assert lines["took"] == [[2.0, 0.0], [4.0, 1.0], [5.0, 2.0], [2.0, 3.0]]
    assert lines["budget"] == [[3.0, 0.0], [4.0, 1.0], [4.0, 2.0]]
    assert [y for _, y in lines["budget spent before"]] == [3.0]


def test_query_timeline_of_one_call():
    left, right = timeline.query_timeline(workload(), CLUSTER, result(), 1).axes
    assert bars(left, "decode query") == {(1.5, 8.5, 0.0)}
    assert not arrows(left)
    assert {line.get_label() for line in right.lines} == {"took", "budget"}


def test_call_graph_lines_up_stages():
    (ax,) = timeline.call_graph(workload(), 0).axes
    assert written(ax) == ["10\n→ 1", "20\n→ 2", "30\n→ 3", "40\n→ 4", "plan", "draft\nit ×2", "check"]
    places = {text.get_text(): text.get_position() for text in ax.texts}
    assert places["20\n→ 2"] == (1, -0.5)
    assert places["30\n→ 3"] == (1, 0.5)
    assert places["40\n→ 4"] == (2, 0.0)
    assert len(arrows(ax)) == 4


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=30))
def test_lanes_never_overlap_and_are_as_few_as_can_be(drawn):
    begin = np.array([b for b, _ in drawn], float)
    end = begin + [length for _, length in drawn]
    lane = timeline.lanes(begin, end)
    for i in range(len(drawn)):
        for j in range(i):
            assert lane[i] != lane[j] or end[i] <= begin[j] or end[j] <= begin[i]
    moments = np.unique(begin)
    most = max((int(np.sum((begin <= t) & (t < end))) for t in moments), default=0)
    assert lane.max(initial=-1) + 1 == most


@pytest.mark.parametrize("query", [-1, 2])
def test_a_query_that_does_not_exist_is_refused(query):
    for draw in (
        lambda: timeline.call_graph(workload(), query),
        lambda: timeline.cluster_timeline(workload(), CLUSTER, result(), query),
        lambda: timeline.query_timeline(workload(), CLUSTER, result(), query),
    ):
        with pytest.raises(InputError, match=f"query={query} does not exist; 'by hand' has queries 0 to 1"):
            draw()


def test_a_window_that_ends_before_it_begins_is_refused():
    with pytest.raises(InputError, match="window_s"):
        timeline.cluster_timeline(workload(), CLUSTER, result(), 0, window_s=(3.0, 3.0))


def test_the_same_picture_gives_the_same_bytes(tmp_path):
    for name in "ab":
        figure = timeline.cluster_timeline(workload(), CLUSTER, result(), 0)
        figure.savefig(tmp_path / name, format="png", metadata={"Software": None})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
