"""The calls that wait at an instance: who is next, whether it fits, and its move into the batch."""

import math

from hexrepro.compiled import inlined, kernel
from hexrepro.simulator import fairness
from hexrepro.simulator.heaps import pop, push
from hexrepro.simulator.kv import adopt, blocks, lookup
from hexrepro.simulator.state import NONE, ZERO


@kernel
def _client(mem, options, m):
    return fairness.least_served(mem, m) if options.fair else ZERO


@kernel
def head_fits(load, mem, options, m, free):
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
def admit(load, mem, options, m, now):
    """Move the head of the queue into the batch; `head_fits` has just looked up its cached tokens, which count as computed."""
    at, view = mem.engines[m], mem.views[m]
    client = _client(mem, options, m)
    call = mem.clients[m, client].root
    state = mem.calls[call]
    mem.clients[m, client].root = pop(mem.calls, call)
    at.waiting -= 1
    at.running += 1
    state.admitted = at.admissions
    at.admissions += 1
    at.newest_s = max(at.newest_s, state.release_s)
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
