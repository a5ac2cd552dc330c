"""Does a claim hold? Pure functions from intervals to a verdict; nothing here knows of files or experiments.

A *gain* is a factor that is above 1 when the claim's policy is the better one. It is *shown* when its whole 95 %
interval lies above 1, a *loss* when it lies below, and a *tie* otherwise. For each condition (a hardware view with or
without prefix caching) a rule grades the gains of all settings; `overall` makes the verdict of the grades.

The paper's numbers come from single runs, and changing one run of the released simulator in a way that should not
matter moves the P95 by some per cent. So a size counts as agreeing within TOLERANCE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

TOLERANCE = 0.10
"""One seed proves nothing under 10 % (measured on the released simulator)."""


class Grade(StrEnum):
    """How far a claim holds in one condition, and in all."""

    HOLDS = "holds"
    PARTLY = "partly"
    FAILS = "fails"


@dataclass(frozen=True)
class Gain:
    """A factor with its interval, in one setting. The group (a cluster) is judged and shown on its own."""

    setting: str
    value: float
    low: float
    high: float
    group: str = ""

    @property
    def shown(self) -> bool:
        return self.low > 1.0

    @property
    def loss(self) -> bool:
        return self.high < 1.0

    @property
    def tie(self) -> bool:
        return not self.shown and not self.loss


@dataclass(frozen=True)
class Judgement:
    """A grade, and why, in a few words."""

    grade: Grade
    why: str


def mean_gain(gains: Sequence[Gain]) -> Gain:
    """Geometric mean over settings. The ends are averaged like the values, as if all settings erred together: settings
    share arrival seeds, so their errors do not cancel; the interval is at most too wide."""

    def mean(values: list[float]) -> float:
        if any(v <= 0 for v in values):
            return 0.0
        return math.exp(sum(math.log(v) for v in values) / len(values))

    return Gain(
        f"{len(gains)} settings",
        mean([g.value for g in gains]),
        mean([g.low for g in gains]),
        mean([g.high for g in gains]),
    )


def agrees(gain: Gain, least: float, most: float | None = None) -> bool:
    """Whether the interval meets [least, most], both widened by the tolerance."""
    most = least if most is None else most
    return gain.high >= least / (1 + TOLERANCE) and gain.low <= most * (1 + TOLERANCE)


def in_range(gains: Sequence[Gain], least: float, most: float) -> Judgement:
    """ "The gain is `least` to `most`": holds when every setting shows a gain and the mean has that size; partly when at
    least half of the settings show one; else it fails."""
    shown = sum(g.shown for g in gains)
    if 2 * shown < len(gains):
        return Judgement(Grade.FAILS, _counted(gains))
    if shown < len(gains):
        return Judgement(Grade.PARTLY, _counted(gains))
    if agrees(mean_gain(gains), least, most):
        return Judgement(Grade.HOLDS, "the paper's size")
    larger = mean_gain(gains).value > most
    return Judgement(Grade.PARTLY, f"{'larger' if larger else 'smaller'} than in the paper")


def mean_and_most(gains: Sequence[Gain], mean: float, most: float) -> Judgement:
    """ "Up to `most`, `mean` on average": as `in_range`, with the mean's and the largest gain's size."""
    shown = sum(g.shown for g in gains)
    if 2 * shown < len(gains):
        return Judgement(Grade.FAILS, _counted(gains))
    if shown < len(gains):
        return Judgement(Grade.PARTLY, _counted(gains))
    ours, largest = mean_gain(gains), max(gains, key=lambda g: g.value)
    if agrees(ours, mean) and agrees(largest, most):
        return Judgement(Grade.HOLDS, "the paper's size")
    return Judgement(Grade.PARTLY, f"{'larger' if ours.value > mean else 'smaller'} than in the paper")


@dataclass(frozen=True)
class Change:
    """Two values with their intervals in one setting, before -> after, and the gain between them (seeds paired)."""

    setting: str
    before: Gain
    after: Gain
    gain: Gain


def from_to(changes: Sequence[Change], before: float, after: float) -> Judgement:
    """ "`before` -> `after`", in a setting that is not told: holds when some setting shows the gain and meets both numbers,
    partly when some setting shows a gain, else it fails."""
    shown = [c for c in changes if c.gain.shown]
    if not shown:
        return Judgement(Grade.FAILS, "no setting shows a gain")
    meeting = [c for c in shown if agrees(c.before, before) and agrees(c.after, after)]
    if meeting:
        return Judgement(Grade.HOLDS, f"met at {meeting[0].setting}")
    size = [c for c in shown if agrees(c.gain, before / after)]
    if size:
        return Judgement(
            Grade.PARTLY, f"the same ratio from another start at {len(size)} of {len(changes)} settings"
        )
    return Judgement(Grade.PARTLY, f"a gain of another size at {len(shown)} of {len(changes)} settings")


def always(gains: Sequence[Gain]) -> Judgement:
    """ "It helps here too": holds when every setting shows a gain, partly when some do, else it fails."""
    shown = sum(g.shown for g in gains)
    grade = Grade.HOLDS if shown == len(gains) else Grade.PARTLY if shown else Grade.FAILS
    return Judgement(grade, _counted(gains))


def helps(gains: Sequence[Gain]) -> Judgement:
    """ "This part helps": holds when at least half of the settings show a gain and none a loss; partly when more show a
    gain than a loss; else it fails."""
    shown, lost = sum(g.shown for g in gains), sum(g.loss for g in gains)
    if 2 * shown >= len(gains) and not lost:
        return Judgement(Grade.HOLDS, _counted(gains))
    return Judgement(Grade.PARTLY if shown > lost else Grade.FAILS, _counted(gains))


def never_worse(gains: Sequence[Gain]) -> Judgement:
    """ "It is as good": holds when no setting shows a loss, partly when less than half do, else it fails."""
    lost = sum(g.loss for g in gains)
    if not lost:
        return Judgement(Grade.HOLDS, _counted(gains))
    return Judgement(Grade.PARTLY if 2 * lost < len(gains) else Grade.FAILS, _counted(gains))


def both(judgements: Mapping[str, Judgement]) -> Judgement:
    """Several parts of one claim: holds when all parts do, fails when none does, partly otherwise."""
    grades = [j.grade for j in judgements.values()]
    why = "; ".join(f"{part}: {j.grade} ({j.why})" for part, j in judgements.items())
    if all(g == Grade.HOLDS for g in grades):
        return Judgement(Grade.HOLDS, why)
    return Judgement(Grade.FAILS if all(g == Grade.FAILS for g in grades) else Grade.PARTLY, why)


@dataclass(frozen=True)
class BestAlpha:
    """In one setting: the P95 at the authors' best α over the least P95 of any α (≥ 1), ours, and theirs."""

    setting: str
    penalty: Gain
    ours: float
    theirs: float


def same_alpha(found: Sequence[BestAlpha]) -> Judgement:
    """ "The best α is ...": agrees in a setting when the authors' α is no worse than ours beyond the interval. Holds when
    it agrees in all settings, partly when in at least half, else it fails."""
    agreeing = sum(not f.penalty.shown for f in found)
    why = f"the authors' α is as good as the best in {agreeing} of {len(found)} settings"
    if agreeing == len(found):
        return Judgement(Grade.HOLDS, why)
    return Judgement(Grade.PARTLY if 2 * agreeing >= len(found) else Grade.FAILS, why)


def below(largest: Gain, limit: float, unit: str) -> Judgement:
    """ "Less than `limit`": holds when the largest value's interval lies below, partly when only the value does."""
    why = f"at most {largest.value:.2g} {unit}"
    if largest.high < limit:
        return Judgement(Grade.HOLDS, why)
    return Judgement(Grade.PARTLY if largest.value < limit else Grade.FAILS, why)


def shrinks(first: Gain, last: Gain) -> Judgement:
    """ "The gain falls from first to last": holds when the intervals are apart, fails when it does not fall."""
    if last.high < first.low:
        return Judgement(Grade.HOLDS, "falls beyond the intervals")
    return Judgement(Grade.PARTLY if last.value < first.value else Grade.FAILS, "inside the intervals")


def overall(grades: Mapping[str, Grade], deciding: Sequence[str]) -> str:
    """The verdict of the conditions' grades: reproduced when it holds in every deciding condition, not when it fails in
    all that were run, partly otherwise; 'not run' when a deciding condition is missing."""
    if any(condition not in grades for condition in deciding):
        return "not run"
    if all(grades[condition] == Grade.HOLDS for condition in deciding):
        return "reproduced"
    return "not" if all(g == Grade.FAILS for g in grades.values()) else "partly"


def _counted(gains: Sequence[Gain]) -> str:
    shown, lost = sum(g.shown for g in gains), sum(g.loss for g in gains)
    text = f"a gain in {shown} of {len(gains)} setting{'s' if len(gains) != 1 else ''}"
    return f"{text}, a loss in {lost}" if lost else text
