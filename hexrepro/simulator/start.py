"""How a run begins that does not begin empty: calls wait and run at the instances, and templates are cached.

So the future of a live cluster can be simulated from its present state.
"""

import numpy as np

from hexrepro.compiled import kernel
from hexrepro.simulator.decoding import join_decoding
from hexrepro.simulator.heaps import set_timer
from hexrepro.simulator.kv import blocks, free_blocks, segment_node, store, take
from hexrepro.simulator.state import NONE, ONE
from hexrepro.simulator.steps import compute_prompt
from hexrepro.simulator.waiting import admit, enqueue, head_fits


@kernel
def place(load, mem, options, m, call):
    """Send a call, whose key and estimates stand in its record, to the queue of instance m."""
    at, instance = mem.engines[m], mem.views[m]
    state, task = mem.calls[call], load.tasks[call]
    state.seq = at.enqueued
    at.enqueued += 1
    state.instance = m
    state.known = task.input_tokens + state.generated
    instance.prefill_tokens += state.prefill_left
    instance.output_tokens += state.output_estimate
    instance.kv_tokens += task.input_tokens + state.output_estimate
    instance.outstanding_s += state.estimate_s
    instance.dispatched_s += state.estimate_s
    enqueue(load, mem, options, m, call, True)


@kernel
def resume(load, options, mem):
    """Bring a run to where it stands at `load.start_s`."""
    for m in range(len(load.closed)):
        mem.is_open[m] = not load.closed[m]
    if load.warm and options.caching:
        _warm(load, mem)
    for i in range(len(load.started)):
        started = load.started[i]
        call, m = started.call, started.instance
        state, task = mem.calls[call], load.tasks[call]
        state.missing = NONE  # it has been released
        state.release_s = load.start_s
        if started.generated >= task.output_tokens:
            mem.clock[0].unfinished -= np.int64(task.query < load.watched)
            state.finish_s = load.start_s
            for e in range(task.succ_begin, task.succ_end):
                mem.calls[load.successors[e]].missing -= 1
            continue
        state.key = started.key
        state.estimate_s = started.estimate_s
        state.budget_s = started.budget_s
        state.output_estimate = max(task.output_estimate, started.generated + 1.0)
        state.prefill_left = 0.0 if started.generated > 0 else task.input_tokens - task.cached_estimate
        state.generated = max(started.generated - ONE, 0)
        place(load, mem, options, m, call)
        at = mem.engines[m]
        alone = at.waiting == 1 and at.running < mem.views[m].max_num_seqs
        if started.generated > 0 and alone and head_fits(load, mem, options, m, free_blocks(at)):
            _join(load, mem, options, m, call)
    for m in range(len(mem.views)):
        at = mem.engines[m]
        if at.running + at.waiting > 0:  # as if a step that did nothing ended now
            at.busy = True
            at.start_s = at.end_s = load.start_s
            set_timer(mem.timers, m, load.start_s)


@kernel
def _join(load, mem, options, m, call):
    """Move the only call in the queue to the batch, with the KV of its prompt and of the tokens before its newest."""
    at, state = mem.engines[m], mem.calls[call]
    admit(load, mem, options, m, load.start_s)
    held = state.computed >> at.block_shift
    take(at, mem.nodes, blocks(state.known, at.block_shift) - held)
    compute_prompt(load, mem, options, m, call, state.known - state.computed)
    at.fresh = 0
    state.generated += 1
    state.charged = state.generated
    state.first_token_s = load.start_s
    state.finish_step = at.steps + load.tasks[call].output_tokens - state.generated
    join_decoding(mem, m, call, state.known, at.steps)
    state.known += 1


@kernel
def _warm(load, mem):
    """Put every template into every instance's prefix cache, as far as there is room."""
    for call in range(len(load.tasks)):
        segment = load.tasks[call].first_segment
        if segment == NONE:
            continue
        for m in range(len(mem.views)):
            count = load.tasks[call].first_end >> mem.engines[m].block_shift
            node = segment_node(load, segment, m)
            if 0 < count <= mem.engines[m].plain and mem.nodes[node].cached == 0:
                store(mem.engines[m], mem.nodes, node, count)
