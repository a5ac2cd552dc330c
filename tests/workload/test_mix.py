"""Workloads made from others."""

from __future__ import annotations

import numpy as np
import pytest

from hexrepro.errors import InputError
from hexrepro.workload import generate, interleave, with_cached_share, with_random_tenants


def named(name: str, n: int):
    """A trace whose only tenant has its name."""
    return generate(name, n_queries=n).with_tenants(np.zeros(n), (name,), 1.0)


def test_interleave_keeps_each_workload_s_queries_and_their_order():
    first, second = named("tiny", 30), named("chat", 90)
    both = interleave([first, second], seed=1)
    assert both.n_queries == 120
    assert both.tenant_names == ("tiny", "chat")
    for i, part in enumerate((first, second)):
        calls = np.isin(both.query, np.flatnonzero(both.tenant == i))
        np.testing.assert_array_equal(both.input_tokens[calls], part.input_tokens)
        np.testing.assert_array_equal(both.output_tokens[calls], part.output_tokens)
    assert interleave([first, second], seed=1).equals(both)
    assert not interleave([first, second], seed=2).equals(both)


def test_interleave_puts_every_order_at_equal_chances():
    """Two marks of one kind among four places: six orders, each in a sixth of 1200 seeds (chi-square, 5 df, p > 0.001)."""
    first, second = named("tiny", 2), named("chat", 2)
    seen: dict[tuple, int] = {}
    for seed in range(1200):
        order = tuple(interleave([first, second], seed).tenant)
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 6
    assert sum((n - 200) ** 2 / 200 for n in seen.values()) < 20.5


def test_tenants_get_their_shares_at_random_places():
    workload = with_random_tenants(generate("tiny", n_queries=40), ("a", "b"), (1.0, 2.0), (3.0, 1.0), seed=0)
    assert np.bincount(workload.tenant).tolist() == [30, 10]
    np.testing.assert_array_equal(workload.slo_scale, np.where(workload.tenant == 0, 1.0, 2.0))
    assert workload.tenant[:30].sum() > 3  # not first all of one
    again = with_random_tenants(generate("tiny", n_queries=40), ("a", "b"), (1.0, 2.0), (3.0, 1.0), seed=0)
    assert again.equals(workload)


def test_cached_share_is_a_prefix_of_each_kind_of_call():
    plain = generate("trace1")
    half = with_cached_share(plain, 0.5)
    assert half.template_tokens.sum() / half.input_tokens.sum() == pytest.approx(0.5, abs=0.001)
    assert (half.context == -1).all()
    for field in ("input_tokens", "output_tokens", "stage", "successors"):
        np.testing.assert_array_equal(getattr(half, field), getattr(plain, field))
    # calls share a prefix just as they shared a template before
    pairs = {(int(a), int(b)) for a, b in zip(plain.template, half.template, strict=True)}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})

    none = with_cached_share(plain, 0.0)
    assert (none.template == -1).all()
    whole = with_cached_share(plain, 1.0)
    assert (whole.template_tokens < whole.input_tokens).all()
    for template in np.unique(whole.template):
        calls = whole.template == template
        assert whole.template_tokens[calls][0] == whole.input_tokens[calls].min() - 1
    with pytest.raises(InputError, match="from 0 to 1"):
        with_cached_share(plain, -0.1)


def test_chat_has_the_lengths_of_its_table():
    chat = generate("chat")
    assert chat.n_calls == chat.n_queries == 500
    for lengths, table in (
        (chat.input_tokens, {5: 169, 25: 405, 50: 1036, 75: 1160, 95: 4078}),
        (chat.output_tokens, {5: 40, 25: 94, 50: 362, 75: 406, 95: 499}),
    ):
        for level, tokens in table.items():
            assert np.percentile(lengths, level) == pytest.approx(tokens, rel=0.03)
    # drawn independently, as the provenance says; the standard error is 1 / sqrt(500)
    assert abs(np.corrcoef(chat.input_tokens, chat.output_tokens)[0, 1]) < 0.15
