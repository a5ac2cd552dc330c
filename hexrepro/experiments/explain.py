"""Hydra's and OmegaConf's errors in one line that says what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hexrepro.paths import conf_dir


def suggest(word: str, options: Iterable[str]) -> str:
    """'; did you mean X? (one of: ...)' for the end of a message."""
    options = sorted(str(o) for o in options if not str(o).startswith("_"))
    near = difflib.get_close_matches(str(word), options, 2, 0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{hint} (one of: {', '.join(options)})"


def explain(error: Exception, config_dirs: Sequence[Path] = ()) -> str | None:
    """One line for the user; None when the error is not of the user's making."""
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {error.override!r}: write NAME=VALUE (quote what the shell would take apart)"
    if isinstance(error, MissingConfigException):
        return _missing_config(error, config_dirs)
    if isinstance(error, HydraException):
        return _composition(str(error), error.__cause__)
    if isinstance(error, OmegaConfBaseException):
        return _value(error)
    if isinstance(error, OSError):
        where = error.filename or "the run directory"
        return f"cannot write the run directory: {where}: {error.strerror}; hydra.run.dir=DIR chooses another"
    if isinstance(error, ValueError) and error.__traceback__ and _raised_in_hydra(error):
        return _flat(str(error))
    return None


def _missing_config(error: MissingConfigException, config_dirs: Sequence[Path]) -> str:
    missing = error.missing_cfg_file or re.search(r"Could not (?:load|find) '([^']*)'", str(error))
    group, _, name = str(missing if isinstance(missing, str) else missing and missing[1]).rpartition("/")
    options = {file.stem for directory in config_dirs for file in (directory / group).glob("*.yaml")}
    if group and options:
        return f"{group}={name} is unknown{suggest(name, options)}"
    return _flat(str(error))


def _composition(message: str, cause: BaseException | None) -> str:
    unknown = re.match(r"Could not override '([^']*)'", message)
    if unknown:
        key = unknown[1].split("@")[0]
        value_error = isinstance(cause, OmegaConfBaseException) and "is not in struct" not in str(cause)
        if value_error and "No match in the defaults" not in message:
            return f"{key}: {_flat(str(cause))}"
        return f"{key} is no option{suggest_key(key)}"
    if message.startswith("You must specify"):
        group = re.search(r"'([^']*)'", message)[1]
        return f"{group}=NAME is missing (one of: {', '.join(_listed(message))})"
    merging = re.match(r"Error merging override (\S+)", message)
    if merging:
        return f"{merging[1]}: {_flat(str(cause or message))}"
    return _flat(message)


def _value(error: OmegaConfBaseException) -> str:
    key = getattr(error, "full_key", None)
    message = _flat(str(error).split("full_key:")[0])
    if message.startswith("Missing mandatory value"):
        return f"{key} has no value; give one: {key}=VALUE"
    return f"{key}: {message}" if key and key not in message else message


def suggest_key(key: str) -> str:
    """Near matches among all keys of the default config."""
    keys = list(_known_keys())
    near = difflib.get_close_matches(key, keys, 3, 0.6)
    if not near:  # the right name in the wrong place, or the other way round
        last = key.rpartition(".")[2]
        near = [k for k in keys if k.rpartition(".")[2] == last][:3]
    top = sorted({k.split(".")[0] for k in keys} | {"experiment"})
    return (
        f"; did you mean {' or '.join(near)}?"
        if near
        else f" (there are: {', '.join(top)}; +{key}=... would add it)"
    )


def _known_keys() -> Iterable[str]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        first = min(f.stem for f in (conf_dir() / "experiment").glob("*.yaml"))
        return _flatten(compose("config", overrides=[f"experiment={first}"]))


def _flatten(cfg: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for key in cfg:
        keys.append(f"{prefix}{key}")
        node = cfg._get_node(key)
        if OmegaConf.is_dict(node):
            keys += _flatten(node, f"{prefix}{key}.")
    return keys


def _listed(message: str) -> list[str]:
    return [line.strip() for line in message.splitlines() if line.startswith("\t") and line.strip()[0] != "_"]


def _flat(message: str) -> str:
    """On one line, without Hydra's advice to look elsewhere."""
    message = re.sub(r"See https?://\S+.*", "", message)
    return " ".join(message.split()).strip()


def _raised_in_hydra(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return ".".join(trace.tb_frame.f_globals.get("__name__", "").split(".")[:1]) in ("hydra", "omegaconf")
