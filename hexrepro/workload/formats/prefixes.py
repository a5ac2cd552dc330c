"""Shared prefixes: from the block hashes of a trace to templates and contexts, and back.

A trace with `hash_ids` gives an id for each block of a prompt; prompts that begin with the same ids share that prefix.
So the prompts form a tree of any depth. A call of a `Workload` has two shared segments, a template and behind it a
context, each of one length. So for each call two nodes of the tree are chosen:

1. The context: going from the leaves to the root, where two calls or more meet that have none yet, their common prefix
   becomes theirs.
2. The template: the same once more with the contexts in place of the calls. Where a short prefix of many contexts would
   save more tokens than a long one of few, the short one is taken.

What a cache without limit would find with all blocks, and with these two segments, is counted for the report.
"""

from __future__ import annotations

import numpy as np

from hexrepro.workload.dag import concat_ranges


def from_blocks(
    ids: np.ndarray, offsets: np.ndarray, block_tokens: int, input_tokens: np.ndarray
) -> tuple[dict[str, np.ndarray], int, int]:
    """Templates and contexts of n prompts, and how much is shared.

    ``ids`` int[m], ``offsets`` int64[n + 1]: prompt i begins with the blocks ids[offsets[i]:offsets[i + 1]], in the order
    in which the prompts arrive. Returns the columns template, template_tokens, context and context_tokens (int64[n]), and
    the prompt tokens that a cache without limit finds by all blocks, and by the two segments.
    """
    import pandas as pd

    n = len(offsets) - 1
    input_tokens = np.asarray(input_tokens, np.int64)
    ids = chained(ids, offsets)
    owner = np.repeat(np.arange(n), np.diff(offsets))
    # what stands in one prompt only is shared with none, nor is what follows it there
    twice = (np.bincount(ids) > 1)[ids]
    ids, owner = pd.factorize(ids[twice])[0].astype(np.int64), owner[twice]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=n))])
    position = np.arange(len(ids)) - offsets[:-1][owner]
    n_nodes = int(ids.max()) + 1 if len(ids) else 0
    depth = np.zeros(n_nodes, np.int64)
    depth[ids] = position + 1
    parent = np.full(n_nodes, -1)
    later = position > 0
    parent[ids[later]] = ids[np.flatnonzero(later) - 1]

    # the last node on each prompt's path
    end = np.full(n, -1)
    some = np.diff(offsets) > 0
    end[some] = ids[offsets[1:][some] - 1]

    context = _meeting(end, parent, depth)
    groups, of_group = np.unique(context, return_inverse=True)
    alone = context < 0
    # who looks for a template: each context once, and each call without one
    seekers = np.concatenate([groups[groups >= 0], end[alone]])
    found = _meeting(seekers, parent, depth, most_tokens=True)
    skip = int(len(groups) > 0 and groups[0] < 0)
    template = np.full(n, -1)
    template[alone] = found[len(groups) - skip :]
    template[~alone] = found[of_group[~alone] - skip]
    # a shared prefix without another in front of it is a template
    single = (template < 0) & ~alone
    template[single] = context[single]
    context[template == context] = -1

    columns = _lengths(template, context, depth, block_tokens, input_tokens)
    first = np.full(n_nodes, n)
    np.minimum.at(first, ids, owner)
    seen = np.bincount(owner, first[ids] < owner, n).astype(np.int64)
    in_blocks = int(np.minimum(seen * block_tokens, input_tokens - 1).sum())
    return columns, in_blocks, int(unbounded_hits(**columns).sum())


def unbounded_hits(
    template: np.ndarray, template_tokens: np.ndarray, context: np.ndarray, context_tokens: np.ndarray
) -> np.ndarray:
    """int64[n]: the prompt tokens of each call that a cache without limit finds, the calls one after the other."""
    key = template.astype(np.int64) + 1
    pair = key * (int(context.max()) + 2) + context + 1
    hits = np.where((template >= 0) & _again(key), template_tokens, 0).astype(np.int64)
    return hits + np.where((context >= 0) & _again(pair), context_tokens, 0)


def _again(key: np.ndarray) -> np.ndarray:
    """bool[n]: whether an entry came before."""
    import pandas as pd

    return pd.Series(key).duplicated().to_numpy()


def chained(ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The ids renumbered from 0 (int64[m]) so that an id stands for the whole prefix up to it, not for a block alone.

    The published traces are so already; others may give one id to the same text wherever it stands.
    """
    import pandas as pd

    ids = pd.factorize(ids)[0].astype(np.int64)
    previous = np.empty(len(ids), np.int64)
    previous[1:] = ids[:-1]
    previous[offsets[:-1][np.diff(offsets) > 0]] = -1
    of_id = np.full(int(ids.max()) + 1 if len(ids) else 0, -1)
    of_id[ids] = previous
    if np.array_equal(of_id[ids], previous):
        return ids
    # block by block: a node is a node and the block behind it
    result = np.empty(len(ids), np.int64)
    rows, node, nodes = np.flatnonzero(np.diff(offsets) > 0), np.full(len(offsets) - 1, 0), 1
    step = 0
    while len(rows):
        at = offsets[rows] + step
        number, unique = pd.factorize(node[rows] * (int(ids.max()) + 1) + ids[at])
        node[rows] = number + nodes
        nodes += len(unique)
        result[at] = node[rows]
        step += 1
        rows = rows[offsets[rows] + step < offsets[rows + 1]]
    return pd.factorize(result)[0].astype(np.int64)


def _meeting(end: np.ndarray, parent: np.ndarray, depth: np.ndarray, most_tokens: bool = False) -> np.ndarray:
    """For each seeker with its path ending at node ``end`` (-1 = none), the node at which it meets others, or -1.

    ``most_tokens``: give up a meeting when its seekers save more at the next one towards the root.
    """
    n_nodes = len(parent)
    waiting = np.bincount(end[end >= 0], minlength=n_nodes)
    levels = _by_depth(end, parent, depth)
    met = np.zeros(n_nodes, bool)
    seekers = np.zeros(n_nodes, np.int64)
    for nodes in reversed(levels):
        here = nodes[waiting[nodes] > 1]
        met[here] = True
        seekers[here] = waiting[here]
        on = nodes[(waiting[nodes] == 1) & (parent[nodes] >= 0)]
        np.add.at(waiting, parent[on], 1)
    nearest = _nearest(met, levels, parent)
    if most_tokens:
        for nodes in reversed(levels):
            nodes = nodes[met[nodes] & (parent[nodes] >= 0)]
            above = nearest[parent[nodes]]
            nodes, above = nodes[above >= 0], above[above >= 0]
            worse = (seekers[nodes] - 1) * depth[nodes] < seekers[nodes] * depth[above]
            met[nodes[worse]] = False
            np.add.at(seekers, above[worse], seekers[nodes[worse]])
        nearest = _nearest(met, levels, parent)
    return np.where(end >= 0, nearest[end] if n_nodes else -1, -1)


def _by_depth(end: np.ndarray, parent: np.ndarray, depth: np.ndarray) -> list[np.ndarray]:
    """The nodes on the paths to ``end``, a list a depth, from the root on."""
    wanted = np.zeros(len(parent), bool)
    new = np.unique(end[end >= 0])
    while len(new):
        wanted[new] = True
        new = np.unique(parent[new])
        new = new[new >= 0]
        new = new[~wanted[new]]
    nodes = np.flatnonzero(wanted)
    nodes = nodes[np.argsort(depth[nodes], kind="stable")]
    cuts = np.flatnonzero(np.diff(depth[nodes])) + 1
    return np.split(nodes, cuts) if len(nodes) else []


def _nearest(met: np.ndarray, levels: list[np.ndarray], parent: np.ndarray) -> np.ndarray:
    """The nearest node of ``met`` at or above each node, or -1."""
    nearest = np.full(len(parent), -1)
    for nodes in levels:
        above = np.where(parent[nodes] >= 0, nearest[parent[nodes]], -1)
        nearest[nodes] = np.where(met[nodes], nodes, above)
    return nearest


def _lengths(
    template: np.ndarray, context: np.ndarray, depth: np.ndarray, block_tokens: int, input_tokens: np.ndarray
) -> dict[str, np.ndarray]:
    """Ids from 0 and lengths. A prompt's last token is never shared (an engine always computes it), and its last block
    may be partly filled, so a segment is no longer than the shortest of its prompts allows."""
    import pandas as pd

    depth = np.append(depth, 0)  # the last entry is for -1

    def reach(node: np.ndarray, group: np.ndarray) -> np.ndarray:
        group = pd.factorize(group)[0]
        least = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(least, group, np.minimum(depth[node] * block_tokens, input_tokens - 1))
        return np.where(node < 0, 0, least[group])

    template_tokens = reach(template, template)
    template = np.where(template_tokens > 0, template, -1)
    context_tokens = reach(context, (template + 1) * len(depth) + context + 1) - template_tokens
    context = np.where(context_tokens > 0, context, -1)

    def numbered(node: np.ndarray) -> np.ndarray:
        return pd.factorize(np.where(node < 0, np.nan, node))[0].astype(np.int64)

    return {
        "template": numbered(template),
        "template_tokens": template_tokens,
        "context": numbered(context),
        "context_tokens": np.where(context >= 0, context_tokens, 0),
    }


# ---- and back ----------------------------------------------------------------------------------------------


def to_blocks(
    template: np.ndarray,
    template_tokens: np.ndarray,
    context: np.ndarray,
    context_tokens: np.ndarray,
    input_tokens: np.ndarray,
    block_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    """``(ids int64[m], offsets int64[n + 1])``: block ids of n prompts, the same where a whole block is shared.

    An id stands for the prefix up to it. The last block of a prompt may be partly filled.
    """
    pair_key = (template.astype(np.int64) + 1) * (int(context.max()) + 2) + context + 1
    pairs, pair = np.unique(np.where(context >= 0, pair_key, -1), return_inverse=True)
    in_template = template_tokens.astype(np.int64) // block_tokens
    in_pair = (template_tokens.astype(np.int64) + context_tokens) // block_tokens - in_template
    in_all = -(-np.asarray(input_tokens, np.int64) // block_tokens)
    own = in_all - in_template - in_pair
    offsets = np.concatenate([[0], np.cumsum(in_all)])

    template_size = np.zeros(int(template.max()) + 2, np.int64)
    template_size[template] = in_template  # the last entry is for -1
    template_base = np.cumsum(template_size) - template_size
    pair_size = np.zeros(len(pairs), np.int64)
    pair_size[pair] = in_pair
    pair_base = np.cumsum(pair_size) - pair_size + template_size.sum()
    own_base = np.cumsum(own) - own + template_size.sum() + pair_size.sum()

    ids = np.empty(int(offsets[-1]), np.int64)
    start = offsets[:-1]
    for base, size in ((template_base[template], in_template), (pair_base[pair], in_pair), (own_base, own)):
        ids[concat_ranges(start, size)] = concat_ranges(base, size)
        start = start + size
    return ids, offsets
