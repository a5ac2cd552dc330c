"""Real vLLM servers (CPU build): launched, profiled through their API, replayed against, and held against the simulator.

    HEXREPRO_VLLM_PYTHON=path/to/python pytest -m vllm tests/validation

Bounds are several times what was measured on two busy cores, which stands beside them.
"""

from __future__ import annotations

import json
import urllib.request

import numpy as np
import pytest

from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.simulator import simulate
from hexrepro.validation.fidelity import OLDEST_QUERY, replay_and_simulate, shortened
from hexrepro.validation.profile_endpoint import Design, profile_endpoint
from hexrepro.validation.prompts import Prompts
from hexrepro.validation.replay import replay
from hexrepro.workload import arrival_times, generate
from tests.real_vllm import PACED
from tests.strategies import make_workload

pytestmark = pytest.mark.vllm

SEQUENCES = PACED.max_num_seqs
DESIGN = Design(
    concurrency=(1, 2, 4),
    contexts=(64, 1000),
    decode_tokens=24,
    prompts=(16, 256, 272, 512, 528, 1024, 1040, 2048, 2064),
    repeats=3,
    held_out=((3, 600),),
    burst=16,
)


@pytest.fixture(scope="module")
def profile(vllm_servers):
    return profile_endpoint(vllm_servers["paced"].url, design=DESIGN)


@pytest.fixture(scope="module")
def queries():
    """8 CHESS-like queries of 115 calls in all, prompts a quarter and outputs half as long."""
    return shortened(generate("tiny", seed=3, n_queries=8), 4, 2)


def ask(url: str, path: str, content: dict) -> dict:
    request = urllib.request.Request(
        url + path, json.dumps(content).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.parametrize("name", ["paced", "computing"])
def test_text_and_chat(vllm_servers, name):
    """The tokenizer works: n words are n tokens, both ways."""
    url = vllm_servers[name].url
    assert ask(url, "/tokenize", dict(model="hexrepro", prompt="t5 t6 t500"))["tokens"] == [5, 6, 500]
    chat = dict(
        model="hexrepro", messages=[dict(role="user", content="t9 t8 t7")], max_tokens=5, ignore_eos=True
    )
    answer = ask(url, "/v1/chat/completions", chat)
    assert answer["usage"]["prompt_tokens"] == 3
    assert (
        len(answer["choices"][0]["message"]["content"].split()) == answer["usage"]["completion_tokens"] == 5
    )


def test_the_profile_finds_what_was_configured(profile):
    """Without having been told. Measured: coefficients of one step within 0.3 %, the held-out step within 2 %."""
    truth = PACED.instance()
    for step in [(0, 0, 1, 64), (0, 0, 4, 4000), (1024, 1024 * 1500, 1, 0), (300, 300**2 / 2, 3, 400)]:
        assert profile.latency.step_s(*step) == pytest.approx(truth.latency.step_s(*step), rel=0.05), step
    assert profile.max_num_seqs == SEQUENCES
    assert profile.max_num_batched_tokens == 1024
    assert (profile.kv_blocks, profile.block_size) == (truth.kv_blocks, truth.block_size)
    assert profile.errors["held_out"].max < 0.15
    assert 0.0 <= profile.overhead_s < 0.03  # on a busy machine it drowns in the noise of the prompts


def test_light_load(vllm_servers, profile, queries):
    """Measured: mean of queries within 1 %, of calls 1 % (mean absolute 3 %); a second replay differs as much."""
    workload = queries.with_arrivals(arrival_times("poisson", queries.n_queries, 0.8, seed=1))
    check, measured, _ = replay_and_simulate(
        workload, [vllm_servers["paced"].url], [profile.instance("paced")], profile.overhead_s, "vllm",
        model="hexrepro", shared="full", salt=1, limit_s=60.0,
    )  # fmt: skip
    assert measured.errors == {}
    asked, real = measured.rates_qps(workload)
    assert real == pytest.approx(asked, rel=0.02)
    error = check.summary.set_index("metric")["error"]
    assert abs(error["query_mean_s"]) < 0.06
    assert abs(error["query_p95_s"]) < 0.10
    assert check.spread["mean_abs"].max() < 0.15
    # the prefix cache of the server and of the simulator hit alike, call by call
    assert np.array_equal(check.calls["cached_tokens"], check.calls["cached_simulated"])
    assert check.calls["cached_tokens"].sum() > 20_000


@pytest.mark.parametrize(("policy", "salt"), [("vllm", 2), (OLDEST_QUERY, 3)], ids=["fcfs", "priority"])
def test_overload(vllm_servers, profile, queries, policy, salt):
    """Calls queue for the slots. Measured: mean of queries within 4 %; queries of two replays differ by 0.2 to 6 %."""
    workload = queries.with_arrivals(arrival_times("poisson", queries.n_queries, 3.0, seed=1))
    check, measured, _ = replay_and_simulate(
        workload, [vllm_servers["paced"].url], [profile.instance("paced")], profile.overhead_s, policy,
        model="hexrepro", shared="full", salt=salt, limit_s=60.0,
    )  # fmt: skip
    assert measured.errors == {}
    error = check.summary.set_index("metric")["error"]
    assert abs(error["query_mean_s"]) < 0.12
    assert abs(error["throughput_qps"]) < 0.12


def test_a_priority_passes_the_queue(vllm_servers):
    """Slots are full and ten calls wait; the last to come is the most urgent, and begins before all that waited."""
    n = SEQUENCES + 11
    calls = [dict(input_tokens=16, output_tokens=60) for _ in range(n)]
    workload = make_workload([dict(arrival_s=0.005 * i, calls=[c]) for i, c in enumerate(calls)])
    priority = np.full(n, 10)
    priority[-1] = 0
    run = replay(
        workload,
        vllm_servers["paced"].url,
        model="hexrepro",
        priority=priority,
        prompts=Prompts(workload, "off", salt=9),
    )
    assert run.errors == {}
    waited = run.first_token_s[SEQUENCES + 1 : -1]
    assert run.first_token_s[-1] < waited.min()
    assert run.first_token_s[-1] > run.call_finish_s.min()  # it takes nobody's slot


def test_a_computing_server(vllm_servers):
    """It really computes: a longer prompt takes longer, and lengths are as asked."""
    tokens = [64] * 4 + [3000] * 4
    workload = make_workload(
        [dict(arrival_s=0.4 * i, calls=[dict(input_tokens=n, output_tokens=4)]) for i, n in enumerate(tokens)]
    )
    run = replay(
        workload, vllm_servers["computing"].url, model="hexrepro", prompts=Prompts(workload, "off", salt=1)
    )
    assert run.errors == {}
    ttft = run.first_token_s - run.sent_s
    assert np.median(ttft[4:]) > 2 * np.median(ttft[:4])


def test_the_simulator_refuses_what_the_server_would(vllm_servers, profile):
    """A call that never fits: the server answers 400, the simulator says so before."""
    tokens = PACED.kv_blocks * PACED.block_size
    workload = make_workload([dict(arrival_s=0.0, calls=[dict(input_tokens=tokens, output_tokens=40)])])
    run = replay(workload, vllm_servers["paced"].url, model="hexrepro")
    assert run.errors[0].startswith("HTTP 400")
    with pytest.raises(InputError, match="KV blocks"):
        simulate(workload, Cluster("one", (profile.instance("paced"),)), "vllm", base_slo=1.0)
