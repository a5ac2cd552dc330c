"""The command line: `python -m hexrepro`, or `hexrepro` when installed.

Help is answered here from the text of the config files, without Hydra or anything compiled, so that it comes at once.
All else goes to Hydra (`experiments/launch.py`). A user's mistake ends in one line on stderr and exit code 2.
"""

from __future__ import annotations

from pathlib import Path

from hexrepro.errors import command
from hexrepro.installed import installed_policies, source_of
from hexrepro.paths import conf_dir

GROUPS = (
    "workload",
    "arrivals",
    "tenants",
    "background",
    "cluster",
    "policy",
    "engine",
    "tuning/sampler",
    "tuning/space",
    "hydra/launcher",
)


@command(interrupted="interrupted; finished cells are kept: the same command goes on")
def main(argv: list[str]) -> int:
    """Run one command line; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text(conf_dir()))
        return 0
    if argv == ["--version"]:
        from hexrepro import __version__

        print(f"hexrepro {__version__}")
        return 0
    from hexrepro.experiments.launch import launch

    launch(argv)
    return 0


def help_text(conf: Path) -> str:
    """Experiments and config groups with their one-line descriptions, and how to override."""
    lines = [
        "Simulate HexGen-Flow and its rivals on mixed GPU clusters.",
        "",
        "  python -m hexrepro experiment=NAME [NAME=VALUE ...] [-m]",
        "",
        "Experiments (experiment=NAME):",
        *_options(conf / "experiment"),
    ]
    for group in GROUPS:
        lines += [
            "",
            f"{group}={'NAME or [NAME,NAME,...]' if group == 'policy' else 'NAME'}:",
            *_options(conf / group),
            *(_installed() if group == "policy" else ()),
        ]
    lines += [
        "",
        "Other values, with their meaning, stand in conf/config.yaml:",
        *(f"  {line}" for line in _top_level(conf / "config.yaml")),
        "",
        "Examples:",
        "  python -m hexrepro experiment=hetero1",
        "  python -m hexrepro experiment=hetero2 policy=[vllm,hexgen_flow] workload=trace1 workload.rate_qps=0.7 seeds=50",
        "  python -m hexrepro experiment=homo profile=silicon prefix_caching=full slo_scale=4",
        "  python -m hexrepro experiment=hetero1 workload=file workload.path=trace.json workload.rate_qps=0.5",
        "  python -m hexrepro experiment=hetero1 prefix_caching=off,template,full -m     (one run each)",
        "  python -m hexrepro experiment=hetero1 --cfg job     (show the composed config, run nothing)",
        "",
        "hydra/launcher=NAME runs a sweep's runs (-m) in other processes or on other machines.",
        "`python -m hexrepro.scheduling check POLICY` tries a policy of your own; `python -m hexrepro.report` makes a page of",
        "a run (html), and a trace for Perfetto (timeline).",
        "--config-dir DIR adds a directory of your own configs: DIR/policy/mine.yaml is then policy=mine.",
        "Results go to outputs/EXPERIMENT/DATE_TIME (hydra.run.dir=DIR chooses another). Finished cells are cached in",
        "HEXREPRO_CACHE (default: the user's cache directory). HEXREPRO_DEBUG=1 shows the traceback of a mistake.",
    ]
    return "\n".join(lines)


def _options(group: Path) -> list[str]:
    files = sorted(group.glob("[!_]*.yaml"))
    width = max((len(f.stem) for f in files), default=0)
    return [f"  {f.stem:<{width}}  {describe(f)}" for f in files] or ["  (none)"]


def _installed() -> list[str]:
    """Policies of installed packages, and the package of each."""
    found = installed_policies()
    width = max((len(name) for name in found), default=0)
    return [f"  {name:<{max(width, 11)}}  of {source_of(entries)}" for name, entries in found.items()]


def describe(file: Path) -> str:
    """The first comment line of a config file, Hydra's `# @package` line aside."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.lstrip("# ").strip()
        if text and not text.startswith("@package"):
            return text
    return ""


def _top_level(config: Path) -> list[str]:
    """`NAME=default` of each top-level scalar, with the first line of the comment above it."""
    found, comment = [], []
    for line in config.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            comment.append(line.lstrip("# "))
            continue
        name, colon, value = line.partition(":")
        if colon and comment and not line.startswith((" ", "defaults", "hydra", "run:")):
            value = value.strip() or "..."
            found.append((f"{name}={value}", comment[0]))
        comment = []
    width = max((len(name) for name, _ in found), default=0)
    return [f"{name:<{width}}  {text}" for name, text in found]
