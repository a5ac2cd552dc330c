"""Shared by all tests: no test writes to the user's cache, a stand-in for the simulator where it does not matter, real vLLM
servers, and how pytest-xdist's workers share the work."""

from __future__ import annotations

import os
import signal

import hypothesis
import numpy as np
import pytest

from hexrepro.simulator.results import INSTANCE_COUNTS
from tests import in_parallel

# The same examples every time; HYPOTHESIS_PROFILE=search looks for others. An example that compiles, or waits for a busy core,
# is no failure.
hypothesis.settings.register_profile("hexrepro", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "hexrepro"))


# A shell's background job (`pytest &`, nohup) begins with Ctrl-C ignored, and so would all that the tests start and interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config) -> int | None:
    """`-n auto`: one more than there are cores, since many tests wait: for servers, for processes, for time to pass."""
    return (os.cpu_count() or 1) + 1 if config.option.numprocesses == "auto" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return in_parallel.scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=in_parallel.place)


@pytest.fixture(scope="session", autouse=True)
def kernels_are_compiled_once(tmp_path_factory):
    """By one of pytest-xdist's workers; others that need them wait for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with in_parallel.one_compiles(tmp_path_factory.getbasetemp().parent):  # which all workers share
        yield


@pytest.fixture(scope="session")
def vllm_servers(tmp_path_factory):
    """Real servers by name, see `tests/real_vllm.py`. They end with the session; idle, they take no CPU."""
    from tests import real_vllm

    with real_vllm.servers(tmp_path_factory.mktemp("vllm")) as running:
        yield running


@pytest.fixture
def cell_cache(tmp_path, monkeypatch):
    """An empty cache of finished cells; compiled code keeps its own place."""
    import hexrepro.compiled  # noqa: F401 -- has chosen the place of the compiled code before the variable changes

    directory = tmp_path / "cache"
    monkeypatch.setenv("HEXREPRO_CACHE", str(directory))
    return directory / "cells"


@pytest.fixture
def no_sweep(monkeypatch):
    """Hydra composes every config twice, the first time only to learn whether it is a sweep. Here it is told that it is none,
    which halves what a quick run takes. Sweeps, and both compositions, are tested in tests/experiments/test_studies.py."""
    from hydra._internal.hydra import Hydra

    monkeypatch.setattr(Hydra, "get_mode", lambda *args, **kwargs: None)


@pytest.fixture
def fake_simulator(monkeypatch):
    """Replaces `simulate_grid` by a formula: a query takes 10 s, and 10 s more for each unit of |alpha - 0.3|.

    Returns the list of its calls as (policy, runs), in order.
    """
    from hexrepro import simulator
    from hexrepro.simulator import GridResult

    calls = []

    def simulate_grid(
        workload, cluster, policy, *, arrivals_s, base_slo, dispatch_params=None, detail=False, **_options
    ) -> GridResult:
        runs, queries = arrivals_s.shape
        calls.append((policy.name, runs))
        alpha = policy.dispatch_vector if dispatch_params is None else dispatch_params
        alpha = np.broadcast_to(np.atleast_2d(alpha), (runs, alpha.shape[-1]))
        slow = 10.0 * np.abs(alpha[:, :1] - 0.3) if alpha.shape[1] else 5.0
        finish_s = arrivals_s + 10.0 + slow + np.arange(queries) * 0.01
        per_call = np.zeros((runs, workload.n_calls if detail else 0))
        per_instance = np.ones((runs, len(cluster.instances)))
        times = ("release_s", "admit_s", "first_token_s", "call_finish_s", "budget_s", "estimate_s")
        counts = ("instance", "call_cached_tokens", "call_preemptions")
        return GridResult(
            arrival_s=arrivals_s,
            finish_s=finish_s,
            slo_s=np.broadcast_to(base_slo * workload.slo_scale, finish_s.shape),
            busy_s=per_instance,
            **dict.fromkeys(INSTANCE_COUNTS, per_instance),
            **dict.fromkeys(times, per_call),
            **dict.fromkeys(counts, per_call.astype(np.int32)),
        )

    monkeypatch.setattr(simulator, "simulate_grid", simulate_grid)
    return calls
