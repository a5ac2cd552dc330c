"""A policy: a dispatch rule and a queue rule with their parameters, under a name.

The named ones are the YAML files of `conf/policy`, and those that installed packages offer (`hexrepro/installed.py`). A rule
is named by its function in `dispatch.py` or `queues.py`, or, for a rule of your own, as `package.module:function` or
`path/to/file.py:function`.
"""

import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from hexrepro.errors import InputError
from hexrepro.installed import GROUP, installed_policies, source_of
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
    """The policies that can be given by name: those of `conf/policy`, and those of installed packages."""
    return sorted({path.stem for path in _files()} | set(installed_policies()))


def policy_sources() -> dict[str, str]:
    """Name -> where the policy comes from: 'built in', or the package and its version."""
    ours = {path.stem for path in _files()}
    theirs = {name: source_of(found) for name, found in installed_policies().items()}
    return {name: "built in" if name in ours else theirs[name] for name in policy_names()}


def _files() -> list[Path]:
    return sorted((conf_dir() / "policy").glob("*.yaml"))


def load_policy(spec: "str | Path | Mapping | Policy") -> Policy:
    """A policy from its name, from the path of a YAML file, or from a mapping with the file's content.

    Of a name that `conf/policy` has and a package offers too, the policy of `conf/policy` is taken.
    """
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
        if not path.is_file() and str(spec) in installed_policies():
            return load_installed(str(spec))
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


def load_installed(name: str) -> Policy:
    """The policy of this name that an installed package offers: a Policy, a mapping of its fields, or a YAML file's path."""
    entries = installed_policies()[name]
    source = f"policy {name} of {source_of(entries)}"
    if len(entries) > 1:
        raise InputError(
            f"{source}: two packages offer this name; uninstall one, or name its rules in a YAML file"
        )
    try:
        offered = entries[0].load()
    except (
        Exception,
        SystemExit,
    ) as error:  # it is the package's code that is run here, and it may raise anything
        message = " ".join(str(error).split())
        raise InputError(f"{source}: {entries[0].value}: {type(error).__name__}: {message}") from error
    is_file = isinstance(offered, str | Path) and Path(offered).suffix in (".yaml", ".yml")
    if not (is_file or isinstance(offered, Policy | Mapping)):
        raise InputError(
            f"{source}: {entries[0].value} is a {type(offered).__name__}; an entry point of {GROUP} must name a Policy,"
            " a mapping with a policy's fields, or the path of a YAML file"
        )
    policy = load_policy(offered)
    if policy.name != name:
        raise InputError(f"{source}: its name is {policy.name}; it must be the entry point's, {name}")
    return policy


def fields_of(policy: Policy) -> dict:
    """A policy as the content of a YAML file."""
    content = {name: getattr(policy, name) for name in Policy.__dataclass_fields__}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in content.items()}


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
    rule = _attribute(name, f"policy {policy}: {kind}={name!r}")
    if not isinstance(rule, Rule) or rule.signature() != _signature(kind):
        where, function = name.rsplit(":", 1)
        raise InputError(
            f"policy {policy}: {kind}={name!r}: {function} in {where} is not decorated with @{kind}_rule()"
        )
    return rule


def rule_at(name: str) -> tuple[str, Rule]:
    """The rule at `path/to/file.py:function` or `package.module:function`, and its kind: dispatch or queue."""
    rule = _attribute(name, f"rule {name!r}")
    for kind in ("dispatch", "queue"):
        if isinstance(rule, Rule) and rule.signature() == _signature(kind):
            return kind, rule
    raise InputError(f"rule {name!r}: it is not decorated with @dispatch_rule() or @queue_rule()")


def _attribute(name: str, whose: str):
    """What a file or module holds under a name."""
    where, function = name.rsplit(":", 1)
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except InputError as mistake:  # of a decorator
        raise InputError(f"{whose}: {mistake}") from mistake
    except (Exception, SystemExit) as error:  # the user's code is run here, and it may raise anything
        message = " ".join(str(error).split())
        raise InputError(f"{whose}: {type(error).__name__}: {message}") from error
    if not hasattr(module, function):
        near = difflib.get_close_matches(
            function, [n for n, r in vars(module).items() if isinstance(r, Rule)], 1
        )
        raise InputError(
            f"{whose}: {where} has no {function!r}{f'; did you mean {near[0]}?' if near else ''}"
        )
    return getattr(module, function)


def _signature(kind: str):
    from hexrepro.scheduling.views import DISPATCH, QUEUE

    return {"dispatch": DISPATCH, "queue": QUEUE}[kind]


class _FromSource(importlib.machinery.SourceFileLoader):
    """Python's cache of bytecode would take an edit within a second that leaves the length for no edit; here it is not used."""

    def path_stats(self, path: str):
        raise OSError


def _load_file(path: Path):
    """The file as a module. Its name carries the content: an edited file is another module, and the same in any process."""
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"hexrepro_rules_{path.stem}_{digest}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: Numba's cache looks modules up by name
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
