"""What `python -m hexrepro experiment=...` runs: a composed config in, tidy tables and figures out.

RUNNERS maps the config's `run` to `module:function`; the function takes a Job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

RUNNERS = {
    "compare": "hexrepro.experiments.compare:run",
    "goodput": "hexrepro.experiments.goodput:run",
    "plan": "hexrepro.experiments.plan:run",
    "scale": "hexrepro.experiments.scale:run",
    "tune": "hexrepro.experiments.tune:run",
    "alpha_sensitivity": "hexrepro.experiments.alpha_sensitivity:run",
    "alpha_online": "hexrepro.experiments.alpha_online:run",
    "validation": "hexrepro.experiments.validation:run",
}


@dataclass(frozen=True)
class Job:
    """One run as Hydra hands it over: the composed config, what was chosen and overridden, and where results go."""

    cfg: DictConfig
    run_dir: Path
    choices: Mapping[str, Any]
    overrides: Sequence[str]
