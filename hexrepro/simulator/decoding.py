"""Many decode steps at once: how long they take, which blocks they need, and where they have to stop.

Between two events of an instance the batch does not change, so its steps are an arithmetic series.
"""

import math

import numpy as np

from hexrepro.compiled import inlined, kernel
from hexrepro.simulator.heaps import push_finish
from hexrepro.simulator.kv import free_blocks
from hexrepro.simulator.state import ZERO
from hexrepro.simulator.steps import run_until

ADMISSIONS = 1 << 32  # finish keys order by finish step, then by admission


@kernel
def join_decoding(mem, m, call, computed, steps):
    """Count a call among the decoding ones: `computed` KV tokens when the step counter stands at `steps`."""
    at, state = mem.engines[m], mem.calls[call]
    key = state.finish_step * ADMISSIONS + state.admitted
    push_finish(mem.slots[m], at.decoding, key, call)
    mem.residues[m, (computed - steps) & at.block_mask] += 1
    at.decoding += 1
    at.kv_tokens += computed


@kernel
def decode_blocks(mem, options, m, steps):
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


@kernel
def decode_s(mem, m, steps):
    """Seconds of `steps` decode steps in a row; the KV read grows by one token a sequence and step."""
    at, view = mem.engines[m], mem.views[m]
    kv_tokens = float(at.kv_tokens) * steps + float(at.decoding) * (0.5 * steps * (steps - 1.0))
    plain_s = steps * (view.base_s + view.sequence_s * at.decoding) + view.kv_token_s * kv_tokens
    return at.slowdown * plain_s


@inlined
def skip_to_next_event(mem, options, m, now):
    """Decode until the first call finishes, or until the blocks run out."""
    at = mem.engines[m]
    if at.decoding == 0:
        # nothing runs and the queue's head does not fit; `check_fits` refuses such calls beforehand
        run_until(mem, m, np.inf)
        return
    steps = mem.slots[m, 0].key // ADMISSIONS - at.steps
    if options.fair and at.blocked:
        steps = 1  # the counters move with every token, and with them the head of the queue
    if options.decode_blocks:
        free = free_blocks(at)
        if ((steps >> at.block_shift) + 1) * at.decoding > free:
            steps = min(steps, _steps_that_fit(mem, options, m, free))
    # Given prompt times may be negative (see `simulate_grid`): then time has run back, but not to before a call was released.
    now = max(now, at.newest_s)
    at.start_s = now
    at.skip = True
    at.advance = steps
    at.scheduled = at.decoding
    run_until(mem, m, now + decode_s(mem, m, steps))


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
def steps_until(mem, m, now):
    """The number of decode steps after which the stretch in progress first reaches `now`; at least 1."""
    at, view = mem.engines[m], mem.views[m]
    quadratic = 0.5 * view.kv_token_s * at.decoding
    linear = view.base_s + view.sequence_s * at.decoding + view.kv_token_s * at.kv_tokens - quadratic
    elapsed = (now - at.start_s) / at.slowdown
    guess = 2.0 * elapsed / (linear + math.sqrt(linear * linear + 4.0 * quadratic * elapsed))
    steps = max(1, math.ceil(guess))
    while steps > 1 and at.start_s + decode_s(mem, m, steps - 1) >= now:  # mend what rounding did to the root
        steps -= 1
    while at.start_s + decode_s(mem, m, steps) < now:
        steps += 1
    return steps


@kernel
def interrupt(mem, options, m, call, now):
    """A call has come to instance m: end a stretch of decode steps at the next boundary, unless it can't matter."""
    at = mem.engines[m]
    if not at.skip or at.advance <= 1:
        return
    if not options.fair:
        if at.running >= mem.views[m].max_num_seqs:
            return  # nobody can be admitted before a call finishes
        if at.blocked and mem.clients[m, 0].root != call:
            return  # it stands behind a head that does not fit
    steps = steps_until(mem, m, now)
    if steps < at.advance:
        at.advance = steps
        run_until(mem, m, at.start_s + decode_s(mem, m, steps))
