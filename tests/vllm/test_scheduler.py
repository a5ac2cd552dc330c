"""The simulator against vLLM's own scheduler, in virtual time.

vLLM runs in a process of its own, by the interpreter that HEXREPRO_VLLM_PYTHON names (or by this one, when it
has vLLM):

    HEXREPRO_VLLM_PYTHON=path/to/python pytest -m vllm

The oracle must agree pass by pass: which calls got how many tokens, in which order, who was preempted, when
it began and ended. The compiled engine must agree call by call.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.oracle import Oracle, OracleInstance, only_instance
from tests.strategies import make_instance, make_workload
from tests.vllm.scenarios import drawn_all, named

pytestmark = pytest.mark.vllm

N_DRAWN = 300
SCENARIOS = {scenario["name"]: scenario for scenario in [*named(), *drawn_all(N_DRAWN)]}
PER_TEST = 25  # drawn scenarios per test


def vllm_python() -> str | None:
    named_python = os.environ.get("HEXREPRO_VLLM_PYTHON")
    if named_python:
        return named_python
    spec = importlib.util.find_spec("vllm")
    # a bare folder is not vLLM
    return sys.executable if spec is not None and spec.origin is not None else None


@pytest.fixture(scope="module")
def vllm_says() -> dict[str, dict]:
    """Outcomes by scenario name, all from one run of the driver."""
    python = vllm_python()
    if python is None:
        pytest.skip("no vLLM: set HEXREPRO_VLLM_PYTHON to a Python that has it")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(Path(__file__).with_name("scheduler_driver.py"))],
        input=json.dumps(list(SCENARIOS.values())),
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {outcome["name"]: outcome for outcome in json.loads(done.stdout)}


# --------------------------------------------------------------------------- the two that are held against it


def workload_of(scenario: dict, slo_scale: Callable[[int, dict], float] = lambda i, call: 1.0):
    """Each call as a query of its own; the i-th query is the i-th call."""
    queries = []
    for i, call in enumerate(scenario["calls"]):
        queries.append(dict(arrival_s=call["arrival_s"], slo_scale=slo_scale(i, call), calls=[call]))
    return make_workload(queries, name=scenario["name"])


def instance_of(scenario: dict):
    s = scenario
    return make_instance(
        "one", s["step_s"], s["kv_blocks"], s["block_size"], s["max_num_seqs"], s["max_num_batched_tokens"]
    )


def oracle_says(scenario: dict, exact: bool = False) -> dict:
    """The driver's format. The queue key is the priority, under FCFS there is none."""
    calls = scenario["calls"]
    fcfs = scenario["scheduling"] == "fcfs"
    result = Oracle(
        workload_of(scenario),
        [OracleInstance.from_spec(instance_of(scenario))],
        only_instance,
        key=lambda call, instance, oracle: 0 if fcfs else calls[call]["priority"],
        prefix_caching=scenario["prefix_caching"],
        exact=exact,
    ).run()
    name = [call["id"] for call in calls]
    return dict(
        name=scenario["name"],
        passes=[
            [p.start_s, p.end_s, [[name[c], n] for c, n in p.tokens], sorted(name[c] for c in p.preempted)]
            for p in result.passes
        ],
        calls={
            name[c]: dict(
                admit_s=result.admit_s[c],
                first_token_s=result.first_token_s[c],
                finish_s=result.finish_s[c],
                cached_tokens=result.cached_tokens[c],
                preemptions=result.preemptions[c],
            )
            for c in range(len(calls))
        },
    )


def engine_says(scenario: dict) -> dict:
    """The compiled engine: FCFS by the policy `vllm`; priorities by the policy `rr_pq` and SLOs that put its
    keys in their order.

    A call that is a whole query has the urgency key arrival + SLO - t_comp. All are of one stage, so t_comp
    is one constant, and SLO = 1024 s * (its rank by priority, then arrival) - arrival makes the key follow
    the rank.
    """
    simulator = pytest.importorskip("hexrepro.simulator")
    scheduling = pytest.importorskip("hexrepro.scheduling")
    from hexrepro.cluster.types import Cluster

    if not hasattr(simulator, "simulate"):
        pytest.skip("hexrepro.simulator.simulate does not exist yet")
    calls = scenario["calls"]
    by_priority = sorted(range(len(calls)), key=lambda i: (calls[i]["priority"], i))
    rank = {i: place + 1 for place, i in enumerate(by_priority)}
    result = simulator.simulate(
        workload_of(scenario, lambda i, call: 1024.0 * rank[i] - call["arrival_s"]),
        Cluster("one", (instance_of(scenario),)),
        scheduling.load_policy("vllm" if scenario["scheduling"] == "fcfs" else "rr_pq"),
        base_slo=1.0,
        engine=simulator.EngineOptions(batching="chunked", prefix_caching=scenario["prefix_caching"]),
    )
    return dict(
        name=scenario["name"],
        calls={
            call["id"]: dict(
                admit_s=float(result.admit_s[i]),
                first_token_s=float(result.first_token_s[i]),
                finish_s=float(result.call_finish_s[i]),
                cached_tokens=int(result.call_cached_tokens[i]),
                preemptions=int(result.call_preemptions[i]),
            )
            for i, call in enumerate(calls)
        },
    )


IMPLEMENTATIONS = {"oracle": oracle_says, "engine": engine_says}


def compare(ours: dict, vllms: dict) -> None:
    """Equal to the bit: all times are sums of dyadic rationals. The first pass that differs says most, so it
    comes first.
    """
    if "passes" in ours:
        for i, (mine, theirs) in enumerate(zip(ours["passes"], vllms["passes"], strict=False)):
            assert mine == theirs, f"{ours['name']}, pass {i}: ours {mine}, vLLM's {theirs}"
        assert len(ours["passes"]) == len(vllms["passes"])
    for name, theirs in vllms["calls"].items():
        assert ours["calls"][name] == theirs, (
            f"{ours['name']}, call {name}: ours {ours['calls'][name]}, vLLM's {theirs}"
        )


# -------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("says", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [scenario["name"] for scenario in named()])
def test_named_scenario(vllm_says: dict[str, dict], says: Callable, name: str) -> None:
    compare(says(SCENARIOS[name]), vllm_says[name])


@pytest.mark.parametrize("says", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("first", range(0, N_DRAWN, PER_TEST))
def test_drawn_scenarios(vllm_says: dict[str, dict], says: Callable, first: int) -> None:
    for seed in range(first, first + PER_TEST):
        name = f"drawn {seed}"
        compare(says(SCENARIOS[name]), vllm_says[name])


def test_scenarios_provoke_what_they_are_for(vllm_says: dict[str, dict]) -> None:
    """vLLM itself must have preempted, hit, chunked and self-preempted, or agreement would mean little."""
    passes = [p for outcome in vllm_says.values() for p in outcome["passes"]]
    calls = [call for outcome in vllm_says.values() for call in outcome["calls"].values()]
    assert all(call["finish_s"] is not None for call in calls)
    assert sum(len(preempted) for *_, preempted in passes) > 200
    assert sum(not tokens for _, _, tokens, _ in passes) >= 3  # passes that scheduled nothing
    assert sum(call["cached_tokens"] > 0 for call in calls) > 300
    assert sum(call["preemptions"] >= 2 for call in calls) > 20
    pressed = [o for o in vllm_says.values() if any(call["preemptions"] for call in o["calls"].values())]
    assert {SCENARIOS[o["name"]]["scheduling"] for o in pressed} == {"fcfs", "priority"}
    assert {SCENARIOS[o["name"]]["prefix_caching"] for o in pressed} == {"off", "template", "full"}
    expected = {
        "a pass without tokens": lambda o: any(not tokens for _, _, tokens, _ in o["passes"]),
        "victim already scheduled": lambda o: o["calls"]["v"]["preemptions"] > 0,
        "hit within a step": lambda o: (
            len(o["passes"][0][2]) == 4 and o["calls"]["c3"]["cached_tokens"] == 32
        ),
        "slots are not preempted": lambda o: (
            o["calls"]["urgent"]["admit_s"] == o["calls"]["long"]["finish_s"]
        ),
        "context behind two templates": lambda o: (
            o["calls"]["c1"]["cached_tokens"] == 0 and o["calls"]["c3"]["cached_tokens"] == 64
        ),
        "all but one token cached": lambda o: (
            o["passes"][-4][2][0][1] == 2 and o["calls"]["b"]["cached_tokens"] == 64
        ),
    }
    for name, holds in expected.items():
        assert holds(vllm_says[name]), f"{name}: {vllm_says[name]}"
