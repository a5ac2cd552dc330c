"""Drives vLLM's own V1 Scheduler through scenarios, in virtual time: no model, no forward pass, no clock.

    VLLM_PYTHON scheduler_driver.py < scenarios.json > outcomes.json

Runs in vLLM's environment and imports nothing of ours, so it says what vLLM does and not what we think it
does. It is written for vLLM 0.32 (CPU build). Times advance by the step-time model of hexrepro (vLLM has
none); all else is vLLM's.

A scenario: {name, scheduling: fcfs|priority, block_size, kv_blocks, max_num_seqs, max_num_batched_tokens,
             prefix_caching: off|template|full, step_s: [base, prefill_token, prefill_context, sequence,
             kv_token], calls: [{id, arrival_s, input_tokens, output_tokens, priority, template,
             template_tokens, context, context_tokens}]}
calls in the order in which they are added to the scheduler, arrivals nondecreasing.
An outcome:  {name, passes: [[start_s, end_s, [[id, tokens], ...], [preempted ids]], ...],
              calls: {id: {admit_s, first_token_s, finish_s, cached_tokens, preemptions}}}
A pass is one Scheduler.schedule(); one that scheduled nothing takes no time (vLLM's worker does not run the
model then).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", CUDA_VISIBLE_DEVICES=""
)

import torch
from vllm import EngineArgs, SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MAX_MODEL_LEN = 1 << 17
SEGMENT = 1 << 20  # distance between the token ids of two segments: longer than any prompt


def tiny_model(directory: str) -> str:
    """A model directory with nothing but a config: the scheduler never looks at weights."""
    config = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=64,
        max_position_embeddings=MAX_MODEL_LEN,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump(config, file)
    return directory


def make_scheduler(model: str, scenario: dict) -> Scheduler:
    block_size = scenario["block_size"]
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=scenario["max_num_seqs"],
        max_num_batched_tokens=scenario["max_num_batched_tokens"],
        scheduling_policy=scenario["scheduling"],
        enable_prefix_caching=scenario["prefix_caching"] != "off",
        block_size=block_size,
        async_scheduling=False,
    ).create_engine_config()
    n_blocks = scenario["kv_blocks"] + 1  # one of them becomes vLLM's null block
    config.cache_config.num_gpu_blocks = n_blocks
    attention = FullAttentionSpec(block_size, num_kv_heads=1, head_size=32, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=n_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)]
    )
    scheduler = Scheduler(config, kv, StructuredOutputManager(config), block_size=block_size, log_stats=False)
    # the settings really arrived, whatever EngineArgs made of them
    assert scheduler.max_num_running_reqs == scheduler.max_num_active_reqs == scenario["max_num_seqs"]
    assert scheduler.max_num_scheduled_tokens == scenario["max_num_batched_tokens"]
    assert scheduler.kv_cache_manager.enable_caching == (scenario["prefix_caching"] != "off")
    assert scheduler.kv_cache_manager.coordinator.single_type_managers[0].block_size == block_size
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == scenario["kv_blocks"]
    assert scheduler.scheduler_reserve_full_isl
    assert scheduler.scheduler_config.enable_chunked_prefill
    return scheduler


class Prompts:
    """Token ids: calls with the same template (and context) begin with equal ids; everything else is unique."""

    def __init__(self, prefix_caching: str) -> None:
        self.share_context = prefix_caching == "full"
        self.segments: dict[tuple, int] = {}

    def segment(self, name: tuple, n: int) -> list[int]:
        start = self.segments.setdefault(name, (len(self.segments) + 1) * SEGMENT)
        return list(range(start, start + n))

    def prompt(self, call: dict) -> list[int]:
        tokens: list[int] = []
        if call["template"] >= 0:
            tokens += self.segment(("template", call["template"]), call["template_tokens"])
        if call["context"] >= 0:
            name = ("context", call["context"]) if self.share_context else ("context of", call["id"])
            tokens += self.segment(name, call["context_tokens"])
        return tokens + self.segment(("call", call["id"]), call["input_tokens"] - len(tokens))


def step_time(step_s: list[float], prefills: list[tuple[int, int]], contexts: list[int]) -> float:
    """prefills: (chunk tokens, tokens computed before) each; contexts: tokens computed before, of each
    decoding sequence.
    """
    base, prefill_token, prefill_context, sequence, kv_token = step_s
    p = sum(n for n, _ in prefills)
    a = sum(n * k + n * n / 2 for n, k in prefills)
    return (
        base
        + prefill_token * p
        + prefill_context * a
        + sequence * (len(prefills) + len(contexts))
        + kv_token * sum(contexts)
    )


def run(model: str, scenario: dict) -> dict:
    scheduler = make_scheduler(model, scenario)
    hash_block = None
    if scenario["prefix_caching"] != "off":
        hash_block = get_request_block_hasher(scenario["block_size"], get_hash_fn_by_name("sha256"))
    prompts = Prompts(scenario["prefix_caching"])
    live: dict[str, Request] = {}
    calls: dict[str, dict] = {}
    passes: list[list] = []
    arrivals = list(scenario["calls"])
    # sequences whose prefill (or recomputation) is complete: they got a token and kept their KV
    complete: set[str] = set()
    now = 0.0
    while arrivals or live:
        if not live:
            now = max(now, arrivals[0]["arrival_s"])
        while arrivals and arrivals[0]["arrival_s"] <= now:
            call = arrivals.pop(0)
            sampling = SamplingParams(
                max_tokens=call["output_tokens"], min_tokens=call["output_tokens"], ignore_eos=True
            )
            live[call["id"]] = Request(
                call["id"],
                prompts.prompt(call),
                sampling,
                None,
                priority=call["priority"],
                block_hasher=hash_block,
                # only orders ties of the priority: the order of arrival, never equal
                arrival_time=float(len(calls)),
            )
            scheduler.add_request(live[call["id"]])
            calls[call["id"]] = dict(
                admit_s=None, first_token_s=None, finish_s=None, cached_tokens=None, preemptions=0
            )
        output = scheduler.schedule()
        preempted = sorted(output.preempted_req_ids or ())
        complete -= set(preempted)
        for new in output.scheduled_new_reqs:
            calls[new.req_id]["admit_s"] = now
            calls[new.req_id]["cached_tokens"] = new.num_computed_tokens
        prefills, contexts = [], []
        for name, n in output.num_scheduled_tokens.items():
            before = live[name].num_computed_tokens - n  # schedule() has counted them already
            if name in complete:
                contexts.append(before)
            else:
                prefills.append((n, before))
        start = now
        if output.num_scheduled_tokens:
            now += step_time(scenario["step_s"], prefills, contexts)
        passes.append([start, now, [[name, n] for name, n in output.num_scheduled_tokens.items()], preempted])
        names = list(output.num_scheduled_tokens)
        # the model samples a token for each sequence whose known tokens are all computed; ids of outputs are
        # unique too
        sampled = []
        for name in names:
            request = live[name]
            done = request.num_computed_tokens == request.num_tokens
            sampled.append(prompts.segment(("output", name, request.num_output_tokens), 1) if done else [])
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        for name, tokens in zip(names, sampled, strict=True):
            request = live[name]
            if tokens:
                complete.add(name)
                if request.num_output_tokens == 1:
                    calls[name]["first_token_s"] = now
            if request.is_finished():
                calls[name]["finish_s"] = now
                calls[name]["preemptions"] = request.num_preemptions
                del live[name]
                complete.discard(name)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == scenario["kv_blocks"]
    return dict(name=scenario["name"], passes=passes, calls=calls)


def main() -> None:
    scenarios = json.load(sys.stdin)
    outcomes = sys.stdout
    sys.stdout = sys.stderr  # vLLM may print
    init_none_hash(get_hash_fn_by_name("sha256"))
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_model(directory)
        json.dump([run(model, scenario) for scenario in scenarios], outcomes)


if __name__ == "__main__":
    main()
