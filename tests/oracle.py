"""A slow and obvious simulator of LLM serving, in plain Python: the reference that the compiled engine must
equal.

It follows vLLM 0.32's V1 scheduler (vllm/v1/core/sched/scheduler.py, kv_cache_manager.py, block_pool.py) one
engine step and one sequence at a time, with real block objects. Nothing is skipped, closed, or clever.
`tests/vllm` holds it against vLLM's own scheduler; `tests/simulator/test_engine_vs_oracle.py` holds the
engine against it.

Read top to bottom: the inputs, the KV pool, one call at its instance, one instance (a step), the cluster (the
event loop), the policies.

Numbers: times are Fractions when `exact=True`, else floats; lengths are ints. At every event time t, in this
order:
  1. steps that end at t end: tokens come out, calls finish, successors are released;
  2. calls released at or before t are dispatched, in the order of (release time, call index);
  3. every instance that is not inside a step and has work starts a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

Number = Any  # float, or Fraction when exact


# ----------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class OracleInstance:
    """One model instance. The first five are the step-time coefficients, in seconds per unit (see
    `step_time`).
    """

    base_s: Number
    prefill_token_s: Number
    prefill_context_s: Number
    sequence_s: Number
    kv_token_s: Number
    kv_blocks: int  # usable blocks; vLLM's null block is not among them
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048

    @classmethod
    def from_spec(cls, spec: Any) -> OracleInstance:
        """The same from a `hexrepro.cluster` InstanceSpec."""
        latency = spec.latency
        return cls(
            latency.base_s,
            latency.prefill_token_s,
            latency.prefill_context_s,
            latency.sequence_s,
            latency.kv_token_s,
            spec.kv_blocks,
            spec.block_size,
            spec.max_num_seqs,
            spec.max_num_batched_tokens,
        )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# ---------------------------------------------------------------------------------------------------- KV pool


class Block:
    """One KV block. `hash` names its content once it is (scheduled to be) full; it stays after the block is
    freed.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.references = 0
        self.hash: tuple | None = None


class BlockPool:
    """vLLM's BlockPool: a queue of free blocks, some of which still hold content that a later call can hit."""

    def __init__(self, n_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(n_blocks)]
        self.free: deque[Block] = deque(self.blocks)
        self.cached: dict[tuple, list[Block]] = {}  # hash -> blocks with that content, the first cached first

    @property
    def n_free(self) -> int:
        return len(self.free)

    def lookup(self, block_hash: tuple) -> Block | None:
        """The block that was cached first under this hash, in use or free."""
        blocks = self.cached.get(block_hash)
        return blocks[0] if blocks else None

    def take(self, n: int) -> list[Block]:
        """n blocks from the front of the free queue; cached content in them is evicted."""
        taken = [self.free.popleft() for _ in range(n)]
        for block in taken:
            assert block.references == 0
            if block.hash is not None:
                self.cached[block.hash].remove(block)
                block.hash = None
            block.references = 1
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Take cached blocks into use: those that nobody uses leave the free queue."""
        for block in blocks:
            if block.references == 0:
                self.free.remove(block)
            block.references += 1

    def put_hash(self, block: Block, block_hash: tuple) -> None:
        """The block's content is named from now on. A second block of the same content queues up behind the
        first.
        """
        assert block.hash is None
        block.hash = block_hash
        self.cached.setdefault(block_hash, []).append(block)

    def give_back(self, blocks_of_call: list[Block]) -> None:
        """A call's blocks, the last one first: unhashed ones to the front of the queue, hashed ones to its
        end.
        """
        front, end = [], []
        for block in reversed(blocks_of_call):
            block.references -= 1
            if block.references == 0:
                (front if block.hash is None else end).append(block)
        self.free.extendleft(reversed(front))  # the first of `front` is the first of the queue
        self.free.extend(end)


# ----------------------------------------------------------------------------------- one call at its instance


@dataclass(eq=False)
class LocalCall:
    """One call at its instance. `known` tokens are its prompt and what it has generated; `computed` ones have
    their KV.
    """

    call: int
    client: int
    input_tokens: int
    output_tokens: int
    key: Number  # queue key: the least is served first; constant
    order: int  # enqueue number at the instance: breaks ties of the key; kept through preemption
    hash_of: Callable[[int], tuple] | None  # content of its j-th block; None when prefix caching is off
    generated: int = 0
    computed: int = 0
    # its prefill (or its recomputation) is complete: it has got a token since it was last admitted
    decoding: bool = False
    blocks: list[Block] = field(default_factory=list)
    preemptions: int = 0
    cached_tokens: int | None = None  # prefix hit at the first admission

    @property
    def known(self) -> int:
        return self.input_tokens + self.generated

    @property
    def rank(self) -> tuple[Number, int]:
        return (self.key, self.order)


@dataclass
class Step:
    """What one engine step did. `tokens` in the order of the running list."""

    instance: int
    start_s: Number
    end_s: Number
    tokens: list[tuple[int, int]]  # (call, tokens scheduled)
    preempted: list[int]
    admitted: list[int]
    prefill_tokens: int  # P
    decodes: int
    used_blocks: int  # while the step runs


# ----------------------------------------------------------------------------------------------- one instance


class Instance:
    """Continuous batching on one instance: a waiting queue, a running list in the order of admission, a KV
    pool.
    """

    def __init__(
        self, index: int, spec: OracleInstance, fair: VirtualTokenCounter | None, decode_blocks: bool
    ) -> None:
        self.index = index
        self.spec = spec
        self.fair = fair
        self.pool = BlockPool(spec.kv_blocks)
        self.waiting: list[LocalCall] = []
        self.running: list[LocalCall] = []
        self.enqueued = 0
        self.step: Step | None = None  # the step it is inside of
        self.scheduled: dict[LocalCall, int] = {}
        self.decode_blocks = decode_blocks
        self.idle_since: Number | None = 0  # when it ran out of work; None while it has some
        self.peak_blocks = 0

    # ---- the waiting queue

    def enqueue(self, sequence: LocalCall) -> None:
        if self.fair is not None:
            self.fair.arrives(sequence.client, {s.client for s in self.waiting})
        self.waiting.append(sequence)

    def head(self) -> LocalCall:
        candidates = self.waiting if self.fair is None else self.fair.candidates(self.waiting)
        return min(candidates, key=lambda s: s.rank)

    # ---- KV

    def stored(self, sequence: LocalCall, tokens: int) -> int:
        """How many of its first `tokens` tokens take memory: all, but in the released simulator only the
        prompt's.
        """
        return tokens if self.decode_blocks else min(tokens, sequence.input_tokens)

    def blocks_missing(self, sequence: LocalCall, tokens: int) -> int:
        """Blocks to take so that the sequence can hold `tokens` tokens."""
        return max(ceil_div(self.stored(sequence, tokens), self.spec.block_size) - len(sequence.blocks), 0)

    def allocate(self, sequence: LocalCall, n: int) -> None:
        """Blocks for n more tokens. Blocks that this step fills are hashed at once, as vLLM's allocate_slots
        does.
        """
        end = sequence.computed + n
        sequence.blocks += self.pool.take(self.blocks_missing(sequence, end))
        if sequence.hash_of is not None:
            for j in range(self.stored(sequence, end) // self.spec.block_size):
                if sequence.blocks[j].hash is None:
                    self.pool.put_hash(sequence.blocks[j], sequence.hash_of(j))

    def cached_prefix(self, sequence: LocalCall) -> list[Block]:
        """The cached blocks that its known tokens begin with. The last known token is always computed."""
        hits: list[Block] = []
        if sequence.hash_of is not None:
            for j in range((sequence.known - 1) // self.spec.block_size):
                block = self.pool.lookup(sequence.hash_of(j))
                if block is None:
                    break
                hits.append(block)
        return hits

    def fits(self, sequence: LocalCall, hits: list[Block]) -> bool:
        """All known tokens must fit (scheduler_reserve_full_isl). Hits that lie in the free queue use up free
        blocks too.
        """
        new = ceil_div(self.stored(sequence, sequence.known), self.spec.block_size) - len(hits)
        return new + sum(block.references == 0 for block in hits) <= self.pool.n_free

    # ---- scheduling

    def preempt(self, victim: LocalCall) -> None:
        """Its KV is given up, its tokens are kept; it waits again, with its own key and number."""
        self.running.remove(victim)
        self.pool.give_back(victim.blocks)
        victim.blocks = []
        victim.computed = 0
        victim.decoding = False
        victim.preemptions += 1
        self.waiting.append(victim)

    def admit(self, sequence: LocalCall, hits: list[Block], n: int) -> None:
        self.waiting.remove(sequence)
        if self.fair is not None:
            self.fair.leaves(sequence.client)
        if sequence.cached_tokens is None:  # its first admission
            sequence.cached_tokens = len(hits) * self.spec.block_size
            if self.fair is not None:
                self.fair.charge_input(sequence.client, sequence.input_tokens)
        self.pool.touch(hits)
        sequence.blocks = list(hits)
        sequence.computed = len(hits) * self.spec.block_size
        self.allocate(sequence, n)
        self.running.append(sequence)
        self.scheduled[sequence] = n

    def schedule_running(self, budget: int | None, preempted: list[int]) -> int | None:
        """Each running sequence takes its tokens, in the order of admission. Returns the budget left (None:
        no limit).
        """
        position = 0
        while position < len(self.running) and (budget is None or budget > 0):
            sequence = self.running[position]
            n = sequence.known - sequence.computed
            if budget is not None:
                n = min(n, budget)
            while self.blocks_missing(sequence, sequence.computed + n) > self.pool.n_free:
                victim = max(self.running, key=lambda s: s.rank)
                if self.running.index(victim) < position:
                    position -= 1
                returned = self.scheduled.pop(victim, 0)
                if budget is not None:
                    budget += returned
                self.preempt(victim)
                preempted.append(victim.call)
                if victim is sequence:
                    return budget  # the later ones sit this step out
            self.allocate(sequence, n)
            self.scheduled[sequence] = n
            if budget is not None:
                budget -= n
            position += 1
        return budget

    def schedule_chunked(self, preempted: list[int]) -> None:
        """vLLM V1: a token budget; running sequences first, then waiting calls, prompts in chunks."""
        budget = self.schedule_running(self.spec.max_num_batched_tokens, preempted)
        if preempted:
            return
        while budget > 0 and self.waiting and len(self.running) < self.spec.max_num_seqs:
            sequence = self.head()
            hits = self.cached_prefix(sequence)
            if not self.fits(sequence, hits):
                break
            n = min(sequence.known - len(hits) * self.spec.block_size, budget)
            self.admit(sequence, hits, n)
            budget -= n

    def schedule_prefill_first(self, preempted: list[int]) -> None:
        """vLLM V0 and the released simulator: the whole prompt of one waiting call, alone; else one token for
        each running.
        """
        if self.waiting and len(self.running) < self.spec.max_num_seqs:
            sequence = self.head()
            hits = self.cached_prefix(sequence)
            if self.fits(sequence, hits):
                self.admit(sequence, hits, sequence.known - len(hits) * self.spec.block_size)
                return
        self.schedule_running(None, preempted)

    def start_step(self, now: Number, batching: str) -> list[Step]:
        """Schedule until a step has tokens. Returns all passes, the last one being the step that starts.

        A pass can end with nothing scheduled: a sequence had to preempt itself before the others had their
        turn. The model does not run then, and no time passes; the next pass finds the freed blocks.
        """
        passes: list[Step] = []
        while True:
            already_running = [s for s in self.running if s.decoding]
            waiting_before = set(self.waiting)
            self.scheduled = {}
            preempted: list[int] = []
            if batching == "chunked":
                self.schedule_chunked(preempted)
            else:
                self.schedule_prefill_first(preempted)
            step = Step(
                instance=self.index,
                start_s=now,
                end_s=now,
                tokens=[(s.call, n) for s, n in self.scheduled.items()],
                preempted=preempted,
                admitted=[s.call for s in self.scheduled if s in waiting_before],
                prefill_tokens=0,
                decodes=0,
                used_blocks=self.spec.kv_blocks - self.pool.n_free,
            )
            passes.append(step)
            self.peak_blocks = max(self.peak_blocks, step.used_blocks)
            self.check_blocks()
            if self.scheduled:
                decodes = [s for s in self.scheduled if s in already_running]
                step.decodes = len(decodes)
                step.prefill_tokens = sum(n for s, n in self.scheduled.items() if s not in decodes)
                step.end_s = now + self.step_time(decodes)
                self.step = step
                return passes
            assert preempted, "a pass with work neither schedules nor preempts"

    def step_time(self, decodes: list[LocalCall]) -> Number:
        """base + prefill_token * P + prefill_context * A + sequence * S + kv_token * K, of what is scheduled
        now.

        A sequence decodes when it was running before this step with its prefill complete; then it has exactly
        its one newest token to compute. All else is prefill: chunks of prompts, and recomputation after
        preemption.
        """
        p, twice_a, k = 0, 0, 0
        for sequence, n in self.scheduled.items():
            if sequence in decodes:
                assert n == 1
                k += sequence.computed
            else:
                p += n
                twice_a += 2 * n * sequence.computed + n * n
        c = self.spec
        s = len(self.scheduled)
        return (
            c.base_s
            + c.prefill_token_s * p
            + c.prefill_context_s * twice_a / 2
            + c.sequence_s * s
            + c.kv_token_s * k
        )

    def end_step(self, on_token: Callable[[LocalCall], None], on_finish: Callable[[LocalCall], None]) -> None:
        for sequence, n in self.scheduled.items():
            sequence.computed += n
            if sequence.computed < sequence.known:
                continue  # a prompt's chunk, not its last
            sequence.generated += 1
            sequence.decoding = True
            if self.fair is not None:
                self.fair.charge_output(sequence.client)
            on_token(sequence)
            if sequence.generated == sequence.output_tokens:
                self.pool.give_back(sequence.blocks)
                sequence.blocks = []
                self.running.remove(sequence)
                on_finish(sequence)
        self.scheduled = {}
        self.step = None

    def check_blocks(self) -> None:
        """free + used = pool; a block is referenced by exactly the running sequences that hold it; waiting
        ones hold none.
        """
        holders: dict[int, int] = {}
        for sequence in self.running:
            for block in sequence.blocks:
                holders[block.number] = holders.get(block.number, 0) + 1
        assert all(block.references == holders.get(block.number, 0) for block in self.pool.blocks)
        assert len(self.pool.free) + len(holders) == self.spec.kv_blocks
        assert {block.number for block in self.pool.free}.isdisjoint(holders)
        assert not any(sequence.blocks for sequence in self.waiting)
        for block_hash, blocks in self.pool.cached.items():
            assert all(block.hash == block_hash for block in blocks)
        assert sum(map(len, self.pool.cached.values())) == sum(
            block.hash is not None for block in self.pool.blocks
        )


# ----------------------------------------------------------------------------------- fairness between clients


class VirtualTokenCounter:
    """The fair queue of one instance (VTC, arXiv 2401.00588, algorithm 2): the client that was served least
    comes first.
    """

    def __init__(self, input_weight: Number = 1, output_weight: Number = 2) -> None:
        self.input_weight = input_weight
        self.output_weight = output_weight
        self.counter: dict[int, Number] = {}
        self.last_left: int | None = None  # client of the call that last left the queue

    def arrives(self, client: int, waiting_clients: set[int]) -> None:
        """A client that had no call waiting does not keep credit from its absence. (A preempted call does not
        arrive anew.)
        """
        counter = self.counter.setdefault(client, 0)
        if client in waiting_clients:
            return
        if waiting_clients:
            self.counter[client] = max(counter, min(self.counter[c] for c in waiting_clients))
        elif self.last_left is not None:
            self.counter[client] = max(counter, self.counter[self.last_left])

    def candidates(self, waiting: Sequence[LocalCall]) -> list[LocalCall]:
        """The waiting calls of the client with the least counter; ties go to the lower client index."""
        client = min({s.client for s in waiting}, key=lambda c: (self.counter[c], c))
        return [s for s in waiting if s.client == client]

    def leaves(self, client: int) -> None:
        self.last_left = client

    def charge_input(self, client: int, input_tokens: int) -> None:
        self.counter[client] += self.input_weight * input_tokens

    def charge_output(self, client: int) -> None:
        self.counter[client] += self.output_weight


# ------------------------------------------------------------------------------------------------ the cluster


@dataclass
class OracleResult:
    """Lists over calls, over queries, over instances; and every scheduling pass in the order in which it
    happened.
    """

    instance: list[int]
    dispatch_s: list[Number]
    admit_s: list[Number]  # start of the first step that computed something of the call
    first_token_s: list[Number]
    finish_s: list[Number]
    cached_tokens: list[int]
    preemptions: list[int]
    query_finish_s: list[Number]
    passes: list[Step]  # steps, and passes that scheduled nothing (start = end)
    peak_kv_blocks: list[int]

    @property
    def steps(self) -> list[Step]:
        return [p for p in self.passes if p.tokens]


class Oracle:
    """The cluster in virtual time.

    dispatch(call, oracle) -> instance index, from the state as it is at `oracle.now` (`outstanding`,
    `dispatched`).
    key(call, instance, oracle) -> queue key, least first; asked once, when the call is dispatched.
    fair() -> a new VirtualTokenCounter for each instance, for the VTC policy.
    """

    def __init__(
        self,
        workload: Any,
        instances: Sequence[OracleInstance],
        dispatch: Callable[[int, Oracle], int],
        key: Callable[[int, int, Oracle], Number],
        *,
        prefix_caching: str = "off",  # off | template | full
        batching: str = "chunked",  # chunked | prefill_first
        decode_blocks: bool = True,  # False: generated tokens take no KV blocks (released simulator)
        # > 0: an idle instance looks for work only at multiples of this since it became idle
        idle_poll_s: Number = 0,
        fair: Callable[[], VirtualTokenCounter] | None = None,
        client: str = "tenant",  # whom the fair queue is fair to: tenant | query
        exact: bool = False,
    ) -> None:
        self.number = Fraction if exact else float
        self.workload = workload
        self.dispatch_rule, self.key_rule = dispatch, key
        self.prefix_caching, self.batching, self.client = prefix_caching, batching, client
        self.idle_poll_s = self.number(idle_poll_s)
        self.now: Number = self.number(0)
        self.instances = [
            Instance(i, self.in_numbers(spec), fair() if fair else None, decode_blocks)
            for i, spec in enumerate(instances)
        ]
        self.n_calls = len(workload.input_tokens)
        self.query = [-1] * self.n_calls
        for q in range(len(workload.arrival_s)):
            for call in range(int(workload.query_offsets[q]), int(workload.query_offsets[q + 1])):
                self.query[call] = q
        self.successors = [
            [int(s) for s in workload.successors[workload.succ_offsets[c] : workload.succ_offsets[c + 1]]]
            for c in range(self.n_calls)
        ]
        self.open_predecessors = [0] * self.n_calls
        for followers in self.successors:
            for call in followers:
                self.open_predecessors[call] += 1
        self.refuse_what_never_fits()
        self.dispatched: list[int] = []  # calls in the order of dispatch
        # dispatched, not finished; in order of dispatch
        self.outstanding: list[list[int]] = [[] for _ in self.instances]
        self.pending: list[tuple[Number, int]] = []  # (release time, call), not yet dispatched

    def in_numbers(self, spec: OracleInstance) -> OracleInstance:
        times = (spec.base_s, spec.prefill_token_s, spec.prefill_context_s, spec.sequence_s, spec.kv_token_s)
        return OracleInstance(
            *map(self.number, times),
            spec.kv_blocks,
            spec.block_size,
            spec.max_num_seqs,
            spec.max_num_batched_tokens,
        )

    def refuse_what_never_fits(self) -> None:
        for call in range(self.n_calls):
            tokens = int(self.workload.input_tokens[call])
            for i, instance in enumerate(self.instances):
                if instance.decode_blocks:  # the last token's KV is never written
                    tokens = (
                        int(self.workload.input_tokens[call]) + int(self.workload.output_tokens[call]) - 1
                    )
                if ceil_div(tokens, instance.spec.block_size) > instance.spec.kv_blocks:
                    raise ValueError(f"call {call} never fits in the KV pool of instance {i}")

    def block_hash(self, call: int, j: int, block_size: int) -> tuple:
        """What the j-th block of the call holds. The context's content follows a template, so both ids name
        it.

        A block that reaches beyond the shared tokens is the call's own: only the call itself hits it, when it
        resumes.
        """
        w = self.workload
        end = (j + 1) * block_size
        template, context = int(w.template[call]), int(w.context[call])
        template_tokens, context_tokens = int(w.template_tokens[call]), int(w.context_tokens[call])
        if template >= 0 and end <= template_tokens:
            return ("template", template, j)
        if self.prefix_caching == "full" and context >= 0 and end <= template_tokens + context_tokens:
            return ("context", template, context, j)
        return ("call", call, j)

    # ---- what a dispatch rule may look at, beside `now`, `dispatched` and `outstanding`

    def waiting_at(self, index: int) -> list[int]:
        return [sequence.call for sequence in self.instances[index].waiting]

    def n_calls_at(self, index: int) -> tuple[int, int]:
        """(waiting, running)."""
        return len(self.instances[index].waiting), len(self.instances[index].running)

    # ---- the event loop

    def run(self) -> OracleResult:
        w, number = self.workload, self.number
        self.result = OracleResult(
            [-1] * self.n_calls,
            *([None] * self.n_calls for _ in range(4)),
            [0] * self.n_calls,
            [0] * self.n_calls,
            [None] * len(w.arrival_s),
            [],
            [],
        )
        for call in range(self.n_calls):
            if self.open_predecessors[call] == 0:
                arrival = number(float(w.arrival_s[self.query[call]]))
                self.pending.append((arrival + number(float(w.tool_time_s[call])), call))
        while True:
            times = [release for release, _ in self.pending]
            for instance in self.instances:
                if instance.step is not None:
                    times.append(instance.step.end_s)
                elif instance.waiting:
                    times.append(self.next_look(instance))
            if not times:
                break
            self.now = max(self.now, min(times))
            for instance in self.instances:
                if instance.step is not None and instance.step.end_s == self.now:
                    self.end_step(instance)
            for release, call in sorted(p for p in self.pending if p[0] <= self.now):
                self.pending.remove((release, call))
                self.dispatch(call)
            for instance in self.instances:
                has_work = instance.waiting or instance.running
                if instance.step is None and has_work and self.next_look(instance) == self.now:
                    self.start_step(instance)
        assert None not in self.result.finish_s, "a call was lost"
        self.result.peak_kv_blocks = [instance.peak_blocks for instance in self.instances]
        return self.result

    def next_look(self, instance: Instance) -> Number:
        """When an instance that is outside a step next looks for work: now, or at the next tick of its idle
        poll.
        """
        if self.idle_poll_s == 0 or instance.idle_since is None:
            return self.now
        ticks = -((instance.idle_since - self.now) // self.idle_poll_s)  # rounded up
        return instance.idle_since + ticks * self.idle_poll_s

    def dispatch(self, call: int) -> None:
        w = self.workload
        index = self.dispatch_rule(call, self)
        instance = self.instances[index]
        block_size = instance.spec.block_size
        sequence = LocalCall(
            call=call,
            client=self.query[call] if self.client == "query" else int(w.tenant[self.query[call]]),
            input_tokens=int(w.input_tokens[call]),
            output_tokens=int(w.output_tokens[call]),
            key=self.key_rule(call, index, self),
            order=instance.enqueued,
            hash_of=None if self.prefix_caching == "off" else lambda j: self.block_hash(call, j, block_size),
        )
        instance.enqueued += 1
        instance.enqueue(sequence)
        self.dispatched.append(call)
        self.outstanding[index].append(call)
        self.result.instance[call] = index
        self.result.dispatch_s[call] = self.now

    def start_step(self, instance: Instance) -> None:
        instance.idle_since = None
        passes = instance.start_step(self.now, self.batching)
        self.result.passes += passes
        for call in passes[-1].admitted:
            if self.result.admit_s[call] is None:
                self.result.admit_s[call] = self.now

    def end_step(self, instance: Instance) -> None:
        def on_token(sequence: LocalCall) -> None:
            if sequence.generated == 1:
                self.result.first_token_s[sequence.call] = self.now

        def on_finish(sequence: LocalCall) -> None:
            call = sequence.call
            self.result.finish_s[call] = self.now
            self.result.query_finish_s[self.query[call]] = self.now  # the last call's stays
            self.result.cached_tokens[call] = sequence.cached_tokens
            self.result.preemptions[call] = sequence.preemptions
            self.outstanding[instance.index].remove(call)
            for follower in self.successors[call]:
                self.open_predecessors[follower] -= 1
                if self.open_predecessors[follower] == 0:
                    tool_time = self.number(float(self.workload.tool_time_s[follower]))
                    self.pending.append((self.now + tool_time, follower))

        instance.end_step(on_token, on_finish)
        if not instance.running and not instance.waiting:
            instance.idle_since = self.now


# -------------------------------------------------------------------------------------------------- estimates


def solo_latency(
    instance: OracleInstance, input_tokens: int, cached_tokens: Number, output_tokens: Number
) -> Number:
    """t_comp: a call that has the instance to itself, step by step. The output length is an estimate, so it
    can be a fraction.

    Prompt chunks of the whole budget, then output - 1 decode steps whose contexts begin at the input length.
    A fraction of a decode step counts by the closed form of the sum, d * input + d * (d - 1) / 2.
    """
    total = 0.0
    computed = cached_tokens
    while computed < input_tokens:
        n = min(instance.max_num_batched_tokens, input_tokens - computed)
        total += instance.base_s + instance.sequence_s
        total += instance.prefill_token_s * n + instance.prefill_context_s * (n * computed + n * n / 2)
        computed += n
    d = max(output_tokens, 1) - 1
    return (
        total
        + (instance.base_s + instance.sequence_s) * d
        + instance.kv_token_s * (d * input_tokens + d * (d - 1) / 2)
    )


# -------------------------------------------------------- policies: plain-Python twins of hexrepro.scheduling
# A policy here is a dispatch rule and a key rule. `estimate[call][instance]` is t_comp in seconds, as the
# policy believes it.


def only_instance(call: int, oracle: Oracle) -> int:
    return 0


def round_robin(call: int, oracle: Oracle) -> int:
    """The i-th dispatched call goes to i mod M."""
    return len(oracle.dispatched) % len(oracle.instances)


def fewest_calls(call: int, oracle: Oracle) -> int:
    """The instance with the fewest calls waiting, then running, then the lower index."""
    return min(range(len(oracle.instances)), key=lambda i: (*oracle.n_calls_at(i), i))


def least_outstanding(estimate: list[list[Number]]) -> Callable[[int, Oracle], int]:
    """The instance with the least estimated work that was sent to it and is not finished; ties to the faster,
    then the index.
    """

    def rule(call: int, oracle: Oracle) -> int:
        work = [sum(estimate[c][i] for c in calls) for i, calls in enumerate(oracle.outstanding)]
        return min(range(len(work)), key=lambda i: (work[i], estimate[call][i], i))

    return rule


def workload_balanced(
    estimate: list[list[Number]],
    stage_mean: list[Number],
    alpha: float,
    beta: float = 1.0,
    waiting_only: bool = False,
) -> Callable[[int, Oracle], int]:
    """The paper's dispatch: the greatest (1 - alpha) * B / t_queue - alpha * t_comp, B = beta * (cluster mean
    of the stage)^2.

    t_queue is the estimated work at the instance (all outstanding, or only what waits), but at least one step
    of one sequence. Ties go to the smaller t_comp, then to the lower index.
    """

    def rule(call: int, oracle: Oracle) -> int:
        b = beta * stage_mean[call] * stage_mean[call]

        def order(i: int) -> tuple:
            calls = oracle.waiting_at(i) if waiting_only else oracle.outstanding[i]
            instance = oracle.instances[i].spec
            t_queue = max(sum(estimate[c][i] for c in calls), instance.base_s + instance.sequence_s)
            score = (1.0 - alpha) * b / t_queue - alpha * estimate[call][i]
            return (-score, estimate[call][i], i)

        return min(range(len(oracle.instances)), key=order)

    return rule


def as_released(
    estimate: list[list[Number]], load_weight: list[float], alpha: float
) -> Callable[[int, Oracle], int]:
    """The released score: alpha * t_comp(base) / t_comp - (1 - alpha) * k * W / W(base), W all work ever
    sent; first of equals.
    """

    def rule(call: int, oracle: Oracle) -> int:
        ever = [0.0] * len(oracle.instances)
        for c in oracle.dispatched:
            ever[oracle.result.instance[c]] += estimate[c][oracle.result.instance[c]]
        unit = ever[0] if ever[0] > 0 else 1.0

        def order(i: int) -> tuple:
            speed = alpha * estimate[call][0] / estimate[call][i]
            return (-(speed - (1.0 - alpha) * load_weight[i] * (ever[i] / unit)), i)

        return min(range(len(oracle.instances)), key=order)

    return rule


def first_come(call: int, instance: int, oracle: Oracle) -> Number:
    """FCFS: no key; the enqueue number decides."""
    return 0


def urgency(
    estimate: list[list[Number]], budget: Callable[[int, Number], Number]
) -> Callable[[int, int, Oracle], Number]:
    """The paper's urgency U = t_comp - (t_SLO - waited), greatest first, as the key it is: the latest start,
    least first.

    `budget(call, now)` is t_SLO, counted from the dispatch.
    """
    return lambda call, instance, oracle: oracle.now + budget(call, oracle.now) - estimate[call][instance]


def slo_budget(
    workload: Any, query: list[int], base_slo_s: float, stage_mean: list[Number], remaining: list[Number]
):
    """t_SLO = (SLO - elapsed) * t(stage) / (t(stage) + t(stages after it)), with t the mean of t_comp over
    the cluster.

    `remaining[call]`: the estimated time of what comes after the call in its query.
    """

    def budget(call: int, now: Number) -> Number:
        q = query[call]
        slo = float(workload.slo_scale[q]) * base_slo_s
        elapsed = now - float(workload.arrival_s[q])
        return (slo - elapsed) * stage_mean[call] / (stage_mean[call] + remaining[call])

    return budget


def least_laxity(estimate: list[list[Number]], slo_s: list[float], calls_per_query: float = 15.0):
    """LLF: each call has a deadline of its own, its query's SLO / 15 after it was dispatched; `slo_s[call]`."""
    return lambda call, instance, oracle: (
        oracle.now + slo_s[call] / calls_per_query - estimate[call][instance]
    )


def request_groups(slo_s: list[float], calls_per_query: float = 15.0, group_s: float = 10.0):
    """QLM's order: calls whose deadlines fall into the same 10 s are a group; groups by deadline, FCFS within
    one.
    """
    return lambda call, instance, oracle: (oracle.now + slo_s[call] / calls_per_query) // group_s
