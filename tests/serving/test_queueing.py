"""Order in one instance's lane, and keys as integers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from hexrepro.serving.queueing import Lane, priority

keys = st.floats(allow_nan=False)


@given(keys, keys)
def test_priorities_order_as_their_keys_do(a: float, b: float) -> None:
    assert (priority(a) < priority(b)) == (a < b)
    assert (priority(a) == priority(b)) == (a == b)
    assert -(2**63) <= priority(a) < 2**63


def test_priorities_of_the_ends() -> None:
    assert priority(-math.inf) < priority(-1.0) < priority(-5e-324) < priority(0.0) < priority(math.inf)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_least_key_first_then_arrival(drawn: list[int], slots: int) -> None:
    lane = Lane(slots)
    for call, key in enumerate(drawn):
        lane.put(call, key)
    order = []
    while turn := lane.admit():
        assert lane.running <= slots
        order += turn
        lane.remove(turn[0])
        for call in turn[1:]:
            lane.remove(call)
    assert order == sorted(range(len(drawn)), key=lambda i: (drawn[i], i))


def test_a_withdrawn_call_is_never_admitted_and_leaves_no_trace() -> None:
    lane = Lane(1)
    for call in range(500):
        lane.put(call, 0.0)
    assert lane.admit() == [0]
    for call in range(1, 499):
        lane.remove(call)
    assert lane.waiting == [499]
    assert len(lane._heap) < 100
    lane.remove(0)
    assert lane.admit() == [499]
    assert lane.running == 1
    assert len(lane) == 0


def test_the_head_waits_for_room_and_nobody_overtakes_it() -> None:
    lane = Lane(10, capacity=100)
    lane.put("a", 0, 60)
    lane.put("big", 1, 50)
    lane.put("small", 2, 10)
    assert lane.admit() == ["a"]
    assert lane.admit() == []
    lane.remove("a")
    assert lane.admit() == ["big", "small"]


def test_a_call_larger_than_the_capacity_runs_alone() -> None:
    lane = Lane(10, capacity=100)
    lane.put("huge", 0, 1000)
    lane.put("next", 0, 1)
    assert lane.admit() == ["huge"]
    lane.remove("huge")
    assert lane.admit() == ["next"]


def test_a_call_that_is_seen_to_run_was_not_waiting() -> None:
    lane = Lane(1)
    lane.put("a", 0)
    lane.put("b", 1)
    assert lane.admit() == ["a"]
    assert lane.start("b")
    assert not lane.start("b")
    assert lane.running == 2
    lane.remove("a")
    assert lane.admit() == []


def test_a_lane_that_is_never_empty_does_not_grow() -> None:
    """Engine mode under lasting overload: all slots taken, calls are seen to run before it is believed to be their turn."""
    lane = Lane(1)
    lane.put("first", 0.0)
    lane.admit()
    lane.put("last", 9e9)
    for call in range(1000):
        lane.put(call, float(call))
        assert lane.admit() == []
        assert lane.start(call)
        lane.remove(call)
    assert lane.free == 0
    assert len(lane) == 1
    assert len(lane._heap) < 100
    lane.remove("first")
    assert lane.admit() == ["last"]
