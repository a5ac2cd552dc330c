"""One instance's continuous batching: vLLM V1's scheduler, step by step or many decode steps at once.

`begin_step` decides what the next step computes, `end_step` books it. A step with nothing but decoding, and with nobody
to admit, is stretched to the next event: `advance` steps in closed form, cut short by `interrupt` at the first step
boundary after a new call arrives. Everything here equals stepping one by one.

In each function `m` is the instance, `at` its ENGINE record, `view` its INSTANCE record, `mem` the run's `Memory`.
"""

import math

import numpy as np

from hexrepro.compiled import inlined, kernel
from hexrepro.simulator import fairness
from hexrepro.simulator.heaps import before, pop, pop_finish, push, push_finish, set_timer
from hexrepro.simulator.kv import adopt, blocks, fill, free_blocks, lookup, release, take
from hexrepro.simulator.state import NONE, ONE, ZERO

_ADMISSIONS = 1 << 32  # finish keys order by finish step, then by admission


@inlined
def begin_step(load, mem, options, m, now):
    """Start a step at `now` if the instance has work; vLLM's `Scheduler.schedule`."""
    at = mem.engines[m]
    at.ready = False
    if at.running == 0 and at.waiting == 0:
        if not at.busy:
            return
        at.busy = False
        at.polled = False
        at.idle_since_s = now
        set_timer(mem.timers, m, np.inf)
        return
    at.start_s = now
    at.fresh = 0
    at.skip = False
    at.blocked = False
    if options.idle_poll_s > 0.0 and not at.busy and not at.polled:
        _wait_for_poll(mem, options, m, now)
        return
    at.busy = True
    at.polled = True
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
        need = _decode_blocks(mem, options, m, ONE)
        if at.prefilling != NONE:
            state = mem.calls[at.prefilling]
            chunk = min(state.known - state.computed, mem.views[m].max_num_batched_tokens - at.decoding)
            need += blocks(state.computed + chunk, at.block_shift) - blocks(state.computed, at.block_shift)
        if need > free_blocks(at):
            return _step_under_pressure(load, mem, options, m, now)
    admit = False
    if chunk == 0 and at.waiting > 0 and at.running < mem.views[m].max_num_seqs:
        admit = _head_fits(load, mem, options, m, free_blocks(at) - need)
        at.blocked = not admit
    if admit or chunk > 0:
        # taking the decoding calls' blocks may evict what the head would hit: then `_compose` looks again
        _compose(load, mem, options, m, now, need, chunk, admit and need <= at.plain)
        return True
    if options.prefill_first and _decode_blocks(mem, options, m, ONE) > free_blocks(at):
        return _step_under_pressure(load, mem, options, m, now)
    _skip(mem, options, m, now)
    return True


@inlined
def _compose(load, mem, options, m, now, need, chunk, admit):
    """A step that computes prompts: decode (chunked mode), go on with the unfinished prompt, admit from the queue.

    `need`: blocks for the first two; `chunk`: tokens of the unfinished prompt; `admit`: the queue's head is
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
            if not admit and not _head_fits(load, mem, options, m, free_blocks(at)):
                break
            admit = False
            call = _admit(load, mem, options, m, now)
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
        context += _attention(chunk, mem.calls[call].computed)
        sequences += 1
        budget = ZERO if options.prefill_first else budget - chunk
        _compute(load, mem, options, m, call, chunk)
        chunk = ZERO
    _run_until(mem, m, now + step_s(view, prefill, context, sequences, kv_tokens))
    at.prefill_tokens += prefill
    _note_peak(mem, m)


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
def _attention(chunk, computed):
    return float(chunk) * computed + 0.5 * chunk * chunk


@inlined
def _run_until(mem, m, end_s):
    mem.engines[m].end_s = end_s
    set_timer(mem.timers, m, end_s)


@kernel
def _wait_for_poll(mem, options, m, now):
    """The released simulator's idle instance looks for work every `idle_poll_s` only."""
    at = mem.engines[m]
    polls = math.ceil((now - at.idle_since_s) / options.idle_poll_s)
    at.busy = True
    at.polled = True
    at.advance = 0
    at.scheduled = 0
    _run_until(mem, m, max(now, at.idle_since_s + polls * options.idle_poll_s))


# --- the waiting queue


@kernel
def _client(mem, options, m):
    return fairness.least_served(mem, m) if options.fair else ZERO


@kernel
def _head_fits(load, mem, options, m, free):
    """Whether all known tokens of the first call in the queue fit into `free` blocks (vLLM's full_sequence_must_fit)."""
    at = mem.engines[m]
    call = mem.clients[m, _client(mem, options, m)].root
    known = mem.calls[call].known
    need = blocks(known, at.block_shift)
    at.head_hit = ZERO
    if options.caching:
        hit, in_queue = lookup(load, mem.nodes, m, call, known, at.block_shift)
        at.head_hit = hit << at.block_shift
        need += in_queue - hit
    return need <= free


@kernel
def enqueue(load, mem, options, m, call, arrives):
    """Put a call into the queue of instance m, by the key and the number that it has; a preempted call does not arrive."""
    at = mem.engines[m]
    client = ZERO
    if options.fair:
        client = load.queries[load.tasks[call].query].client
        if mem.clients[m, client].root == NONE:
            fairness.enter(mem, m, client, arrives)
    mem.clients[m, client].root = push(mem.calls, mem.clients[m, client].root, call)
    at.waiting += 1
    mem.views[m].waiting += 1
    mem.views[m].waiting_s += mem.calls[call].estimate_s


@inlined
def _admit(load, mem, options, m, now):
    """Move the head of the queue into the batch; `_head_fits` has just looked up its cached tokens, which count as computed."""
    at, view = mem.engines[m], mem.views[m]
    client = _client(mem, options, m)
    call = mem.clients[m, client].root
    state = mem.calls[call]
    mem.clients[m, client].root = pop(mem.calls, call)
    at.waiting -= 1
    at.running += 1
    state.admitted = at.admissions
    at.admissions += 1
    view.waiting -= 1
    view.running += 1
    view.waiting_s = view.waiting_s - state.estimate_s if view.waiting > 0 else 0.0
    if options.caching:
        adopt(load, at, mem.nodes, m, call, at.block_shift)
    at.cached_tokens += at.head_hit
    first_time = math.isnan(state.admit_s)
    if first_time:
        state.admit_s = now
        state.cached_tokens = at.head_hit
    if options.fair:
        fairness.leave(load, mem, options, m, client, call, first_time)
    state.computed = at.head_hit
    at.prefilling = call
    return call


@kernel
def _compute(load, mem, options, m, call, chunk):
    """Schedule `chunk` more prompt tokens of a call in prefill."""
    at, state = mem.engines[m], mem.calls[call]
    state.computed += chunk
    if options.caching:
        fill(load, mem.nodes, m, call, state.computed, at.block_shift)
    if state.computed == state.known:
        mem.slots[m, at.fresh].fresh = call
        at.fresh += 1
        at.prefilling = NONE


# --- decoding


@kernel
def _decode_blocks(mem, options, m, steps):
    """Blocks that the decoding calls take in their next `steps` steps: each opens one when its last is full."""
    at = mem.engines[m]
    if not options.decode_blocks:
        return ZERO
    cycles = steps >> at.block_shift
    need = cycles * at.decoding
    last = at.steps + steps
    for step in range(at.steps + (cycles << at.block_shift), last):
        need += mem.residues[m, -step & at.block_mask]
    return need


@inlined
def _skip(mem, options, m, now):
    """Decode until the first call finishes, or until the blocks run out."""
    at = mem.engines[m]
    if (
        at.decoding == 0
    ):  # nothing runs and the queue's head does not fit: `check_fits` refuses such calls beforehand
        _run_until(mem, m, np.inf)
        return
    steps = mem.slots[m, 0].key // _ADMISSIONS - at.steps
    if options.fair and at.blocked:
        steps = 1  # the counters move with every token, and with them the head of the queue
    if options.decode_blocks:
        free = free_blocks(at)
        if ((steps >> at.block_shift) + 1) * at.decoding > free:
            steps = min(steps, _steps_that_fit(mem, options, m, free))
    at.skip = True
    at.advance = steps
    at.scheduled = at.decoding
    _run_until(mem, m, now + decode_s(mem, m, steps))


@kernel
def _steps_that_fit(mem, options, m, free):
    at = mem.engines[m]
    cycles = free // at.decoding
    steps = cycles << at.block_shift
    free -= cycles * at.decoding
    while True:
        free -= mem.residues[m, -(at.steps + steps) & at.block_mask]
        if free < 0:
            return steps
        steps += 1


@kernel
def decode_s(mem, m, steps):
    """Seconds of `steps` decode steps in a row; the KV read grows by one token a sequence and step."""
    at, view = mem.engines[m], mem.views[m]
    kv_tokens = float(at.kv_tokens) * steps + float(at.decoding) * (0.5 * steps * (steps - 1.0))
    return steps * (view.base_s + view.sequence_s * at.decoding) + view.kv_token_s * kv_tokens


@kernel
def steps_until(mem, m, now):
    """The number of decode steps after which the stretch in progress first reaches `now`; at least 1."""
    at, view = mem.engines[m], mem.views[m]
    quadratic = 0.5 * view.kv_token_s * at.decoding
    linear = view.base_s + view.sequence_s * at.decoding + view.kv_token_s * at.kv_tokens - quadratic
    elapsed = now - at.start_s
    guess = 2.0 * elapsed / (linear + math.sqrt(linear * linear + 4.0 * quadratic * elapsed))
    steps = max(1, math.ceil(guess))
    while steps > 1 and at.start_s + decode_s(mem, m, steps - 1) >= now:  # mend what rounding did to the root
        steps -= 1
    while at.start_s + decode_s(mem, m, steps) < now:
        steps += 1
    return steps


@kernel
def interrupt(load, mem, options, m, call, now):
    """A call has come to instance m: end a stretch of decode steps at the next boundary, unless it can't matter."""
    at = mem.engines[m]
    if not at.skip or not at.busy or at.advance <= 1:
        return
    if not options.fair:
        if at.running >= mem.views[m].max_num_seqs:
            return  # nobody can be admitted before a call finishes
        if at.blocked and mem.clients[m, 0].root != call:
            return  # it stands behind a head that does not fit
    steps = steps_until(mem, m, now)
    if steps < at.advance:
        at.advance = steps
        _run_until(mem, m, at.start_s + decode_s(mem, m, steps))


# --- the end of a step


@inlined
def end_step(load, mem, options, m):
    """Book the step that ends: tokens, KV, and the calls whose prompt is complete. Finished calls: see `next_finished`."""
    at, view = mem.engines[m], mem.views[m]
    now = at.end_s
    tokens = at.scheduled * at.advance
    if at.skip:
        take(at, mem.nodes, _decode_blocks(mem, options, m, at.advance))
        _note_peak(mem, m)
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
        _join_decoding(mem, options, m, call, state.computed, at.steps)


@kernel
def _join_decoding(mem, options, m, call, computed, steps):
    """Count a call among the decoding ones: `computed` KV tokens when the step counter stands at `steps`."""
    at, state = mem.engines[m], mem.calls[call]
    key = state.finish_step * _ADMISSIONS + state.admitted
    push_finish(mem.slots[m], at.decoding, key, call)
    mem.residues[m, (computed - steps) & at.block_mask] += 1
    at.decoding += 1
    at.kv_tokens += computed


@inlined
def next_finished(load, mem, options, m):
    """Take the next call that is finished out of the batch and free its blocks; NONE when there is none."""
    at, view = mem.engines[m], mem.views[m]
    if at.decoding == 0 or mem.slots[m, 0].key // _ADMISSIONS > at.steps:
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


# --- KV pressure: the blocks do not suffice for the step


@kernel
def _step_under_pressure(load, mem, options, m, now):
    """vLLM's loop over the running calls, call by call: whoever can't get a block preempts the last in line."""
    at, view = mem.engines[m], mem.views[m]
    order = mem.order
    if options.fair:
        fairness.charge(load, mem, options, m, ZERO)
    running = _running_in_order(load, mem, m)
    budget = view.max_num_batched_tokens
    i = ZERO
    while i < running:
        call, computed = order[i].call, order[i].computed
        chunk = min(mem.calls[call].known - computed, budget)
        need = blocks(computed + chunk, at.block_shift) - blocks(computed, at.block_shift)
        while need > free_blocks(at):
            last = 0
            for j in range(1, running):
                if before(mem.calls, order[last].call, order[j].call):
                    last = j
            victim, held = order[last].call, order[last].computed
            if last < i:  # it was scheduled in this step already: its tokens go back to the budget
                held += order[last].scheduled
                budget += order[last].scheduled
                i -= 1
            running -= 1
            for j in range(last, running):
                order[j] = order[j + 1]
            _preempt(load, mem, options, m, victim, held)
            if victim == call:
                break
        if i >= running or order[i].call != call:
            break  # it gave way itself; those behind it sit this step out
        take(at, mem.nodes, need)
        order[i].scheduled = chunk
        budget -= chunk
        i += 1
    _rebuild(load, mem, options, m, running, i)
    prefill, context, kv_tokens = ZERO, 0.0, ZERO
    for j in range(i):
        if order[j].call == at.prefilling:
            prefill += order[j].scheduled
            context += _attention(order[j].scheduled, order[j].computed)
        else:
            kv_tokens += order[j].computed
    if prefill > 0:
        _compute(load, mem, options, m, at.prefilling, prefill)
    _note_peak(mem, m)
    if i == 0:
        return False
    _run_until(mem, m, now + step_s(view, prefill, context, i, kv_tokens))
    at.prefill_tokens += prefill
    return True


@kernel
def _running_in_order(load, mem, m):
    """List the running calls in order of admission, with their known and computed tokens brought up to date."""
    at = mem.engines[m]
    order = mem.order
    for i in range(at.decoding):
        call = mem.slots[m, i].call
        state, task = mem.calls[call], load.tasks[call]
        state.generated = task.output_tokens - (state.finish_step - at.steps)
        state.known = task.input_tokens + state.generated
        j = i
        while j > 0 and mem.calls[order[j - 1].call].admitted > state.admitted:
            order[j] = order[j - 1]
            j -= 1
        order[j].call = call
        order[j].computed = state.known - 1
    running = at.decoding
    if at.prefilling != NONE:  # the last that was admitted
        order[running].call = at.prefilling
        order[running].computed = mem.calls[at.prefilling].computed
        running += 1
    return running


@kernel
def _preempt(load, mem, options, m, call, held):
    """Back to the queue by its own key; its KV is dropped and will be computed again, its tokens stay."""
    at, view, state = mem.engines[m], mem.views[m], mem.calls[call]
    if options.fair:
        fairness.charge_call(load, mem, options, m, call, state.generated)
    if call == at.prefilling:
        at.prefilling = NONE
    release(load, at, mem.nodes, m, call, held, options.caching, at.block_shift)
    state.computed = 0
    state.preemptions += 1
    at.preempted += 1
    at.running -= 1
    view.running -= 1
    again = state.known - state.prefill_left
    state.prefill_left += again
    view.prefill_tokens += again
    enqueue(load, mem, options, m, call, False)


@kernel
def _rebuild(load, mem, options, m, running, scheduled):
    """Make the decoding calls' closed form anew from `order`: the first `scheduled` decode in this step, the rest wait."""
    at = mem.engines[m]
    steps = at.steps
    at.decoding = 0
    at.kv_tokens = 0
    at.scheduled = 0
    at.advance = 1
    mem.residues[m, :] = 0
    for i in range(running):
        call = mem.order[i].call
        if call == at.prefilling:
            continue
        state = mem.calls[call]
        state.finish_step = steps + load.tasks[call].output_tokens - state.generated
        join = steps
        if i < scheduled:
            at.scheduled += 1
        elif scheduled > 0:  # after this step the counter will have moved on, the call will not
            state.finish_step += 1
            join += 1
        _join_decoding(mem, options, m, call, mem.order[i].computed, join)


@kernel
def _note_peak(mem, m):
    at = mem.engines[m]
    held = at.pool_blocks - free_blocks(at)
    at.peak_blocks = max(at.peak_blocks, held)
