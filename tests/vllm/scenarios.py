"""Scenarios for the comparison with vLLM's scheduler: one instance, calls without dependencies. Format:
scheduler_driver.py.

All times are dyadic rationals (multiples of 1/65536 s that stay far below 2^52 of them), so floats add up
exactly and any two orders of summation agree to the bit.
"""

from __future__ import annotations

import random

# base, prefill token, prefill context, sequence, KV token
STEP_S = [8 / 1024, 1 / 8192, 1 / 65536, 1 / 4096, 1 / 65536]


def call(name, arrival_s, input_tokens, output_tokens, priority=0, template=None, context=None) -> dict:
    """template and context: (id, tokens) or None."""
    return dict(
        id=name,
        arrival_s=arrival_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        priority=priority,
        template=template[0] if template else -1,
        template_tokens=template[1] if template else 0,
        context=context[0] if context else -1,
        context_tokens=context[1] if context else 0,
    )


def scenario(
    name, calls, scheduling="priority", block_size=16, kv_blocks=64, seqs=8, budget=64, caching="off"
) -> dict:
    return dict(
        name=name,
        scheduling=scheduling,
        block_size=block_size,
        kv_blocks=kv_blocks,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        prefix_caching=caching,
        step_s=STEP_S,
        calls=calls,
    )


def named() -> list[dict]:
    """One scenario per rule that a simulator can get wrong."""
    template, context = (0, 40), (0, 24)
    return [
        scenario("one call", [call("a", 0.5, 100, 5)]),
        scenario("one token out", [call("a", 0, 10, 1), call("b", 0, 1, 1), call("c", 0, 64, 1)]),
        scenario(
            "fcfs in chunks", [call(f"c{i}", i / 64, 150, 6) for i in range(5)], scheduling="fcfs", budget=32
        ),
        scenario("burst", [call(f"c{i}", 0, 20 + i, 8, priority=5 - i) for i in range(6)], seqs=2),
        scenario(
            "priority passes the queue",
            [*(call(f"low{i}", 0, 90, 12, priority=9) for i in range(6)), call("high", 3 / 64, 30, 3)],
            seqs=2,
        ),
        scenario(
            "ties of priority",
            [call(f"c{i}", (i // 2) / 32, 50, 10, priority=i % 2) for i in range(8)],
            seqs=3,
        ),
        # a running call is never evicted for a slot, however urgent the waiting one is
        scenario(
            "slots are not preempted",
            [call("long", 0, 30, 40, priority=9), call("urgent", 1 / 32, 10, 2)],
            seqs=1,
        ),
        # the whole prompt must fit at admission, though its first chunk would
        scenario(
            "whole prompt must fit", [call("a", 0, 100, 30), call("b", 0, 100, 30)], kv_blocks=10, budget=16
        ),
        scenario(
            "kv pressure fcfs", [call(f"c{i}", 0, 30, 60) for i in range(6)], scheduling="fcfs", kv_blocks=12
        ),
        scenario(
            "kv pressure priority", [call(f"c{i}", 0, 30, 60, priority=-i) for i in range(6)], kv_blocks=12
        ),
        # the least urgent runs first in the list and must preempt itself: a pass that schedules nothing
        scenario(
            "a pass without tokens",
            [call("a", 0, 4, 12, priority=5), call("b", 1 / 256, 5, 11)],
            block_size=4,
            kv_blocks=4,
            budget=8,
            seqs=2,
        ),
        # the victim was scheduled earlier in the same step: its token returns to the budget
        scenario(
            "victim already scheduled",
            [call("v", 0, 8, 30, priority=9), call("b", 0, 7, 30), call("c", 0, 6, 30)],
            block_size=4,
            kv_blocks=10,
            budget=8,
            seqs=3,
        ),
        # a call whose prompt ends one token before the budget's edge: its last chunk is one token, yet
        # prefill
        scenario("last chunk of one token", [call("a", 0, 33, 4), call("b", 0, 65, 4)], budget=32),
        scenario(
            "shared template",
            [call(f"c{i}", i / 8, 70, 6, template=template) for i in range(4)],
            caching="template",
        ),
        # hits on blocks that a call admitted earlier in the same step is about to fill
        scenario(
            "hit within a step",
            [call(f"c{i}", 0, 70, 6, template=template) for i in range(4)],
            budget=256,
            caching="template",
        ),
        scenario(
            "template and context",
            [call(f"c{i}", i / 16, 90, 6, template=template, context=(i % 2, 24)) for i in range(6)],
            caching="full",
        ),
        scenario(
            "context alone", [call(f"c{i}", i / 16, 90, 6, context=context) for i in range(4)], caching="full"
        ),
        scenario(
            "contexts unshared",
            [call(f"c{i}", i / 16, 90, 6, template=template, context=context) for i in range(4)],
            caching="template",
        ),
        # same context behind different templates: not the same content
        scenario(
            "context behind two templates",
            [call(f"c{i}", i / 16, 90, 6, template=(i % 2, 32), context=(0, 32)) for i in range(6)],
            caching="full",
        ),
        # all but the last token are shared and fill whole blocks: the last token is computed alone
        scenario(
            "all but one token cached",
            [
                call("a", 0, 65, 4, template=(0, 64)),
                call("b", 0.5, 65, 4, template=(0, 64)),
                call("c", 1, 66, 4, template=(0, 64)),
            ],
            caching="template",
        ),
        scenario(
            "evictions",
            [call(f"c{i}", i / 8, 60, 10, template=(i % 3, 48)) for i in range(9)],
            caching="template",
            kv_blocks=9,
            seqs=2,
        ),
        scenario(
            "resumes from its own blocks",
            [call(f"c{i}", 0, 33, 40, priority=i) for i in range(4)],
            caching="template",
            kv_blocks=12,
            seqs=4,
        ),
        scenario(
            "resumes, blocks partly evicted",
            [call(f"c{i}", i / 64, 20, 60, priority=i % 3, template=(0, 16)) for i in range(6)],
            block_size=4,
            caching="full",
            kv_blocks=24,
            seqs=6,
        ),
        scenario(
            "blocks of one token",
            [
                call(f"c{i}", i / 64, 9, 12, priority=i % 2, template=(0, 5), context=(i % 2, 3))
                for i in range(6)
            ],
            block_size=1,
            caching="full",
            kv_blocks=40,
            seqs=4,
            budget=16,
        ),
    ]


def drawn(seed: int) -> dict:
    """A random scenario. The seed decides the family: chunking, memory pressure, shared prefixes, or all
    together.
    """
    rnd = random.Random(seed)
    family = seed % 4
    caching = rnd.choice(["template", "full"]) if family == 2 else rnd.choice(["off", "template", "full"])
    block_size = rnd.choice([1, 4, 4, 16, 16])
    longest_in, longest_out = {0: (160, 12), 1: (40, 60), 2: (120, 16), 3: (90, 40)}[family]
    n = rnd.randint(3, 12)
    levels = rnd.choice([1, 2, n, 100])
    # then the first in the running list is the first to be preempted
    later_is_more_urgent = rnd.random() < 0.3
    templates = {t: rnd.randint(1, max(1, longest_in // 2)) for t in range(rnd.randint(1, 3))}
    contexts = {
        (t, c): rnd.randint(1, max(1, longest_in // 4))
        for t in [-1, *templates]
        for c in range(rnd.randint(1, 4))
    }
    calls, now = [], 0
    for i in range(n):
        if rnd.random() > 0.4:  # else a burst: it arrives together with the one before
            now += rnd.randint(1, 40)
        template = rnd.choice([-1, *templates, *templates])
        context = rnd.choice([-1] + [c for t, c in contexts if t == template] * 2)
        shared = (templates[template] if template >= 0 else 0) + (
            contexts[template, context] if context >= 0 else 0
        )
        calls.append(
            call(
                f"c{i}",
                now / 256,
                shared + rnd.randint(1, longest_in),
                rnd.randint(1, longest_out),
                n - i if later_is_more_urgent else rnd.randrange(levels),
                template=(template, templates[template]) if template >= 0 else None,
                context=(context, contexts[template, context]) if context >= 0 else None,
            )
        )
    needs = [-(-(c["input_tokens"] + c["output_tokens"] - 1) // block_size) for c in calls]
    tightness = {0: 4.0, 1: 0.4, 2: 1.5, 3: 0.8}[family]
    kv_blocks = max(needs) + rnd.randint(0, int(1 + tightness * max(needs)))
    seqs = rnd.randint(1, 8)
    budget = max(seqs, rnd.choice([seqs, 8, 16, 33, 64, 256]))
    name = f"drawn {seed}"
    return scenario(
        name,
        calls,
        rnd.choice(["fcfs", "priority", "priority"]),
        block_size,
        kv_blocks,
        seqs,
        budget,
        caching,
    )


def drawn_all(n: int) -> list[dict]:
    return [drawn(seed) for seed in range(n)]
