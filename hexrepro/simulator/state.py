"""The simulator's working memory: NumPy records, allocated once a thread and wiped at the start of each run."""

from typing import NamedTuple

import numpy as np

from hexrepro.scheduling.decision import Desk, desk
from hexrepro.scheduling.views import INSTANCE

# All integers that compiled functions hand to each other are int64, typed constants included: Numba compiles a function
# anew for every combination of integer types and literals that it meets.
NONE = np.int64(-1)  # no call, no node
ZERO, ONE = np.int64(0), np.int64(1)

# One LLM call. The queue links are used by one heap at a time: a call is either released and not yet dispatched, or
# waits at one instance.
CALL_STATE = np.dtype(
    [
        ("key", np.float64),  # queue key, or release time before dispatch
        ("seq", np.int64),  # enqueue order at the instance, or call index before dispatch
        ("child", np.int64),
        ("sibling", np.int64),
        ("missing", np.int64),  # prerequisites that have not finished
        ("instance", np.int64),
        ("known", np.int64),  # prompt + generated tokens
        ("computed", np.int64),  # of these, in the KV cache; kept only while the prompt is computed
        ("generated", np.int64),
        ("charged", np.int64),  # generated tokens on the client's virtual counter (VTC)
        ("admitted", np.int64),  # order of admission to the running batch
        ("finish_step", np.int64),  # the instance's decode step after which the call has all its tokens
        ("prefill_left", np.float64),  # its part in the instance view's prefill_tokens
        ("output_estimate", np.float64),
        ("estimate_s", np.float64),  # t_comp on its instance
        ("budget_s", np.float64),
        ("release_s", np.float64),
        ("admit_s", np.float64),
        ("first_token_s", np.float64),
        ("finish_s", np.float64),
        ("cached_tokens", np.int64),  # at first admission
        ("preemptions", np.int64),
    ],
    align=True,
)

# One instance's engine. Between two events of an instance its batch does not change, so what grows with every decode
# step is kept as of step `steps` and advanced in closed form.
ENGINE = np.dtype(
    [
        # the step in progress
        ("start_s", np.float64),
        ("end_s", np.float64),
        ("busy", np.bool_),  # has work: inside a step, or waiting out its idle poll
        ("ready", np.bool_),  # listed to start a step at the present time
        ("skip", np.bool_),  # `advance` decode steps in one go, their blocks not yet taken
        ("blocked", np.bool_),  # planned while the head of the queue did not fit
        ("advance", np.int64),  # decode steps in it (0 while prefill_first computes a prompt)
        ("scheduled", np.int64),  # sequences that decode in it
        ("fresh", np.int64),  # sequences whose prompt is complete at its end
        ("idle_since_s", np.float64),
        ("slowdown", np.float64),  # a step takes so many times what the latency model says
        ("newest_s", np.float64),  # the latest release time of the calls admitted so far
        # the batch
        ("steps", np.int64),  # decode steps so far
        ("decoding", np.int64),  # sequences past their prompt
        ("running", np.int64),  # these, the one in prefill, and the fresh
        (
            "prefilling",
            np.int64,
        ),  # the call whose prompt is partly computed; at most one, as it takes all the budget left
        ("kv_tokens", np.int64),  # KV tokens of the decoding sequences
        ("waiting", np.int64),
        ("head_hit", np.int64),  # cached tokens of the queue's head, when it was last looked at
        ("enqueued", np.int64),  # counts calls that came
        ("admissions", np.int64),
        # the block pool: free blocks without a hash, then cached blocks in order of eviction
        ("block_shift", np.int64),  # log2 of the block size
        ("block_mask", np.int64),
        ("pool_blocks", np.int64),
        ("plain", np.int64),
        ("evictable", np.int64),
        ("oldest", np.int64),
        ("newest", np.int64),
        # fair queue
        ("active", np.int64),
        ("last_left", np.int64),
        # totals
        ("busy_s", np.float64),
        ("engine_steps", np.int64),
        ("preempted", np.int64),
        ("prefill_tokens", np.int64),
        ("decode_tokens", np.int64),
        ("cached_tokens", np.int64),
        ("peak_blocks", np.int64),
    ],
    align=True,
)

# A run of cached blocks that belong together: a shared prefix segment at one instance, or what is one call's own.
NODE = np.dtype(
    [
        ("cached", np.int32),  # blocks of it in the cache, counted from its beginning
        ("holders", np.int32),  # running calls that hold it; 0 = it lies in the free queue
        ("older", np.int32),
        ("newer", np.int32),
    ],
    align=True,
)


# What is fixed about a call: the workload's facts, and what the scheduler believes.
TASK = np.dtype(
    [
        ("stage", np.int64),
        ("query", np.int64),
        ("input_tokens", np.int64),
        ("output_tokens", np.int64),
        ("succ_begin", np.int64),  # its successors: load.successors[succ_begin:succ_end]
        ("succ_end", np.int64),
        ("prerequisites", np.int64),
        ("first_segment", np.int64),  # shared prefix segment (template), or NONE
        ("first_end", np.int64),  # tokens up to its end
        ("second_segment", np.int64),  # the shared segment behind it (context), or NONE
        ("second_end", np.int64),  # tokens up to its end
        ("position", np.int64),  # place in the plan
        ("tool_time_s", np.float64),
        ("cached_estimate", np.float64),
        ("output_estimate", np.float64),
        ("stage_mean_s", np.float64),
        ("remaining_s", np.float64),
    ],
    align=True,
)

QUERY = np.dtype(
    [
        ("begin", np.int64),  # its calls: begin to end
        ("end", np.int64),
        ("tenant", np.int64),
        ("client", np.int64),  # whom a fair queue is fair to
    ],
    align=True,
)

# What is believed of a stage: medians in tokens, and t_comp averaged over the cluster.
STAGE = np.dtype(
    [
        ("input_median", np.float64),
        ("output_median", np.float64),
        ("cached_median", np.float64),
        ("mean_s", np.float64),
        ("finished", np.int64),  # calls of it so far, for the running medians
    ],
    align=True,
)

# A call that has been dispatched when a run begins.
STARTED = np.dtype(
    [
        ("call", np.int64),
        ("instance", np.int64),
        ("generated", np.int64),  # tokens so far: all = it has finished, 0 = it waits or computes its prompt
        ("key", np.float64),
        ("estimate_s", np.float64),
        ("budget_s", np.float64),
    ],
    align=True,
)

# How far a run has come.
CLOCK = np.dtype(
    [
        ("released", np.int64),  # heap of calls that are released, or will be at their key
        ("next_query", np.int64),
        ("unfinished", np.int64),  # calls of the watched queries
        ("sequence", np.int64),  # calls dispatched
        ("releases", np.int64),
    ],
    align=True,
)

# A place in an instance's batch: an entry of the heap of decoding calls, and one of the list of the fresh.
SLOT = np.dtype([("key", np.int64), ("call", np.int64), ("fresh", np.int64)], align=True)

# A client of a fair queue at an instance.
CLIENT = np.dtype(
    [
        ("root", np.int64),  # heap of its waiting calls; all calls, where the queue is not fair
        ("active", np.int64),  # entry i of the list of clients with waiting calls
        ("place", np.int64),  # this client's place in that list
        ("counter", np.float64),  # virtual tokens served
    ],
    align=True,
)

# A running call while blocks are short.
RUNNING = np.dtype([("call", np.int64), ("computed", np.int64), ("scheduled", np.int64)], align=True)


class Load(NamedTuple):
    """A workload and the scheduler's beliefs about it, as the kernel reads them."""

    tasks: np.ndarray  # TASK[n]
    queries: np.ndarray  # QUERY[q]
    successors: np.ndarray  # int32[e]
    stages: np.ndarray  # STAGE[S]
    remaining: np.ndarray  # float64[places, S], see `estimates.Plan`
    stage_s: np.ndarray  # float64[S, M] or [0, 0], see `estimates.Estimates`
    prefill_s: (
        np.ndarray
    )  # float64[n, M] or [0, 0]: how long each prompt takes, instead of the latency model (prefill_first)
    segments: int  # shared prefix segments
    window: int  # of running medians; 0 = fixed beliefs
    started: np.ndarray  # STARTED[k], see `engine.Start`
    start_s: float  # when the run begins
    warm: bool  # templates are in every instance's prefix cache by then
    closed: np.ndarray  # bool[M], instances that take no new calls then
    watched: int  # the run ends when the first so many queries have finished


class Options(NamedTuple):
    """Switches of the engine."""

    caching: bool
    prefill_first: bool
    finish_order: (
        bool  # calls released at one time are dispatched in the order in which what they waited for finished
    )
    decode_blocks: bool  # whether generated tokens take KV blocks (the released simulator: no)
    idle_poll_s: float
    fair: bool  # VTC, with the price of a prompt token and of a generated one
    input_weight: float
    output_weight: float


class Memory(NamedTuple):
    """Working memory of one run at a time."""

    calls: np.ndarray  # CALL_STATE[n]
    engines: np.ndarray  # ENGINE[M]
    views: np.ndarray  # INSTANCE[M], the state that rules see
    is_open: np.ndarray  # bool[M], the instances that take new calls
    desk: Desk  # where calls are placed
    nodes: np.ndarray  # NODE[n + M * segments]
    slots: np.ndarray  # SLOT[M, B]
    clients: np.ndarray  # CLIENT[M, C]
    residues: np.ndarray  # int64[M, block_size], decoding calls by (KV tokens - steps) mod block size
    timers: np.ndarray  # float64[2 * P], tournament of the instances' end_s
    ready: np.ndarray  # int64[M], instances about to start a step
    order: np.ndarray  # RUNNING[B]
    stages: np.ndarray  # STAGE[S], with running medians
    recent: (
        np.ndarray
    )  # float64[S, 2, 2, window], recent input and output lengths: in order of arrival, and sorted
    clock: np.ndarray  # CLOCK[1]
    blank_call: np.ndarray  # CALL_STATE[1], as every call begins
    blank_engine: np.ndarray  # ENGINE[1], as every engine begins


def allocate(load: Load, views: np.ndarray, options: Options) -> Memory:
    """Memory for runs of this load on these instances (INSTANCE[M])."""
    n, instances, stages = len(load.tasks), len(views), len(load.stages)
    batch = int(min(views["max_num_seqs"].max(), n))
    clients = int(load.queries["client"].max()) + 1 if options.fair else 1
    leaves = 1 << max(instances - 1, 1).bit_length()
    return Memory(
        calls=np.zeros(n, CALL_STATE),
        engines=np.zeros(instances, ENGINE),
        views=np.zeros(instances, INSTANCE),
        is_open=np.ones(instances, bool),
        desk=desk(instances),
        nodes=np.zeros(n + instances * load.segments if options.caching else 1, NODE),
        slots=np.zeros((instances, batch), SLOT),
        clients=np.zeros((instances, clients), CLIENT),
        residues=np.zeros((instances, views["block_size"].max()), np.int64),
        timers=np.zeros(2 * leaves),
        ready=np.zeros(instances, np.int64),
        order=np.zeros(batch, RUNNING),
        stages=np.zeros(stages, STAGE),
        recent=np.zeros((stages, 2, 2, max(load.window, 1))),
        clock=np.zeros(1, CLOCK),
        blank_call=_blank(CALL_STATE, child=NONE, sibling=NONE, instance=NONE),
        blank_engine=_blank(
            ENGINE,
            prefilling=NONE,
            oldest=NONE,
            newest=NONE,
            last_left=NONE,
            end_s=np.inf,
            slowdown=1.0,
        ),
    )


def _blank(dtype: np.dtype, **fields) -> np.ndarray:
    """One record with times unknown (NaN in a call), the rest 0, and `fields` as given."""
    record = np.zeros(1, dtype)
    if dtype is CALL_STATE:
        for name in ("release_s", "admit_s", "first_token_s", "finish_s"):
            record[name] = np.nan
    for name, value in fields.items():
        record[name] = value
    return record
