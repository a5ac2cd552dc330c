"""One instance's continuous batching: vLLM V1's scheduler, step by step or many decode steps at once.

`begin_step` decides what the next step computes, `end_step` books it. A step with nothing but decoding, and with nobody
to admit, is stretched to the next event (`decoding.py`): many steps in closed form, cut short by `interrupt` at the first
step boundary after a new call arrives. Everything here equals stepping one by one.

In each function `m` is the instance, `at` its ENGINE record, `view` its INSTANCE record, `mem` the run's `Memory`.
"""

import math

import numpy as np

from hexrepro.compiled import inlined, kernel
from hexrepro.simulator import fairness
from hexrepro.simulator.decoding import (
    ADMISSIONS,
    decode_blocks,
    decode_s,
    join_decoding,
    skip_to_next_event,
    steps_until,
)
from hexrepro.simulator.heaps import pop_finish, set_timer
from hexrepro.simulator.kv import blocks, free_blocks, release, take
from hexrepro.simulator.preemption import step_under_pressure
from hexrepro.simulator.state import NONE, ONE, ZERO
from hexrepro.simulator.steps import attention, compute_prompt, note_peak, run_until, step_s
from hexrepro.simulator.waiting import admit, head_fits


@inlined
def begin_step(load, mem, options, m, now):
    """Start a step at `now` if the instance has work; vLLM's `Scheduler.schedule`."""
    at = mem.engines[m]
    at.ready = False
    if at.running == 0 and at.waiting == 0:
        if not at.busy:
            return
        at.busy = False
        at.idle_since_s = now
        set_timer(mem.timers, m, np.inf)
        return
    at.start_s = now
    at.fresh = 0
    at.skip = False
    at.blocked = False
    if options.idle_poll_s > 0.0 and not at.busy:
        _wait_for_poll(mem, options, m, now)
        return
    at.busy = True
    while not _plan_step(load, mem, options, m, now):
        pass


@inlined
def _plan_step(load, mem, options, m, now):
    """One pass of the scheduler. False: calls were preempted and nothing was scheduled, so no step runs and no time passes."""
    at = mem.engines[m]
    if options.fair and at.waiting > 0:
        fairness.charge(load, mem, options, m, ZERO)
    need = chunk = ZERO
    if not options.prefill_first:
        need = decode_blocks(mem, options, m, ONE)
        if at.prefilling != NONE:
            state = mem.calls[at.prefilling]
            chunk = min(state.known - state.computed, mem.views[m].max_num_batched_tokens - at.decoding)
            need += blocks(state.computed + chunk, at.block_shift) - blocks(state.computed, at.block_shift)
        if need > free_blocks(at):
            return step_under_pressure(load, mem, options, m, now)
    fits = False
    if chunk == 0 and at.waiting > 0 and at.running < mem.views[m].max_num_seqs:
        fits = head_fits(load, mem, options, m, free_blocks(at) - need)
        at.blocked = not fits
    if fits or chunk > 0:
        # taking the decoding calls' blocks may evict what the head would hit: then `_compose` looks again
        _compose(load, mem, options, m, now, need, chunk, fits and need <= at.plain)
        return True
    if options.prefill_first and decode_blocks(mem, options, m, ONE) > free_blocks(at):
        return step_under_pressure(load, mem, options, m, now)
    skip_to_next_event(mem, options, m, now)
    return True


@inlined
def _compose(load, mem, options, m, now, need, chunk, fits):
    """A step that computes prompts: decode (chunked mode), go on with the unfinished prompt, admit from the queue.

    `need`: blocks for the first two; `chunk`: tokens of the unfinished prompt; `fits`: the queue's head is
    known to fit, with its hit.
    """
    at, view = mem.engines[m], mem.views[m]
    at.scheduled = ZERO if options.prefill_first else at.decoding
    at.advance = ZERO if options.prefill_first else ONE
    kv_tokens = ZERO if options.prefill_first else at.kv_tokens
    sequences = at.scheduled
    budget = view.max_num_batched_tokens - at.scheduled
    prefill, context = ZERO, 0.0
    call = at.prefilling
    take(at, mem.nodes, need)
    while True:
        if chunk == 0:  # the running calls have what they need: admit the next
            if budget <= 0 or at.waiting == 0 or at.running >= view.max_num_seqs:
                break
            if not fits and not head_fits(load, mem, options, m, free_blocks(at)):
                break
            fits = False
            call = admit(load, mem, options, m, now)
            state = mem.calls[call]
            chunk = state.known - state.computed
            if not options.prefill_first:
                chunk = min(chunk, budget)
            take(
                at,
                mem.nodes,
                blocks(state.computed + chunk, at.block_shift) - (state.computed >> at.block_shift),
            )
        prefill += chunk
        context += attention(chunk, mem.calls[call].computed)
        sequences += 1
        budget = ZERO if options.prefill_first else budget - chunk
        compute_prompt(load, mem, options, m, call, chunk)
        chunk = ZERO
    if options.prefill_first and len(load.prefill_s) > 0:
        run_until(mem, m, max(now, mem.calls[call].release_s) + load.prefill_s[call, m])
    else:
        run_until(mem, m, now + at.slowdown * step_s(view, prefill, context, sequences, kv_tokens))
    at.prefill_tokens += prefill
    note_peak(mem, m)


@kernel
def _wait_for_poll(mem, options, m, now):
    """The released simulator's idle instance looks for work every `idle_poll_s` only."""
    at = mem.engines[m]
    polls = math.ceil((now - at.idle_since_s) / options.idle_poll_s)
    at.busy = True
    at.advance = 0
    at.scheduled = 0
    run_until(mem, m, max(now, at.idle_since_s + polls * options.idle_poll_s))


@inlined
def end_step(load, mem, options, m):
    """Book the step that ends: tokens, KV, and the calls whose prompt is complete. Finished calls: see `next_finished`."""
    at, view = mem.engines[m], mem.views[m]
    now = at.end_s
    tokens = at.scheduled * at.advance
    if at.skip:
        take(at, mem.nodes, decode_blocks(mem, options, m, at.advance))
        note_peak(mem, m)
        at.engine_steps += at.advance
    elif at.scheduled + at.fresh > 0 or at.prefilling != NONE:
        at.engine_steps += 1
    if at.skip or at.running > 0:
        at.busy_s += now - at.start_s
    at.steps += at.advance
    at.kv_tokens += tokens
    at.decode_tokens += tokens
    at.skip = False
    for i in range(at.fresh):
        call = mem.slots[m, i].fresh
        state = mem.calls[call]
        state.generated += 1
        state.known += 1
        if state.generated == 1:
            state.first_token_s = now
        view.prefill_tokens = max(0.0, view.prefill_tokens - state.prefill_left)
        state.prefill_left = 0.0
        state.finish_step = at.steps + load.tasks[call].output_tokens - state.generated
        join_decoding(mem, m, call, state.computed, at.steps)


@inlined
def next_finished(load, mem, options, m):
    """Take the next call that is finished out of the batch and free its blocks; NONE when there is none."""
    at, view = mem.engines[m], mem.views[m]
    if at.decoding == 0 or mem.slots[m, 0].key // ADMISSIONS > at.steps:
        return NONE
    call = mem.slots[m, 0].call
    state = mem.calls[call]
    pop_finish(mem.slots[m], at.decoding)
    computed = load.tasks[call].input_tokens + load.tasks[call].output_tokens - 1
    if options.fair:
        fairness.charge_call(load, mem, options, m, call, load.tasks[call].output_tokens)
    mem.residues[m, (computed - at.steps) & at.block_mask] -= 1
    at.decoding -= 1
    at.running -= 1
    at.kv_tokens -= computed
    held = computed if options.decode_blocks else load.tasks[call].input_tokens
    release(load, at, mem.nodes, m, call, held, options.caching, at.block_shift)
    state.finish_s = at.end_s
    state.generated = load.tasks[call].output_tokens
    view.running -= 1
    outstanding = view.running + view.waiting
    view.outstanding_s = view.outstanding_s - state.estimate_s if outstanding > 0 else 0.0
    view.output_tokens = view.output_tokens - state.output_estimate if outstanding > 0 else 0.0
    kv_estimate = load.tasks[call].input_tokens + state.output_estimate
    view.kv_tokens = view.kv_tokens - kv_estimate if outstanding > 0 else 0.0
    return call


@kernel
def change_speed(load, mem, options, m, slowdown, now):
    """From its next step on, instance m takes `slowdown` times as long as its latency model says.

    Of a stretch of decode steps, those before the one in progress are booked, and that one ends as it began.
    """
    at = mem.engines[m]
    if at.skip and at.advance > 1:
        done = min(steps_until(mem, m, now), at.advance - ONE)
        if at.start_s + decode_s(mem, m, done) > now:
            done -= 1
        start_s = at.start_s + decode_s(mem, m, done)
        last_s = decode_s(mem, m, done + ONE) - decode_s(mem, m, done)
        if done > 0:
            at.advance = done
            at.end_s = start_s
            end_step(load, mem, options, m)
        at.skip = True
        at.advance = ONE
        at.scheduled = at.decoding
        at.start_s = start_s
        run_until(mem, m, start_s + last_s)
    at.slowdown = slowdown
