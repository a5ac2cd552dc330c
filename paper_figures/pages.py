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
# For readers of the paper: claims and figures

- **Does a claim hold?** [REPRODUCTION.md](REPRODUCTION.md) takes them one by one: the paper's value and how sure it is, ours
  with intervals under both views of the hardware, the verdict, and the assumption on which it turns.
- **What does it look like?** The figures are below, each with what to see in it.
- **What does the scheduler do?** [Notebook 01](../notebooks/01_tour.ipynb) follows one query's LLM calls through the system;
  [02](../notebooks/02_ablation.ipynb) takes the scheduler apart; in [03](../notebooks/03_alpha.ipynb) a slider moves α.
- **Is the simulator right?** [Notebook 05](../notebooks/05_sim_vs_vllm.ipynb) holds it against real vLLM servers.
- **Would another assumption change the picture?** [Other settings](../hexrepro/experiments/README.md) are one command each.

To draw the figures again, from a clone:

```sh
python -m paper_figures --list       # what there is, and whether its results are those of this code
python -m paper_figures attainment   # one of them (or several): run what is missing or stale, redraw, rewrite the pages
python -m paper_figures              # all
python -m paper_figures --again      # run again even what is fresh
```

Ctrl-C loses no finished work. The results are kept in [results/](results), a directory for each experiment, and the figures
read only these: redrawing runs nothing. This page is written by the same command; all figures took {total} to compute.

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
