"""Refresh the README's tables from runs: `python paper_figures/readme.py RUN_DIR [RUN_DIR ...]`.

The first run is the headline: its first table and its summary. All runs together make the table of what the
gain hangs on. No number in the README is typed by hand.
"""

import re
import sys
from pathlib import Path

import pandas as pd
import yaml

ROOT = Path(__file__).parents[1]
SHOWN = ("vllm", "ray", "vtc", "qlm", "llf", "rr_pq", "wb_fcfs", "hexgen_flow", "eft", "low")
COMPARED = ("hexgen_flow", "low", "qlm", "eft")


def first_table(printed: str) -> str:
    """The first table of tables.txt, with the rows of SHOWN and the lines that belong to them."""
    lines, keep = [], True
    for line in printed.split("\n\nWhat ")[0].splitlines():
        if line.startswith("± half"):
            break
        if name := re.match(r" (\w+) {2,}", line):
            keep = name[1] in (*SHOWN, "policy", "α", "baseline")
        if keep:
            lines.append(line.rstrip())
    return "\n".join(lines).strip()


def gains(printed: str) -> str:
    """The summary tables of tables.txt."""
    tables = re.split(r"\n(?=What )", printed)[1:]
    return "\n\n".join("\n".join(line.rstrip() for line in table.splitlines()).strip() for table in tables)


def conditions(runs: list[Path]) -> str:
    """A Markdown row a run and view: how many times lower than vllm's the P95 is, over the run's settings."""
    rows = [
        "| cluster | step times | prefix caching | " + " | ".join(COMPARED) + " | throughput, hexgen_flow |"
    ]
    rows.append("|---" * (len(COMPARED) + 4) + "|")
    for run in runs:
        summary = pd.read_csv(run / "summary.csv")
        caching = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["prefix_caching"]
        for profile, part in summary.groupby("profile", sort=False):
            cells = [
                part.cluster.iloc[0],
                profile,
                caching[profile] if isinstance(caching, dict) else caching,
            ]
            cells = ["off" if cell is False else str(cell) for cell in cells]
            for policy in COMPARED:
                cells.append(_range(1 / part[(part.policy == policy) & (part.metric == "p95_s_ratio")].value))
            at = (part.policy == "hexgen_flow") & (part.metric == "throughput_qps_ratio")
            cells.append(_range(part[at].value))
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _range(values: pd.Series) -> str:
    return f"{values.min():.2f}–{values.max():.2f} ×"


def replace(readme: str, marker: str, content: str) -> str:
    """The README with other content between `<!-- marker -->` and `<!-- end -->`."""
    pattern = rf"(<!-- {re.escape(marker)} -->\n)(?:(?!<!-- ).)*?(<!-- end -->)"
    if not re.search(pattern, readme, re.S):
        raise SystemExit(f"README.md has no block {marker!r}")
    return re.sub(pattern, lambda found: f"{found[1]}{content}\n{found[2]}", readme, flags=re.S)


def main() -> None:
    runs = [Path(argument) for argument in sys.argv[1:]]
    if not runs:
        raise SystemExit(__doc__)
    printed = (runs[0] / "tables.txt").read_text(encoding="utf-8")
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    readme = replace(readme, "table", f"```text\n{first_table(printed)}\n```")
    readme = replace(readme, "gains", f"```text\n{gains(printed)}\n```")
    readme = replace(readme, "conditions", conditions(runs))
    path.write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    main()
