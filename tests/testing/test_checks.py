"""The test kit: it passes what is sound, and catches each kind of broken policy with the smallest example."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest

from hexrepro.compiled import njit
from hexrepro.errors import InputError
from hexrepro.scheduling import Policy
from hexrepro.scheduling.__main__ import main
from hexrepro.scheduling.rules import dispatch_rule, queue_rule
from hexrepro.testing import Failed, check_policy, checks, findings, runs, starvation
from hexrepro.testing.decisions import decisions, describe, smallest
from hexrepro.testing.runs import Call, Case, Query, instance

# ---- broken rules --------------------------------------------------------------------------------------------------

lengths = np.zeros(10_000, np.int64)  # the true output lengths of what is being simulated


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
def true_length(query):
    return int(lengths[query])


@dispatch_rule()
def clairvoyant(call, t_comp_s, instances, params):
    """Goes by the true length of a query's first call, through a back door."""
    return true_length(call.query) % len(instances)


@dispatch_rule()
def too_early(call, t_comp_s, instances, params):
    """Reads what is left of the call before it."""
    return 0 if call.t_comp_s > 1.0 else len(instances) - 1


@dispatch_rule(seen=0.0)
def remembers(call, t_comp_s, instances, params):
    params[0] += 1.0
    return int(params[0]) % len(instances)


@dispatch_rule()
def scribbles(call, t_comp_s, instances, params):
    instances[0].outstanding_s += 1.0
    return 0


@dispatch_rule()
def flips_a_coin(call, t_comp_s, instances, params):
    return int(np.random.random() * len(instances))  # noqa: NPY002 -- the one that compiled code has


@dispatch_rule()
def one_too_many(call, t_comp_s, instances, params):
    """Right on an idle instance; outside the cluster where all are busy."""
    for m in range(len(instances)):
        if instances[m].running == 0:
            return m
    return len(instances)


@dispatch_rule()
def looks_beyond(call, t_comp_s, instances, params):
    best = 0
    for m in range(len(instances) + 1):
        if t_comp_s[m] < t_comp_s[best]:
            best = m
    return min(best, len(instances) - 1)


@dispatch_rule()
def always_the_first(call, t_comp_s, instances, params):
    return 0


@queue_rule()
def newest_first(call, params):
    return -call.now_s


@queue_rule()
def shortest_first(call, params):
    return call.t_comp_s


@queue_rule()
def no_number(call, params):
    return call.budget_s / (call.budget_s - call.budget_s)


@njit
def entry(t_comp_s, m):
    return t_comp_s[m]


@dispatch_rule()
def helper_looks_beyond(call, t_comp_s, instances, params):
    best = 0
    for m in range(len(instances) + 1):
        if entry(t_comp_s, m) < entry(t_comp_s, best):
            best = m
    return min(best, len(instances) - 1)


@dispatch_rule()
def never_ends(call, t_comp_s, instances, params):
    m = 0
    while instances[m].running > 0:
        m = (m + 1) % len(instances)
    return m


@njit
def positive(number):
    assert number > 0.0
    return number


@queue_rule()
def asserts(call, params):
    return positive(call.t_comp_s)


@queue_rule()
def prints(call, params):
    print(call.query)
    return 0.0


@queue_rule()
def not_a_number(call, params):
    return np.nan


@dispatch_rule()
def misspelt(call, t_comp_s, instances, params):
    return instances[0].runing


history = np.zeros(1)


@dispatch_rule()
def counts(call, t_comp_s, instances, params):
    history[0] += 1.0
    return int(history[0]) % len(instances)


def rule(name: str) -> str:
    return f"{__name__}:{name}"


BROKEN = {
    "a length that nobody knows yet": ("clairvoyant", "oracle boundary", r"only the lengths of calls differ.*\d instances; q"),
    "a field of the call before": ("too_early", "oracle boundary", r"call\.t_comp_s, which is set only after"),
    "a state in the parameters": ("remembers", "determinism", r"one question with|writes into its parameters"),
    "a state in the cluster": ("scribbles", "determinism", r"changes what it looks at"),
    "a coin": ("flips_a_coin", "determinism", r"answers one question with 0 or 1: 2 instances$"),
    "an instance outside": ("one_too_many", "values", r"answers 1 instead of 0 to 0: 1 instance; instance 0 with running=\d+$"),
    "beyond an array": ("looks_beyond", "agreement", r"reads beyond the end of an array: 1 instance$"),
    "beyond an array in a helper": ("helper_looks_beyond", "agreement", r"reads beyond the end of an array: 1 instance$"),
    "a loop without an end": ("never_ends", "agreement", r"not answered.*: 1 instance; instance 0 with running=\d+$"),
    "an exception": ("asserts", "agreement", r"rule asserts: positive raises an exception or asserts"),
    "a print": ("prints", "agreement", r"prints prints, which a compiled rule can't"),
    "not a number": ("not_a_number", "values", r"answers nan instead of a finite number"),
    "a misspelt field": ("misspelt", "agreement", r"does not compile: there is no field 'runing'$"),
    "a state beside the rule": ("counts", "agreement", r"Cannot modify readonly array.*\(test_checks\.py, line \d+\)$"),
    "a label": ("always_the_first", "symmetry", r"it matters which is which.*shares of 1 : 0, and of 0 : 1 when"),
    "one instance drowns": ("always_the_first", "no starvation", r"2 equal instances.*first come, first served"),
    "the newest first": ("newest_first", "no starvation", r"one busy instance.*later calls go first"),
    "the shortest first": ("shortest_first", "no starvation", r"only short calls with a tight SLO come: a long call"),
    "a key that is no number": ("no_number", "values", r"instead of a finite number: 1 instance"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # compiled code that calls back into Python can't be cached
@pytest.mark.parametrize(("name", "check", "says"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_policy_is_caught(name: str, check: str, says: str, monkeypatch) -> None:
    original = runs.simulate_grid

    def told(workload, *args, **options):
        lengths[: workload.n_queries] = workload.output_tokens[workload.query_offsets[:-1]]
        return original(workload, *args, **options)

    monkeypatch.setattr(runs, "simulate_grid", told)
    with pytest.raises(Failed) as failure:
        check_policy(rule(name), check)
    message = str(failure.value)
    assert re.search(says, message), message
    assert "\n" not in message
    assert len(message) < 600


def test_each_fault_has_one_name() -> None:
    """That a key is not a number is no matter of how it was compiled."""
    assert check_policy(rule("not_a_number"), "agreement")


def test_what_is_sound_passes_every_check() -> None:
    """By what instances hold, and at random with a fair queue between tenants."""
    assert [f for f in findings("hexgen_flow") if not f.passed] == []
    for check in ("agreement", "determinism", "symmetry", "no starvation"):
        assert check_policy(Policy("fair", "power_of_two", "vtc", client="tenant"), check)


def test_a_busy_machine_does_not_make_a_rule_slow(monkeypatch) -> None:
    """After a pause of a second at the first question it is still asked often enough to be timed."""
    clock, asked = iter([0.0, 1.0]), []
    monkeypatch.setattr(checks.time, "perf_counter", lambda: next(clock, 1.0))
    monkeypatch.setattr(checks, "_dispatch_often", lambda times, *_: asked.append(times))
    assert check_policy("vllm", "cost").startswith("0 µs at 4 instances")
    assert max(asked) == 4**10


# ---- the checks of runs, against runs made wrong by hand ---------------------------------------------------------------

PAIR = Case(
    (Query(0.0, (Call(0, 10, 4), Call(0, 10, 2, (0,)))), Query(0.5, (Call(0, 10, 4),))),
    (instance(1 / 8), instance(1 / 8)),
)


def spoilt(**changes) -> runs.Result:
    """A run of PAIR with one entry of some arrays changed: name=(place, value)."""
    result = runs.run(Policy("p", "round_robin", "fcfs"), PAIR)
    for name, (place, value) in changes.items():
        array = getattr(result, name).copy()
        array[0, place] = value
        object.__setattr__(result, name, array)
    return result.run(0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        (dict(call_finish_s=(2, np.inf)), "call 2 has no call_finish_s"),
        (dict(release_s=(1, 0.1)), "call 1 is not dispatched when"),
        (dict(admit_s=(0, 5.0)), "call 0 finishes before it begins"),
        (dict(finish_s=(1, 9.0)), "does not end with its last call"),
        (dict(decode_tokens=(0, 9)), "instance 0 has made 11 tokens for calls that have 8"),  # calls 0 and 2
    ],
)
def test_conservation_sees_what_is_lost_or_doubled(changes: dict, says: str | None) -> None:
    found = runs.lost_or_doubled(PAIR, spoilt(**changes))
    assert found is None if says is None else says in found


def test_work_conservation_sees_an_idle_instance() -> None:
    assert runs.idle_with_work(PAIR, spoilt()) is None
    # by hand: instance 1 has the second call of query 0 for 2 steps of 1/8 s
    found = runs.idle_with_work(PAIR, spoilt(busy_s=(1, 0.125)))
    assert found == "instance 1 computes for 0.125 s of the 0.25 s in which it has a call"


def test_the_load_lasts_as_it_says_and_fcfs_keeps_a_bounded_backlog() -> None:
    """By hand: a backlog of three calls of the kind and three others before the first of the stream. Under FCFS the first of
    the stream waits for all their tokens, and nobody waits longer."""
    fcfs = Policy("fcfs", "round_robin", "fcfs")
    for load in list(starvation.loads(32.0))[: len(starvation.KINDS)]:
        output = dict(zip(starvation.KINDS, (2, 2, 16, 16), strict=True))
        ahead = sum(output[kind] for kind in load.kinds[: starvation.BACKLOG + 3])
        assert starvation.longest_wait(fcfs, load).seconds == ahead * starvation.STEP_S
        assert load.case.queries[-1].arrival_s < 32.0


# ---- examples are made small -------------------------------------------------------------------------------------------


def test_an_example_keeps_only_what_matters() -> None:
    at = list(decisions(3, 10))[-1]
    at.instances["running"][2], at.call["input_tokens"] = 17, 900
    small = smallest(at, lambda d: d.instances["running"].max() > 9 and d.call["input_tokens"][0] > 10)
    assert re.fullmatch(
        r"1 instance; a call with input_tokens=\d+; instance 0 with running=\d+", describe(small)
    )


# ---- at a terminal -----------------------------------------------------------------------------------------------------


def test_check_at_a_terminal(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from hexrepro.scheduling.rules import queue_rule\n@queue_rule()\ndef late(call, params):\n    return -call.now_s\n"
    )
    assert main(["check", "mine.py:late", "values", "cost"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ok    values .*\nok    cost .*µs at 4 instances", out)
    assert main(["check", "mine.py:late", "no starvation"]) == 1
    assert capsys.readouterr().out.startswith("FAIL  no starvation")
    (tmp_path / "mine.yaml").write_text("name: mine\ndispatch: low\nqueue: 'mine.py:late'\n")


def test_a_check_that_would_crash_ends_the_list(capsys) -> None:
    (finding,) = findings(rule("looks_beyond"))
    assert not finding.passed
    assert main(["check", rule("looks_beyond")]) == 1
    assert "not tried, as they rest on that: values, determinism" in capsys.readouterr().out


FILES = {
    "bare.py": "@queue_rule\ndef late(call, params):\n    return 0.0",
    "klass.py": "@queue_rule()\nclass Late:\n    pass",
    "text.py": "@queue_rule(weight='x')\ndef late(call, params):\n    return 0.0",
    "exits.py": "raise SystemExit(3)",
    "syntax.py": "def late(:",
}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["check"], ("check POLICY",)),
        (["check", "no_such_policy"], ("no_such_policy", "one of:", "vllm")),
        (["check", "vllm", "sanity"], ("sanity", "agreement")),
        (["check", "missing.py:rule"], ("missing.py",)),
        (["check", "hexrepro.scheduling.policy:load_policy"], ("not decorated",)),
        (["check", "hexrepro.scheduling.queues:fcsf"], ("has no 'fcsf'; did you mean fcfs?",)),
        (["check", "bare.py:late"], ("bare.py:late", "write @queue_rule()")),
        (["check", "klass.py:Late"], ("klass.py:Late", "a rule must be a function")),
        (["check", "text.py:late"], ("late: weight must be a finite number, got 'x'",)),
        (["check", "exits.py:late"], ("exits.py:late", "SystemExit: 3")),
        (["check", "syntax.py:late"], ("syntax.py:late", "SyntaxError", "line 1")),
        (["check", "vllm", "--seed", "x"], ("--seed",)),
        (["chek", "vllm"], ("chek", "check POLICY")),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], words: tuple[str, ...], tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace("@", "from hexrepro.scheduling.rules import queue_rule\n@"))
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("hexrepro: ")
    assert error.count("\n") == 1
    assert all(word in error for word in words), error


def test_list_says_where_a_policy_comes_from(capsys) -> None:
    assert main(["list"]) == 0
    assert re.search(r"^vllm\s+built in\s+round robin \+ FCFS", capsys.readouterr().out, re.M)


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(InputError, match="one of: agreement"):
        check_policy("vllm", "everything")
