"""Makes `policy=[vllm,eft]` compose into `policy.vllm` and `policy.eft`.

Hydra would merge several options of one group into one node, the last winning, unless each file opened with a line
`# @package policy.NAME`. A policy file should hold nothing but the policy, so that line is supplied here: the group
`policy` is read by a config source of our own, ahead of the directories that Hydra searches.
"""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

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


class _PoliciesFirst(SearchPathPlugin):
    config_dirs: tuple[Path, ...] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for directory in self.config_dirs:
            search_path.prepend(
                "hexrepro", f"policies://{directory}", anchor=SearchPathQuery(provider="main")
            )


def register(*config_dirs: Path) -> None:
    """Take policies from these config directories; of two with one name, the first directory's."""
    _PoliciesFirst.config_dirs = tuple(directory.absolute() for directory in reversed(config_dirs))
    Plugins.instance().register(_PolicySource)
    Plugins.instance().register(_PoliciesFirst)
