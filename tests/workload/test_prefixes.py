"""Templates and contexts from block hashes, against the definition: prompts compared block by block."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexrepro.workload.formats.prefixes import from_blocks, to_blocks, unbounded_hits


def flat(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([i for prompt in prompts for i in prompt], np.int64),
        np.cumsum([0] + [len(prompt) for prompt in prompts]),
    )


def common(a: list[int], b: list[int]) -> int:
    """How many blocks two prompts have in common at their beginning."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@st.composite
def prompts(draw, symbols: int = 3):
    """Prompts over few block ids, so that many begin alike; an id may stand at several places."""
    some = draw(st.lists(st.lists(st.integers(0, symbols - 1), max_size=7), min_size=1, max_size=14))
    block = draw(st.sampled_from([1, 4, 512]))
    rest = st.integers(0, block - 1)
    tokens = [max(1, len(prompt) * block - draw(rest)) for prompt in some]
    return some, block, np.array(tokens)


@given(prompts())
@settings(max_examples=100)
def test_nothing_is_shared_that_is_not_the_same(drawn):
    some, block, tokens = drawn
    columns, in_blocks, in_segments = from_blocks(*flat(some), block, tokens)
    template, context = columns["template"], columns["context"]
    upto = columns["template_tokens"] + columns["context_tokens"]
    assert np.all(upto < tokens)
    for i in range(len(some)):
        for j in range(i):
            same = common(some[i], some[j]) * block
            if template[i] == template[j] >= 0:
                assert columns["template_tokens"][i] == columns["template_tokens"][j] <= same
                if context[i] == context[j] >= 0:
                    assert upto[i] == upto[j] <= same
    # what a cache finds: the longest beginning that an earlier prompt has too
    finds = [
        min(max((common(p, q) for q in some[:i]), default=0) * block, int(tokens[i]) - 1)
        for i, p in enumerate(some)
    ]
    assert in_blocks == sum(finds)
    assert np.all(unbounded_hits(**columns) <= finds)
    assert in_segments == unbounded_hits(**columns).sum() <= in_blocks


@given(prompts())
def test_an_id_for_a_prefix_or_for_a_block_gives_the_same(drawn):
    some, block, tokens = drawn
    number: dict[tuple, int] = {}
    prefixes = [
        [number.setdefault(tuple(prompt[: k + 1]), 10**12 + len(number)) for k in range(len(prompt))]
        for prompt in some
    ]
    a, *counts_a = from_blocks(*flat(some), block, tokens)
    b, *counts_b = from_blocks(*flat(prefixes), block, tokens)
    assert counts_a == counts_b
    for field in a:
        assert np.array_equal(a[field], b[field]), field


def test_a_template_for_many_and_a_context_for_few():
    """System prompt 1 2, documents behind it: both are found, all that can be."""
    some = [[1, 2, 10, 11, k] for k in (100, 101)] + [[1, 2, 20, k] for k in (102, 103)] + [[1, 2, 104]]
    columns, in_blocks, in_segments = from_blocks(*flat(some), 16, np.full(5, 500))
    assert columns["template"].tolist() == [0] * 5
    assert columns["template_tokens"].tolist() == [32] * 5
    assert columns["context"].tolist() == [0, 0, 1, 1, -1]
    assert columns["context_tokens"].tolist() == [32, 32, 16, 16, 0]
    assert in_blocks == in_segments == 16 * (4 + 2 + 3 + 2)


def test_a_short_prefix_of_many_is_the_template_rather_than_a_long_one_of_few():
    """Twenty documents behind a prompt of 10 blocks; two of them share one block more."""
    some = [[*range(10), 50 + min(k, 18), 100 + k, 200 + k % 2] for k in range(20) for _ in range(2)]
    columns, *_ = from_blocks(*flat(some), 1, np.full(40, 500))
    assert set(columns["template_tokens"]) == {10}
    assert len(set(columns["template"])) == 1


def test_deeper_nesting_is_counted_as_lost():
    """A conversation whose every turn begins with all before it: 10 + 20 + ... + 90 blocks are the same as before."""
    some = [list(range(10 * turn)) for turn in range(1, 11)]
    _, in_blocks, in_segments = from_blocks(*flat(some), 1, np.full(10, 1000))
    assert in_blocks == sum(range(10, 100, 10))
    assert 0.6 * in_blocks < in_segments < in_blocks


def test_nothing_shared_and_no_blocks_at_all():
    columns, in_blocks, in_segments = from_blocks(*flat([[1, 2], [3], []]), 4, np.array([8, 4, 9]))
    assert in_blocks == in_segments == 0
    assert columns["template"].tolist() == columns["context"].tolist() == [-1, -1, -1]
    columns, *_ = from_blocks(*flat([[], []]), 4, np.array([8, 4]))
    assert columns["template"].tolist() == [-1, -1]


@pytest.mark.parametrize("block", [1, 3, 16])
def test_blocks_are_the_same_as_far_as_whole_ones_are_shared(block):
    """Two templates, of which one has two contexts; a context without a template; and prompts that share nothing."""
    template = np.array([0, 0, 0, 1, 1, -1, -1, -1])
    template_tokens = np.array([40, 40, 40, 7, 7, 0, 0, 0])
    context = np.array([0, 0, 1, -1, 0, 1, 1, -1])
    context_tokens = np.array([25, 25, 50, 0, 9, 33, 33, 0])
    tokens = np.array([80, 90, 91, 50, 20, 60, 61, 5])
    ids, offsets = to_blocks(template, template_tokens, context, context_tokens, tokens, block)
    rows = [ids[a:b].tolist() for a, b in pairwise(offsets)]
    assert [len(row) for row in rows] == [-(-t // block) for t in tokens]
    shared = {(0, 1): 65, (0, 2): 40, (1, 2): 40, (3, 4): 7, (5, 6): 33}
    for i in range(8):
        for j in range(i + 1, 8):
            assert common(rows[i], rows[j]) == shared.get((i, j), 0) // block, (i, j)
            assert not set(rows[i][common(rows[i], rows[j]) :]) & set(rows[j])
