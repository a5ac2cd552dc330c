"""What pytest-xdist's workers are told: a group is one piece of work, and no name in the lists has gone stale."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import in_parallel

HERE = Path(__file__).parents[1]


@pytest.mark.parametrize("start", dict.fromkeys([*in_parallel.GROUPS, *in_parallel.FIRST]))
def test_what_is_named_is_there(start: str) -> None:
    file, _, test = start.partition("::")
    assert (HERE / file).exists()
    assert not test or f"def {test}(" in (HERE / file).read_text(encoding="utf-8")


class Worker:
    """Stands for one of xdist's: what it is sent, as places in the list of all tests."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.sent: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_group_goes_to_one_worker(monkeypatch, request) -> None:
    monkeypatch.setattr("xdist.scheduler.loadscope.parse_tx_spec_config", lambda config: ["popen"] * 2)
    config = request.config
    monkeypatch.setattr(config.option, "dist", "loadgroup")
    monkeypatch.setattr(config.option, "loadscopereorder", True, raising=False)
    monkeypatch.setattr(in_parallel, "GROUPS", {"a.py": "servers", "b.py::test_1": "servers"})
    ids = ["a.py::test_1", "c.py::test_1", "a.py::test_2", "b.py::test_1", "b.py::test_2", "c.py::test_2"]
    scheduler = in_parallel.scheduler(config, None)
    assert isinstance(scheduler, LoadScopeScheduling)
    workers = [Worker("gw0"), Worker("gw1")]
    for worker in workers:
        scheduler.add_node(worker)
    for worker in workers:
        scheduler.add_node_collection(worker, ids)
    scheduler.schedule()
    assert workers[0].sent == [0, 2, 3]
    assert workers[1].sent[:2] == [1, 4]

    monkeypatch.setattr(config.option, "dist", "load")
    assert in_parallel.scheduler(config, None) is None
