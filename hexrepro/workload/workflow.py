"""A workflow: the steps that an application takes for one query, and what their prompts have in common.

Read from ``data/workloads/workflows/*.yaml``; each file says where its facts come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import yaml

from hexrepro.errors import InputError
from hexrepro.paths import data_dir


@dataclass(frozen=True)
class Template:
    """A prompt prefix that all calls of a step share, and the tail in which calls of one query differ
    (tokens)."""

    name: str
    tokens: int
    own_tokens: int


@dataclass(frozen=True)
class Step:
    """One kind of call in a workflow."""

    name: str
    stage: str
    template: str
    times: str | None  # the count that says how often it comes in a query; None = once
    only_with: str | None  # the count that must be above 0 for the step to come at all
    parallel: bool  # its calls in one query run side by side
    beside_previous: bool  # runs side by side with the step before it


@dataclass(frozen=True)
class Workflow:
    """Steps in order, their templates, and the step names that the released simulator's JSON uses."""

    name: str
    released_names: dict[str, str]  # stage -> name in the released JSON
    templates: tuple[Template, ...]
    steps: tuple[Step, ...]

    @property
    def stages(self) -> tuple[str, ...]:
        """Stage names in the order of the file."""
        return tuple(self.released_names)

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of the numbers that a query needs: how often its optional and repeated steps come."""
        wanted = [count for step in self.steps for count in (step.only_with, step.times) if count]
        return tuple(dict.fromkeys(wanted))

    def template_id(self, name: str) -> int:
        """Index of a template in `templates`."""
        return [template.name for template in self.templates].index(name)

    def templates_of(self, stage: str) -> list[int]:
        """Ids of the templates of a stage, longest first."""
        ids = dict.fromkeys(self.template_id(step.template) for step in self.steps if step.stage == stage)
        return sorted(ids, key=lambda i: -self.templates[i].tokens)

    def runs_parallel(self, stage: str) -> bool:
        """Whether neighbouring calls of a stage run side by side."""
        return any(step.parallel or step.beside_previous for step in self.steps if step.stage == stage)


def workflow_names() -> list[str]:
    """Names of the workflows that the project knows."""
    return sorted(path.stem for path in (data_dir() / "workloads" / "workflows").glob("*.yaml"))


@lru_cache
def load_workflow(name: str) -> Workflow:
    """The workflow called ``name``; InputError when there is none."""
    if name not in workflow_names():
        raise InputError(f"unknown workflow {name!r}; known are {', '.join(workflow_names())}")
    path = data_dir() / "workloads" / "workflows" / f"{name}.yaml"
    raw = read_yaml(path)
    return Workflow(
        name=name,
        released_names=dict(raw["stages"]),
        templates=tuple(
            Template(key, int(t["tokens"]), int(t["own_tokens"])) for key, t in raw["templates"].items()
        ),
        steps=tuple(
            Step(
                name=step["name"],
                stage=step["stage"],
                template=step["template"],
                times=step.get("times"),
                only_with=step.get("only_with"),
                parallel=step.get("in") == "parallel",
                beside_previous=step.get("beside") == "previous",
            )
            for step in raw["steps"]
        ),
    )


def read_yaml(path: Path) -> dict:
    """The mapping in a YAML file; InputError when it is not there or not a mapping."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: holds {type(raw).__name__}; it must be a mapping of keys to values")
    return raw


def shared_prefixes(
    workflow: Workflow, template: np.ndarray, input_tokens: np.ndarray, same_text: np.ndarray
) -> dict[str, np.ndarray]:
    """The prompt parts that calls share: columns template, template_tokens, context and context_tokens
    (int[n]).

    ``template``: int[n], index into ``workflow.templates``, -1 = none. ``same_text``: int[n], an id per
    query; queries that ask the same text again have the same id, which becomes the context id. A context is
    what the calls of one query behind one template have in common: the shortest of their prompts less the
    template and its own_tokens. A prompt no longer than its template is taken to share nothing.
    """
    tokens = np.array([t.tokens for t in workflow.templates] + [0], np.int64)  # the last entry is for -1
    own = np.array([t.own_tokens for t in workflow.templates] + [1], np.int64)
    input_tokens = np.asarray(input_tokens, np.int64)
    template = np.where(input_tokens > tokens[template], template, -1)
    key = np.asarray(same_text, np.int64) * len(tokens) + template + 1
    _, group = np.unique(key, return_inverse=True)
    shortest = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(shortest, group, input_tokens)
    context_tokens = np.maximum(0, shortest[group] - tokens[template] - own[template])
    context_tokens[template < 0] = 0
    return {
        "template": template,
        "template_tokens": tokens[template],
        "context": np.where(context_tokens > 0, same_text, -1),
        "context_tokens": context_tokens,
    }
