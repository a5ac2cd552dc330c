"""Profiling against a stub whose step times are known, and the arithmetic of its windows by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hexrepro.cluster import load_cluster
from hexrepro.cluster.latency import LatencyModel, fit_calls
from hexrepro.errors import InputError
from hexrepro.validation.completion_stream import Streamed
from hexrepro.validation.endpoint_design import Design
from hexrepro.validation.endpoint_fit import fit_budget
from hexrepro.validation.endpoint_probe import decode_window, read_metrics
from hexrepro.validation.profile_endpoint import profile_endpoint, write_profiles
from tests.strategies import make_workload
from tests.validation.paced_stub import PacedStub

TRUTH = dict(base_s=0.008, prefill_token_s=4e-5, prefill_context_s=8e-9, sequence_s=8e-4, kv_token_s=6e-7)
DESIGN = Design(
    concurrency=(1, 3, 8),
    contexts=(32, 1200),
    decode_tokens=20,
    prompts=(16, 256, 272, 512, 528, 1024, 1040, 2048, 4000),
    repeats=3,
    held_out=((3, 700),),
    burst=12,
)


@pytest.fixture(scope="module")
def profile():
    with PacedStub(**TRUTH, overhead_s=0.006, max_num_seqs=6, budget=1024) as stub:
        return profile_endpoint(stub.url, design=DESIGN)


def test_finds_the_step_times(profile):
    fitted, truth = profile.latency, LatencyModel(**TRUTH)
    # Coefficients trade off against each other; step times are what counts, inside what was measured. The stub runs in a thread
    # of this process: on an idle machine these are 1 to 3 % off, beside other work more.
    for step in [
        (0, 0, 1, 32),
        (0, 0, 4, 4 * 1200),
        (0, 0, 2, 100),
        (500, 500**2 / 2, 1, 0),
        (1024, 1024 * 2500, 1, 0),
    ]:
        assert fitted.step_s(*step) == pytest.approx(truth.step_s(*step), rel=0.15), step
    # the stub's own work and the socket are in it too
    assert 0.003 < profile.overhead_s < 0.018
    assert profile.errors["decode"].mape < 0.08
    assert profile.errors["prefill"].mape < 0.10
    assert profile.errors["held_out"].n == 1
    assert profile.errors["held_out"].mape < 0.30


def test_finds_the_limits(profile):
    assert (profile.max_num_batched_tokens, profile.max_num_seqs) == (1024, 6)
    assert profile.found["max_num_seqs"] == "measured"
    # of the 1025 blocks that vLLM tells, one is its null block
    assert (profile.kv_blocks, profile.block_size) == (1024, 16)
    assert profile.model == "stub"


def test_tells_where_it_extrapolates(profile):
    def workload(tokens, output=10):
        return make_workload([dict(arrival_s=0.0, calls=[dict(input_tokens=tokens, output_tokens=output)])])

    assert profile.extrapolates(workload(3000)) == []
    assert "prompts of up to 5000 tokens, measured up to 4000" in profile.extrapolates(workload(5000))[0]
    assert any("KV tokens" in line for line in profile.extrapolates(workload(3000, output=8000)))
    assert any("extrapolates" in line for line in profile.lines())


def test_goes_through_a_file(profile, tmp_path):
    write_profiles(tmp_path / "ours.yaml", {"fast": profile})
    config = dict(name="ours", profile=str(tmp_path / "ours.yaml"), instances=[{"gpu": "fast", "count": 2}])
    cluster = load_cluster(config, "measured")
    spec, direct = cluster.instances[1], profile.instance("fast-1", "fast")
    assert np.allclose(spec.latency.coefficients, direct.latency.coefficients, rtol=1e-5)
    assert (spec.kv_blocks, spec.max_num_seqs, spec.max_num_batched_tokens) == (1024, 6, 1024)


def test_window_by_hand():
    """Two calls: one has its first token at 1.0 s, the other at 1.3 s; the first ends at 2.0 s. Steps of 0.1 s."""
    early = [(1.0 + 0.1 * k, k + 1) for k in range(11)]
    late = [(1.3 + 0.1 * k, k + 1) for k in range(12)]
    answers = [
        Streamed(0, 1.0, 2.0, 50, 11, None, {}, early),
        Streamed(0, 1.3, 2.4, 50, 12, None, {}, late),
    ]
    window = decode_window(answers, 50)
    # between 1.3 and 2.0: seven steps; early's tokens 5 to 11 read 53 to 59, late's 2 to 8 read 50 to 56
    assert window["steps"] == pytest.approx(7)
    assert window["seconds"] == pytest.approx(0.7)
    assert window["sequences"] == pytest.approx(14)
    assert window["kv_tokens"] == pytest.approx(sum(range(53, 60)) + sum(range(50, 57)))
    # several tokens a chunk give the same step time
    answers[0].progress = early[::3]
    assert decode_window(answers, 50)["seconds"] / decode_window(answers, 50)["steps"] == pytest.approx(0.1)
    # too short a window is none
    assert decode_window([answers[0], Streamed(0, 1.8, 2.9, 50, 12, None, {}, late[5:])], 50) is None


def test_fit_calls_recovers_what_made_the_times():
    rng = np.random.default_rng(1)
    truth = np.array([0.02, 1e-4, 2e-9, 3e-4, 5e-8, 0.007])  # the last is the API's
    n = 40
    calls = np.repeat([1.0, 0.0], n // 2)
    length = rng.integers(10, 8000, n) * calls
    steps = np.where(calls == 1, np.ceil(length / 2048), rng.integers(5, 50, n))
    sequences = np.where(calls == 1, steps, steps * rng.integers(1, 16, n))
    kv = np.where(calls == 1, 0, sequences * rng.integers(10, 9000, n))
    seconds = np.column_stack([steps, length, length**2 / 2, sequences, kv, calls]) @ truth
    fit = fit_calls(calls, steps, length, length**2 / 2, sequences, kv, seconds)
    assert [*fit.model.coefficients, fit.overhead_s] == pytest.approx(truth, rel=1e-6)
    assert fit.errors.max < 1e-6


@pytest.mark.parametrize("budget", [256, 512, 1024, 2048, 8192, 16384])
def test_the_fit_finds_the_token_budget(budget):
    """A step's base is what 200 prompt tokens take, so that chunks and tokens look much alike. Times vary by
    1 %; by 0.3 % where one step more in a prompt of 8192 tokens is only 2 % of its time.
    """
    rng = np.random.default_rng(3)
    truth = np.array([0.014, 7e-5, 2e-9, 3e-4, 5e-8])
    rows = []
    for length in Design().prompts:
        steps = np.ceil(length / budget)
        seconds = 0.006 + truth @ [steps, length, length**2 / 2, steps, 0]
        rows.append(dict(kind="prefill", calls=1, length=length, together=1, seconds=seconds))
    for together in (1, 2, 4, 8):
        for kv in (together * 64, together * 2048):
            seconds = truth @ [30, 0, 0, 30 * together, 30 * kv]
            rows.append(
                dict(kind="decode", calls=0, length=64, together=together, seconds=seconds, steps=30, prefill_tokens=0,
                     prefill_context=0, sequences=30 * together, kv_tokens=30 * kv)
            )  # fmt: skip
    frame = pd.DataFrame(rows)
    frame["seconds"] *= rng.normal(1.0, 0.01 if budget < 8192 else 0.003, len(frame))
    fit, found, how = fit_budget(frame, None)
    assert found == budget
    assert "chosen" in how or "cut" in how
    assert fit.model.step_s(1024, 1024 * 512, 1, 0) == pytest.approx(
        0.0143 + 1024 * 7e-5 + 1024 * 512 * 2e-9, rel=0.05
    )


def test_reads_vllms_metrics():
    text = (
        "# HELP vllm:num_requests_running Number.\n# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:request_success_total{finished_reason="stop"} 2.0\n'
        'vllm:request_success_total{finished_reason="length"} 1.5e+01\n'
        'vllm:e2e_request_latency_seconds_bucket{le="0.3"} 7.0\n'
        "vllm:e2e_request_latency_seconds_sum 1.25\n"
        'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="77",cache_dtype="auto"} 1.0\n'
        'python_gc_objects_collected_total{generation="0"} 9.0\n'
    )
    assert read_metrics(text) == {
        "num_requests_running": 3.0,
        "request_success_total": 17.0,
        "e2e_request_latency_seconds_sum": 1.25,
        "block_size": 32.0,
        "num_gpu_blocks": 77.0,
    }


# ---- endpoints that can't be profiled, or not wholly --------------------------------------------------------

SMALL = Design(
    concurrency=(1, 2),
    contexts=(8, 64),
    decode_tokens=12,
    prompts=(4, 16, 64, 100),
    repeats=1,
    held_out=(),
    burst=4,
)


def test_without_metrics_the_kv_memory_must_be_given():
    with PacedStub(base_s=0.003, with_metrics=False, max_model_len=None) as stub:
        profile = profile_endpoint(stub.url, design=SMALL)
    assert profile.kv_blocks is None
    assert "not reached" in profile.found["max_num_seqs"]
    with pytest.raises(InputError, match="give kv_blocks and block_size"):
        profile.instance("a")
    assert profile.instance("a", kv_blocks=10, block_size=16).kv_blocks == 10


def test_a_short_context_limits_the_design():
    with PacedStub(base_s=0.003, max_model_len=80) as stub:
        profile_endpoint(stub.url, design=SMALL)
        assert max(len(r["prompt"]) + r["max_tokens"] for r in stub.requests) <= 80


def test_refuses_wrong_endpoints():
    with pytest.raises(InputError, match="does not answer"):
        profile_endpoint("http://127.0.0.1:9", design=SMALL)
    with PacedStub(base_s=0.003) as stub, pytest.raises(InputError, match="model is 'other'; it serves stub"):
        profile_endpoint(stub.url, model="other", design=SMALL)
    with (
        PacedStub(base_s=0.003, faults={3: "500"}) as stub,
        pytest.raises(InputError, match="a call failed: HTTP 500"),
    ):
        profile_endpoint(stub.url, design=SMALL)
    with PacedStub(base_s=0.5) as stub, pytest.raises(InputError, match="not done after 1 s"):
        profile_endpoint(stub.url, design=SMALL, limit_s=1.0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(concurrency=(1,)), "concurrency is"),
        (dict(prompts=(1, 2, 3)), "four lengths"),
        (dict(decode_tokens=5), "decode_tokens=5"),
    ],
)
def test_refuses_a_wrong_design(wrong, says):
    with pytest.raises(InputError, match=says):
        Design(**wrong)
