"""Policies of an installed package: found by their entry points, used by name everywhere, compiled with what they use."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hexrepro import cli
from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.installed import GROUP
from hexrepro.scheduling import Policy, load_policy, policy_names
from hexrepro.scheduling.__main__ import main
from hexrepro.scheduling.policy import fields_of, policy_sources
from hexrepro.scheduling.sources import digest
from hexrepro.serving.coordinator import Coordinator
from hexrepro.simulator import simulate
from tests.oracle import Oracle, OracleInstance, first_come, solo_latency
from tests.strategies import make_instance, make_workload

EXAMPLE = Path(__file__).parents[1] / "example_policies"


def install(place: Path, entries: dict[str, str], name: str = "their-policies", version: str = "1.2") -> None:
    """What pip leaves of a package's metadata."""
    info = place / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{key} = {value}\n" for key, value in entries.items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """A directory of installed packages; its modules are forgotten afterwards."""
    place = tmp_path / "site"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))
    before = set(sys.modules)
    yield place
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("their_policies", "broken"):
            del sys.modules[name]


@pytest.fixture
def installed(site) -> Path:
    """The example package, as pip would install it."""
    shutil.copytree(EXAMPLE / "their_policies", site / "their_policies")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(site, project["entry-points"][GROUP], project["name"], project["version"])
    return site


SPEEDS = (1.0, 2.0, 4.0)  # seconds of a step on each of three instances
WORKLOAD = make_workload(
    [
        dict(arrival_s=i / 2, calls=[dict(input_tokens=10, output_tokens=5), dict(input_tokens=20, output_tokens=3, after=[0])])
        for i in range(12)
    ]
)  # fmt: skip
CLUSTER = Cluster("three", tuple(make_instance(f"i{m}", (s, 0, 0, 0, 0), 1000) for m, s in enumerate(SPEEDS)))


def test_by_name(installed) -> None:
    lean, patient = load_policy("lean"), load_policy("patient")
    assert (lean.dispatch, lean.queue, patient.queue) == (
        "their_policies.rules:fewest_calls",
        "urgency",
        "fcfs",
    )
    assert {"lean", "patient", "vllm"} <= set(policy_names())
    assert policy_sources()["lean"] == "their-policies 1.2"
    assert vars(load_policy(fields_of(lean))) == vars(lean)


def test_it_decides_as_a_twin_of_it_in_plain_python(installed) -> None:
    """The whole run, against the step-by-step oracle under a rule written anew."""

    def twin(call: int, oracle: Oracle) -> int:
        w = oracle.workload
        tokens = (
            5 if w.input_tokens[call] == 10 else 3
        )  # the median length: every call of a prompt's length has it

        def cost(i: int) -> float:
            waiting, running = oracle.n_calls_at(i)
            return (waiting + running) * solo_latency(
                oracle.instances[i].spec, int(w.input_tokens[call]), 0, tokens
            )

        return min(range(3), key=lambda i: (cost(i), i))

    stages = make_workload(
        [
            dict(
                arrival_s=i / 2,
                calls=[
                    dict(input_tokens=10, output_tokens=5, stage=0),
                    dict(input_tokens=20, output_tokens=3, stage=1, after=[0]),
                ],
            )
            for i in range(12)
        ]
    )
    expected = Oracle(
        stages, [OracleInstance.from_spec(i) for i in CLUSTER.instances], twin, first_come
    ).run()
    result = simulate(stages, CLUSTER, "patient", base_slo=30.0)
    assert result.instance.tolist() == expected.instance
    assert result.call_finish_s.tolist() == expected.finish_s


def test_in_an_experiment(installed, tmp_path, monkeypatch, cell_cache, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [
        "experiment=hetero1",
        "policy=[lean,patient]",
        "workload=trace1",
        "workload.n_queries=4",
        "seeds=2",
    ]
    assert (
        cli.main([*argv, "profile=silicon", "workload.rate_qps=1", "figures=false", "hydra.run.dir=run"]) == 0
    )
    assert set(pd.read_csv("run/summary.csv").policy) == {"vllm", "lean", "patient"}
    capsys.readouterr()
    assert cli.main(["experiment=hetero1", "policy=patiently"]) == 2


def test_in_the_gateway(installed) -> None:
    """The coordinator, which decides for the gateway, sends to the instance with the fewest calls."""
    coordinator = Coordinator(CLUSTER, "lean")
    assert coordinator.policy.name == "lean"
    coordinator.views["running"] = [1, 0, 1]
    rule = coordinator.policy.dispatch_rule
    call = np.zeros(1, rule.signature().args[0].dtype)[0]
    assert rule(call, np.ones(3), coordinator.views, coordinator.policy.dispatch_vector) == 1


def test_in_the_lists(installed, capsys) -> None:
    assert main(["list"]) == 0
    assert "lean" in (out := capsys.readouterr().out)
    assert "their-policies 1.2" in out
    assert cli.main(["--help"]) == 0
    assert "  lean         of their-policies 1.2" in capsys.readouterr().out
    assert "their_policies" not in sys.modules  # a list imports no package


def test_a_helper_that_is_edited_is_compiled_anew(installed) -> None:
    """The file next door: neither compiled code nor cached results of the old one are taken for the new one's."""
    before = load_policy("patient").dispatch_rule
    old = digest(before.function)
    assert before(*moment()) == 1
    helpers = installed / "their_policies" / "helpers.py"
    helpers.write_text(
        helpers.read_text().replace("instance.running + instance.waiting", "-instance.running")
    )
    for name in [n for n in sys.modules if n.split(".")[0] == "their_policies"]:
        del sys.modules[name]
    after = load_policy("patient").dispatch_rule
    assert digest(after.function) != old
    assert after(*moment()) == 2


def moment():
    """A call, its times on three instances that run 2, 1 and 3 calls, those, and the parameters."""
    policy = Policy("p", "round_robin", "fcfs")
    call = np.zeros(1, policy.dispatch_rule.signature().args[0].dtype)[0]
    views = Coordinator(CLUSTER, policy).views
    views["running"] = [2, 1, 3]
    return call, np.ones(3), views, np.ones(1)


def test_a_name_that_is_ours_stays_ours(site) -> None:
    install(site, {"vllm": "broken:NOTHING"})
    assert load_policy("vllm").dispatch == "round_robin"
    assert policy_sources()["vllm"] == "built in"


BROKEN = {
    "a module that is not there": ("mine = broken:MINE", "", ("broken:MINE", "MINE")),
    "a module": ("mine = broken", "", ("is a module", "a Policy, a mapping")),
    "a rule alone": ("mine = broken:late", "from hexrepro.scheduling.queues import fcfs as late", ("is a Rule",)),
    "another name": (
        "mine = broken:P",
        "P = dict(name='yours', dispatch='round_robin', queue='fcfs')",
        ("its name is yours", "the entry point's, mine"),
    ),
    "an unknown rule": ("mine = broken:P", "P = dict(name='mine', dispatch='x', queue='fcfs')", ("rule 'x' is unknown",)),
    "a file that is gone": ("mine = broken:P", "P = '/nowhere/p.yaml'", ("/nowhere/p.yaml", "no such file")),
    "code that raises": ("mine = broken:P", "1 / 0", ("their-policies 1.2", "ZeroDivisionError", "division by zero")),
}  # fmt: skip


@pytest.mark.parametrize(("entry", "source", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_package_is_named(entry: str, source: str, words: tuple[str, ...], site, capsys) -> None:
    name, _, value = entry.partition(" = ")
    install(site, {name: value})
    (site / "broken.py").write_text(source + "\n")
    with pytest.raises(InputError) as error:
        load_policy(name)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)
    assert (
        cli.main(["experiment=hetero1", f"policy={name}", "hydra.run.dir=run"]) == 2
    )  # as told at a terminal
    assert capsys.readouterr().err.count("\n") == 1


def test_two_packages_with_one_name(site) -> None:
    install(site, {"mine": "broken:P"})
    install(site, {"mine": "broken:P"}, name="other-policies", version="3")
    with pytest.raises(
        InputError, match=r"their-policies 1.2 and other-policies 3|other-policies 3 and their-policies 1.2"
    ):
        load_policy("mine")
