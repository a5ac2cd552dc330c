"""Policies by name, by file, by mapping; rules of one's own; and mistakes, each answered in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import yaml

from hexrepro import compiled
from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.paths import conf_dir
from hexrepro.scheduling import Policy, load_policy, policy_names
from hexrepro.simulator import simulate
from tests.strategies import make_instance, make_workload

FILES = sorted((conf_dir() / "policy").glob("*.yaml"))


def run(policy, **options):
    calls = [dict(input_tokens=10, output_tokens=5), dict(input_tokens=20, output_tokens=3, after=[0])]
    workload = make_workload([dict(arrival_s=i / 2, calls=calls) for i in range(10)])
    cluster = Cluster("three", tuple(make_instance(f"i{m}", (1.0, 0, 0, 0, 0), 1000) for m in range(3)))
    return simulate(workload, cluster, policy, base_slo=30.0, **options)


def in_a_process(program: str, *arguments: str, cache: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run Python code in a fresh interpreter that keeps its compiled code in `cache`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {"HEXREPRO_CACHE": str(cache), "PYTHONPATH": str(compiled.PACKAGE.parent), **variables}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True
    )


# ------------------------------------------------------------------------------------------------------- by name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_policy_file_loads(path: Path) -> None:
    policy = load_policy(path.stem)
    content = yaml.safe_load(path.read_text())
    assert (policy.name, policy.dispatch, policy.queue) == (path.stem, content["dispatch"], content["queue"])
    assert vars(load_policy(path)) == vars(policy)
    assert vars(load_policy(content)) == vars(policy)
    assert load_policy(policy) is policy
    assert path.read_text().startswith("# ")  # what it is


def test_names() -> None:
    assert policy_names() == [path.stem for path in FILES]
    assert {"vllm", "ray", "vtc", "qlm", "llf", "rr_pq", "wb_fcfs", "hexgen_flow", "as_released"} <= set(
        policy_names()
    )


def test_ablations_differ_in_one_rule() -> None:
    """Queue alone, dispatch alone, both, neither."""
    both, queue, dispatch, neither = map(load_policy, ("hexgen_flow", "rr_pq", "wb_fcfs", "vllm"))
    assert (queue.dispatch, queue.queue) == (neither.dispatch, both.queue)
    assert (dispatch.dispatch, dispatch.queue) == (both.dispatch, neither.queue)
    assert dispatch.dispatch_params == both.dispatch_params


def test_parameters_go_to_the_rule_that_takes_them() -> None:
    policy = load_policy("hexgen_flow").with_params(alpha=0.25)
    assert policy.dispatch_vector.tolist() == [0.25, 1.0, 0.0]
    policy = Policy("x", "workload_balanced", "least_laxity").with_params(calls_per_query=4, beta=3)
    assert policy.dispatch_vector.tolist() == [0.5, 3.0, 0.0]
    assert policy.queue_vector.tolist() == [4.0]
    assert load_policy("hexgen_flow").dispatch_vector.tolist() == [
        0.5,
        1.0,
        0.0,
    ]  # the others are as they were


# ------------------------------------------------------------------------------------------------- rules of one's own

OWN_RULES = """
from hexrepro.scheduling.rules import dispatch_rule, queue_rule

@dispatch_rule(which=1.0)
def always(call, t_comp_s, instances, params):
    return int(params[0])

@queue_rule()
def last_first(call, params):
    return -call.now_s

@dispatch_rule()
def outside(call, t_comp_s, instances, params):
    return len(instances)

@dispatch_rule()
def negative(call, t_comp_s, instances, params):
    return -1

@queue_rule()
def nan(call, params):
    return call.now_s * 0.0 / 0.0

def undecorated(call, params):
    return 0.0

number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own_rules.py"
    path.write_text(OWN_RULES)
    return str(path)


def test_rules_from_a_file(own: str) -> None:
    policy = Policy("mine", f"{own}:always", f"{own}:last_first")
    assert set(run(policy).instance) == {1}
    assert set(run(policy.with_params(which=2)).instance) == {2}


def test_rules_from_a_file_named_in_a_yaml_file(own: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\ndispatch: '{own}:always'\nqueue: fcfs\ndispatch_params: {{which: 0}}\n")
    assert set(run(str(path)).instance) == {0}


def test_rules_from_a_relative_path(own: str, monkeypatch) -> None:
    monkeypatch.chdir(Path(own).parent)
    assert set(run(Policy("mine", "own_rules.py:always", "fcfs")).instance) == {1}


def test_two_files_of_one_name_are_two(own: str, tmp_path: Path) -> None:
    other = tmp_path / "other" / "own_rules.py"
    other.parent.mkdir()
    other.write_text(OWN_RULES.replace("which=1.0", "which=2.0"))
    assert set(run(Policy("mine", f"{own}:always", "fcfs")).instance) == {1}
    assert set(run(Policy("mine", f"{other}:always", "fcfs")).instance) == {2}


def test_an_edited_file_is_read_again(own: str) -> None:
    """As in a notebook: edit, run again."""
    assert set(run(Policy("mine", f"{own}:always", "fcfs")).instance) == {1}
    Path(own).write_text(OWN_RULES.replace("which=1.0", "which=2.0"))
    assert set(run(Policy("mine", f"{own}:always", "fcfs")).instance) == {2}


def test_rules_from_a_file_in_one_process_after_another(own: str, tmp_path: Path) -> None:
    """The second finds compiled code of the first in the cache."""
    program = f"""if True:
        from hexrepro.scheduling import Policy
        policy = Policy("mine", {own + ":always"!r}, {own + ":last_first"!r})
        assert policy.dispatch_rule.__wrapper_address__() and policy.queue_rule.__wrapper_address__()
    """
    for hash_seed in ("1", "2"):
        done = in_a_process(program, cache=tmp_path / "cache", PYTHONHASHSEED=hash_seed)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", [("python", "kernel"), ("kernel", "python")])
def test_a_rule_is_called_from_python_and_from_compiled_code(order: tuple[str, str], tmp_path: Path) -> None:
    """In either order, in one process, and in a second that finds both in the cache: the same key to the bit. In
    processes of their own, as compiled code of the one kind taken for the other ends in a crash.
    """
    program = """if True:
        import sys
        import numba
        import numba.experimental.function_type  # lets compiled code take a rule as an argument
        import numpy as np
        from hexrepro.scheduling.queues import least_laxity
        from hexrepro.scheduling.views import CALL
        call, params = np.zeros(1, CALL)[0], least_laxity.params()
        call["now_s"], call["slo_s"], call["t_comp_s"] = 100.0, 60.0, 7.0
        as_the_kernel_does = numba.njit(lambda rule, call, params: rule(call, params))
        for caller in sys.argv[1:]:
            key = least_laxity(call, params) if caller == "python" else as_the_kernel_does(least_laxity, call, params)
            assert key == 97.0, key
    """
    for _ in range(2):
        done = in_a_process(program, *order, cache=tmp_path / "cache")
        assert done.returncode == 0, done.stderr


def test_rules_from_a_module_and_typed_at_a_prompt(monkeypatch) -> None:
    """Code that has no file: there is no cache for it, and it works all the same."""
    module = types.ModuleType("typed_at_a_prompt")
    exec(OWN_RULES, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert set(run(Policy("mine", "typed_at_a_prompt:always", "typed_at_a_prompt:last_first")).instance) == {
        1
    }
    assert module.last_first(np.zeros(1, module.last_first.signature().args[0].dtype)[0], np.zeros(0)) == 0.0


# ---------------------------------------------------------------------------------------------------------- mistakes


def refused(action) -> str:
    with pytest.raises(InputError) as error:
        action()
    message = str(error.value)
    assert "\n" not in message
    return message


GOOD = dict(name="mine", dispatch="round_robin", queue="fcfs")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(dispatch="robin"), ("policy mine", "dispatch rule 'robin' is unknown", "round_robin")),
        (dict(dispatch="fcfs"), ("dispatch rule 'fcfs' is unknown",)),
        (dict(queue="njit"), ("queue rule 'njit' is unknown", "urgency")),
        (dict(queue="workload_balanced"), ("queue rule 'workload_balanced' is unknown",)),
        (dict(dispatch_params=dict(alpha=0.5)), ("round_robin", "unknown parameter alpha", "none")),
        (dict(dispatch="workload_balanced", dispatch_params=dict(alhpa=0.5)), ("alhpa", "alpha, beta, waiting_only")),
        (dict(dispatch="workload_balanced", dispatch_params=dict(alpha=float("nan"))), ("alpha must be a finite number",)),
        (dict(dispatch="workload_balanced", dispatch_params=dict(alpha=float("inf"))), ("alpha must be a finite number",)),
        (dict(dispatch="workload_balanced", dispatch_params=dict(alpha="0.5")), ("alpha must be a finite number", "'0.5'")),
        (dict(dispatch="workload_balanced", dispatch_params=dict(alpha=True)), ("alpha must be a finite number",)),
        (dict(dispatch="workload_balanced", dispatch_params=dict(alpha=[0.5])), ("alpha must be a finite number",)),
        (dict(queue="vtc", queue_params=dict(input_weight=None)), ("input_weight must be a finite number",)),
        (dict(queue_params=[1, 2]), ("queue_params",)),
        (dict(client="user"), ("client='user' is unknown", "query, tenant")),
        (dict(name=3), ("field name must be text",)),
        (dict(dispatch=None), ("field dispatch must be text",)),
        (dict(queues="fcfs"), ("unknown field 'queues'", "queue_params")),
        (dict(dispatch="no_such_module_at_all:rule"), ("no_such_module_at_all",)),
        (dict(dispatch="no/such/file.py:rule"), ("no/such/file.py",)),
        (dict(queue="hexrepro.scheduling.queues:urgencey"), ("has no 'urgencey'; did you mean urgency?",)),
        (dict(queue="hexrepro.scheduling.dispatch:round_robin"), ("round_robin", "not decorated with @queue_rule()")),
        (dict(dispatch=":rule"), ("policy mine",)),
        (dict(dispatch="..relative:rule"), ("policy mine",)),
    ],
)  # fmt: skip
def test_mistakes_in_a_policy(changes: dict, words: tuple[str, ...]) -> None:
    message = refused(lambda: load_policy(GOOD | changes))
    assert all(word in message for word in words), message


@pytest.mark.parametrize("function", ["undecorated", "number"])
def test_what_is_no_rule_is_refused(function: str, own: str) -> None:
    assert f"{function} in {own} is not decorated" in refused(
        lambda: Policy("mine", "round_robin", f"{own}:{function}")
    )


def test_unknown_names_come_with_a_hint() -> None:
    assert "did you mean hexgen_flow?" in refused(lambda: load_policy("hexgen-flow"))
    assert "one of: as_released" in refused(lambda: load_policy("xyz"))


@pytest.mark.parametrize("content", ["name: [", "just text", "", "- a\n- b", "\t"])
def test_files_that_hold_no_policy(content: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    assert str(path) in refused(lambda: load_policy(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "no such file" in refused(lambda: load_policy(tmp_path / "mine.yaml"))
    (tmp_path / "directory.yaml").mkdir()
    assert "no such file" in refused(lambda: load_policy(tmp_path / "directory.yaml"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(:\n", "own.py"),
        ("1 / 0\n", "division by zero"),
        ("import no_such_module_at_all\n", "no_such_module_at_all"),
    ],
)
def test_a_file_that_cannot_be_run(source: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(source)
    message = refused(lambda: Policy("mine", f"{path}:rule", "fcfs"))
    assert words in message
    assert "policy mine" in message


def test_a_rule_that_does_not_compile(tmp_path: Path) -> None:
    """A field that the view lacks: the message names rule and field, not Numba's pages of types."""
    path = tmp_path / "own.py"
    path.write_text(
        "from hexrepro.scheduling.rules import queue_rule\n"
        "@queue_rule()\ndef misspelt(call, params):\n    return call.budget\n"
    )
    message = refused(lambda: run(Policy("mine", "round_robin", f"{path}:misspelt")))
    assert "misspelt" in message
    assert "budget" in message


@pytest.mark.parametrize(
    ("dispatch", "queue", "words"),
    [
        ("outside", "last_first", ("policy mine", "outside", "outside the cluster", "0 to 2")),
        ("negative", "last_first", ("policy mine", "negative", "0 to 2")),
        ("always", "nan", ("policy mine", "nan", "NaN", "must return a number")),
    ],
)
@pytest.mark.parametrize("client", ["query", "tenant"])
def test_rules_that_answer_nonsense(
    dispatch: str, queue: str, words: tuple[str, ...], client: str, own: str
) -> None:
    message = refused(lambda: run(Policy("mine", f"{own}:{dispatch}", f"{own}:{queue}", client=client)))
    assert all(word in message for word in words), message


def test_a_parameter_may_be_nonsense_too(own: str) -> None:
    message = refused(lambda: run(Policy("mine", f"{own}:always", "fcfs", dispatch_params=dict(which=3))))
    assert "0 to 2" in message
