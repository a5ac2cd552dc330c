"""KV pressure: the blocks do not suffice for a step, and calls lose their place in the batch."""

from hexrepro.compiled import kernel
from hexrepro.simulator import fairness
from hexrepro.simulator.decoding import join_decoding
from hexrepro.simulator.heaps import before
from hexrepro.simulator.kv import blocks, free_blocks, release, take
from hexrepro.simulator.state import NONE, ZERO
from hexrepro.simulator.steps import attention, compute_prompt, note_peak, run_until, step_s
from hexrepro.simulator.waiting import enqueue


@kernel
def step_under_pressure(load, mem, options, m, now):
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
            context += attention(order[j].scheduled, order[j].computed)
        else:
            kv_tokens += order[j].computed
    if prefill > 0:
        compute_prompt(load, mem, options, m, at.prefilling, prefill)
    note_peak(mem, m)
    if i == 0:
        return False
    run_until(mem, m, now + at.slowdown * step_s(view, prefill, context, i, kv_tokens))
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
        join_decoding(mem, m, call, mem.order[i].computed, join)
