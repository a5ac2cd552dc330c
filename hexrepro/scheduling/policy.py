"""A policy: a dispatch rule and a queue rule with their parameters, under a name.

The named ones are the YAML files of `conf/policy`. A rule is named by its function in `dispatch.py` or `queues.py`, or,
for a rule of your own, as `package.module:function` or `path/to/file.py:function`.
"""

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from hexrepro.errors import InputError
from hexrepro.paths import conf_dir
from hexrepro.scheduling import dispatch as dispatch_rules
from hexrepro.scheduling import queues as queue_rules
from hexrepro.scheduling.rules import Rule

CLIENTS = ("query", "tenant")


@dataclass(frozen=True)
class Policy:
    """How calls are dispatched and queued. `client` says who a fair queue (VTC) is fair to: each query, or each tenant."""

    name: str
    dispatch: str
    queue: str
    dispatch_params: Mapping[str, float] = field(default_factory=dict, hash=False)
    queue_params: Mapping[str, float] = field(default_factory=dict, hash=False)
    client: str = "query"

    def __post_init__(self):
        if self.client not in CLIENTS:
            raise InputError(
                f"policy {self.name}: client={self.client!r} is unknown (one of: {', '.join(CLIENTS)})"
            )
        self.dispatch_vector, self.queue_vector  # noqa: B018 -- resolve the rules now: a mistake shows here, not later

    def __reduce__(self):
        # to another process it goes by its names: a compiled rule can't travel
        values = (self.name, self.dispatch, self.queue, dict(self.dispatch_params), dict(self.queue_params))
        return Policy, (*values, self.client)

    @cached_property
    def dispatch_rule(self) -> Rule:
        return _find_rule(self.name, "dispatch", self.dispatch, dispatch_rules)

    @cached_property
    def queue_rule(self) -> Rule:
        return _find_rule(self.name, "queue", self.queue, queue_rules)

    @property
    def dispatch_vector(self) -> np.ndarray:
        """float64[P]: the dispatch rule's parameters, in its order."""
        return self.dispatch_rule.params(**self.dispatch_params)

    @property
    def queue_vector(self) -> np.ndarray:
        return self.queue_rule.params(**self.queue_params)

    def with_params(self, **values: float) -> "Policy":
        """The same policy with other parameters, whichever of its two rules takes them."""
        at_dispatch = {k: v for k, v in values.items() if k not in self.queue_rule.defaults}
        at_queue = {k: v for k, v in values.items() if k in self.queue_rule.defaults}
        return replace(
            self,
            dispatch_params={**self.dispatch_params, **at_dispatch},
            queue_params={**self.queue_params, **at_queue},
        )


def policy_names() -> list[str]:
    """The policies that can be given by name."""
    return sorted(path.stem for path in (conf_dir() / "policy").glob("*.yaml"))


def load_policy(spec: "str | Path | Mapping | Policy") -> Policy:
    """A policy from its name, from the path of a YAML file, or from a mapping with the file's content."""
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, Mapping):
        return _from_mapping(dict(spec), str(spec.get("name", "policy")))
    path = Path(spec)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise InputError(f"policy {path}: no such file")
    else:
        path = conf_dir() / "policy" / f"{spec}.yaml"
        if not path.is_file():
            near = difflib.get_close_matches(str(spec), policy_names(), 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(
                f"policy {spec!r} is unknown; {hint}(one of: {', '.join(policy_names())}, or a YAML file)"
            )
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"policy {path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise InputError(f"policy {path}: must hold the fields name, dispatch and queue, got {content!r}")
    return _from_mapping(content, str(path))


def _from_mapping(content: dict, source: str) -> Policy:
    for name in ("name", "dispatch", "queue"):
        if not isinstance(content.get(name), str):
            raise InputError(f"policy {source}: field {name} must be text, got {content.get(name)!r}")
    for name in ("dispatch_params", "queue_params"):
        params = content.get(name) or {}
        if not isinstance(params, Mapping):
            raise InputError(
                f"policy {source}: {name} must map names to numbers, such as {{alpha: 0.3}}, got {params!r}"
            )
        content[name] = dict(params)
    known = Policy.__dataclass_fields__
    for name in content:
        if name not in known:
            raise InputError(f"policy {source}: unknown field {name!r} (one of: {', '.join(known)})")
    return Policy(**content)


def _find_rule(policy: str, kind: str, name: str, builtin) -> Rule:
    if ":" not in name:
        rule = getattr(builtin, name, None)
        if not isinstance(rule, Rule):
            known = sorted(n for n, r in vars(builtin).items() if isinstance(r, Rule))
            raise InputError(
                f"policy {policy}: {kind} rule {name!r} is unknown (one of: {', '.join(known)}, or package.module:function)"
            )
        return rule
    where, function = name.rsplit(":", 1)
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # it is the user's code that is run here, and it may raise anything
        message = " ".join(str(error).split())
        raise InputError(f"policy {policy}: {kind}={name!r}: {type(error).__name__}: {message}") from error
    rule = getattr(module, function, None)
    if not isinstance(rule, Rule) or rule.signature() != _signature(kind):
        raise InputError(
            f"policy {policy}: {kind}={name!r}: {function} in {where} is not decorated with @{kind}_rule()"
        )
    return rule


def _signature(kind: str):
    from hexrepro.scheduling.views import DISPATCH, QUEUE

    return {"dispatch": DISPATCH, "queue": QUEUE}[kind]


def _load_file(path: Path):
    """The file as a module. Its name carries the content: an edited file is another module, and the same in any process."""
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"hexrepro_rules_{path.stem}_{digest}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: Numba's cache looks modules up by name
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
