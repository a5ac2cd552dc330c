"""What the gateway is told: the cluster file, and the settings of conf/serving/gateway.yaml.

A cluster file is one of the simulator's (see `cluster/profiles.py`) in which every instance has a `url`:

    name: ours
    model: llama-3.1-70b                 # names the profile; also the model that clients ask for, unless `models` is given
    models: [llama]                      # optional
    instances:
      - {gpu: a100, url: "http://10.0.0.1:8000"}
      - {gpu: l40s, url: "http://10.0.0.2:8000", api_key_env: L40S_KEY, concurrency: 64}
    tenants:                             # optional; with keys, every client must bring one
      - {name: gold, key_env: GOLD_KEY, max_under_way: 100}
    workflows:                           # optional: what is believed of stages before calls have shown it
      chess:
        stages: {candidate: {input_tokens: 11748, output_tokens: 678, cached_tokens: 9158}, revise: ...}
        # optional: how many steps of which stages follow a query's first, second, ... step of a stage, on average
        remaining: {candidate: [{revise: 1.8}]}

Secrets stand in environment variables, never in the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hexrepro.cluster.profiles import load_cluster, read_profile
from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.paths import conf_dir
from hexrepro.serving.learning import Beliefs, Place
from hexrepro.serving.options import Options
from hexrepro.serving.ranges import check_numbers
from hexrepro.serving.upstream import Timeouts
from hexrepro.workload.workflow import read_yaml

MODES = ("gateway", "engine")
TOKENIZE = ("estimate", "upstream")
_OURS = ("url", "api_key_env", "concurrency")  # of an instance; the rest is the simulator's
_TOP = ("models", "tenants", "workflows")


@dataclass(frozen=True)
class Tenant:
    """A client of the gateway. `key`: its API key, None where there are none. `max_under_way`: calls at a time, 0 = any."""

    name: str
    key: str | None = field(default=None, repr=False)
    max_under_way: int = 0


@dataclass(frozen=True)
class Settings:
    """How the gateway works; each field is explained in conf/serving/gateway.yaml."""

    host: str = "127.0.0.1"
    port: int = 8080
    mode: str = "gateway"
    max_waiting: int = 1000
    max_under_way: int = 0
    attempts: int = 3
    retry_share: float = 0.2
    patience_s: float = 30.0
    failures: int = 3
    pause_s: float = 0.5
    longest_pause_s: float = 30.0
    probe_every_s: float = 5.0
    drain_s: float = 30.0
    max_body_bytes: int = 8 * 2**20
    max_header_bytes: int = 16 * 2**10
    tokenize: str = "estimate"
    ask_usage: bool = True
    tune: bool = False
    call_log: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    coordinator: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        check_numbers(
            self,
            "serving",
            zero=("max_waiting", "max_under_way", "drain_s", "port", "patience_s", "retry_share"),
        )
        check_numbers(self.timeouts, "serving.timeouts")
        if self.port > 65535:
            raise InputError(f"serving: port={self.port} must be at most 65535; 0 takes any that is free")
        if self.call_log is not None and not (isinstance(self.call_log, str) and self.call_log):
            raise InputError(f"serving: call_log={self.call_log!r} must name a file; null = no log")
        for name, among in (("mode", MODES), ("tokenize", TOKENIZE)):
            if getattr(self, name) not in among:
                raise InputError(
                    f"serving: {name}={getattr(self, name)!r} is unknown (one of: {', '.join(among)})"
                )


@dataclass(frozen=True)
class Serving:
    """All that a gateway needs. `urls`, `keys` and `concurrency` have one entry an instance."""

    cluster: Cluster
    urls: tuple[str, ...]
    keys: tuple[str | None, ...] = field(repr=False, default=())
    concurrency: tuple[int, ...] = ()
    models: tuple[str, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    beliefs: Beliefs = field(default_factory=Beliefs)
    policy: str = "hexgen_flow"
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        n = len(self.cluster)
        if len(self.urls) != n:
            raise InputError(f"serving: {len(self.urls)} urls for {n} instances; there must be one each")
        object.__setattr__(self, "keys", tuple(self.keys) or (None,) * n)
        slots = tuple(self.concurrency) or tuple(spec.max_num_seqs for spec in self.cluster.instances)
        object.__setattr__(self, "concurrency", slots)


def load_serving(overrides: Mapping[str, Any]) -> Serving:
    """From `cluster=FILE` and overrides of conf/serving/gateway.yaml, as given on the command line."""
    values = dict(overrides)
    where = values.pop("cluster", None)
    if not isinstance(where, str):
        raise InputError(
            "serving: cluster is missing; give cluster=FILE, a cluster file whose instances have urls"
        )
    policy, view = values.pop("policy", None), values.pop("view", None)
    settings = read_settings(values)
    return read_cluster(Path(where), policy=policy or "hexgen_flow", view=view, settings=settings)


def read_settings(overrides: Mapping[str, Any]) -> Settings:
    """conf/serving/gateway.yaml with `overrides` (nested mappings) in its places."""
    path = conf_dir() / "serving" / "gateway.yaml"
    content = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(path), OmegaConf.create(dict(overrides))))
    parts = {}
    for name, kind in (("timeouts", Timeouts), ("coordinator", Options)):
        parts[name] = _make(kind, content.pop(name, {}), f"serving: {name}")
    return _make(Settings, content | parts, "serving")


def read_cluster(
    path: Path, *, policy: str = "hexgen_flow", view: str | None = None, settings: Settings | None = None
) -> Serving:
    """A cluster file. `view`: of the hardware profile; the file's own profile's, or silicon."""
    content = read_yaml(path)
    where = str(path)
    entries = content.get("instances")
    if not isinstance(entries, list) or not entries:
        raise InputError(
            f"{where}: instances must be a list such as [{{gpu: a100, url: 'http://host:8000'}}]"
        )
    urls, keys, slots, plain = [], [], [], []
    for i, entry in enumerate(entries):
        place = f"{where}: instances[{i}]"
        if not isinstance(entry, Mapping):
            raise InputError(f"{place} is {entry!r}; it must be a mapping with gpu and url")
        urls.append(_url(entry.get("url"), place))
        keys.append(_secret(entry.get("api_key_env"), f"{place}.api_key_env"))
        if entry.get("count", 1) != 1:
            raise InputError(f"{place}: count must be 1: every instance has a url of its own")
        slots.append(entry.get("concurrency", 0))
        if isinstance(slots[-1], bool) or not isinstance(slots[-1], int) or slots[-1] < 0:
            raise InputError(
                f"{place}: concurrency is {slots[-1]!r}; it must be a whole number of at least 1"
            )
        plain.append({k: v for k, v in entry.items() if k not in _OURS})
    if len(set(urls)) < len(urls):
        raise InputError(f"{where}: two instances have the same url; each is a server of its own")
    config = {k: v for k, v in content.items() if k not in _TOP} | {"instances": plain}
    if config.get("profile") is not None:
        config["profile"] = str((path.parent / str(config["profile"])).resolve())
        view = view or read_profile(config["profile"])["view"]
    try:
        cluster = load_cluster(config, view or "silicon")
    except InputError as error:
        raise InputError(str(error).replace("cluster config", where, 1)) from None
    models = content.get("models") or [content.get("model") or cluster.instances[0].model]
    if not isinstance(models, list) or not all(isinstance(m, str) and m for m in models):
        raise InputError(
            f"{where}: models is {models!r}; it must be a list of the names that clients ask for"
        )
    return Serving(
        cluster=cluster,
        urls=tuple(urls),
        keys=tuple(keys),
        concurrency=tuple(s or spec.max_num_seqs for s, spec in zip(slots, cluster.instances, strict=True)),
        models=tuple(models),
        tenants=_tenants(content.get("tenants") or [], where),
        beliefs=_beliefs(content.get("workflows") or {}, where),
        policy=policy,
        settings=settings or Settings(),
    )


def _tenants(entries: Any, where: str) -> tuple[Tenant, ...]:
    if not isinstance(entries, list):
        raise InputError(
            f"{where}: tenants is {entries!r}; it must be a list such as [{{name: gold, key_env: GOLD}}]"
        )
    found = []
    for i, entry in enumerate(entries):
        place = f"{where}: tenants[{i}]"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise InputError(f"{place} is {entry!r}; it must be a mapping with name and, optionally, key_env")
        _known(entry, ("name", "key_env", "max_under_way"), place)
        most = entry.get("max_under_way", 0)
        if isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise InputError(f"{place}: max_under_way is {most!r}; it must be a whole number, 0 for no limit")
        found.append(Tenant(entry["name"], _secret(entry.get("key_env"), f"{place}.key_env"), most))
    for values, what in (([t.name for t in found], "names"), ([t.key for t in found if t.key], "keys")):
        if len(set(values)) < len(values):
            raise InputError(f"{where}: two tenants have equal {what}; they must differ")
    if 0 < sum(t.key is not None for t in found) < len(found):
        raise InputError(f"{where}: some tenants have a key_env and some not; give all of them one, or none")
    return tuple(found)


def _beliefs(workflows: Any, where: str) -> Beliefs:
    stages, plans = {}, {}
    if not isinstance(workflows, Mapping):
        raise InputError(f"{where}: workflows is {workflows!r}; it must map names to {{stages: ...}}")
    for workflow, content in workflows.items():
        place = f"{where}: workflows.{workflow}"
        if not isinstance(content, Mapping) or not isinstance(content.get("stages"), Mapping):
            raise InputError(f"{place} must be a mapping with stages")
        _known(content, ("stages", "remaining"), place)
        for stage, lengths in content["stages"].items():
            at = f"{place}.stages.{stage}"
            if not isinstance(lengths, Mapping):
                raise InputError(
                    f"{at} is {lengths!r}; it must be a mapping with input_tokens and output_tokens"
                )
            names = ("input_tokens", "output_tokens", "cached_tokens")
            _known(lengths, names, at)
            numbers = [lengths.get(n, 0 if n == "cached_tokens" else None) for n in names]
            for name, value in zip(names, numbers, strict=True):
                least = 0 if name == "cached_tokens" else 1
                if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
                    raise InputError(f"{at}: {name} is {value!r}; it must be a number of at least {least}")
            stages[f"{workflow}/{stage}"] = tuple(map(float, numbers))
        plans[workflow] = content.get("remaining") or {}
    return Beliefs(stages, _remaining(plans, list(stages), where))


def _remaining(plans: Mapping[str, Any], stages: list[str], where: str) -> dict[Place, dict[int, float]]:
    """What follows each place, as `Beliefs.remaining` has it, from `remaining` of each workflow."""
    index = {name: i for i, name in enumerate(stages)}
    remaining = {}
    for workflow, plan in plans.items():
        place = f"{where}: workflows.{workflow}.remaining"
        if not isinstance(plan, Mapping) or not all(isinstance(steps, list) for steps in plan.values()):
            raise InputError(f"{place} must map stages to lists such as [{{revise: 1.8}}]")
        for stage, steps in plan.items():
            for occurrence, after in enumerate(steps):
                at = f"{place}.{stage}[{occurrence}]"
                if not isinstance(after, Mapping):
                    raise InputError(f"{at} is {after!r}; it must map stages to their number of steps")
                for name, number in {stage: 0.0, **after}.items():
                    if f"{workflow}/{name}" not in index:
                        raise InputError(f"{at}: stage {name!r} is not among workflows.{workflow}.stages")
                    if isinstance(number, bool) or not isinstance(number, int | float) or not number >= 0:
                        raise InputError(f"{at}: {name} is {number!r}; it must be a number, 0 or more")
                remaining[index[f"{workflow}/{stage}"], occurrence] = {
                    index[f"{workflow}/{name}"]: float(number) for name, number in after.items()
                }
    return remaining


def _url(value: Any, place: str) -> str:
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
        fine = (
            parts is not None
            and parts.scheme in ("http", "https")
            and parts.hostname
            and not parts.query
            and value.isprintable()
            and " " not in value
            and parts.port != 0  # raises ValueError for what is no port
        )
    except ValueError:
        fine = False
    if not fine:
        raise InputError(f"{place}: url is {value!r}; it must be the server's, such as http://10.0.0.1:8000")
    if "@" in parts.netloc:
        raise InputError(f"{place}: url holds a password; a server's key is named by api_key_env")
    return value.rstrip("/").removesuffix("/v1")


def _secret(variable: Any, place: str) -> str | None:
    if variable is None:
        return None
    if not isinstance(variable, str) or not os.environ.get(variable):
        raise InputError(f"{place}: {variable!r} must name an environment variable that holds the key")
    key = os.environ[variable].strip()
    if not key or not key.isascii() or not key.isprintable():
        raise InputError(f"{place}: the key in {variable} must be printable ASCII, as it goes into a header")
    return key


def _known(content: Mapping, names: tuple[str, ...], place: str) -> None:
    for name in content:
        if name not in names:
            raise InputError(f"{place}: field {name!r} is not known; the fields are {', '.join(names)}")


def _make(kind: type, content: Any, place: str):
    if not isinstance(content, Mapping):
        raise InputError(f"{place} is {content!r}; it must be a mapping of field names to values")
    _known(content, tuple(f.name for f in fields(kind)), place)
    hints = get_type_hints(kind)
    for name, value in content.items():
        want = hints[name]  # numbers are checked by the class itself
        if want is float and isinstance(value, int) and not isinstance(value, bool):
            content = {**content, name: float(value)}
        elif want in (str, bool) and not isinstance(value, want):
            raise InputError(
                f"{place}: {name}={value!r} must be {'text' if want is str else 'true or false'}"
            )
    return kind(**content)


def parse_overrides(argv: list[str]) -> dict[str, Any]:
    """`name=value` arguments as nested mappings."""
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if not equals or not name:
            raise InputError(f"{argument!r} is not of the form name=value, such as cluster=my_cluster.yaml")
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist(argv))
    except (OmegaConfBaseException, ValueError) as error:
        raise InputError(f"arguments: {' '.join(str(error).split())}") from None
