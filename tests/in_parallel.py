"""How pytest-xdist's workers share the tests: what starts servers stays in one worker, and what takes long begins early.

xdist's own `--dist loadgroup` does nothing with pytest 9.2 (pytest-xdist issue 1386): it marks groups in node IDs, which can't
be changed any more. Here the beginning of a test's ID says to which group it belongs, so nothing has to be marked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Tests that run in one worker, one after the other: what they share takes long to start, or the machine is too small for two.
GROUPS = {
    "tests/serving/test_gateway_vllm.py": "vllm",
    "tests/text2sql/test_real_vllm.py": "vllm",
    "tests/validation/test_real_vllm.py": "vllm",
    "tests/validation/test_experiment.py::test_real_server": "vllm",
    "tests/vllm/test_scheduler.py": "vllm",
    "tests/validation/test_profile_endpoint.py": "profile",
}
# What begins first, in this order; the rest follows as collected. The second compiles the simulator's kernels, which takes
# 20 s; those behind it keep other workers busy without them.
FIRST = (
    *(start for start, group in GROUPS.items() if group == "vllm"),
    "tests/experiments/test_compare.py::test_the_main_job_shrunk",
    "tests/validation/test_profile_endpoint.py",
    "tests/cluster/",
    "tests/workload/",
    "tests/validation/test_experiment.py",
    "tests/experiments/test_alpha_online.py",
    "tests/experiments/test_elsewhere.py",
    "notebooks/",
)


def place(item: pytest.Item) -> int:
    """Where a test stands in the order of all."""
    return next((i for i, start in enumerate(FIRST) if item.nodeid.startswith(start)), len(FIRST))


def group(node_id: str) -> str:
    """What is not in a group is one of its own."""
    return next((group for start, group in GROUPS.items() if node_id.startswith(start)), node_id)


def scheduler(config: pytest.Config, log):
    """xdist's scheduler by group, in the order of collection; None where the user chose another way with --dist."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # else groups with many tests go first
    return ByGroup(config, log)


@contextmanager
def one_compiles(directory: Path) -> Iterator[None]:
    """While this lasts, of all processes that share `directory` one at a time compiles a kernel of the simulator, and the next
    finds it in the cache."""
    try:
        import fcntl
    except ImportError:  # Windows: each compiles
        yield
        return
    from numba.core.dispatcher import Dispatcher

    compile_one, inside = Dispatcher.compile, threading.local()

    def compile_alone(self, signature):
        if getattr(inside, "compiling", False):  # what the kernel calls
            return compile_one(self, signature)
        inside.compiling = True
        try:
            if not self.py_func.__module__.startswith("hexrepro.simulator."):
                return compile_one(self, signature)
            with (directory / "compiling").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                return compile_one(self, signature)
        finally:
            inside.compiling = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "compile", compile_alone)
        yield
