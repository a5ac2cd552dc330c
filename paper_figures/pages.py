"""The two pages beside the figures, REPRODUCTION.md and README.md: written from results and stamps, never by hand."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

from hexrepro.report import reproduction, results
from hexrepro.report.style import name_of
from paper_figures import FIGURES, figure, runs
from paper_figures.readme import replace

HERE = Path(__file__).parent

_HEAD = """\
# The figures

```sh
python -m paper_figures              # run what is missing or stale, redraw, rewrite this page and REPRODUCTION.md
python -m paper_figures NAME ...     # only these
python -m paper_figures --list       # what there is, and whether its results are those of this code
python -m paper_figures --again      # run again even so
```

Run it from the repository. Ctrl-C loses no finished work. The results are kept in [results/](results), a directory for
each experiment, and the figures read only these: redrawing runs nothing. [REPRODUCTION.md](REPRODUCTION.md) says which of
the paper's claims hold. This page is written by the same command; all figures together took {total} to compute.

In all figures a policy has one colour, an interval is a 95 % interval over arrival seeds (the same arrivals for every
policy), and a hollow mark is a tie: the interval of the ratio contains 1.
"""


def write(place: Path = HERE, directory: Path = runs.RESULTS, front: Path = runs.ROOT / "README.md") -> None:
    """Write both pages into `place`, beside the figures in `place`/out, and the verdicts into the front page's block
    `verdicts` where it has one."""
    everything = {d.name: results.read(d) for d in sorted(directory.glob("[!.]*")) if d.is_dir()}
    pictures = {file.stem: f"out/{file.name}" for file in sorted((place / "out").glob("*.png"))}
    answers = reproduction.answers(everything, pictures)
    (place / "REPRODUCTION.md").write_text(reproduction.page(answers), encoding="utf-8")
    (place / "README.md").write_text(readme(pictures, directory), encoding="utf-8")
    text = front.read_text(encoding="utf-8")
    if "<!-- verdicts -->" in text:
        front.write_text(replace(text, "verdicts", reproduction.short(answers)), encoding="utf-8")


def readme(pictures: dict[str, str], directory: Path = runs.RESULTS) -> str:
    """A heading for each figure: what it shows, the command, cluster, seeds and time, and the pictures."""
    stamps = {figure(name).EXPERIMENT: runs.stamp_of(figure(name).EXPERIMENT, directory) for name in FIGURES}
    seconds = sum(stamp.seconds for stamp in stamps.values() if stamp)
    parts = [_HEAD.format(total=duration(seconds))]
    for name in FIGURES:
        module = figure(name)
        parts.append(_section(name, module, stamps[module.EXPERIMENT], pictures))
    return "\n".join(parts)


def _section(name: str, module: ModuleType, stamp: runs.Stamp | None, pictures: dict[str, str]) -> str:
    shows = inspect.cleandoc(module.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    lines = [f"## {module.TITLE}", "", shows, "", f"`python -m paper_figures {name}`", ""]
    if stamp:
        clusters = ", ".join(name_of(c) for c in stamp.clusters)
        cached = ", part of it from the cache" if stamp.cached else ""
        lines.append(
            f"Experiment `{stamp.command}`; {clusters}; {stamp.seeds} seeds; {duration(stamp.seconds)}{cached}."
        )
    else:
        lines.append(f"Experiment `{runs.command(module.EXPERIMENT)}`; not run yet.")
    lines += ["", module.SEES, ""]
    mine = [stem for stem in pictures if stem == name or stem.startswith(f"{name}_")]
    for stem in mine:
        lines += [f"![{stem}]({pictures[stem]})", ""]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """'48 s' or '3 min 20 s'."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
