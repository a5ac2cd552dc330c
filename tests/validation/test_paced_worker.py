"""The paced worker without vLLM: its step times against the latency model's definition, and its clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hexrepro.cluster.latency import LatencyModel
from hexrepro.validation import paced_worker
from hexrepro.validation.paced_worker import Batch, Pace, read_pace

COEFFICIENTS = (0.01, 1e-4, 1e-7, 1e-3, 1e-6)


def scheduled(tokens: dict, new=(), cached=(), finished=(), resumed=()):
    """What vLLM's scheduler would say. new: (name, prompt tokens, computed); cached: (name, computed)."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        finished_req_ids=set(finished),
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name,
                prompt_token_ids=[0] * prompt,
                prefill_token_ids=None,
                num_computed_tokens=computed,
            )
            for name, prompt, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in cached],
            num_computed_tokens=[computed for _, computed in cached],
            resumed_req_ids=set(resumed),
        ),
    )


def test_step_times_over_a_life():
    """A prompt in two chunks beside another that decodes, with a cached prefix; then preempted and computed again."""
    model = LatencyModel(*COEFFICIENTS)
    batch = Batch(COEFFICIENTS)

    # a: 100 of 150 tokens; b: 20 tokens of which 16 were cached
    step = batch.step(scheduled({"a": 100, "b": 4}, new=[("a", 150, 0), ("b", 20, 16)]))
    assert step[0] == pytest.approx(model.step_s(104, 100**2 / 2 + 4 * 16 + 8, 2, 0))
    assert step[1:] == (["a", "b"], [False, True], False)

    # a's rest is 50 behind 100; b decodes behind 20
    step = batch.step(scheduled({"a": 50, "b": 1}, cached=[("a", 100), ("b", 20)]))
    assert step[0] == pytest.approx(model.step_s(50, 50 * 100 + 50**2 / 2, 2, 20))
    assert step[1:] == (["a", "b"], [True, True], True)

    step = batch.step(scheduled({"a": 1, "b": 1}, cached=[("a", 150), ("b", 21)]))
    assert step[0] == pytest.approx(model.step_s(0, 0, 2, 171))

    # b ends; a was preempted with 2 tokens generated, 152 known, and comes back: a prompt again
    step = batch.step(scheduled({"a": 152}, cached=[("a", 0)], finished=["b"], resumed=["a"]))
    assert step[0] == pytest.approx(model.step_s(152, 152**2 / 2, 1, 0))
    assert step[1:] == (["a"], [True], True)
    assert batch.step(scheduled({"a": 1}, cached=[("a", 152)]))[0] == pytest.approx(
        model.step_s(0, 0, 1, 152)
    )
    assert "b" not in batch.known


def test_a_prompt_of_one_new_token_is_no_decode():
    batch = Batch(COEFFICIENTS)
    step = batch.step(scheduled({"a": 1}, new=[("a", 17, 16)]))
    assert step[0] == pytest.approx(LatencyModel(*COEFFICIENTS).step_s(1, 16.5, 1, 0))


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


def test_pace_absorbs_what_lies_between_steps():
    clock = Clock()
    pace = Pace(clock, clock.sleep)
    ends = []
    for i in range(5):
        clock.now += 0.002  # the engine's own work
        pace.begin(0.010, continued=i > 0)
        clock.now += 0.001
        pace.end()
        ends.append(clock.now)
    # the first step begins when it comes; each of the others is due 10 ms after the one before
    assert ends == pytest.approx([100.012, 100.022, 100.032, 100.042, 100.052])
    assert pace.late == 0


def test_pace_after_idleness_begins_anew():
    clock = Clock()
    pace = Pace(clock, clock.sleep)
    pace.begin(0.010, continued=False)
    pace.end()
    clock.now += 5.0
    pace.begin(0.010, continued=False)
    pace.end()
    assert clock.now == pytest.approx(105.020)


def test_pace_catches_up_by_one_step_at_most_and_counts_what_is_late():
    clock = Clock()
    pace = Pace(clock, clock.sleep)
    pace.begin(0.010, continued=False)
    clock.now += 0.035  # the machine was away
    pace.end()
    assert (pace.late, pace.behind_s) == (1, pytest.approx(0.025))
    pace.begin(0.010, continued=True)  # due at once, not 15 ms ago
    pace.end()
    assert clock.now == pytest.approx(100.035)
    pace.begin(0.010, continued=True)
    pace.end()
    assert clock.now == pytest.approx(100.045)


def test_pace_is_read_and_scaled():
    assert read_pace('{"base_s": 0.02, "sequence_s": 0.001, "scale": 0.5}') == pytest.approx(
        (0.01, 0, 0, 0.0005, 0)
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "HEXREPRO_PACE is not set"),
        ("{", "not JSON"),
        ("{}", "with base_s"),
        ('{"base_s": 0}', "above 0"),
        ('{"base_s": 0.1, "speed": 2}', "speed is not known"),
        ('{"base_s": 0.1, "sequence_s": -1}', "sequence_s is -1"),
        ('{"base_s": true}', "base_s is True"),
        ('{"base_s": 0.1, "scale": 0}', "above 0"),
    ],
)
def test_a_wrong_pace_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        read_pace(text)


def test_imports_nothing_that_vllms_python_lacks():
    """In a Python without site-packages; the worker itself then asks for vLLM."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(paced_worker.__file__).parent)!r})\n"
        "import paced_worker\n"
        "try: paced_worker.PacedWorker\n"
        "except ModuleNotFoundError as error: print(error.name)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("vllm", "")


def test_another_vllm_is_refused(monkeypatch):
    for name in (
        "vllm",
        "vllm.logger",
        "vllm.v1",
        "vllm.v1.outputs",
        "vllm.v1.worker",
        "vllm.v1.worker.cpu_worker",
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    sys.modules["vllm"].__version__ = "0.33.1"
    sys.modules["vllm.logger"].init_logger = None
    sys.modules["vllm.v1.outputs"].EMPTY_MODEL_RUNNER_OUTPUT = sys.modules[
        "vllm.v1.outputs"
    ].ModelRunnerOutput = None
    sys.modules["vllm.v1.worker.cpu_worker"].CPUWorker = object
    with pytest.raises(RuntimeError, match=r"written for vLLM 0\.32, this is 0\.33\.1"):
        _ = paced_worker.PacedWorker
