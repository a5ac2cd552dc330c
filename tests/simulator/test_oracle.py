"""The oracle itself: examples worked out by hand, and what must hold of every run.

Times are dyadic rationals throughout, so they are compared exactly.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import (
    Oracle,
    OracleInstance,
    OracleResult,
    VirtualTokenCounter,
    first_come,
    only_instance,
    round_robin,
)
from tests.strategies import make_workload, pressed_runs, runs

UNIT_STEP = (1.0, 0.0, 0.0, 0.0, 0.0)  # every step takes 1 s


def unit(kv_blocks: int = 100, block_size: int = 2, seqs: int = 8, budget: int = 100) -> OracleInstance:
    return OracleInstance(*UNIT_STEP, kv_blocks, block_size, seqs, budget)


def one_call_queries(*calls: dict) -> list[dict]:
    """Queries of one call each; `arrival_s` and `tenant` are taken out of the call."""
    return [
        dict(arrival_s=call.get("arrival_s", 0.0), tenant=call.get("tenant", 0), calls=[call])
        for call in calls
    ]


def run(queries: list[dict], *instances: OracleInstance, dispatch=only_instance, keys=None, **options):
    """Keys: one queue key per call; FCFS without."""
    n_tenants = 1 + max(query.get("tenant", 0) for query in queries)
    key = first_come if keys is None else (lambda call, instance, oracle: keys[call])
    return Oracle(make_workload(queries, n_tenants=n_tenants), instances, dispatch, key, **options).run()


def timeline(result: OracleResult) -> list[tuple]:
    """(start, end, tokens, preempted) of every pass."""
    return [(p.start_s, p.end_s, dict(p.tokens), p.preempted) for p in result.passes]


# ----------------------------------------------------------------------------------------- worked out by hand


def test_step_time_of_one_call() -> None:
    # base 1, prefill token 1/4, prefill context 1/16, sequence 1/2, KV token 1/8; released at 2 + 1 = 3
    instance = OracleInstance(
        1.0, 0.25, 0.0625, 0.5, 0.125, kv_blocks=2, block_size=4, max_num_batched_tokens=4
    )
    queries = [dict(arrival_s=2.0, calls=[dict(input_tokens=5, output_tokens=3, tool_time_s=1.0)])]
    result = run(queries, instance)
    assert timeline(result) == [
        # 4 tokens on 0: P = 4, A = 4*0 + 16/2 = 8:  1 + 4/4 + 8/16 + 1/2 = 3
        (3.0, 6.0, {0: 4}, []),
        # the 5th on 4: P = 1, A = 1*4 + 1/2 = 4.5: 1 + 1/4 + 4.5/16 + 1/2 = 2.03125; the prompt is complete
        (6.0, 8.03125, {0: 1}, []),
        # decode on 5 computed tokens: 1 + 1/2 + 5/8 = 2.125
        (8.03125, 10.15625, {0: 1}, []),
        # decode on 6: 1 + 1/2 + 6/8 = 2.25
        (10.15625, 12.40625, {0: 1}, []),
    ]
    assert result.dispatch_s == [3.0]
    assert result.admit_s == [3.0]
    assert result.first_token_s == [8.03125]
    assert result.finish_s == result.query_finish_s == [12.40625]
    assert result.peak_kv_blocks == [2]  # 5 + 3 - 1 = 7 tokens: the last token's KV is never written


def test_budget_goes_to_running_calls_first() -> None:
    # budget 4: the second call gets what the first one's decode leaves
    result = run(
        one_call_queries(
            dict(input_tokens=3, output_tokens=3),
            dict(input_tokens=6, output_tokens=1),
            dict(input_tokens=1, output_tokens=1),
        ),
        unit(budget=4),
    )
    assert timeline(result) == [
        (0.0, 1.0, {0: 3, 1: 1}, []),  # 1 of 6
        (1.0, 2.0, {0: 1, 1: 3}, []),  # 4 of 6; nothing is left for the third
        (2.0, 3.0, {0: 1, 1: 2, 2: 1}, []),  # decode, rest of the prompt, then the third
    ]
    assert result.first_token_s == [1.0, 3.0, 3.0]
    assert result.finish_s == [3.0, 3.0, 3.0]


PRESSED = one_call_queries(
    dict(input_tokens=3, output_tokens=4),  # 6 tokens, 3 blocks of 2
    dict(input_tokens=3, output_tokens=3),  # 5 tokens, 3 blocks
)


def test_preemption_and_recomputation() -> None:
    result = run(PRESSED, unit(kv_blocks=4))
    assert timeline(result) == [
        (0.0, 1.0, {0: 3, 1: 3}, []),  # 2 blocks each: the pool is full
        (1.0, 2.0, {0: 1, 1: 1}, []),  # 4 tokens in 2 blocks
        (2.0, 3.0, {0: 1}, [1]),  # the 5th token of call 0 needs a block: call 1, the later, gives up its 2
        (3.0, 4.0, {0: 1}, []),  # call 1 knows 5 tokens, 3 blocks; 1 is free: it waits
        (4.0, 5.0, {1: 5}, []),  # call 0 is done; prompt and both generated tokens are computed again
    ]
    assert result.finish_s == [4.0, 5.0]
    assert result.preemptions == [0, 1]
    assert result.cached_tokens == [0, 0]


def test_preempted_call_hits_what_is_left_of_its_own_blocks() -> None:
    result = run(PRESSED, unit(kv_blocks=4), prefix_caching="template")
    # Call 1 held b0 (tokens 0-1) and b1 (tokens 2-3), both full. They are freed last block first, so call 0
    # takes b1 and its content is gone; b0 stays. When call 1 comes back its first 2 tokens are there: 3 of 5
    # are computed.
    assert timeline(result)[-1] == (4.0, 5.0, {1: 3}, [])
    assert result.cached_tokens == [0, 0]  # counts the first admission only


def test_least_urgent_preempts_itself_and_a_pass_stays_empty() -> None:
    # blocks of 1 token, 3 of them; call 0 is ahead in the running list but less urgent
    result = run(
        one_call_queries(
            dict(input_tokens=1, output_tokens=3),
            dict(input_tokens=1, output_tokens=3, arrival_s=0.5),
        ),
        unit(kv_blocks=3, block_size=1),
        keys=[5, 0],
    )
    assert timeline(result) == [
        (0.0, 1.0, {0: 1}, []),
        (1.0, 2.0, {0: 1, 1: 1}, []),  # 2 blocks and 1
        (2.0, 2.0, {}, [0]),  # call 0 needs a third block and is the victim itself; call 1 sits the pass out
        # at once again: call 1 takes a block; call 0 knows 3 tokens, only 1 block is free
        (2.0, 3.0, {1: 1}, []),
        (3.0, 4.0, {1: 1}, []),
        (4.0, 5.0, {0: 3}, []),
    ]
    assert result.finish_s == [5.0, 4.0]


def test_nobody_is_preempted_for_a_slot() -> None:
    calls = [dict(input_tokens=1, output_tokens=3), dict(input_tokens=1, output_tokens=1, arrival_s=0.5)]
    result = run(one_call_queries(*calls), unit(seqs=1), keys=[9, 0])
    assert result.admit_s == [0.0, 3.0]


def test_whole_prompt_must_fit_though_its_first_chunk_would() -> None:
    calls = [dict(input_tokens=6, output_tokens=2), dict(input_tokens=6, output_tokens=1)]
    result = run(one_call_queries(*calls), unit(kv_blocks=5, budget=8))
    # call 0 takes 3 of 5 blocks; a chunk of 2 of call 1 would fit, its 3 blocks do not
    assert timeline(result) == [(0.0, 1.0, {0: 6}, []), (1.0, 2.0, {0: 1}, []), (2.0, 3.0, {1: 6}, [])]


def test_shared_prefixes() -> None:
    # blocks of 2; the template has 5 tokens: blocks 0 and 1 are its own, block 2 spans template and context
    shared = dict(template=0, template_tokens=5, context_tokens=3, output_tokens=1)
    calls = [
        dict(input_tokens=10, context=0, **shared),  # fills blocks 0-4
        # the same template and context, admitted in the same step
        dict(input_tokens=10, context=0, **shared),
        dict(input_tokens=10, context=1, **shared),  # the same template only
        dict(input_tokens=9, context=0, arrival_s=5.0, **shared),  # 8 shared tokens, and the last one
        # no template before it
        dict(input_tokens=6, context=0, context_tokens=3, output_tokens=1, arrival_s=6.0),
    ]
    result = run(one_call_queries(*calls), unit(), prefix_caching="full")
    assert result.cached_tokens == [0, 8, 4, 8, 0]
    result = run(one_call_queries(*calls), unit(), prefix_caching="template")
    assert result.cached_tokens == [0, 4, 4, 4, 0]
    result = run(one_call_queries(*calls), unit(), prefix_caching="off")
    assert result.cached_tokens == [0, 0, 0, 0, 0]
    # 8 tokens, all of them in full blocks of an earlier call but for the last: with a template of 7, 6 can be
    # hit
    calls = [
        dict(input_tokens=8, output_tokens=1, template=0, template_tokens=7, arrival_s=i) for i in (0.0, 1.0)
    ]
    assert run(one_call_queries(*calls), unit(), prefix_caching="template").cached_tokens == [0, 6]


def test_eviction_takes_the_longest_free_and_the_tail_first() -> None:
    # 4 blocks of 2; each call 5 tokens (3 blocks), the first 4 of them a template of its own (2 blocks)
    calls = [
        dict(input_tokens=5, output_tokens=1, template=t, template_tokens=4, arrival_s=float(i))
        for i, t in enumerate([0, 1, 0])
    ]
    result = run(one_call_queries(*calls), unit(kv_blocks=4), prefix_caching="template")
    # free queue by number: 0 1 2 3. Call 0 holds 0 1 (hashed) and 2; freed: 2 to the front, then 1 and 0 to
    # the end: 2 3 1 0. Call 1 takes 2 3 (hashed) and 1: template 0 loses its second block. Freed: 1 to the
    # front, 3 2 to the end: 1 0 3 2. Call 2 hits block 0 only.
    assert result.cached_tokens == [0, 0, 2]


def test_dag_with_tool_times_on_two_instances() -> None:
    # instance 0 takes 1 s a step, instance 1 takes 2 s; round robin over the calls as they are dispatched
    slow = OracleInstance(2.0, 0.0, 0.0, 0.0, 0.0, kv_blocks=10)
    one = dict(input_tokens=1, output_tokens=1)
    calls = [
        dict(one),
        dict(one, after=[0]),
        dict(one, after=[0], tool_time_s=0.5),
        dict(one, after=[1, 2], tool_time_s=0.25),
    ]
    result = run([dict(arrival_s=0.0, calls=calls)], unit(), slow, dispatch=round_robin)
    assert result.instance == [0, 1, 0, 1]
    # the last: after 3 (call 1) and 2.5 (call 2), and its own 0.25
    assert result.dispatch_s == [0.0, 1.0, 1.5, 3.25]
    assert result.finish_s == [1.0, 3.0, 2.5, 5.25]
    assert result.query_finish_s == [5.25]


def test_prefill_first() -> None:
    # base 1, prefill token 1: a whole prompt at a time, ahead of decoding, whatever the token budget
    instance = OracleInstance(1.0, 1.0, 0.0, 0.0, 0.0, kv_blocks=10, max_num_seqs=2, max_num_batched_tokens=2)
    calls = [
        dict(input_tokens=4, output_tokens=3),
        dict(input_tokens=8, output_tokens=2, arrival_s=0.5),
        dict(input_tokens=1, output_tokens=1, arrival_s=0.5),
    ]
    result = run(one_call_queries(*calls), instance, batching="prefill_first")
    assert timeline(result) == [
        (0.0, 5.0, {0: 4}, []),
        (5.0, 14.0, {1: 8}, []),  # call 0 does not decode meanwhile
        (14.0, 15.0, {0: 1, 1: 1}, []),  # two are running: the third has to wait
        (15.0, 17.0, {2: 1}, []),
        (17.0, 18.0, {0: 1}, []),
    ]
    assert result.first_token_s == [5.0, 14.0, 17.0]
    assert result.finish_s == [18.0, 15.0, 17.0]


def test_idle_poll() -> None:
    calls = [dict(input_tokens=1, output_tokens=1, arrival_s=t) for t in (0.75, 2.0, 3.125)]
    result = run(one_call_queries(*calls), unit(), idle_poll_s=0.5)
    # idle since 0: looks at 1.0. Its step ends at 2.0, work is there: no wait. Idle since 3.0: looks at 3.5.
    assert result.dispatch_s == [0.75, 2.0, 3.125]
    assert result.admit_s == [1.0, 2.0, 3.5]
    assert result.finish_s == [2.0, 3.0, 4.5]


def test_virtual_token_counter() -> None:
    # one slot; input weight 1, output weight 2; a call of 4 in, 1 out costs its client 4 when it starts and 2
    # when it ends
    one = dict(input_tokens=4, output_tokens=1)
    calls = [
        dict(one),
        dict(one),
        dict(one),
        dict(one, tenant=1),
        dict(one, tenant=1, arrival_s=10.0),
        dict(one, arrival_s=10.0),
    ]
    result = run(one_call_queries(*calls), unit(seqs=1), fair=lambda: VirtualTokenCounter(1, 2))
    # 0 s: counters 0 and 0, the lower client first: call 0, client 0 is at 6. 1 s: client 1 (call 3), then it
    # is at 6 too. 2 s: a tie: call 1, client 0 is at 12; 3 s: call 2, 18. 10 s: client 1 returns to an empty
    # queue: lifted to the counter of client 0, which last left it, 18. Then client 0 arrives: max(18, least
    # in the queue 18). A tie again: client 0 first, though it came second.
    assert result.admit_s == [0.0, 2.0, 3.0, 1.0, 11.0, 10.0]


def test_call_that_never_fits_is_refused() -> None:
    fits = one_call_queries(dict(input_tokens=5, output_tokens=4))  # 8 tokens
    assert run(fits, unit(kv_blocks=4)).finish_s == [4.0]
    with pytest.raises(ValueError, match="call 0 never fits"):
        run(one_call_queries(dict(input_tokens=5, output_tokens=5)), unit(kv_blocks=4))


# ------------------------------------------------------------------------------------------ what always holds


@given(st.one_of(runs(max_queries=6, max_calls=5), pressed_runs()))
@settings(max_examples=100, deadline=None)
def test_invariants(drawn) -> None:
    workload, cluster, batching, prefix_caching = drawn
    options = dict(batching=batching, prefix_caching=prefix_caching)
    instances = [OracleInstance.from_spec(spec) for spec in cluster.instances]
    # it checks its blocks in every pass
    oracle = Oracle(workload, instances, round_robin, first_come, **options)
    result = oracle.run()

    # conservation: every call ran, with as many tokens as it has; all memory came back; nobody is left
    scheduled = [0] * workload.n_calls
    for step in result.steps:
        for call, n in step.tokens:
            scheduled[call] += n
    for call in range(workload.n_calls):
        least = workload.input_tokens[call] + workload.output_tokens[call] - 1 - result.cached_tokens[call]
        assert scheduled[call] == least if not result.preemptions[call] else scheduled[call] > 0
        assert (
            result.dispatch_s[call]
            <= result.admit_s[call]
            < result.first_token_s[call]
            <= result.finish_s[call]
        )
    for instance in oracle.instances:
        assert instance.pool.n_free == instance.spec.kv_blocks
        assert not instance.waiting
        assert not instance.running
        # content lies in one block only, so a cache may hold one block per hash
        assert all(len(blocks) <= 1 for blocks in instance.pool.cached.values())

    # causality: after all prerequisites and the tool time, to the instant
    for call in range(workload.n_calls):
        before = [c for c in range(workload.n_calls) if call in oracle.successors[c]]
        query = oracle.query[call]
        ready = max((result.finish_s[c] for c in before), default=workload.arrival_s[query])
        assert result.dispatch_s[call] == ready + workload.tool_time_s[call]

    # limits, and work conservation: an instance that has a call is inside a step
    for i, spec in enumerate(cluster.instances):
        steps = [step for step in result.steps if step.instance == i]
        for step in steps:
            assert len(step.tokens) <= spec.max_num_seqs
            if batching == "chunked":
                assert sum(n for _, n in step.tokens) <= spec.max_num_batched_tokens
            assert step.used_blocks <= spec.kv_blocks
        for earlier, later in itertools.pairwise(steps):
            assert earlier.end_s <= later.start_s
        mine = [c for c in range(workload.n_calls) if result.instance[c] == i]
        for start, end in gaps(steps):
            assert not any(result.dispatch_s[c] < end and result.finish_s[c] > start for c in mine)


def gaps(steps: list) -> list[tuple[float, float]]:
    ends = [0.0] + [step.end_s for step in steps]
    starts = [step.start_s for step in steps]
    return [(end, start) for end, start in zip(ends, starts, strict=False) if start > end]


@given(runs(max_queries=4, max_calls=4))
@settings(max_examples=20, deadline=None)
def test_floats_are_exact(drawn) -> None:
    """The drawn times are dyadic: floats and fractions give the same run, so comparisons elsewhere may ask
    for equality.
    """
    workload, cluster, batching, prefix_caching = drawn
    instances = [OracleInstance.from_spec(spec) for spec in cluster.instances]
    options = dict(batching=batching, prefix_caching=prefix_caching)
    by_floats, by_fractions = (
        Oracle(workload, instances, round_robin, first_come, exact=exact, **options).run()
        for exact in (False, True)
    )
    assert by_floats == by_fractions
