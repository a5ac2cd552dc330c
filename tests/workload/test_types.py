"""`Workload`: what it keeps, what it refuses, and what is made from it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexrepro.errors import InputError
from hexrepro.workload import Workload, concat
from hexrepro.workload.dag import barrier_edges, csr, edges, find_cycle, levels, topological_order
from tests.workload.samples import fields, workloads

ONE_LINE = "\n"


def changed_at(field: str, index: int, value: object) -> dict:
    values = list(fields()[field])
    values[index] = value
    return fields(**{field: values})


def test_keeps_what_it_is_given_in_its_own_types():
    w = Workload(**fields())
    assert (w.n_calls, w.n_queries, w.has_arrivals) == (6, 2, True)
    assert w.stage.dtype == w.successors.dtype == w.query.dtype == w.n_predecessors.dtype == np.int32
    assert w.arrival_s.dtype == np.float64
    assert w.query.tolist() == [0, 0, 0, 1, 1, 1]
    assert w.n_predecessors.tolist() == [0, 1, 1, 0, 1, 1]
    assert w.stage_id("write") == 1


def test_nobody_can_write_to_it():
    tokens = np.array([100, 200, 300, 100, 250, 260], np.int32)
    w = Workload(**fields(input_tokens=tokens))
    tokens[0] = 1
    assert w.input_tokens[0] == 100
    with pytest.raises(ValueError, match="read-only"):
        w.input_tokens[0] = 1
    with pytest.raises(AttributeError):
        w.name = "other"
    with pytest.raises(ValueError, match="read-only"):
        w.query[0] = 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (changed_at("input_tokens", 4, 0), ["query 1 call 1 (write)", "input_tokens is 0", "at least 1"]),
        (changed_at("output_tokens", 2, -3), ["query 0 call 2", "output_tokens is -3"]),
        (changed_at("input_tokens", 0, 100.5), ["input_tokens[0] is 100.5", "whole number"]),
        (changed_at("input_tokens", 0, float("nan")), ["input_tokens[0] is nan"]),
        (changed_at("input_tokens", 0, 2**31), ["input_tokens[0]", "32 bits"]),
        (fields(input_tokens=["a"] * 6), ["input_tokens", "whole numbers"]),
        (fields(input_tokens=[[100] * 6]), ["input_tokens", "2-d"]),
        (fields(output_tokens=[5] * 5), ["output_tokens has 5 entries", "needs 6"]),
        (changed_at("stage", 3, 2), ["query 1 call 0", "stage is 2", "0 to 1"]),
        (changed_at("tool_time_s", 1, -1.0), ["query 0 call 1", "tool_time_s is -1.0"]),
        (changed_at("tool_time_s", 1, float("inf")), ["query 0 call 1", "tool_time_s is inf"]),
        (changed_at("template", 0, -2), ["query 0 call 0", "template is -2"]),
        (
            changed_at("template_tokens", 4, 81),
            ["query 1 call 1", "template 1 has 81 tokens but 80", "one length"],
        ),
        (
            changed_at("context_tokens", 2, 61),
            ["query 0 call 2", "context 0 behind template 1", "61 tokens but 60"],
        ),
        (changed_at("template", 0, -1), ["query 0 call 0", "template_tokens is 50", "no template"]),
        (changed_at("context_tokens", 0, 5), ["query 0 call 0", "context_tokens is 5", "no context"]),
        (changed_at("input_tokens", 1, 140), ["query 0 call 1", "less than input_tokens, 140"]),
        (changed_at("arrival_s", 0, float("nan")), ["query 0", "arrival_s is missing", "all 2, or none"]),
        (changed_at("arrival_s", 0, 2.0), ["query 1", "arrival_s is 1.5, before query 0's 2.0"]),
        (changed_at("arrival_s", 0, -0.5), ["query 0", "arrival_s is -0.5"]),
        (changed_at("arrival_s", 1, float("inf")), ["query 1", "arrival_s is inf"]),
        (changed_at("slo_scale", 1, 0.0), ["query 1", "slo_scale is 0.0"]),
        (changed_at("tenant", 1, 1), ["query 1", "tenant is 1"]),
        (fields(tenant_names=("a", "a")), ["tenant_names repeats"]),
        (fields(stage_names="ab"), ["stage_names"]),
        (fields(name=""), ["workload name"]),
        (fields(query_offsets=[0, 3, 5]), ["query_offsets", "6"]),
        (fields(query_offsets=[0, 0, 6]), ["query 0 has no calls"]),
        (fields(succ_offsets=[0, 1, 2, 2, 4, 4]), ["succ_offsets has 6 entries", "7"]),
        (fields(succ_offsets=[0, 2, 1, 2, 4, 4, 4]), ["succ_offsets must grow"]),
        (changed_at("successors", 3, 6), ["query 1 call 0", "successor 6, which does not exist"]),
        (changed_at("successors", 3, -1), ["query 1 call 0", "successor -1, which does not exist"]),
        (changed_at("successors", 1, 4), ["query 0 call 1", "query 1 call 1", "inside one query"]),
        (changed_at("successors", 3, 4), ["query 1 call 0", "twice"]),
        (changed_at("successors", 1, 0), ["query 0", "cycle", "0 -> 1 -> 0"]),
        (changed_at("successors", 0, 0), ["query 0", "cycle", "0 -> 0"]),
        (
            fields(succ_offsets=[0, 0, 1, 2, 4, 4, 4], successors=[2, 0, 4, 5]),
            ["query 0 call 0", "before its prerequisite query 0 call 2", "prerequisites first"],
        ),
        (
            fields(**{f: [] for f in fields() if f not in ("name", "stage_names", "tenant_names")}),
            ["holds no calls"],
        ),
    ],
)
def test_refuses_in_one_line_that_names_the_place(values, words):
    with pytest.raises(InputError) as caught:
        Workload(**values)
    message = str(caught.value)
    assert ONE_LINE not in message
    for word in words:
        assert word in message


def test_successors_are_put_in_order():
    w = Workload(**fields(successors=[1, 2, 5, 4]))
    assert w.equals(Workload(**fields()))


def test_a_million_calls_are_checked_quickly():
    q, calls = 50_000, 20
    n = q * calls
    query = np.repeat(np.arange(q), calls)
    succ_offsets, successors = csr(n, *barrier_edges(np.tile(np.repeat(np.arange(10), 2), q), query))
    values = fields(
        stage=np.zeros(n, np.int32),
        input_tokens=np.full(n, 100),
        output_tokens=np.ones(n, np.int32),
        template=np.zeros(n, np.int32),
        template_tokens=np.full(n, 10),
        context=query,
        context_tokens=np.full(n, 20),
        tool_time_s=np.zeros(n),
        succ_offsets=succ_offsets,
        successors=successors,
        query_offsets=np.arange(q + 1) * calls,
        arrival_s=np.full(q, np.nan),
        tenant=np.zeros(q, np.int32),
        slo_scale=np.ones(q),
    )
    took = time.process_time()
    Workload(**values)
    assert time.process_time() - took < 2.0


@given(workloads())
@settings(max_examples=60, deadline=None)
def test_invariants(w):
    assert w.query_offsets[-1] == w.n_calls == len(w.query)
    assert np.all(w.template_tokens + w.context_tokens < w.input_tokens)
    before, after = edges(w.succ_offsets, w.successors)
    assert np.all(before < after)
    assert np.all(w.query[before] == w.query[after])
    assert w.n_predecessors.sum() == len(w.successors)
    again = csr(w.n_calls, before, after)
    assert np.array_equal(again[0], w.succ_offsets)
    assert np.array_equal(again[1], w.successors)


@given(workloads(), st.data())
@settings(max_examples=60, deadline=None)
def test_take_keeps_each_query_whole(w, data):
    picked = np.array(data.draw(st.lists(st.integers(0, w.n_queries - 1), min_size=1, max_size=8)))
    if w.has_arrivals:  # taken queries are put in order of arrival
        picked = picked[np.argsort(w.arrival_s[picked], kind="stable")]
    taken = w.take(picked)
    assert taken.n_queries == len(picked)
    for i, j in enumerate(picked):
        a, b = w.query_offsets[j : j + 2]
        c, d = taken.query_offsets[i : i + 2]
        for field in ("stage", "input_tokens", "output_tokens", "template", "context", "tool_time_s"):
            assert np.array_equal(getattr(w, field)[a:b], getattr(taken, field)[c:d])
        for call in range(b - a):
            mine = w.successors[w.succ_offsets[a + call] : w.succ_offsets[a + call + 1]] - a
            theirs = taken.successors[taken.succ_offsets[c + call] : taken.succ_offsets[c + call + 1]] - c
            assert np.array_equal(mine, theirs)
        assert taken.slo_scale[i] == w.slo_scale[j]
    assert w.take(np.arange(w.n_queries)).equals(w)


@given(workloads(), workloads())
@settings(max_examples=40, deadline=None)
def test_concat_keeps_all_queries_and_keeps_prompts_apart(a, b):
    if a.has_arrivals != b.has_arrivals:
        with pytest.raises(InputError, match="no arrivals but others have"):
            concat([a, b])
        return
    both = concat([a, b])
    assert both.n_queries == a.n_queries + b.n_queries
    assert both.n_calls == a.n_calls + b.n_calls
    assert sorted(both.input_tokens) == sorted([*a.input_tokens, *b.input_tokens])
    if not a.has_arrivals:
        assert both.take(np.arange(a.n_queries)).successors.tolist() == a.successors.tolist()
        used = [set(part.template[part.template >= 0]) for part in (a, both.take(np.arange(a.n_queries)))]
        rest = both.take(np.arange(a.n_queries, both.n_queries))
        assert used[0] == used[1]
        assert not used[1] & set(rest.template[rest.template >= 0])
    else:
        assert np.array_equal(both.arrival_s, np.sort(np.concatenate([a.arrival_s, b.arrival_s])))


def test_concat_with_the_same_templates_wants_their_lengths_to_agree():
    a = Workload(**fields())
    both = concat([a, a], same_templates=True)
    assert set(both.template) == {0, 1}
    assert set(both.context) == {-1, 0, 1, 2, 3}
    other = Workload(**fields(template_tokens=[40, 80, 80, 40, 80, 80]))
    with pytest.raises(InputError, match="one template has one length"):
        concat([a, other], same_templates=True)


def test_arrivals_and_tenants_are_exchanged():
    w = Workload(**fields())
    assert w.with_arrivals(np.array([3.0, 3.0])).arrival_s.tolist() == [3.0, 3.0]
    mixed = w.with_tenants([1, 0], ("fast", "slow"), [1.0, 2.0])
    assert mixed.tenant_names == ("fast", "slow")
    assert mixed.slo_scale.tolist() == [1.0, 2.0]
    assert w.with_tenants([0, 0], ["one"], 2.0).slo_scale.tolist() == [2.0, 2.0]
    assert w.renamed("other").name == "other"
    assert not w.equals(mixed)
    with pytest.raises(InputError, match="has no stage 'judge'"):
        w.stage_id("judge")
    for wrong in ([2], [-1], [], [0.5]):
        with pytest.raises(InputError, match=r"take\(\)"):
            w.take(wrong)


@given(workloads(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_any_order_of_calls_can_be_made_topological(w, random):
    shuffled = np.arange(w.n_calls)
    for a, b in zip(w.query_offsets[:-1], w.query_offsets[1:], strict=True):
        part = shuffled[a:b].tolist()
        random.shuffle(part)
        shuffled[a:b] = part
    before, after = edges(w.succ_offsets, w.successors)
    before, after = shuffled[before], shuffled[after]
    order = topological_order(w.query_offsets, before, after, "it")
    place = np.argsort(order)
    assert np.all(place[before] < place[after])
    assert np.array_equal(w.query[order], w.query)


@given(workloads())
@settings(max_examples=60, deadline=None)
def test_levels_are_longest_chains_and_cycles_are_found(w):
    level = levels(w.succ_offsets, w.successors)
    before, after = edges(w.succ_offsets, w.successors)
    assert np.all(level[before] < level[after])
    assert np.all((level > 0) == (w.n_predecessors > 0))
    assert find_cycle(w.succ_offsets, w.successors) is None
    if len(before):
        looped = csr(w.n_calls, np.append(before, after[0]), np.append(after, before[0]))
        cycle = find_cycle(*looped)
        assert cycle is not None
        arrows = set(zip(*(ends.tolist() for ends in edges(*looped)), strict=True))
        assert all(arrow in arrows for arrow in zip(cycle, [*cycle[1:], cycle[0]], strict=True))


def test_barriers_join_neighbouring_groups_only():
    before, after = barrier_edges(np.array([0, 1, 1, 2, 0, 0]), np.array([0, 0, 0, 0, 1, 1]))
    assert list(zip(before.tolist(), after.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 3), (2, 3)]
