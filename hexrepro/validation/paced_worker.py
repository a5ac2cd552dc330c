"""A vLLM worker that takes a modelled time for each engine step instead of computing it.

    python -m vllm.entrypoints.openai.api_server --worker-cls hexrepro.validation.paced_worker.PacedWorker ...

All else of the server is vLLM's own: API, scheduler, batching, KV blocks, prefix cache, priorities, preemption, metrics. So a
laptop can stand in for a cluster of GPUs of different speed. The step time is that of `hexrepro.cluster.latency`:

    scale * (base_s + prefill_token_s * P + prefill_context_s * A + sequence_s * S + kv_token_s * K)

and comes as JSON in the environment variable HEXREPRO_PACE: `{"base_s": 0.01, ..., "scale": 0.2}`. Every sequence whose
known tokens are all computed gets one token, always the same. There are no log-probabilities and no structured output.

This module runs in vLLM's Python and imports nothing but vLLM and the standard library (`launch.py` puts it on the path). It
touches vLLM's internals and so is pinned to one version.
"""

from __future__ import annotations

import json
import math
import os
import time

VLLM = "0.32"
VARIABLE = "HEXREPRO_PACE"
COEFFICIENTS = ("base_s", "prefill_token_s", "prefill_context_s", "sequence_s", "kv_token_s")
TOKEN = 7  # what every sequence gets; the tokenizer of `tiny_model.py` has it, and it ends nothing
IDLE_S = 0.003  # a gap that could be the engine's own work between two steps; a longer one may be idleness
REPORT_EVERY = 2000  # steps


def read_pace(text: str | None) -> tuple[float, ...]:
    """The five coefficients in seconds, scaled, from the JSON in HEXREPRO_PACE; ValueError says what is wrong with it."""
    if not text:
        raise ValueError(
            f'environment variable {VARIABLE} is not set; it must hold JSON such as {{"base_s": 0.01}}'
        )
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{VARIABLE} is not JSON: {error}") from None
    if not isinstance(given, dict) or "base_s" not in given:
        raise ValueError(f"{VARIABLE} is {text!r}; it must be a JSON object with base_s")
    for name, value in given.items():
        if name not in (*COEFFICIENTS, "scale"):
            raise ValueError(f"{VARIABLE}: {name} is not known; known are {', '.join(COEFFICIENTS)}, scale")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{VARIABLE}: {name} is {value!r}; it must be a number, 0 or more")
    scale = float(given.get("scale", 1.0))
    if not scale * given["base_s"] > 0:
        raise ValueError(f"{VARIABLE}: base_s and scale must be above 0")
    return tuple(scale * float(given.get(name, 0.0)) for name in COEFFICIENTS)


class Batch:
    """What the worker has to know of the sequences: how many tokens of each are known, and which of them decode."""

    def __init__(self, coefficients: tuple[float, ...]) -> None:
        self.coefficients = coefficients
        self.known: dict[str, int] = {}  # prompt and generated tokens
        self.decoding: set[str] = set()  # all known tokens but the newest are computed

    def step(self, scheduled) -> tuple[float, list[str], list[bool], bool]:
        """Take in a SchedulerOutput.

        Returns the step's seconds, the sequences in it, which of them get a token, and whether one of them was under way.
        """
        for name in scheduled.finished_req_ids:
            self.known.pop(name, None)
            self.decoding.discard(name)
        computed: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:  # a preempted one may come back as new
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.known[new.req_id] = max(len(tokens), self.known.get(new.req_id, 0))
            self.decoding.discard(new.req_id)
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        self.decoding -= set(cached.resumed_req_ids)  # preempted before: all is computed again
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

        prefill = sequences = kv = 0
        context = 0.0
        names, complete = [], []
        for name, n in scheduled.num_scheduled_tokens.items():
            before = computed[name]
            sequences += 1
            if name in self.decoding:
                kv += before
            else:
                prefill += n
                context += n * before + 0.5 * n * n
            done = before + n >= self.known[name]
            if done:
                self.known[name] += 1
                self.decoding.add(name)
            names.append(name)
            complete.append(done)
        base, per_prefill, per_context, per_sequence, per_kv = self.coefficients
        seconds = (
            base + per_prefill * prefill + per_context * context + per_sequence * sequences + per_kv * kv
        )
        return seconds, names, complete, bool(cached.req_ids)


class Pace:
    """Ends each step at its due time, on a clock that the engine's own work between steps does not push back.

    A real GPU's measured step time has the scheduler's share in it; so here a step that follows another directly begins when
    that one was due to end. A step after idleness begins when it comes. A machine that falls behind catches up by at most one
    step at a time, and what it could not make up for is counted as late.
    """

    def __init__(self, clock=time.monotonic, sleep=time.sleep) -> None:
        self.clock, self.sleep = clock, sleep
        self.due_s = -math.inf
        self.steps = self.late = 0
        self.behind_s = 0.0  # total of what steps ended late

    def begin(self, seconds: float, continued: bool) -> None:
        """A step of so many seconds begins; `continued` says that one of its sequences was under way before."""
        now = self.clock()
        if continued:
            start = max(self.due_s, now - seconds)
        elif now - self.due_s < IDLE_S:
            start = self.due_s
        else:
            start = now
        self.due_s = start + seconds

    def end(self) -> None:
        left = self.due_s - self.clock()
        if left > 0:
            self.sleep(left)
        else:
            self.late += 1
            self.behind_s -= left
        self.steps += 1


def _worker():
    """The worker class; made on demand so that the rest of this module can be tested without vLLM."""
    import vllm
    from vllm.logger import init_logger
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
    from vllm.v1.worker.cpu_worker import CPUWorker

    if vllm.__version__.split("+")[0].rsplit(".", 1)[0] != VLLM:
        raise RuntimeError(
            f"the paced worker is written for vLLM {VLLM}, this is {vllm.__version__}: it touches internals that change;"
            f" install the pinned version, or check paced_worker.py against the new one"
        )
    logger = init_logger("vllm.hexrepro.paced_worker")

    class PacedWorker(CPUWorker):
        """vLLM's CPU worker, its forward pass replaced by a sleep."""

        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            if self.speculative_config is not None or self.parallel_config.world_size != 1:
                raise ValueError(
                    "the paced worker knows one process and no speculative decoding; leave both options away"
                )
            self.batch = Batch(read_pace(os.environ.get(VARIABLE)))
            self.pace = Pace()
            self._late_before, self._behind_before = 0, 0.0

        def execute_model(self, scheduler_output):
            seconds, names, complete, continued = self.batch.step(scheduler_output)
            if not names:
                return EMPTY_MODEL_RUNNER_OUTPUT
            self.pace.begin(seconds, continued)
            tokens = [[TOKEN] if done else [] for done in complete]
            output = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=tokens,
            )
            self.pace.end()
            if self.pace.steps % REPORT_EVERY == 0:
                self._report()
            return output

        def _report(self) -> None:
            late, behind_s = self.pace.late - self._late_before, self.pace.behind_s - self._behind_before
            self._late_before, self._behind_before = self.pace.late, self.pace.behind_s
            if late > 0.01 * REPORT_EVERY:
                logger.warning(
                    "of the last %d paced steps %d ended late, by %.2f ms on average: the machine is too slow for this pace",
                    REPORT_EVERY,
                    late,
                    behind_s / late * 1e3,
                )

    PacedWorker.__module__, PacedWorker.__qualname__ = __name__, "PacedWorker"
    return PacedWorker


def __getattr__(name: str):
    if name == "PacedWorker":
        worker = globals()["PacedWorker"] = _worker()
        return worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
