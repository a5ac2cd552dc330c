"""`python -m paper_figures [NAME ...]`: run what is missing, redraw the figures, rewrite the pages."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pandas as pd
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hexrepro.errors import InputError
from hexrepro.report import results
from paper_figures import FIGURES, figure, pages, runs

OUT = Path(__file__).parent / "out"
INTERRUPTED = "paper_figures: interrupted; finished work is kept: the same command goes on"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 an experiment failed, 2 a user's mistake, 130 interrupted."""
    args = _parse(argv)
    try:
        names = _known(args.names)
        if args.list:
            print(listing())
            return 0
        failed = run_experiments(experiments_of(names), again=args.again)
        draw(names, again=args.again)
        pages.write()
    except InputError as mistake:
        print(f"paper_figures: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 130
    for mistake in failed:
        print(f"paper_figures: {mistake}", file=sys.stderr)
    return 1 if failed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m paper_figures",
        description="Run the experiments whose results are missing or stale, redraw the figures, and rewrite "
        "paper_figures/REPRODUCTION.md and README.md.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures; all when none is named")
    parser.add_argument(
        "--again", action="store_true", help="run the experiments even if their results are fresh"
    )
    parser.add_argument("--list", action="store_true", help="list the figures and the state of their results")
    return parser.parse_args(argv)


def _known(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in FIGURES:
            from hexrepro.experiments.explain import suggest  # brings Hydra with it

            raise InputError(f"no figure {name}{suggest(name, FIGURES)}")
    return list(dict.fromkeys(names)) or list(FIGURES)


def experiments_of(names: Sequence[str]) -> list[str]:
    """The experiments that these figures read, each once."""
    return list(dict.fromkeys(figure(name).EXPERIMENT for name in names))


def listing() -> str:
    """A line a figure: its experiment, and how its results stand."""
    lines = []
    for name in FIGURES:
        module = figure(name)
        stamp = runs.stamp_of(module.EXPERIMENT)
        took = f", {stamp.seconds:.0f} s on {stamp.date}" if stamp else ""
        head = (module.__doc__ or "").splitlines()[0]
        lines.append(f"{name:<18} {runs.state(module.EXPERIMENT)}{took}\n{'':<18} {head}")
    return "\n".join(lines)


def run_experiments(experiments: Sequence[str], *, again: bool = False) -> list[str]:
    """Run those whose results are missing or stale; returns a line for each that failed."""
    todo = [e for e in experiments if again or runs.state(e) != "fresh"]
    if not todo:
        return []
    failed = []
    with _Bar(len(todo)) as bar:
        for experiment in todo:
            bar.begin(experiment)
            try:
                stamp = runs.run(experiment, bar.tell)
                bar.done(f"{experiment}: {stamp.seconds:.0f} s")
            except InputError as mistake:
                failed.append(str(mistake))
                bar.done(f"{experiment}: failed")
    return failed


def draw(
    names: Sequence[str], *, again: bool = False, directory: Path = runs.RESULTS, out: Path = OUT
) -> list[str]:
    """Draw those of these figures whose results or whose code have changed; returns their names.

    A figure without results is left as it is. OUT/drawn.yaml remembers what each figure was drawn from.
    """
    out.mkdir(exist_ok=True)
    memory = out / "drawn.yaml"
    drawn_from = yaml.safe_load(memory.read_text(encoding="utf-8")) if memory.exists() else {}
    todo = {}
    for name in names:
        origin = _origin(figure(name), directory)
        there = all((out / f"{stem}.{kind}").exists() for stem in stems(name, out) for kind in ("png", "pdf"))
        if origin and (again or drawn_from.get(name) != origin or not (there and stems(name, out))):
            todo[name] = origin
    start = time.monotonic()
    for name, origin in todo.items():
        from hexrepro.report.style import save

        module = figure(name)
        for file in [out / f"{stem}.{kind}" for stem in stems(name, out) for kind in ("png", "pdf")]:
            file.unlink(missing_ok=True)  # a picture that is no longer drawn must not stay
        for stem, drawn in drawn_by(module, results.read(directory / module.EXPERIMENT)).items():
            save(drawn, out / stem)
        drawn_from[name] = origin
        memory.write_text(yaml.safe_dump(drawn_from), encoding="utf-8")
    print(f"{len(todo)} figures drawn in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return list(todo)


def stems(name: str, out: Path = OUT) -> list[str]:
    """The pictures of a figure that are there."""
    return sorted(f.stem for f in out.glob("*.png") if f.stem == name or f.stem.startswith(f"{name}_"))


def _origin(module: ModuleType, directory: Path) -> str:
    """A digest of what a figure is drawn from: its results, its module, and the report package; '' without results."""
    files = sorted((directory / module.EXPERIMENT).glob("*.csv"))
    if not files:
        return ""
    files += [Path(module.__file__), *sorted((runs.ROOT / "hexrepro" / "report").glob("*.py"))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def drawn_by(module: ModuleType, frames: Mapping[str, pd.DataFrame]) -> dict:
    """File name without ending -> figure. A module draws one figure of its own name, or several that begin with it."""
    drawn = module.draw(frames)
    return drawn if isinstance(drawn, dict) else {module.__name__.rsplit(".", 1)[-1]: drawn}


class _Bar:
    """Progress over experiments on stderr: a bar at a terminal, a line each elsewhere."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        self._plain = not console.is_terminal
        self._bar = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            disable=self._plain,
        )
        self._task = self._bar.add_task("", total=total)
        self._experiment = ""

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def begin(self, experiment: str) -> None:
        """Say which experiment runs."""
        self._experiment = experiment
        if self._plain:
            print(f"{experiment} ...", file=sys.stderr, flush=True)
        self.tell("")

    def tell(self, line: str) -> None:
        """Show the latest line that the experiment printed."""
        self._bar.update(self._task, description=f"{self._experiment}  {line[:70]}")

    def done(self, line: str) -> None:
        """One experiment is over."""
        self._bar.advance(self._task)
        print(line, file=sys.stderr, flush=True) if self._plain else self._bar.console.print(line)


if __name__ == "__main__":
    sys.exit(main())
