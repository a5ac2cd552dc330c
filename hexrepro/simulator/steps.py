"""What all kinds of engine steps have in common: their time, their end, and prompts that progress.

In the functions of an instance `m` is its index, `at` its ENGINE record, `view` its INSTANCE record, `mem` the run's `Memory`.
"""

from hexrepro.compiled import inlined, kernel
from hexrepro.simulator.heaps import set_timer
from hexrepro.simulator.kv import fill, free_blocks
from hexrepro.simulator.state import NONE


@kernel
def step_s(view, prefill_tokens, prefill_context, sequences, kv_tokens):
    """Seconds of one step; `hexrepro.cluster.latency` defines the terms."""
    return (
        view.base_s
        + view.prefill_token_s * prefill_tokens
        + view.prefill_context_s * prefill_context
        + view.sequence_s * sequences
        + view.kv_token_s * kv_tokens
    )


@kernel
def attention(chunk, computed):
    return float(chunk) * computed + 0.5 * chunk * chunk


@inlined
def run_until(mem, m, end_s):
    mem.engines[m].end_s = end_s
    set_timer(mem.timers, m, end_s)


@kernel
def compute_prompt(load, mem, options, m, call, chunk):
    """Schedule `chunk` more prompt tokens of a call in prefill."""
    at, state = mem.engines[m], mem.calls[call]
    state.computed += chunk
    if options.caching:
        fill(load, mem.nodes, m, call, state.computed, at.block_shift)
    if state.computed == state.known:
        mem.slots[m, at.fresh].fresh = call
        at.fresh += 1
        at.prefilling = NONE


@kernel
def note_peak(mem, m):
    at = mem.engines[m]
    held = at.pool_blocks - free_blocks(at)
    at.peak_blocks = max(at.peak_blocks, held)
