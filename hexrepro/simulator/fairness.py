"""The virtual token counters of VTC (arXiv 2401.00588), one a client and instance.

A client is charged for a prompt when its call starts, and for every token generated. The queue serves the client with
the least counter. A client that comes back to the queue is lifted to the least counter in it, so that being away earns no
credit. The prices of a prompt token and of a generated one are in `Options`.

Counters are read only when the queue is; until then decoding calls are charged late, from how far they have come.
"""

from hexrepro.compiled import kernel
from hexrepro.simulator.state import NONE


@kernel
def charge_call(load, mem, options, m, call, generated):
    """Charge a call's client for the tokens up to `generated` that were not charged before."""
    state = mem.calls[call]
    client = mem.clients[m, load.queries[load.tasks[call].query].client]
    client.counter += options.output_weight * (generated - state.charged)
    state.charged = generated


@kernel
def charge(load, mem, options, m, steps_done):
    """Bring the counters of instance m up to date: its decoding calls have come `steps_done` steps beyond `steps`."""
    at = mem.engines[m]
    for i in range(at.decoding):
        call = mem.slots[m, i].call
        left = mem.calls[call].finish_step - at.steps - steps_done
        generated = load.tasks[call].output_tokens - left
        # a call that sits out a step under memory pressure is put down as one step later while the step lasts
        charge_call(load, mem, options, m, call, max(generated, mem.calls[call].charged))


@kernel
def least_served(mem, m):
    """Of the clients with waiting calls, the one with the least counter; ties to the lower index."""
    best = mem.clients[m, 0].active
    for i in range(1, mem.engines[m].active):
        client = mem.clients[m, i].active
        counter, least = mem.clients[m, client].counter, mem.clients[m, best].counter
        if counter < least or (counter == least and client < best):
            best = client
    return best


@kernel
def enter(mem, m, client, arrives):
    """A client without waiting calls gets one. If it is a new call, lift the counter; a preempted call comes back as it is."""
    at = mem.engines[m]
    if arrives:
        floor = mem.clients[m, client].counter
        if at.active > 0:
            floor = mem.clients[m, least_served(mem, m)].counter
        elif at.last_left != NONE:
            floor = mem.clients[m, at.last_left].counter
        mem.clients[m, client].counter = max(mem.clients[m, client].counter, floor)
    mem.clients[m, at.active].active = client
    mem.clients[m, client].place = at.active
    at.active += 1


@kernel
def leave(load, mem, options, m, client, call, first_time):
    """A call of the client was taken from the queue: charge its prompt once, and note when it was the client's last."""
    at = mem.engines[m]
    if first_time:
        mem.clients[m, client].counter += options.input_weight * load.tasks[call].input_tokens
    if mem.clients[m, client].root == NONE:
        at.active -= 1
        moved = mem.clients[m, at.active].active
        place = mem.clients[m, client].place
        mem.clients[m, place].active = moved
        mem.clients[m, moved].place = place
        at.last_left = client
