"""Faults that users of other simulators and servers ran into; each must be impossible here, and is tried on a case made for it.

The threads are named for looking up. Tested elsewhere:

- inference-sim 374, 330 (overhead outside the server breaks the theory): test_theory.py, at four loads; here the least of it
- inference-sim PR 818 (a burstiness knob that changes the mean rate): tests/workload/test_arrivals.py
- guidellm PR 1085 (attainment and goodput, not only percentiles): tests/report/test_metrics.py and
  tests/experiments/test_compare.py
- optuna 4412, numba 5290 (results that depend on the number of workers): test_invariants.py; the search itself with `tuning`
- vllm 21104, aiperf PR 1188 (a load generator that sends late): with `serving`, which has the load generator
- LLMServingSim 40 (accurate only while the queue is empty): with the comparison against real vLLM

A step takes 1 s unless said otherwise, so a call of n output tokens runs n s, and times can be worked out on paper.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexrepro import compiled
from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.report.metrics import attainment, measure, quantile
from hexrepro.scheduling import Policy
from hexrepro.scheduling.queues import urgency
from hexrepro.scheduling.rules import queue_rule
from hexrepro.scheduling.views import CALL
from hexrepro.simulator import EngineOptions, Result, simulate
from tests.strategies import dyadic, make_instance, make_workload

ONE_SECOND_A_STEP = (1.0, 0.0, 0.0, 0.0, 0.0)


def one_instance(kv_blocks=1000, max_num_seqs=256, budget=2048, coefficients=ONE_SECOND_A_STEP) -> Cluster:
    """Blocks of one token."""
    return Cluster("one", (make_instance("one", coefficients, kv_blocks, 1, max_num_seqs, budget),))


def call(input_tokens: int = 4, output_tokens: int = 4, **fields) -> dict:
    return dict(input_tokens=input_tokens, output_tokens=output_tokens, **fields)


def query(arrival_s: float, *calls: dict, slo_scale: float = 1.0) -> dict:
    return dict(arrival_s=arrival_s, slo_scale=slo_scale, calls=list(calls))


def run(
    queries, cluster: Cluster, policy: str | Policy = "vllm", base_slo=100.0, batching="chunked"
) -> Result:
    engine = EngineOptions(batching, prefix_caching="off")
    return simulate(make_workload(queries), cluster, policy, base_slo=base_slo, engine=engine)


# ----------------------------------------------------------------------------------------- servers that do no work


def test_inference_sim_319_an_instance_never_idles_while_a_call_waits() -> None:
    """The memory holds one call at a time: the next starts in the moment the one before ends, or when it comes."""
    result = run(
        [query(0, call(2, 2)), query(0, call(2, 2)), query(10.5, call(2, 2))], one_instance(kv_blocks=3)
    )
    assert result.admit_s.tolist() == [0, 2, 10.5]
    assert result.finish_s.tolist() == [2, 4, 12.5]
    assert result.busy_s.tolist() == [6]


def test_inference_sim_374_330_a_lone_call_takes_its_steps_and_nothing_else() -> None:
    cluster = one_instance(coefficients=(2**-6, 2**-12, 2**-20, 2**-10, 2**-16), budget=100)
    result = run([query(3.25, call(250, 40))], cluster)
    assert result.latency_s[0] == cluster.instances[0].latency.solo_latency_s(250, 0, 40, 100)
    assert result.busy_s[0] == result.latency_s[0]


# -------------------------------------------------------------------------------------------------------- urgency


@pytest.mark.parametrize(
    ("plain", "urgent"), [("vllm", "rr_pq"), ("wb_fcfs", "hexgen_flow"), ("vllm", "llf")]
)
def test_inference_sim_347_urgency_differs_from_fcfs_in_the_right_direction(plain: str, urgent: str) -> None:
    """One slot, three calls of 10 s. The last to come has the tight SLO: FCFS misses it, urgency meets all three."""
    queries = [
        query(0, call(4, 10)),
        query(1, call(4, 10), slo_scale=8),
        query(2, call(4, 10), slo_scale=2),
    ]
    fcfs, pq = (run(queries, one_instance(max_num_seqs=1), policy, base_slo=10) for policy in (plain, urgent))
    assert fcfs.admit_s.tolist() == [0, 10, 20]
    assert pq.admit_s.tolist() == [0, 20, 10]
    assert (fcfs.latency_s <= fcfs.slo_s).tolist() == [True, True, False]
    assert (pq.latency_s <= pq.slo_s).all()


def test_inference_sim_347_a_late_query_goes_before_one_that_has_time() -> None:
    """Same SLO, same call; the query that came first is at its last stage and has used up its time in the stage before."""
    queries = [
        query(0, call(4, 30), call(4, 10, after=[0])),  # its second call is issued at 30, with 10 s left
        query(29, call(4, 10)),  # issued before that, with 40 s left
        query(29.5, call(4, 10)),
    ]
    for policy, order in (("vllm", [0, 50, 30, 40]), ("rr_pq", [0, 30, 40, 50])):
        result = run(queries, one_instance(max_num_seqs=1), policy, base_slo=40)
        assert result.admit_s.tolist() == order


def test_vllm_40004_priority_does_not_preempt_for_a_slot() -> None:
    """With all slots taken an urgent call waits for one, as in vLLM, and is the first to get it. With one free it starts
    at the next step.
    """
    queries = [query(0, call(4, 20), slo_scale=9), query(0, call(4, 20), slo_scale=9)]
    queries += [query(0.5, call(4, 5), slo_scale=9), query(1.5, call(4, 5))]  # the last is the urgent one
    full = run(queries, one_instance(max_num_seqs=2), "rr_pq")
    assert full.preemptions.tolist() == [0]
    assert full.admit_s.tolist() == [0, 0, 20, 20]
    one_frees = run([query(0, call(4, 10), slo_scale=9), *queries[1:]], one_instance(max_num_seqs=2), "rr_pq")
    assert one_frees.admit_s.tolist() == [0, 0, 15, 10]
    free = run([*queries[:2], *queries[3:]], one_instance(max_num_seqs=3), "rr_pq")
    assert free.admit_s.tolist() == [0, 0, 2]


@given(
    st.lists(st.tuples(dyadic(0, 2**14), dyadic(-(2**14), 2**14), dyadic(1, 2**14)), min_size=2, max_size=20),
    dyadic(0, 2**16),
)
def test_vllm_pr_20608_urgency_orders_the_same_at_any_later_time(calls, later_s: float) -> None:
    """U = t_comp - (t_SLO - waited) grows alike for all who wait, so the key, in which no clock appears, has its order."""
    keys, urgencies = [], []
    now_s = max(arrival for arrival, _, _ in calls) + later_s
    view = np.zeros(1, CALL)
    for arrival_s, budget_s, t_comp_s in calls:
        view["now_s"], view["budget_s"], view["t_comp_s"] = arrival_s, budget_s, t_comp_s
        keys.append(urgency(view[0], np.zeros(0)))
        urgencies.append(t_comp_s - (budget_s - (now_s - arrival_s)))
    assert (
        np.argsort(keys, kind="stable").tolist() == np.argsort(np.negative(urgencies), kind="stable").tolist()
    )


@queue_rule(asked=0.0)
def counting(call, params):
    """FCFS that counts how often it is asked."""
    params[0] += 1
    return 0.0


def test_vllm_pr_20608_a_key_is_computed_once(monkeypatch) -> None:
    """However long a call waits, and when it goes back after a preemption, it keeps the key that it came with."""
    asked = np.zeros(1)
    monkeypatch.setattr(Policy, "queue_vector", asked)
    queries = [query(0.5 * i, call(4, 8)) for i in range(20)]
    result = run(
        queries, one_instance(kv_blocks=12), Policy("counting", "round_robin", f"{__name__}:counting")
    )
    assert result.preemptions[0] > 0
    assert asked[0] == len(queries)


# ------------------------------------------------------------------------------------------------ short of memory


@pytest.mark.parametrize("batching", ["chunked", "prefill_first"])
@pytest.mark.parametrize("policy", ["vllm", "rr_pq", "vtc"])
def test_inference_sim_313_293_no_call_is_lost_under_memory_pressure(policy: str, batching: str) -> None:
    """The pool just holds the largest call, and many come at once: preemptions without end, but an end of every call."""
    preemptions = 0
    for seed in range(10):
        rnd = random.Random(seed)

        def drawn(rnd=rnd, **fields) -> dict:
            return call(rnd.randint(1, 12), rnd.randint(1, 20), **fields)

        queries = [query(i // 8, drawn(), drawn(after=[0])) for i in range(20)] + [
            query(3, drawn()) for _ in range(20)
        ]
        workload = make_workload(queries)
        largest = int((workload.input_tokens + workload.output_tokens - 1).max())
        result = run(
            queries, one_instance(kv_blocks=largest, max_num_seqs=8, budget=16), policy, batching=batching
        )
        assert np.isfinite(result.call_finish_s).all()
        assert len(result.call_finish_s) == 60
        assert result.peak_kv_blocks[0] <= largest
        preemptions += result.preemptions[0]
    assert preemptions > 100


def test_inference_sim_313_293_a_call_that_can_never_fit_is_refused_by_name() -> None:
    message = r"query 1, call 1 \(stage 0: 8 input \+ 6 output tokens\) needs 13 KV blocks.*one has 12"
    with pytest.raises(InputError, match=message):
        run([query(0, call()), query(0, call(), call(8, 6))], one_instance(kv_blocks=12))
    assert np.isfinite(
        run([query(0, call(8, 5))], one_instance(kv_blocks=12)).finish_s
    ).all()  # this one just fits


@pytest.mark.parametrize("policy", ["vllm", "rr_pq"])
def test_vllm_pr_54530_calls_of_equal_priority_do_not_preempt_each_other_for_ever(policy: str) -> None:
    """12 blocks for two calls that need 11 each at their end. After three steps both hold 6: the later one gives way, once."""
    result = run([query(0, call(4, 8)), query(0, call(4, 8))], one_instance(kv_blocks=12), policy)
    assert result.call_preemptions.tolist() == [0, 1]
    assert result.finish_s.tolist() == [
        8,
        13,
    ]  # 3 tokens before, then prompt and these again in one step, then 4 more


def test_vllm_pr_54530_of_many_equals_the_first_is_never_held_up() -> None:
    result = run([query(0, call(4, 8)) for _ in range(8)], one_instance(kv_blocks=12), "rr_pq")
    assert result.finish_s[0] == 8
    assert (np.diff(result.finish_s) > 0).all()


@pytest.mark.parametrize("policy", ["vllm", "rr_pq"])
def test_vllm_pr_41951_a_preempted_call_keeps_its_place(policy: str) -> None:
    """As above, and a third call waits when the second is preempted. At 8 there is room for one of them: the second."""
    queries = [query(0, call(4, 8)), query(0, call(4, 8)), query(0.5, call(6, 2))]
    result = run(queries, one_instance(kv_blocks=12), policy)
    assert result.call_preemptions.tolist() == [0, 1, 0]
    assert result.admit_s.tolist() == [0, 0, 13]
    assert result.finish_s.tolist() == [8, 13, 15]


def test_vllm_pr_41951_that_place_is_its_key_not_the_front() -> None:
    """Now the third comes later, at 4, but is more urgent: it has the room at 8, and the second comes back after it."""
    queries = [query(0, call(4, 8)), query(0, call(4, 8)), query(4, call(6, 2), slo_scale=0.25)]
    result = run(queries, one_instance(kv_blocks=12), "rr_pq")
    assert result.admit_s.tolist() == [0, 0, 8]
    assert result.finish_s.tolist() == [8, 15, 10]


# ------------------------------------------------------------------------------------------- what is counted, and when


def test_inference_sim_1409_every_query_that_arrived_counts() -> None:
    """Hopeless overload: ten times as much as can be served. All queries are in the result and in the share that attains."""
    queries = [query(i, call(4, 10)) for i in range(50)]
    result = run(queries, one_instance(max_num_seqs=1), base_slo=25)
    assert len(result.latency_s) == 50
    assert result.latency_s.tolist() == [10 * (i + 1) - i for i in range(50)]
    assert attainment(result.latency_s / result.slo_s, 1.0) == 2 / 50  # 10, 19, then 28 s


def test_inference_sim_1409_an_unfinished_query_is_a_miss() -> None:
    arrival_s, finish_s = np.zeros((1, 4)), np.array([[1.0, 2.0, np.inf, np.inf]])
    measured = measure(arrival_s, finish_s, np.full(4, 1.0), slo_scale=10.0)
    assert measured["attainment"] == [0.5]
    assert measured["goodput_qps"] == [1.0]  # two in the 2 s until the last finish
    assert measured["mean_s"] == [np.inf]
    assert quantile(finish_s, 0.95) == [np.inf]


def test_inference_sim_880_1692_a_stage_starts_when_all_before_it_ended_plus_its_tool_time_once() -> None:
    """a and b in parallel, then c after both, then d after c. Tool times: 0.5 s before a, 2.5 s before c, 1 s before d."""
    calls = [
        call(output_tokens=5, tool_time_s=0.5),
        call(output_tokens=3),
        call(output_tokens=2, tool_time_s=2.5, after=[0, 1]),
        call(output_tokens=1, tool_time_s=1.0, after=[2]),
    ]
    result = run([query(10, *calls)], one_instance())
    # b runs alone in the steps at 10 and 11 (a comes inside the first); from 11 on both; b ends at 13, a at 16
    assert result.release_s.tolist() == [10.5, 10, 18.5, 21.5]
    assert result.admit_s.tolist() == [11, 10, 18.5, 21.5]
    assert result.call_finish_s.tolist() == [16, 13, 20.5, 22.5]
    assert result.latency_s.tolist() == [12.5]


def test_inference_sim_880_a_call_that_waits_does_not_pay_its_tool_time_again() -> None:
    """The slot is taken until 8: the second query's second call, released at 2 + 3, is admitted at 8 and not later."""
    with_tool = query(0, call(output_tokens=2), call(output_tokens=1, tool_time_s=3, after=[0]))
    result = run([with_tool, query(2, call(output_tokens=6))], one_instance(max_num_seqs=1))
    assert result.release_s.tolist() == [0, 5, 2]
    assert result.admit_s.tolist() == [0, 8, 2]


# ------------------------------------------------------------------------------------------------------- stale code


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that a test may edit."""
    copy = tmp_path / "hexrepro"
    shutil.copytree(compiled.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc"))
    return copy


def test_numba_9483_an_edit_of_any_source_gives_another_cache(package: Path, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "PACKAGE", package)
    digest = compiled.source_digest.__wrapped__
    seen = {digest()}
    assert digest() in seen
    sources = sorted(path for room in compiled.ROOMS for path in (package / room).rglob("*.py"))
    deciding = [path for path in sources if not is_aside(path.relative_to(package))]
    assert {
        "loop.py",
        "dispatch.py",
        "queues.py",
        "estimates.py",
        "views.py",
        "latency.py",
        "generate.py",
    } <= {p.name for p in deciding}
    for i, source in enumerate(deciding, start=2):
        source.write_text(source.read_text() + "# edited\n")
        seen.add(digest())
        assert len(seen) == i, source
    last = digest()
    for source in set(sources) - set(deciding):
        source.write_text(source.read_text() + "# edited\n")
    assert digest() == last
    (package / "simulator" / "new.py").write_text("")
    assert digest() not in seen


def is_aside(module: Path) -> bool:
    """Whether a source, by its path in the package, is said to decide no result."""
    room, name = module.parts[:2]
    return name.removesuffix(".py") in compiled.ASIDE.get(room, ())


def test_what_decides_no_result_is_there_and_no_simulation_runs_it() -> None:
    for room, names in compiled.ASIDE.items():
        for name in names:
            assert any((compiled.PACKAGE / room).glob(f"{name}*")), f"{room}/{name} is gone"
    program = """if True:
        import sys
        from hexrepro.cluster import load_cluster
        from hexrepro.simulator import simulate_grid
        import hexrepro.experiments.compare, hexrepro.experiments.tune, hexrepro.experiments.alpha_online
        from hexrepro.workload import arrival_times, generate
        generate("trace1", n_queries=2)
        load_cluster("hetero1", "silicon"), load_cluster("hetero1", "measured")
        print(*(name for name in sys.modules if name.startswith("hexrepro.")))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = [Path(*name.split(".")[1:]) for name in done.stdout.split() if name.count(".") > 1]
    assert Path("workload", "generate") in loaded
    assert Path("cluster", "profiles") in loaded
    # readers of traces are loaded with the package; what they read goes into a cell's key as arrays
    assert [path for path in loaded if is_aside(path) and path.parts[:2] != ("workload", "formats")] == []


def test_numba_9483_no_stale_code_runs_after_an_edit_of_another_file(package: Path, tmp_path: Path) -> None:
    """`solo_latency_s` inlines `solo_terms` of another file; Numba's own cache would go on with the old one."""
    program = """if True:
        import numpy as np
        from hexrepro.scheduling.estimates import solo_latency_s
        from hexrepro.scheduling.views import INSTANCE
        instance = np.zeros(1, INSTANCE)
        instance["base_s"], instance["max_num_batched_tokens"] = 1.0, 100
        print(solo_latency_s(instance[0], 10, 0, 5))
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {"HEXREPRO_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}

    def printed() -> float:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return float(done.stdout)

    assert printed() == 5.0
    latency = package / "cluster" / "latency.py"
    latency.write_text(
        latency.read_text() + "\n\ndef solo_terms(i, c, o, b):\n    return 7.0, 0.0, 0.0, 0.0, 0.0\n"
    )
    assert printed() == 7.0
    assert len(list((tmp_path / "cache" / "numba").iterdir())) == 2
