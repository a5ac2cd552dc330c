"""The public way into the simulator: `simulate` for one run, `simulate_grid` for many at once."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from hexrepro.cluster.types import Cluster
from hexrepro.compiled import njit
from hexrepro.errors import InputError
from hexrepro.scheduling.estimates import Estimates, base_slo_s, cluster_means_s, estimate
from hexrepro.scheduling.policy import Policy, load_policy
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator.loop import BAD_INSTANCE, BAD_KEY, DONE, Arrivals, Rules, simulate_one
from hexrepro.simulator.results import INSTANCE_COUNTS, GridResult, Result
from hexrepro.simulator.state import NONE, QUERY, STAGE, STARTED, TASK, Load, Memory, Options, allocate
from hexrepro.workload.types import Workload

BATCHING = ("chunked", "prefill_first")
PREFIX_CACHING = ("off", "template", "full")


@dataclass(frozen=True)
class EngineOptions:
    """How the instances' engines work.

    batching        chunked: vLLM V1. prefill_first: one whole prompt a step, ahead of decoding (vLLM V0, released simulator)
    prefix_caching  off, template (calls of a stage share their prompt template), or full (and calls of a query their context)
    decode_blocks   whether generated tokens take KV blocks; False as in the released simulator
    idle_poll_s     > 0: an idle instance looks for work only every so often, as in the released simulator
    finish_order    calls released at the same time are dispatched in the order in which the calls before them finished, as
                    in the released simulator, instead of in the workload's order
    """

    batching: str = "chunked"
    prefix_caching: str = "template"
    decode_blocks: bool = True
    idle_poll_s: float = 0.0
    finish_order: bool = False

    def __post_init__(self):
        if self.batching not in BATCHING:
            raise InputError(f"engine: batching={self.batching!r} is unknown (one of: {', '.join(BATCHING)})")
        if self.prefix_caching not in PREFIX_CACHING:
            raise InputError(
                f"engine: prefix_caching={self.prefix_caching!r} is unknown (one of: {', '.join(PREFIX_CACHING)})"
            )
        if not 0.0 <= self.idle_poll_s < np.inf:
            raise InputError(
                f"engine: idle_poll_s={self.idle_poll_s!r} must be 0 or a positive number of seconds"
            )


@dataclass(frozen=True, eq=False)
class Start:
    """Where a run begins that does not begin on an idle cluster.

    at_s     when, in seconds; queries that arrived before are under way
    calls    STARTED[k], the calls that have been dispatched by then: they have finished (all their tokens are generated), run
             or wait at an instance; the running ones in order of admission, and before those that wait
    closed   bool[M], instances that finish what they have and take no new calls; None: all take calls
    warm     the templates are in every instance's prefix cache
    watched  a run ends when the first so many queries have finished; the others only keep the cluster busy, and count as
             not finished. None: all of them
    """

    at_s: float
    calls: np.ndarray
    closed: np.ndarray | None = None
    warm: bool = True
    watched: int | None = None


def simulate(
    workload: Workload,
    cluster: Cluster,
    policy: Policy | str,
    *,
    base_slo: float | None = None,
    engine: EngineOptions = EngineOptions(),
    estimates: Estimates | str = "median",
    prefill_s: np.ndarray | None = None,
    seed: int = 0,
) -> Result:
    """Simulate one run of a workload that has arrivals. See `simulate_grid` for the arguments."""
    if not workload.has_arrivals:
        raise InputError(
            f"workload {workload.name!r} holds no arrival times: give it some with with_arrivals()"
        )
    grid = simulate_grid(
        workload,
        cluster,
        policy,
        arrivals_s=workload.arrival_s[None, :],
        seeds=np.array([seed]),
        base_slo=base_slo,
        engine=engine,
        estimates=estimates,
        prefill_s=prefill_s,
        workers=1,
        detail=True,
    )
    return grid.run(0)


def simulate_grid(
    workload: Workload,
    cluster: Cluster,
    policy: Policy | str,
    *,
    arrivals_s: np.ndarray,
    dispatch_params: np.ndarray | None = None,
    seeds: np.ndarray | None = None,
    base_slo: float | None = None,
    engine: EngineOptions = EngineOptions(),
    estimates: Estimates | str = "median",
    prefill_s: np.ndarray | None = None,
    start: Start | None = None,
    workers: int | None = None,
    detail: bool = False,
    progress: Callable[[int], None] | None = None,
) -> GridResult:
    """Simulate R runs of one workload under one policy, on all cores.

    arrivals_s       float64[R, q], when the queries of each run arrive, in any order
    dispatch_params  float64[R, P], the dispatch rule's parameters of each run; the policy's own if None
    seeds            int64[R], for rules that draw at random; 0, 1, 2, ... if None
    base_slo         seconds; query i's SLO is base_slo * workload.slo_scale[i]. None: the standard workflow's length
    estimates        an estimator's name (`median`, `history`, `oracle`), or `Estimates` of your own
    prefill_s        float64[n, M], seconds that the prompt of each call takes on each instance, instead of what the latency
                     model says (`prefill_first` only). The released simulator takes a measured latency less the decode
                     steps' constant, which is below 0 for some calls: there, and so here, time runs back by that much
    start            where the runs begin, if not on an idle cluster
    workers          threads; the number of usable cores if None. The result is the same to the bit whatever it is
    detail           record the times of every call, not only of every query
    progress         called with the number of runs that were finished since the last call

    Runs are computed in slices, each one call into compiled code that releases the GIL.
    """
    policy = load_policy(policy)
    arrivals_s = writable(arrivals_s)
    if arrivals_s.ndim != 2 or arrivals_s.shape[1] != workload.n_queries or len(arrivals_s) == 0:
        raise InputError(
            f"arrivals_s has shape {arrivals_s.shape}, but must be [runs, {workload.n_queries} queries]"
        )
    if not np.isfinite(arrivals_s).all() or (start is None and (arrivals_s < 0).any()):
        raise InputError("arrivals_s must be finite and not negative")
    order = np.argsort(arrivals_s, axis=1, kind="stable")
    runs = len(arrivals_s)
    seeds = np.arange(runs) if seeds is None else np.asarray(seeds)
    if seeds.shape != (runs,) or seeds.dtype.kind not in "iu":
        raise InputError(f"seeds must be {runs} integers, got shape {seeds.shape} of {seeds.dtype}")
    if dispatch_params is None:
        dispatch_params = np.tile(policy.dispatch_vector, (runs, 1))
    dispatch_params = writable(dispatch_params)
    if dispatch_params.shape != (runs, len(policy.dispatch_vector)) or not np.isfinite(dispatch_params).all():
        raise InputError(
            f"dispatch_params has shape {dispatch_params.shape}, but must be finite numbers"
            f" [{runs} runs, {len(policy.dispatch_vector)} parameters of {policy.dispatch_rule.name}]"
        )
    views, slo_s, load, options = set_up(workload, cluster, policy, base_slo, engine, estimates)
    if start is not None:
        load = start_at(load, start)
    if prefill_s is not None:
        load = load._replace(prefill_s=_checked_prefill_s(prefill_s, workload.n_calls, len(views), engine))
    n, instances = workload.n_calls, len(views)
    kept = n if detail else 0
    # a query whose calls had all finished when the run begins keeps this
    query_end_s = np.full((runs, workload.n_queries), 0.0 if start is None else float(start.at_s))
    totals = np.empty((runs, instances, 1 + len(INSTANCE_COUNTS)))
    times = np.empty((6, runs, kept))
    counts = np.empty((3, runs, kept), np.int32)

    def work(begin: int, end: int) -> int:
        memory = allocate(load, views, options)
        status, where = _simulate_slice(
            load, options, views, arrivals_s[begin:end], order[begin:end], slo_s, policy.dispatch_rule,
            dispatch_params[begin:end], policy.queue_rule, policy.queue_vector, seeds[begin:end].astype(np.int64),
            memory, query_end_s[begin:end], totals[begin:end], times, counts, begin,
        )  # fmt: skip
        if status != DONE:
            raise InputError(explain(status, int(where), policy, instances))
        return end - begin

    workers = workers or usable_cores()
    slices = _slices(runs, n, workers)
    if workers == 1 or len(slices) == 1:
        for begin, end in slices:
            done = work(begin, end)
            if progress:
                progress(done)
    else:
        with ThreadPoolExecutor(workers) as pool:
            try:
                for done in pool.map(lambda bounds: work(*bounds), slices):
                    if progress:
                        progress(done)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    query_end_s[:, load.watched :] = np.inf
    detailed = {}
    if detail:
        names = ("release_s", "admit_s", "first_token_s", "call_finish_s", "budget_s", "estimate_s")
        detailed = dict(zip(names, times, strict=True))
        detailed |= dict(zip(("instance", "call_cached_tokens", "call_preemptions"), counts, strict=True))
    return GridResult(
        arrival_s=arrivals_s,
        finish_s=query_end_s,
        slo_s=np.broadcast_to(slo_s, query_end_s.shape),
        **{name: totals[:, :, i] for i, name in enumerate(("busy_s", *INSTANCE_COUNTS))},
        **detailed,
    )


def writable(values: np.ndarray) -> np.ndarray:
    """float64, contiguous, and a copy if it was read-only: Numba compiles the whole kernel anew for read-only arrays."""
    return np.require(values, np.float64, ["C", "W"])


def set_up(
    workload: Workload,
    cluster: Cluster,
    policy: Policy,
    base_slo: float | None,
    engine: EngineOptions,
    estimates: Estimates | str,
) -> tuple[np.ndarray, np.ndarray, Load, Options]:
    """What every run of a workload needs: INSTANCE[M], the queries' SLOs float64[q], and the kernel's Load and Options."""
    views = instance_views(cluster)
    check_fits(workload, cluster, decode_blocks=engine.decode_blocks)
    if base_slo is None:
        base_slo = base_slo_s(workload, views, prefix_caching=engine.prefix_caching)
    if not base_slo > 0:
        raise InputError(f"base_slo={base_slo!r} must be a positive number of seconds")
    if isinstance(estimates, str):
        estimates = estimate(workload, views, estimator=estimates, prefix_caching=engine.prefix_caching)
    load = prepare(workload, estimates, views, engine.prefix_caching, policy.client)
    return views, base_slo * workload.slo_scale, load, kernel_options(engine, policy)


def start_at(load: Load, start: Start) -> Load:
    """The same load, its runs beginning at `start`."""
    calls = np.ascontiguousarray(start.calls, STARTED)
    instances = len(load.closed)
    closed = np.zeros(instances, bool) if start.closed is None else np.asarray(start.closed, bool)
    if closed.shape != (instances,) or closed.all():
        raise InputError(
            f"start: closed={closed} must name some of the {instances} instances, not all of them"
        )
    for name, most in (("call", len(load.tasks)), ("instance", instances)):
        if len(calls) and not (calls[name].min() >= 0 and calls[name].max() < most):
            raise InputError(f"start: calls[{name!r}] must lie in 0 to {most - 1}")
    bad = (calls["generated"] < 0) | (calls["generated"] > load.tasks["output_tokens"][calls["call"]])
    if bad.any():
        worst = calls[np.argmax(bad)]
        raise InputError(
            f"start: call {worst['call']} has generated {worst['generated']} tokens, which must lie in 0 to its output of"
            f" {load.tasks['output_tokens'][worst['call']]}"
        )
    watched = len(load.queries) if start.watched is None else int(start.watched)
    if not 1 <= watched <= len(load.queries):
        raise InputError(f"start: watched={watched} must lie in 1 to {len(load.queries)} queries")
    if not np.isfinite(start.at_s):
        raise InputError(f"start: at_s={start.at_s!r} must be a finite time in seconds")
    return load._replace(
        started=calls, start_s=float(start.at_s), warm=bool(start.warm), closed=closed, watched=watched
    )


def kernel_options(engine: EngineOptions, policy: Policy) -> Options:
    """The engine's switches as the kernel reads them."""
    fair = policy.queue_rule.fair
    return Options(
        caching=engine.prefix_caching != "off",
        prefill_first=engine.batching == "prefill_first",
        finish_order=bool(engine.finish_order),
        decode_blocks=engine.decode_blocks,
        idle_poll_s=float(engine.idle_poll_s),
        fair=fair,
        input_weight=policy.queue_vector[0] if fair else 0.0,
        output_weight=policy.queue_vector[1] if fair else 0.0,
    )


def _checked_prefill_s(
    prefill_s: np.ndarray, calls: int, instances: int, engine: EngineOptions
) -> np.ndarray:
    if engine.batching != "prefill_first":
        raise InputError(
            f"prefill_s needs an engine with batching=prefill_first, this one has {engine.batching}"
        )
    prefill_s = writable(prefill_s)
    if prefill_s.shape != (calls, instances) or not np.isfinite(prefill_s).all():
        raise InputError(
            f"prefill_s has shape {prefill_s.shape}, but must be finite numbers [{calls} calls, {instances} instances]"
        )
    return prefill_s


def check_fits(workload: Workload, cluster: Cluster, *, decode_blocks: bool = True) -> None:
    """Refuse a workload with a call whose KV does not fit into an idle instance: it could never finish there."""
    tokens = workload.input_tokens.astype(np.int64)
    if decode_blocks:
        tokens += workload.output_tokens - 1
    largest = int(np.argmax(tokens))
    for spec in cluster.instances:
        if spec.block_size & (spec.block_size - 1):
            raise InputError(f"instance {spec.name}: block_size={spec.block_size} must be a power of two")
        need = -(-int(tokens[largest]) // spec.block_size)
        if need > spec.kv_blocks:
            query = int(workload.query[largest])
            raise InputError(
                f"workload {workload.name!r}: query {query}, call {largest - int(workload.query_offsets[query])}"
                f" ({workload.stage_names[workload.stage[largest]]}: {workload.input_tokens[largest]} input +"
                f" {workload.output_tokens[largest]} output tokens) needs {need} KV blocks, but instance {spec.name} has"
                f" {spec.kv_blocks}; shorten the call or give the instance more KV memory"
            )


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(
    workload: Workload, estimates: Estimates, views: np.ndarray, prefix_caching: str, client: str
) -> Load:
    """A workload and the beliefs about it in the form that the kernel reads."""
    tasks = np.zeros(workload.n_calls, TASK)
    for name in ("stage", "query", "input_tokens", "output_tokens", "tool_time_s"):
        tasks[name] = getattr(workload, name)
    tasks["succ_begin"] = workload.succ_offsets[:-1]
    tasks["succ_end"] = workload.succ_offsets[1:]
    tasks["prerequisites"] = workload.n_predecessors
    tasks["position"] = estimates.plan.position
    tasks["cached_estimate"] = estimates.cached_tokens
    tasks["output_estimate"] = estimates.output_tokens
    tasks["stage_mean_s"] = estimates.stage_mean_s
    tasks["remaining_s"] = estimates.remaining_s
    queries = np.zeros(workload.n_queries, QUERY)
    queries["begin"] = workload.query_offsets[:-1]
    queries["end"] = workload.query_offsets[1:]
    queries["tenant"] = workload.tenant
    queries["client"] = np.arange(workload.n_queries) if client == "query" else workload.tenant
    stages = np.zeros(len(workload.stage_names), STAGE)
    stages["input_median"] = estimates.input_median
    stages["output_median"] = estimates.output_median
    stages["cached_median"] = estimates.cached_median
    stages["mean_s"] = cluster_means_s(
        views, estimates.input_median, estimates.cached_median, estimates.output_median
    )
    return Load(
        tasks=tasks,
        queries=queries,
        successors=workload.successors,
        stages=stages,
        remaining=estimates.plan.remaining,
        stage_s=np.zeros((0, 0)) if estimates.stage_s is None else writable(estimates.stage_s),
        prefill_s=np.zeros((0, 0)),
        segments=_mark_segments(tasks, workload, prefix_caching),
        window=estimates.window,
        started=np.zeros(0, STARTED),
        start_s=0.0,
        warm=False,
        closed=np.zeros(len(views), bool),
        watched=workload.n_queries,
    )


def _mark_segments(tasks: np.ndarray, workload: Workload, prefix_caching: str) -> int:
    """Write down which prefix segments each call shares; returns how many there are."""
    tasks["first_segment"] = tasks["second_segment"] = NONE
    if prefix_caching == "off":
        return 0
    tasks["first_segment"] = workload.template
    tasks["first_end"] = workload.template_tokens
    segments = int(workload.template.max()) + 1
    if prefix_caching == "full":
        # A context hits only behind its own template, so a shared segment is a pair of the two.
        has = workload.context >= 0
        pairs = (
            workload.template[has].astype(np.int64) * (int(workload.context.max()) + 1)
            + workload.context[has]
        )
        distinct, pair = np.unique(pairs, return_inverse=True)
        tasks["second_segment"][has] = segments + pair
        tasks["second_end"][has] = (workload.template_tokens + workload.context_tokens)[has]
        segments += len(distinct)
    return segments


def _slices(runs: int, calls: int, workers: int) -> list[tuple[int, int]]:
    """Cut the runs into slices: a few a worker, so that they end together, of at least some 100 000 calls."""
    size = max(1, min(-(-runs // workers), max(-(-runs // (8 * workers)), 100_000 // max(calls, 1))))
    return [(begin, min(begin + size, runs)) for begin in range(0, runs, size)]


def explain(status: int, where: int, policy: Policy, instances: int) -> str:
    if status == BAD_INSTANCE:
        return (
            f"policy {policy.name}: dispatch rule {policy.dispatch} chose a place outside the cluster for call {where};"
            f" it must return 0 to {instances - 1}"
        )
    if status == BAD_KEY:
        return f"policy {policy.name}: queue rule {policy.queue} gave NaN for call {where}; it must return a number"
    return (
        f"the simulation came to a halt with {where} calls unfinished"  # a bug: work conservation excludes it
    )


@njit(_nrt=False)
def _simulate_slice(
    load: Load, options: Options, views, arrivals_s, order, slo_s, dispatch, params, queue, queue_params, seeds,
    mem: Memory, query_end_s, totals, times, counts, first,
):  # fmt: skip
    for r in range(len(arrivals_s)):
        status, where = simulate_one(
            load, options, views, Arrivals(arrivals_s[r], order[r], slo_s),
            Rules(dispatch, params[r], queue, queue_params, seeds[r]), mem, query_end_s[r],
        )  # fmt: skip
        if status != DONE:
            return status, where
        for m in range(len(views)):
            at = mem.engines[m]
            totals[r, m, 0] = at.busy_s
            totals[r, m, 1] = at.engine_steps
            totals[r, m, 2] = at.preempted
            totals[r, m, 3] = at.prefill_tokens
            totals[r, m, 4] = at.decode_tokens
            totals[r, m, 5] = at.cached_tokens
            totals[r, m, 6] = at.peak_blocks
        for c in range(times.shape[2]):
            state = mem.calls[c]
            times[0, first + r, c] = state.release_s
            times[1, first + r, c] = state.admit_s
            times[2, first + r, c] = state.first_token_s
            times[3, first + r, c] = state.finish_s
            times[4, first + r, c] = state.budget_s
            times[5, first + r, c] = state.estimate_s
            counts[0, first + r, c] = state.instance
            counts[1, first + r, c] = state.cached_tokens
            counts[2, first + r, c] = state.preemptions
    return DONE, NONE
