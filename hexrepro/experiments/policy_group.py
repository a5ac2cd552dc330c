"""Makes `policy=[vllm,eft]` compose into `policy.vllm` and `policy.eft`.

Hydra would merge several options of one group into one node, the last winning, unless each file opened with a line
`# @package policy.NAME`. A policy file should hold nothing but the policy, so that line is supplied here: the group
`policy` is read by a config source of our own, ahead of the directories that Hydra searches. Behind them stand the policies
that installed packages offer.
"""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from hexrepro.installed import installed_policies

GROUP = "policy"


class _PolicySource(ConfigSource):
    """The YAML files of DIR/policy, each in a package of its own name."""

    @staticmethod
    def scheme() -> str:
        return "policies"

    def _file(self, config_path: str) -> Path:
        return Path(self.path) / self._normalize_file_name(config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._file(config_path)
        header = {"package": f"{GROUP}.{file.stem}"}
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", OmegaConf.load(file), header)

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path == GROUP

    def is_config(self, config_path: str) -> bool:
        return config_path.startswith(f"{GROUP}/") and self._file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path != GROUP or results_filter == ObjectType.GROUP:
            return []
        return sorted(file.stem for file in (Path(self.path) / GROUP).glob("*.yaml"))


class _InstalledSource(ConfigSource):
    """The policies of installed packages; a package is imported when its policy is chosen."""

    @staticmethod
    def scheme() -> str:
        return "installed-policies"

    def load_config(self, config_path: str) -> ConfigResult:
        from hexrepro.scheduling.policy import fields_of, load_installed

        name = config_path.removeprefix(f"{GROUP}/").removesuffix(".yaml")
        content = OmegaConf.create(fields_of(load_installed(name)))
        header = {"package": f"{GROUP}.{name}"}
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", content, header)

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path == GROUP

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return group == GROUP and name in installed_policies()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path != GROUP or results_filter == ObjectType.GROUP:
            return []
        return list(installed_policies())


class _PoliciesFirst(SearchPathPlugin):
    config_dirs: tuple[Path, ...] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for directory in self.config_dirs:
            search_path.prepend(
                "hexrepro", f"policies://{directory}", anchor=SearchPathQuery(provider="main")
            )
        search_path.append("hexrepro-installed", f"{_InstalledSource.scheme()}://entry points")


def register(*config_dirs: Path) -> None:
    """Take policies from these config directories; of two with one name, the first directory's."""
    _PoliciesFirst.config_dirs = tuple(directory.absolute() for directory in reversed(config_dirs))
    Plugins.instance().register(_PolicySource)
    Plugins.instance().register(_InstalledSource)
    Plugins.instance().register(_PoliciesFirst)
