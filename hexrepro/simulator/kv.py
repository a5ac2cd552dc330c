"""An instance's KV block pool with prefix caching, as in vLLM's `block_pool.py`, in whole runs of blocks.

vLLM keeps a queue of free blocks: blocks without a hash at its front, cached blocks behind them in the order in which they
were freed, each sequence's last block first. Blocks of one call are freed together, so the queue consists of runs, and
taking from the front shortens the oldest run from its end. So a run is a node with a length, a sequence's blocks are at
most three runs (template, context, its own), and the pool is a counter and a linked list: exact to the block, at O(1) a run.

What makes runs enough: an unfinished prompt takes all the token budget that is left, so at most one running call holds
less than its whole template, and no two calls compute the same block at a time. And a template is freed with or after
all that was computed behind it, so it is evicted after it.
"""

import numpy as np

from hexrepro.compiled import inlined, kernel
from hexrepro.simulator.state import NONE, ONE, ZERO


@kernel
def blocks(tokens, shift):
    """Blocks of 2**shift tokens that hold `tokens` tokens."""
    return (tokens + (ONE << shift) - 1) >> shift


@kernel
def free_blocks(engine):
    return engine.plain + engine.evictable


@kernel
def _unlink(engine, nodes, i):
    older, newer = nodes[i].older, nodes[i].newer
    if older == NONE:
        engine.oldest = newer
    else:
        nodes[older].newer = newer
    if newer == NONE:
        engine.newest = older
    else:
        nodes[newer].older = older


@kernel
def _append(engine, nodes, i):
    nodes[i].older = engine.newest
    nodes[i].newer = NONE
    if engine.newest == NONE:
        engine.oldest = i
    else:
        nodes[engine.newest].newer = i
    engine.newest = i


@kernel
def take(engine, nodes, count):
    """Take `count` free blocks, evicting the oldest cached ones when none else are left."""
    plain = min(count, engine.plain)
    engine.plain -= plain
    count -= plain
    engine.evictable -= count
    while count > 0:
        oldest = engine.oldest
        evicted = min(count, nodes[oldest].cached)
        nodes[oldest].cached -= evicted
        count -= evicted
        if nodes[oldest].cached == 0:
            _unlink(engine, nodes, oldest)


@kernel
def _hold(engine, nodes, i):
    if nodes[i].holders == 0 and nodes[i].cached > 0:
        _unlink(engine, nodes, i)
        engine.evictable -= nodes[i].cached
    nodes[i].holders += 1


@kernel
def _let_go(engine, nodes, i):
    nodes[i].holders -= 1
    if nodes[i].holders == 0 and nodes[i].cached > 0:
        _append(engine, nodes, i)
        engine.evictable += nodes[i].cached


@kernel
def store(engine, nodes, i, count):
    """Cache `count` plain blocks as an empty node's content, held by nobody."""
    engine.plain -= count
    nodes[i].cached = count
    nodes[i].holders = 1
    _let_go(engine, nodes, i)


@kernel
def segment_node(load, segment, m):
    """Shared segments come behind the calls' own nodes, one a segment and instance."""
    return len(load.tasks) + m * load.segments + segment


@kernel
def _template_blocks(load, call, shift):
    """Full blocks of the call's template; 0 without one."""
    return load.tasks[call].first_end >> shift


@kernel
def _context_blocks(load, call, shift):
    """Full blocks of the call's context, those that lie behind its template's; 0 without one."""
    if load.tasks[call].second_segment == NONE:
        return ZERO
    return (load.tasks[call].second_end >> shift) - _template_blocks(load, call, shift)


@kernel
def lookup(load, nodes, m, call, known, shift):
    """The cached prefix of a waiting call: (blocks hit, how many of them lie in the free queue).

    Only full blocks hit, and never the last known token: vLLM recomputes it for its logits.
    """
    hit = in_queue = ZERO
    template_blocks, context_blocks = _template_blocks(load, call, shift), _context_blocks(load, call, shift)
    if template_blocks > 0:
        node = segment_node(load, load.tasks[call].first_segment, m)
        hit = np.int64(nodes[node].cached)
        if nodes[node].holders == 0:
            in_queue = hit
        if hit < template_blocks:
            return hit, in_queue
    if context_blocks > 0:
        node = segment_node(load, load.tasks[call].second_segment, m)
        hit += nodes[node].cached
        if nodes[node].holders == 0:
            in_queue += nodes[node].cached
        if nodes[node].cached < context_blocks:
            return hit, in_queue
    own = min(nodes[call].cached, ((known - 1) >> shift) - hit)
    return hit + own, in_queue + own


@inlined
def adopt(load, engine, nodes, m, call, shift):
    """Take the cached prefix of a call that is admitted out of the free queue, and hold its shared segments."""
    if _template_blocks(load, call, shift) > 0:
        _hold(engine, nodes, segment_node(load, load.tasks[call].first_segment, m))
    if _context_blocks(load, call, shift) > 0:
        _hold(engine, nodes, segment_node(load, load.tasks[call].second_segment, m))
    if nodes[call].cached > 0:  # it was preempted, and its own blocks are still there
        _hold(engine, nodes, call)
        nodes[call].cached = 0
    nodes[call].holders = 0


@kernel
def fill(load, nodes, m, call, computed, shift):
    """Hash the blocks of shared segments that are full once `computed` tokens are."""
    full = computed >> shift
    template_blocks, context_blocks = _template_blocks(load, call, shift), _context_blocks(load, call, shift)
    if template_blocks > 0:
        node = segment_node(load, load.tasks[call].first_segment, m)
        nodes[node].cached = max(nodes[node].cached, min(full, template_blocks))
    if context_blocks > 0 and full > template_blocks:
        node = segment_node(load, load.tasks[call].second_segment, m)
        nodes[node].cached = max(nodes[node].cached, min(full - template_blocks, context_blocks))


@kernel
def release(load, engine, nodes, m, call, computed, caching, shift):
    """Free the blocks of a call that holds `computed` tokens: its own, then its context's, then its template's."""
    held = blocks(computed, shift)
    if not caching:
        engine.plain += held
        return
    full = computed >> shift
    engine.plain += held - full  # the last block, if it is not full, has no hash
    template_blocks, context_blocks = _template_blocks(load, call, shift), _context_blocks(load, call, shift)
    nodes[call].cached = full - min(full, template_blocks + context_blocks)
    nodes[call].holders = 1
    _let_go(engine, nodes, call)
    if context_blocks > 0:
        _let_go(engine, nodes, segment_node(load, load.tasks[call].second_segment, m))
    if template_blocks > 0:
        _let_go(engine, nodes, segment_node(load, load.tasks[call].first_segment, m))
