"""A run, or the runs of a sweep, as one HTML page that needs no network: tables, figures and config.

It is made from the files of a run directory, so it can be made at any time later, and on another machine.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd

from hexrepro import __version__
from hexrepro.errors import InputError
from hexrepro.report import results
from hexrepro.report.style import name_of

COLUMNS = (  # metric, head, times, digits
    ("mean_s", "mean, s", 1, 1),
    ("p50_s", "P50, s", 1, 1),
    ("p95_s", "P95, s", 1, 1),
    ("p99_s", "P99, s", 1, 1),
    ("throughput_qps", "throughput, queries/s", 1, 3),
    ("goodput_qps", "goodput, queries/s", 1, 3),
    ("attainment", "SLO attained, %", 100, 1),
    ("scale_at_95", "SLO scale at 95 %", 1, 2),
    ("scale_at_99", "SLO scale at 99 %", 1, 2),
    ("cost_per_1000", "$ per 1 000 queries", 1, 2),
)
ROWS = 200  # of another result file that the page shows
STYLE = """
:root { color-scheme: light dark; --line: #8886; --dim: #6b6b6b; --mark: #0173b2; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; } h3 { font-size: 1em; margin: 1.5em 0 .3em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9em; }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; vertical-align: bottom; white-space: normal; }
td small { display: block; color: var(--dim); } td.better small { color: var(--mark); }
.wide { overflow-x: auto; } pre { overflow-x: auto; background: #8881; padding: 1em; font-size: .85em; }
pre.command { white-space: pre-wrap; }
figure { margin: 1em 0; } figure svg, figure img { max-width: 100%; height: auto; background: white; }
.dim { color: var(--dim); }
@media (prefers-color-scheme: dark) { :root { --dim: #9a9a9a; --mark: #56b4e9; } }
"""


def write_report(directory: Path, output: Path | None = None) -> Path:
    """Write the page of a run directory, or of a sweep's directory with a run in each of its own; returns where it is."""
    runs = run_directories(directory)
    page = report(runs, title=directory.resolve().name)
    output = output or directory / "report.html"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{output}: it cannot be written ({error.strerror})") from error
    return output


def run_directories(directory: Path) -> list[Path]:
    """The run directories that a directory is or holds, in a sweep's order."""
    if (directory / "config.yaml").is_file():
        return [directory]
    found = [d for d in directory.iterdir() if (d / "config.yaml").is_file()] if directory.is_dir() else []
    if not found:
        raise InputError(f"{directory}: not the directory of a run, nor of a sweep: there is no config.yaml")
    return sorted(
        found, key=lambda d: (len(d.name.split("_")[0]), d.name)
    )  # 2_attainment before 10_attainment


def report(runs: list[Path], title: str) -> str:
    """The page as text."""
    body = "".join(_run(run, heading=len(runs) > 1) for run in runs)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} – hexrepro</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n{body}"
        f'<p class="dim">Written by hexrepro {escape(__version__)}.</p></body></html>\n'
    )


def _run(run: Path, heading: bool) -> str:
    config = _text(run / "config.yaml")
    command = config.partition("\n")[0].removeprefix("# ") if config.startswith("# ") else ""
    parts = [f"<h2>{escape(run.name)}</h2>"] if heading else []
    level = 3 if heading else 2  # of the headings below: none is left out
    parts.append(f'<pre class="command">{escape(command)}</pre>' if command else "")
    frames = results.read(run)
    if "summary" in frames:
        parts += _comparison(frames["summary"], level)
    elif (run / "tables.txt").is_file():
        parts.append(f"<h{level}>Tables</h{level}><pre>{escape(_text(run / 'tables.txt'))}</pre>")
    parts += _figures(run, frames, level)
    if "summary" in frames and (run / "tables.txt").is_file():
        parts.append(_folded("As printed", f"<pre>{escape(_text(run / 'tables.txt'))}</pre>"))
    for stem, frame in frames.items():
        if stem not in ("summary", "samples", "curves", "quantiles"):
            rest = f'<p class="dim">and {len(frame) - ROWS} more rows</p>' if len(frame) > ROWS else ""
            table = frame.head(ROWS).to_html(
                index=False, border=0, na_rep="", float_format=lambda x: f"{x:.6g}"
            )
            parts.append(_folded(f"{stem}.csv", f'<div class="wide">{table}</div>{rest}'))
    parts.append(_folded("Config", f"<pre>{escape(config)}</pre>"))
    return "\n".join(part for part in parts if part) + "\n"


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: it cannot be read ({error})") from error


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


# ---- tables --------------------------------------------------------------------------------------------------------------


def _comparison(summary: pd.DataFrame, level: int) -> Iterator[str]:
    """A table for each setting: a row a policy, each metric with its interval, and its ratio to the baseline."""
    setting = [
        c
        for c in summary.columns
        if c not in ("policy", "alpha", "metric", "value", "ci_low", "ci_high", "seeds")
    ]
    for labels, rows in summary.groupby(setting, sort=False, dropna=False):
        seeds = int(rows["seeds"].max())
        words = [_label(name, value) for name, value in zip(setting, labels, strict=True)]
        title = f"{', '.join(w for w in words if w)}; {seeds} arrival seed{'s' if seeds > 1 else ''}"
        yield f"<h{level}>{escape(title)}</h{level}>"
        yield _table(rows)
    yield (
        '<p class="dim">± half of the interval over arrival seeds; × the ratio to the baseline, seeds paired; '
        "≈ a tie: the ratio's interval contains 1.</p>"
    )


def _label(name: str, value: object) -> str:
    if (isinstance(value, float) and np.isnan(value)) or value in ("", "all") or name == "experiment":
        return ""
    if name == "rate_qps":
        return f"{value:g} queries/s"
    if name == "prefix_caching":
        return f"prefix caching {value}"
    return name_of(str(value))


def _table(rows: pd.DataFrame) -> str:
    there = set(rows.loc[rows["value"].notna(), "metric"])  # a cost only where all prices are known
    columns = [c for c in COLUMNS if c[0] in there]
    heads = "".join(f"<th>{escape(head)}</th>" for _, head, _, _ in columns)
    lines = []
    for policy, of in rows.groupby("policy", sort=False):
        found = {
            m: (v, lo, hi)
            for m, v, lo, hi in of[["metric", "value", "ci_low", "ci_high"]].itertuples(index=False)
        }
        alpha = of["alpha"].dropna()
        about = f"<small>α = {alpha.iloc[0]:g}</small>" if len(alpha) else ""
        cells = "".join(_cell(found, metric, times, digits) for metric, _, times, digits in columns)
        lines.append(f"<tr><td>{escape(name_of(str(policy)))}{about}</td>{cells}</tr>")
    return f'<div class="wide"><table><tr><th>policy</th>{heads}</tr>{"".join(lines)}</table></div>'


def _cell(found: dict[str, tuple[float, float, float]], metric: str, times: float, digits: int) -> str:
    if metric not in found:
        return "<td></td>"
    value, low, high = (float(x) * times for x in found[metric])
    text = "never" if np.isinf(value) else "–" if np.isnan(value) else f"{value:.{digits}f}"
    if np.isfinite(value) and np.isfinite(high - low):
        text += f" ±{(high - low) / 2:.{digits}f}"
    ratio, kind = "", ""
    if f"{metric}_ratio" in found:
        r, r_low, r_high = (float(x) for x in found[f"{metric}_ratio"])
        tie = not (r_low > 1 or r_high < 1)
        more_is_better = metric.endswith("_qps") or metric == "attainment"
        kind = ' class="better"' if not tie and (r > 1) == more_is_better else ""
        if np.isfinite(r):
            ratio = f"<small>{'≈' if tie else '×'}{r:.2f}</small>"
    return f"<td{kind}>{text}{ratio}</td>"


# ---- figures -------------------------------------------------------------------------------------------------------------


def _figures(run: Path, frames: dict[str, pd.DataFrame], level: int) -> Iterator[str]:
    """The run's own pictures; if it has none, SLO attainment drawn from its curves."""
    pictures = sorted(run.glob("*.png"))
    if pictures or "curves" in frames:
        yield f"<h{level}>Figures</h{level}>"
    for file in pictures:
        data = base64.b64encode(file.read_bytes()).decode()
        yield f'<figure><img alt="{escape(file.stem)}" src="data:image/png;base64,{data}"></figure>'
    if not pictures and "curves" in frames:
        for svg in _drawn(frames["curves"], frames.get("summary")):
            yield f"<figure>{svg}</figure>"


def _drawn(curves: pd.DataFrame, summary: pd.DataFrame | None) -> Iterator[str]:
    """A picture for each cluster view, as SVG."""
    from hexrepro.report.figures import Curve, attainment_panels

    for (cluster, profile, caching), part in curves.groupby(
        ["cluster", "profile", "prefix_caching"], sort=False
    ):
        panels: dict[tuple[str, str], dict[str, Curve]] = {}
        groups = part[part["tenant"] == "all"].groupby(
            ["rate_qps", "trace", "policy"], sort=False, dropna=False
        )
        for (rate, trace, policy), rows in groups:
            at_95 = np.inf
            if summary is not None:
                same = results.where(
                    summary, cluster=cluster, profile=profile, prefix_caching=caching, trace=trace, policy=policy,
                    tenant="all", metric="scale_at_95",
                )  # fmt: skip
                same = same[(same["rate_qps"] == rate) | same["rate_qps"].isna()]
                at_95 = float(same["value"].iloc[0]) if len(same) else np.inf
            label = "recorded arrivals" if np.isnan(rate) else f"{rate:g} queries/s"
            points = (rows[name].to_numpy(float) for name in ("scale", "attainment", "ci_low", "ci_high"))
            panels.setdefault((label, trace), {})[str(policy)] = Curve(*points, at_95)
        figure = attainment_panels(panels, title=f"{name_of(cluster)}, {profile}, prefix caching {caching}")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        svg = text.getvalue()
        yield svg[svg.index("<svg") :]  # without the XML declaration and a DTD's address
