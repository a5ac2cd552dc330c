"""Three priority queues over plain arrays, each the simplest that is fast for its use."""

from hexrepro.compiled import kernel
from hexrepro.simulator.state import NONE

# --- A pairing heap of calls by (key, seq). Links live in the call records, so all queues together need no memory of
# their own however long one of them grows.


@kernel
def before(calls, a, b):
    """Whether call a is served before call b."""
    key_a, key_b = calls[a].key, calls[b].key
    return key_a < key_b or (key_a == key_b and calls[a].seq < calls[b].seq)


@kernel
def _meld(calls, a, b):
    if before(calls, b, a):
        a, b = b, a
    calls[b].sibling = calls[a].child
    calls[a].child = b
    return a


@kernel
def push(calls, root, call):
    """Add a call; returns the new root."""
    calls[call].child = NONE
    calls[call].sibling = NONE
    return call if root == NONE else _meld(calls, root, call)


@kernel
def pop(calls, root):
    """Take the root (the first to be served) away; returns the new root."""
    rest = calls[root].child
    pairs = NONE
    while rest != NONE:  # meld the children two by two ...
        first, second = rest, calls[rest].sibling
        if second == NONE:
            rest = NONE
        else:
            rest = calls[second].sibling
            first = _meld(calls, first, second)
        calls[first].sibling = pairs
        pairs = first
    root = NONE
    while pairs != NONE:  # ... then the pairs, last to first
        rest = calls[pairs].sibling
        calls[pairs].sibling = NONE
        root = pairs if root == NONE else _meld(calls, root, pairs)
        pairs = rest
    return root


# --- A binary heap in a row of SLOT records: the decoding calls of an instance by (finish step, admission).


@kernel
def push_finish(slots, size, key, call):
    """Add to a heap of `size` entries."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if slots[parent].key <= key:
            break
        slots[i].key = slots[parent].key
        slots[i].call = slots[parent].call
        i = parent
    slots[i].key = key
    slots[i].call = call


@kernel
def pop_finish(slots, size):
    """Take the least away from a heap of `size` entries."""
    last = size - 1
    key, call = slots[last].key, slots[last].call
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        if child + 1 < last and slots[child + 1].key < slots[child].key:
            child += 1
        if key <= slots[child].key:
            break
        slots[i].key = slots[child].key
        slots[i].call = slots[child].call
        i = child
    slots[i].key = key
    slots[i].call = call


# --- A tournament over the instances' next event times: timers[1] is the least, leaf P + m is instance m's.


@kernel
def set_timer(timers, m, time_s):
    i = (len(timers) >> 1) + m
    timers[i] = time_s
    while i > 1:
        i >>= 1
        timers[i] = min(timers[2 * i], timers[2 * i + 1])


@kernel
def first_timer(timers):
    """The instance with the least time, the lowest index of equals."""
    leaves = len(timers) >> 1
    i = 1
    while i < leaves:
        i *= 2
        if timers[i] > timers[i + 1]:
            i += 1
    return i - leaves
