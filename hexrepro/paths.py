"""Where the configs and the data of the project lie.

In a source checkout `conf/` and `data/` stand beside the package, in an installed wheel they lie inside it.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """The Hydra config groups: experiment, cluster, workload, policy and so on."""
    return _find("conf")


def data_dir() -> Path:
    """The data that the project made itself: hardware profiles and stage-length tables."""
    return _find("data")


def _find(name: str) -> Path:
    for parent in (_PACKAGE, _PACKAGE.parent):
        if (parent / name).is_dir():
            return parent / name
    raise FileNotFoundError(
        f"hexrepro: no {name}/ in {_PACKAGE} nor beside it; the installation is not complete"
    )
