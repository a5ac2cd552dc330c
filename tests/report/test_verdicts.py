"""The verdict rules, with made-up intervals on each side of every line."""

from __future__ import annotations

import pytest

from hexrepro.report import verdicts
from hexrepro.report.verdicts import BestAlpha, Change, Gain, Grade, Judgement


def gain(low: float, high: float, value: float | None = None, setting: str = "s") -> Gain:
    return Gain(setting, (low + high) / 2 if value is None else value, low, high)


UP, TIE, DOWN = gain(1.45, 1.55), gain(0.97, 1.03), gain(0.80, 0.90)


def test_a_gain_is_shown_only_beyond_its_interval():
    assert gain(1.001, 1.2).shown
    assert gain(1.0, 1.2).tie  # 1 is in it
    assert gain(0.8, 0.999).loss


def test_the_mean_over_settings_is_geometric_and_its_interval_is_not_narrowed():
    mean = verdicts.mean_gain([gain(1.0, 4.0, 2.0), gain(4.0, 16.0, 8.0)])
    assert (mean.value, mean.low, mean.high) == pytest.approx((4.0, 2.0, 8.0))


@pytest.mark.parametrize(
    ("gains", "grade", "why"),
    [
        ([UP, UP], Grade.HOLDS, "size"),
        ([gain(1.30, 1.32), gain(1.26, 1.30)], Grade.HOLDS, "size"),  # within 10 % of 1.42
        ([gain(1.20, 1.28), gain(1.20, 1.28)], Grade.PARTLY, "smaller"),
        ([gain(1.73, 1.75)], Grade.PARTLY, "larger"),  # 1.56 + 10 % is 1.716
        ([gain(1.70, 1.80)], Grade.HOLDS, "size"),  # the interval reaches it
        ([UP, TIE], Grade.PARTLY, "1 of 2"),  # half of the settings show a gain
        ([UP, TIE, DOWN], Grade.FAILS, "a loss in 1"),
        ([DOWN], Grade.FAILS, "0 of 1"),
    ],
)
def test_in_range(gains, grade, why):
    judgement = verdicts.in_range(gains, 1.42, 1.56)
    assert judgement.grade == grade
    assert why in judgement.why


@pytest.mark.parametrize(
    ("gains", "grade"),
    [
        ([gain(1.15, 1.25), gain(1.6, 1.7)], Grade.HOLDS),
        ([gain(1.40, 1.42), gain(1.40, 1.42)], Grade.PARTLY),  # the mean is right, the most is not
        ([gain(1.60, 1.64), gain(1.66, 1.70)], Grade.PARTLY),  # the most is right, the mean is not
        ([gain(1.60, 1.70), TIE, TIE], Grade.FAILS),
    ],
)
def test_mean_and_most(gains, grade):
    assert verdicts.mean_and_most(gains, 1.41, 1.67).grade == grade


def change(before: float, after: float, shown: bool = True) -> Change:
    ratio = before / after
    width = 0.02 if shown else 2.0
    return Change(
        "Trace 1",
        gain(before - 0.1, before + 0.1),
        gain(after - 0.1, after + 0.1),
        gain(ratio - width, ratio + width),
    )


@pytest.mark.parametrize(
    ("changes", "grade"),
    [
        ([change(5.4, 3.5)], Grade.HOLDS),
        (
            [change(9.0, 3.0), change(5.1, 3.4)],
            Grade.HOLDS,
        ),  # one setting is enough: the paper does not name its own
        ([change(10.8, 7.0)], Grade.PARTLY),  # the same ratio from another start
        ([change(5.4, 5.0)], Grade.PARTLY),
        ([change(5.4, 3.5, shown=False)], Grade.FAILS),
        ([change(3.5, 5.4)], Grade.FAILS),
    ],
)
def test_from_to(changes, grade):
    assert verdicts.from_to(changes, 5.4, 3.5).grade == grade


@pytest.mark.parametrize(
    ("rule", "gains", "grade"),
    [
        (verdicts.always, [UP, UP], Grade.HOLDS),
        (verdicts.always, [UP, TIE], Grade.PARTLY),
        (verdicts.always, [TIE, TIE], Grade.FAILS),
        (verdicts.helps, [UP, TIE], Grade.HOLDS),
        (verdicts.helps, [UP, UP, DOWN], Grade.PARTLY),  # a loss anywhere
        (verdicts.helps, [UP, TIE, TIE], Grade.PARTLY),  # less than half
        (verdicts.helps, [TIE, TIE], Grade.FAILS),
        (verdicts.helps, [UP, DOWN], Grade.FAILS),
        (verdicts.never_worse, [UP, TIE], Grade.HOLDS),
        (verdicts.never_worse, [UP, TIE, DOWN], Grade.PARTLY),
        (verdicts.never_worse, [TIE, DOWN], Grade.FAILS),
    ],
)
def test_counting_rules(rule, gains, grade):
    assert rule(gains).grade == grade


def test_parts_of_one_claim():
    holds, partly, fails = (Judgement(g, "why") for g in (Grade.HOLDS, Grade.PARTLY, Grade.FAILS))
    assert verdicts.both({"a": holds, "b": holds}).grade == Grade.HOLDS
    assert verdicts.both({"a": holds, "b": fails}).grade == Grade.PARTLY
    assert verdicts.both({"a": partly, "b": fails}).grade == Grade.PARTLY
    assert verdicts.both({"a": fails, "b": fails}).grade == Grade.FAILS


def test_the_best_alpha_agrees_when_it_is_no_worse_beyond_the_interval():
    same, other = BestAlpha("s", gain(0.98, 1.04), 0.2, 0.1), BestAlpha("s", gain(1.02, 1.3), 0.2, 0.1)
    assert verdicts.same_alpha([same, same]).grade == Grade.HOLDS
    assert verdicts.same_alpha([same, other]).grade == Grade.PARTLY
    assert verdicts.same_alpha([same, other, other]).grade == Grade.FAILS


def test_below():
    assert verdicts.below(gain(4.0, 4.9), 5.0, "ms").grade == Grade.HOLDS
    assert verdicts.below(gain(4.0, 5.1), 5.0, "ms").grade == Grade.PARTLY
    assert verdicts.below(gain(5.0, 6.0), 5.0, "ms").grade == Grade.FAILS


def test_shrinks():
    first = gain(1.8, 2.0)
    assert verdicts.shrinks(first, gain(1.2, 1.79)).grade == Grade.HOLDS
    assert verdicts.shrinks(first, gain(1.5, 1.85)).grade == Grade.PARTLY
    assert verdicts.shrinks(first, gain(1.9, 2.1)).grade == Grade.FAILS


def test_the_verdict_is_decided_by_the_deciding_conditions():
    holds, partly, fails = Grade.HOLDS, Grade.PARTLY, Grade.FAILS
    deciding = ("silicon", "measured")
    assert verdicts.overall({"silicon": holds, "measured": holds, "other": fails}, deciding) == "reproduced"
    assert verdicts.overall({"silicon": holds, "measured": partly}, deciding) == "partly"
    assert verdicts.overall({"silicon": fails, "measured": fails, "other": holds}, deciding) == "partly"
    assert verdicts.overall({"silicon": fails, "measured": fails, "other": fails}, deciding) == "not"
    assert verdicts.overall({"silicon": holds}, deciding) == "not run"
