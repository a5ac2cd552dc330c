"""The event loop: arrivals, dispatch, and the instances' steps, in virtual time.

At each event time, in this order: steps end and finished calls release what waited for them; released calls are
dispatched by (release time, call index), each seeing the effect of those before it; instances that are not inside a step
start one. So a call that comes exactly at a step boundary is part of the step that begins there.
"""

import math
from typing import NamedTuple

import numpy as np

from hexrepro.compiled import inlined, kernel
from hexrepro.scheduling.decision import decide
from hexrepro.scheduling.estimates import cluster_mean_s
from hexrepro.simulator import fairness
from hexrepro.simulator.decoding import decode_s, interrupt, steps_until
from hexrepro.simulator.heaps import first_timer, pop, push, set_timer
from hexrepro.simulator.instance import begin_step, end_step, next_finished
from hexrepro.simulator.start import place, resume
from hexrepro.simulator.state import NONE, ZERO

DONE, STUCK, BAD_INSTANCE, BAD_KEY = 0, 1, 2, 3
_MIN_HISTORY = 5  # finished calls of a stage before their median replaces the prior


class Arrivals(NamedTuple):
    """When queries come, and how long they may take."""

    at_s: np.ndarray  # float64[q]
    order: np.ndarray  # int[q], the queries as they arrive
    slo_s: np.ndarray  # float64[q]


class Rules(NamedTuple):
    """A policy, compiled."""

    dispatch: object
    params: np.ndarray  # float64[P]
    queue: object
    queue_params: np.ndarray
    seed: int  # of the calls' random numbers


@kernel
def simulate_one(load, options, views, arrivals, rules, mem, query_end_s):
    """Run one simulation; fills `mem` and query_end_s[q]. Returns DONE, or what went wrong and the call it went wrong at."""
    begin(load, options, views, mem)
    return advance(load, options, arrivals, rules, mem, query_end_s, np.inf)


@kernel
def begin(load, options, views, mem):
    """Wipe the memory, and put the calls that are under way at the start in their places."""
    _reset(load, views, mem)
    resume(load, options, mem)


@kernel
def advance(load, options, arrivals, rules, mem, query_end_s, until_s):
    """Go through all events up to and including `until_s`. Returns as `simulate_one`."""
    calls, timers, clock = mem.calls, mem.timers, mem.clock[0]
    arrival_s, order = arrivals.at_s, arrivals.order
    leaves = len(timers) >> 1
    released, unfinished, next_query = clock.released, clock.unfinished, clock.next_query
    sequence, releases = clock.sequence, clock.releases
    queries = len(arrival_s)
    while unfinished > 0:
        now = timers[1]
        if next_query < queries:
            now = min(now, arrival_s[order[next_query]])
        if released != NONE:
            now = min(now, calls[released].key)
        if now == np.inf:
            return STUCK, unfinished
        if now > until_s:
            break
        starting = 0
        # 1. steps end, calls finish, queries arrive
        while timers[1] <= now:
            m = first_timer(timers)
            end_step(load, mem, options, m)
            while True:
                call = next_finished(load, mem, options, m)
                if call == NONE:
                    break
                task = load.tasks[call]
                unfinished -= np.int64(task.query < load.watched)
                query_end_s[task.query] = now  # times only grow: the last call to finish leaves its time
                if load.window > 0:
                    _remember(load, mem, call)
                for e in range(task.succ_begin, task.succ_end):
                    successor = np.int64(load.successors[e])
                    calls[successor].missing -= 1
                    if calls[successor].missing == 0:
                        released = _release(load, options, calls, released, successor, releases, now)
                        releases += 1
            set_timer(timers, m, np.inf)
            mem.engines[m].ready = True
            mem.ready[starting] = m
            starting += 1
        while next_query < queries and arrival_s[order[next_query]] <= now:
            query = order[next_query]
            for call in range(load.queries[query].begin, load.queries[query].end):
                if calls[call].missing == 0:
                    released = _release(
                        load, options, calls, released, call, releases, max(arrival_s[query], load.start_s)
                    )
                    releases += 1
            next_query += 1
        # 2. released calls are dispatched
        while released != NONE and calls[released].key <= now:
            call = released
            released = pop(calls, released)
            status, m = _dispatch(load, options, mem, call, sequence, now, arrivals, rules)
            if status != DONE:
                return status, call
            sequence += 1
            if not mem.engines[m].ready and timers[leaves + m] == np.inf:
                mem.engines[m].ready = True
                mem.ready[starting] = m
                starting += 1
        # 3. steps begin
        for i in range(starting):
            begin_step(load, mem, options, mem.ready[i], now)
    clock.released, clock.unfinished, clock.next_query = released, unfinished, next_query
    clock.sequence, clock.releases = sequence, releases
    return DONE, NONE


@kernel
def _release(load, options, calls, released, call, releases, now):
    calls[call].key = now + load.tasks[call].tool_time_s
    calls[call].seq = releases if options.finish_order else call
    calls[call].release_s = calls[call].key
    return push(calls, released, call)


@inlined
def _dispatch(load, options, mem, call, sequence, now, arrivals, rules):
    """Let the policy place one call, and put it there."""
    view, state, task = mem.desk.call[0], mem.calls[call], load.tasks[call]
    query = task.query
    view.sequence = sequence
    view.query = query
    view.tenant = load.queries[query].tenant
    view.stage = task.stage
    view.input_tokens = task.input_tokens
    view.cached_tokens = int(task.cached_estimate)
    view.now_s = now
    view.arrival_s = arrivals.at_s[query]
    view.slo_s = arrivals.slo_s[query]
    if load.window > 0:
        view.output_tokens = mem.stages[task.stage].output_median
        view.stage_mean_s = mem.stages[task.stage].mean_s
        remaining_s = 0.0
        for s in range(len(mem.stages)):
            remaining_s += load.remaining[task.position, s] * mem.stages[s].mean_s
        view.remaining_s = remaining_s
    else:
        view.output_tokens = task.output_estimate
        view.stage_mean_s = task.stage_mean_s
        view.remaining_s = task.remaining_s
    m, key = decide(
        mem.desk, mem.views, mem.is_open, load.stage_s, rules.dispatch, rules.params, rules.queue, rules.queue_params,
        rules.seed,
    )  # fmt: skip
    if m < 0:
        return BAD_INSTANCE, m
    if math.isnan(key):
        return BAD_KEY, m
    state.key = key
    state.output_estimate = view.output_tokens
    state.prefill_left = view.input_tokens - view.cached_tokens
    state.estimate_s = view.t_comp_s
    state.budget_s = view.budget_s
    if options.fair:
        _charge_until(load, mem, options, m, now)
    place(load, mem, options, m, call)
    interrupt(mem, options, m, call, now)
    return DONE, m


@kernel
def _charge_until(load, mem, options, m, now):
    """Charge the clients of instance m for the steps of the stretch in progress that have ended by `now`."""
    at = mem.engines[m]
    done = ZERO
    if at.skip:
        done = min(steps_until(mem, m, now), at.advance)
        if done == at.advance or at.start_s + decode_s(mem, m, done) > now:
            done -= 1
    fairness.charge(load, mem, options, m, done)


@kernel
def _remember(load, mem, call):
    """Add a finished call to the running medians of its stage (the `history` estimator)."""
    window, task = load.window, load.tasks[call]
    stage = mem.stages[task.stage]
    _add_to_window(mem.recent[task.stage, 0], stage.finished, window, float(task.input_tokens))
    _add_to_window(mem.recent[task.stage, 1], stage.finished, window, float(task.output_tokens))
    stage.finished += 1
    size = min(stage.finished, window)
    if size >= min(_MIN_HISTORY, window):
        stage.input_median = _median(mem.recent[task.stage, 0, 1], size)
        stage.output_median = _median(mem.recent[task.stage, 1, 1], size)
        cached = min(stage.cached_median, stage.input_median - 1.0)
        stage.mean_s = cluster_mean_s(mem.views, stage.input_median, cached, stage.output_median)


@kernel
def _add_to_window(recent, count, window, value):
    """Put a value into recent[2, window]: row 0 in order of arrival (a ring), row 1 sorted."""
    size = min(count, window)
    if size == window:  # forget the oldest
        j = 0
        while recent[1, j] != recent[0, count % window]:
            j += 1
        size -= 1
        while j < size:
            recent[1, j] = recent[1, j + 1]
            j += 1
    recent[0, count % window] = value
    j = size
    while j > 0 and recent[1, j - 1] > value:
        recent[1, j] = recent[1, j - 1]
        j -= 1
    recent[1, j] = value


@kernel
def _median(ordered, size):
    return 0.5 * (ordered[(size - 1) // 2] + ordered[size // 2])


@kernel
def _reset(load, views, mem):
    for c in range(len(mem.calls)):
        mem.calls[c] = mem.blank_call[0]
        mem.calls[c].missing = load.tasks[c].prerequisites
    for m in range(len(views)):
        mem.views[m] = views[m]
        mem.engines[m] = mem.blank_engine[0]
        while (1 << mem.engines[m].block_shift) < views[m].block_size:
            mem.engines[m].block_shift += 1
        mem.engines[m].block_mask = views[m].block_size - 1
        mem.engines[m].pool_blocks = views[m].kv_capacity_tokens // views[m].block_size
        mem.engines[m].plain = mem.engines[m].pool_blocks
        for i in range(mem.clients.shape[1]):
            mem.clients[m, i].root = NONE
            mem.clients[m, i].counter = 0.0
        for i in range(mem.residues.shape[1]):
            mem.residues[m, i] = 0
    for i in range(len(mem.nodes)):
        mem.nodes[i].cached = 0
        mem.nodes[i].holders = 0
    for i in range(len(mem.timers)):
        mem.timers[i] = np.inf
    for i in range(len(load.stages)):
        mem.stages[i] = load.stages[i]
    clock = mem.clock[0]
    clock.released = NONE
    clock.unfinished = load.queries[load.watched - 1].end
    clock.next_query = clock.sequence = clock.releases = 0
