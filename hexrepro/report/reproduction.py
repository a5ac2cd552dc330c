"""REPRODUCTION.md: a row a claim, with the paper's value, ours in four conditions, the verdict, and what it turns on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hexrepro.report import verdicts
from hexrepro.report.claims import TAGS, Claim, Everything, claims
from hexrepro.report.results import CONDITIONS, DEFAULTS, Condition
from hexrepro.report.style import view_of
from hexrepro.report.verdicts import Judgement

MARKS = {verdicts.Grade.HOLDS: "✓", verdicts.Grade.PARTLY: "◐", verdicts.Grade.FAILS: "✗"}

_HEAD = """\
# What holds

Written by `python -m paper_figures`; nothing here is typed by hand. {counts}

Each claim of the paper is measured under two views of the hardware, each without prefix caching and with each stage's
template cached. A verdict is decided by the two **bold** columns: each view with the caching that belongs to it (the
`measured` latencies look cached already). The claim is *reproduced* when it holds in both, *not* when it fails wherever
it was run, and *partly* otherwise.

- **✓ holds, ◐ partly, ✗ fails** in that condition, – was not run there; the rules are in
  [hexrepro/report/verdicts.py](../hexrepro/report/verdicts.py). A size counts as the paper's within {tolerance:.0f} %: the
  paper's numbers come from single runs, and one run of the released simulator moves by as much.
- `1.60 × (1.55–1.65), 1.52 to 1.75`: the geometric mean over a cluster's settings (traces and rates) with its 95 %
  interval, and the least and the greatest setting. Seeds are paired. A *tie* is an interval that contains 1.
- The letter is how sure the paper's value is: {tags}. The paper's body was not available.
"""


Answer = tuple[Claim, str, str]
"""A claim, its verdict, and its line of the page."""


def answers(
    everything: Everything, link: Mapping[str, str], table: Sequence[Claim] | None = None
) -> list[Answer]:
    """Every claim measured. link: picture -> its address, for those that are drawn."""
    return [(claim, *row(claim, everything, link)) for claim in (claims() if table is None else table)]


def page(rows: Sequence[Answer]) -> str:
    """The whole page."""
    theirs = [verdict for claim, verdict, _ in rows if not claim.own]
    counts = ", ".join(
        f"{theirs.count(v)} {v}" for v in ("reproduced", "partly", "not", "not run") if theirs.count(v)
    )
    head = _HEAD.format(
        counts=f"Of the paper's {len(theirs)} claims: {counts}.",
        tolerance=100 * verdicts.TOLERANCE,
        tags="; ".join(f"**{tag}** {meaning}" for tag, meaning in TAGS.items()),
    )
    columns = " | ".join(_column(c) for c in CONDITIONS)
    rule = "|---" * (len(CONDITIONS) + 4) + "|"
    parts = [head]
    for first, title, own in (("claim", "", False), ("finding", "\n## Our own findings\n", True)):
        lines = [line for claim, _, line in rows if claim.own == own]
        if lines:
            header = f"| {first} | paper | {columns} | verdict, and what it turns on | see |"
            parts += [title] * bool(title) + [header, rule, *lines]
    return "\n".join(parts) + "\n"


def short(rows: Sequence[Answer]) -> str:
    """The verdicts on the paper's claims alone, for the front page."""
    lines = ["| claim | paper | verdict |", "|---|---|---|"]
    lines += [f"| {c.text} | {c.paper} [{c.tag}] | {verdict} |" for c, verdict, _ in rows if not c.own]
    return "\n".join(lines)


def row(claim: Claim, everything: Everything, link: Mapping[str, str]) -> tuple[str, str]:
    """The verdict of a claim, and its line of the table."""
    found = {c: claim.measure(everything, c) for c in CONDITIONS}
    judged = {c: m[1] for c, m in found.items() if m is not None}
    verdict = verdict_of(judged)
    cells = [_cell(found[c]) for c in CONDITIONS]
    picture = f"[figure]({link[claim.picture]})<br>" if claim.picture in link else ""
    see = f"{picture}`python -m paper_figures {claim.shows}`"
    word = {"reproduced": "shown", "not": "not shown"}.get(verdict, verdict) if claim.own else verdict
    paper = "–" if claim.own else f"{claim.paper} [{claim.tag}]"
    text = f"**{word}**: turns on {claim.turns_on}"
    return verdict, "| " + " | ".join([claim.text, paper, *cells, text, see]) + " |"


def verdict_of(judged: Mapping[Condition, Judgement]) -> str:
    """Decided by the default conditions that the claim's experiment runs."""
    if not judged:
        return "not run"
    deciding = [c for c in DEFAULTS if c in judged]
    if not deciding:
        return "not run"
    return verdicts.overall({c: j.grade for c, j in judged.items()}, deciding)


def _column(condition: Condition) -> str:
    text = view_of(*condition)
    return f"**{text}**" if condition in DEFAULTS else text


def _cell(measured: tuple[str, Judgement] | None) -> str:
    if measured is None:
        return "–"
    text, judgement = measured
    why = f"<br>{judgement.why}" if judgement.why else ""
    return f"{MARKS[judgement.grade]} {judgement.grade}<br>{text}{why}"
