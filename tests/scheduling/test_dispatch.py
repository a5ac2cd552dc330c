"""Dispatch rules on cases worked out by hand. In the comments: what each instance scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexrepro.scheduling.dispatch import (
    as_released,
    earliest_finish,
    least_outstanding_work,
    least_waiting_time,
    power_of_two,
    round_robin,
    uniform_random,
    workload_balanced,
)
from tests.scheduling.views_by_hand import call, decide, instances


def test_round_robin_takes_turns_call_by_call() -> None:
    views = instances(3)
    assert [decide(round_robin, views, the_call=call(sequence=i)) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("draw", "picked"), [(0.0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (0.99, 3), (1 - 2**-53, 3)]
)
def test_uniform_random_maps_the_draw(draw: float, picked: int) -> None:
    assert decide(uniform_random, instances(4), the_call=call(draw=(draw, 0.0))) == picked


@pytest.mark.parametrize(
    ("draw", "calls", "picked"),
    [
        ((0.0, 0.0), [5, 4, 0], 1),  # drawn: 0 and 1
        ((0.0, 0.9), [5, 4, 6], 0),  # 0 and 2
        ((0.9, 0.0), [3, 9, 3], 2),  # 2 and 0: of equals the first drawn
        ((0.4, 0.9), [3, 4, 0], 0),  # 1 and 0
    ],
)
def test_power_of_two_takes_the_one_with_fewer_calls(draw, calls, picked: int) -> None:
    views = instances(running=[max(n - 2, 0) for n in calls], waiting=[min(n, 2) for n in calls])
    assert decide(power_of_two, views, the_call=call(draw=draw)) == picked


def test_power_of_two_of_one() -> None:
    assert decide(power_of_two, instances(1), the_call=call(draw=(0.7, 0.7))) == 0


unit = st.floats(0, 1, exclude_max=True)


@given(st.integers(1, 9), st.tuples(unit, unit))
def test_draws_never_lead_outside(n: int, draw) -> None:
    for rule in (uniform_random, power_of_two):
        assert 0 <= decide(rule, instances(n), the_call=call(draw=draw)) < n


@given(st.integers(2, 9), st.tuples(unit, unit))
def test_the_two_of_power_of_two_differ(n: int, draw) -> None:
    """With one idle instance among busy ones, it is picked exactly when it is one of the two."""
    picked = {
        decide(power_of_two, instances(waiting=np.arange(n) != i), the_call=call(draw=draw)) for i in range(n)
    }
    assert len(picked) == 2


@pytest.mark.parametrize(
    ("work_s", "t_comp_s", "picked"),
    [
        ([3, 2, 5], [1, 9, 1], 1),
        ([2, 2, 5], [9, 8, 1], 1),  # tie: the faster
        ([2, 2, 2], [9, 9, 9], 0),  # tie again: the lower index
        ([0, 0, 0], [3, 2, 2], 1),
    ],
)
def test_least_outstanding_work(work_s, t_comp_s, picked: int) -> None:
    assert decide(least_outstanding_work, instances(outstanding_s=work_s), t_comp_s) == picked


# ------------------------------------------------------------------------------------------- HexGen-Flow's score
# Two instances, t_comp 10 and 20 s, so t_mean = 15 and B = 225 s^2; 30 and 10 s of work. B / t_queue = 7.5 and 22.5 s.

STAGE = call(stage_mean_s=15.0)
TWO = dict(t_comp_s=[10, 20], the_call=STAGE)


@pytest.mark.parametrize(
    ("alpha", "picked"),
    [
        (0.0, 1),  # 7.5, 22.5: the shorter queue
        (1.0, 0),  # -10, -20: the faster instance
        (0.5, 1),  # 3.75 - 5, 11.25 - 10
        (0.75, 0),  # 1.875 - 7.5, 5.625 - 15
        (0.59, 1),  # the scores meet at 0.6
        (0.61, 0),
    ],
)
def test_paper_score(alpha: float, picked: int) -> None:
    assert decide(workload_balanced, instances(outstanding_s=[30, 10]), **TWO, alpha=alpha) == picked


@pytest.mark.parametrize(("alpha", "picked"), [(0.74, 1), (0.76, 0)])
def test_beta_weighs_the_queue(alpha: float, picked: int) -> None:
    """With beta = 2 the queues' terms are 15 and 45 s, and the scores meet at alpha = 0.75."""
    assert (
        decide(workload_balanced, instances(outstanding_s=[30, 10]), **TWO, alpha=alpha, beta=2.0) == picked
    )


def test_b_follows_the_stage() -> None:
    """A short stage feels a queue less: with t_mean = 1.5, B / t_queue = 0.075 and 0.225, t_comp = 1 and 2."""
    views = instances(outstanding_s=[30, 10])
    assert decide(workload_balanced, views, [1, 2], call(stage_mean_s=1.5), alpha=0.5) == 0
    assert decide(workload_balanced, views, [1, 2], call(stage_mean_s=1.5), alpha=0.1) == 1


def test_queue_is_all_outstanding_work_or_what_waits() -> None:
    views = instances(outstanding_s=[30, 10], waiting_s=[5, 8])
    assert decide(workload_balanced, views, **TWO, alpha=0.0) == 1
    assert decide(workload_balanced, views, **TWO, alpha=0.0, waiting_only=1.0) == 0


def test_queue_counts_as_one_step_at_least() -> None:
    """Steps of 1.25 and 0.5 s: two idle instances score 225 / 1.25 and 225 / 0.5, whatever is less than a step."""
    views = instances(outstanding_s=[0.0, 0.0], base_s=[1.0, 0.5], sequence_s=[0.25, 0.0])
    assert decide(workload_balanced, views, **TWO, alpha=0.0) == 1
    views["outstanding_s"] = [0.1, 0.5]
    assert decide(workload_balanced, views, **TWO, alpha=0.0) == 1
    views["outstanding_s"] = [0.0, 1.5]
    assert decide(workload_balanced, views, **TWO, alpha=0.0) == 0


@pytest.mark.parametrize(
    ("t_comp_s", "picked"),
    [([20, 10, 10], 1), ([10, 10, 20], 0), ([30, 20, 10], 2)],
)
@pytest.mark.parametrize("outstanding_s", [0.0, 0.5, 40.0])  # below, within and above a step
def test_ties_of_the_score_go_to_the_faster_then_to_the_lower_index(
    t_comp_s, picked: int, outstanding_s: float
) -> None:
    views = instances(3, outstanding_s=outstanding_s)
    assert decide(workload_balanced, views, t_comp_s, STAGE, alpha=0.0) == picked


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(1e-3, 1e3)), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(1e-3, 1e3),
)
def test_paper_score_in_plain_python(loads, alpha: float, mean_s: float) -> None:
    outstanding_s, t_comp_s = map(list, zip(*loads, strict=True))
    b = mean_s * mean_s
    scores = [(1 - alpha) * b / max(w, 1.0) - alpha * t for w, t in loads]
    best = min(range(len(loads)), key=lambda m: (-scores[m], t_comp_s[m], m))
    views = instances(outstanding_s=outstanding_s)
    assert decide(workload_balanced, views, t_comp_s, call(stage_mean_s=mean_s), alpha=alpha) == best


# ------------------------------------------------------------------------------------------- the released score
# alpha * t_comp(0) / t_comp(m) - (1 - alpha) * k(m) * W(m) / W(0); t_comp 10 and 20 s, W 100 and 50 s, k 1 and 0.5


@pytest.mark.parametrize(
    ("alpha", "picked"),
    [
        (0.0, 1),  # -1, -0.25
        (1.0, 0),  # 1, 0.5
        (0.5, 1),  # 0, 0.125
        (0.8, 0),  # 0.6, 0.35
    ],
)
def test_released_score(alpha: float, picked: int) -> None:
    views = instances(dispatched_s=[100, 50], load_weight=[1, 0.5])
    assert decide(as_released, views, [10, 20], alpha=alpha) == picked


def test_released_score_sees_all_work_ever_sent_and_no_other() -> None:
    views = instances(dispatched_s=[100, 300], outstanding_s=[90, 0])
    assert decide(as_released, views, [10, 10], alpha=0.0) == 0


def test_released_score_of_an_empty_cluster_is_the_first() -> None:
    assert decide(as_released, instances(3), [10, 10, 10], alpha=0.0) == 0
    assert (
        decide(as_released, instances(3), [10, 5, 5], alpha=0.5) == 1
    )  # of equals the first, not the faster


# ------------------------------------------------------------------------------------------------ the others


@pytest.mark.parametrize(
    ("output_tokens", "kv_capacity_tokens", "max_num_seqs", "t_comp_s", "picked"),
    [
        (
            [100, 100],
            [1000, 100],
            256,
            [9, 1],
            0,
        ),  # calls of 20 tokens: batches of 50 and 5; 100 / 50, 100 / 5 s
        ([100, 5], [1000, 100], 256, [9, 1], 1),  # 2, 1 s
        ([100, 90], [1000, 100], 4, [1, 9], 1),  # slots for 4: 25, 22.5 s
        ([100, 100], [1000, 1000], 256, [9, 8], 1),  # tie: the faster
        ([0, 0], [1000, 100], 256, [9, 9], 0),
    ],
)
def test_qlm_waiting_time(output_tokens, kv_capacity_tokens, max_num_seqs, t_comp_s, picked: int) -> None:
    """Output tokens ahead over the rate of a full batch, with steps of 1 s."""
    views = instances(
        output_tokens=output_tokens, kv_capacity_tokens=kv_capacity_tokens, max_num_seqs=max_num_seqs
    )
    assert decide(least_waiting_time, views, t_comp_s) == picked


def test_earliest_finish_on_an_idle_cluster_is_the_fastest() -> None:
    assert decide(earliest_finish, instances(base_s=[2, 1, 1]), [20, 10, 10]) == 1


def test_earliest_finish_counts_the_batch() -> None:
    """10 tokens alone at 2.5 s a step, or beside four calls at 1 + 5 * 0.5 s; beside two at 1 + 3 * 0.5."""
    views = instances(base_s=[1.0, 2.0], sequence_s=0.5, running=[4, 0])
    assert decide(earliest_finish, views) == 1
    views["running"] = [2, 0]
    assert decide(earliest_finish, views) == 0  # 25 s both: the first
    views["running"] = [3, 0]
    assert decide(earliest_finish, views) == 1


def test_earliest_finish_counts_prompts_that_wait() -> None:
    """0.01 s a prompt token: 1000 of them are 10 s, as long as ten steps."""
    views = instances(prefill_token_s=0.01, base_s=[1.0, 1.5], prefill_tokens=[1000, 0])
    assert decide(earliest_finish, views) == 1
    views["prefill_tokens"] = [100, 0]
    assert decide(earliest_finish, views) == 0


def test_earliest_finish_counts_who_is_over_the_memory() -> None:
    """Ten calls before, and room for eleven or for five: there, more than half of the tokens have to wait their turn."""
    views = instances(running=10, output_tokens=100.0, kv_tokens=200, kv_capacity_tokens=[100, 220])
    assert decide(earliest_finish, views) == 1
