"""The simulator against what was measured: the same workload replayed on real servers and simulated with their profiles.

    check, replayed, simulated = replay_and_simulate(workload, urls, instances, overhead_s, "vllm", model="hexrepro")
    check.summary

This is for policies whose decisions need no coordinator: calls go to the servers in turn, or where it is known beforehand
(`by_query`), and queues are FCFS or in an order known beforehand (`oldest_query`). `compare_runs` takes any replay, also one
through the gateway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from hexrepro.cluster.types import Cluster, InstanceSpec
from hexrepro.errors import InputError
from hexrepro.report.metrics import quantile, throughput_qps
from hexrepro.scheduling.estimates import Estimates, estimate
from hexrepro.scheduling.policy import Policy, load_policy
from hexrepro.scheduling.rules import dispatch_rule, queue_rule
from hexrepro.scheduling.views import instance_views
from hexrepro.simulator import EngineOptions, Result, simulate
from hexrepro.validation.prompts import Prompts
from hexrepro.validation.replay import Replay, call_frame, replay
from hexrepro.workload.types import Workload


@queue_rule()
def oldest_query(call, params):
    """Calls of the query that came first, first. The key is known before the run, so a plain vLLM server can follow it."""
    return float(call.query)


@dispatch_rule()
def by_query(call, t_comp_s, instances, params):
    """All calls of a query go to one instance, the queries in turn. Like `oldest_query`, known before the run.

    In turn call by call, two calls that are released at almost the same time may change places, and from there on every call
    goes elsewhere; between instances of different speed that is a large difference, also between two replays. With this rule,
    what differs is what the instances do.
    """
    return call.query % len(instances)


@dispatch_rule()
def as_placed(call, t_comp_s, instances, params):
    """Where the call was in a replay: `simulate_placed` writes it into the stage."""
    return call.stage % len(instances)


OLDEST_QUERY = Policy("oldest_query", "round_robin", f"{__name__}:oldest_query")
BY_QUERY = Policy("by_query", f"{__name__}:by_query", "fcfs")
BY_QUERY_OLDEST = Policy("by_query_oldest", f"{__name__}:by_query", f"{__name__}:oldest_query")


@dataclass(frozen=True)
class Fidelity:
    """Measured against simulated. An `error` is (simulated - measured) / measured.

    calls    one row a call that finished in both: the columns of `call_frame`, latency_s and ttft_s of both, and the errors
    queries  one row a query that finished in both: query, measured_s, simulated_s, error
    summary  metric, measured, simulated, error: mean, P50 and P95 latency of queries, mean latency and TTFT of calls,
             throughput
    spread   mean and P95 of the absolute error of calls and of queries
    left_out calls that did not finish in the replay
    """

    calls: pd.DataFrame
    queries: pd.DataFrame
    summary: pd.DataFrame
    spread: pd.DataFrame
    left_out: int


def compare_runs(
    workload: Workload, measured: Replay, simulated: Result, overhead_s: float | np.ndarray = 0.0
) -> Fidelity:
    """Hold a replay against a simulation of the same workload, call by call.

    `overhead_s`: what `with_overhead` put before each call's release in the simulation (one for all, or float64[n]); it belongs
    to the call's latency.
    """
    real, model = call_frame(workload, measured), call_frame(workload, simulated)
    calls = real.drop(columns=["latency_s", "ttft_s"])
    calls["release_simulated_s"] = model["release_s"] - overhead_s
    calls["cached_simulated"] = model["cached_tokens"]
    for name in ("ttft_s", "latency_s"):
        calls[f"{name.removesuffix('_s')}_measured_s"] = real[name]
        calls[f"{name.removesuffix('_s')}_simulated_s"] = model[name] + overhead_s
    calls = calls[np.isfinite(measured.call_finish_s)].reset_index(drop=True)
    done = np.isfinite(measured.finish_s)
    if not done.any():
        raise InputError(
            f"comparison: no query of {workload.name!r} finished in the replay: {measured.report(workload)}"
        )
    for name in ("ttft", "latency"):
        calls[f"{name}_error"] = calls[f"{name}_simulated_s"] / calls[f"{name}_measured_s"] - 1
    queries = pd.DataFrame(
        dict(
            query=np.flatnonzero(done),
            measured_s=measured.latency_s[done],
            simulated_s=simulated.latency_s[done],
        )
    )
    queries["error"] = queries["simulated_s"] / queries["measured_s"] - 1

    pairs = {
        "query_mean_s": (queries["measured_s"].mean(), queries["simulated_s"].mean()),
        "query_p50_s": tuple(float(quantile(queries[f"{run}_s"], 0.50)) for run in ("measured", "simulated")),
        "query_p95_s": tuple(float(quantile(queries[f"{run}_s"], 0.95)) for run in ("measured", "simulated")),
        "call_mean_s": (calls["latency_measured_s"].mean(), calls["latency_simulated_s"].mean()),
        "ttft_mean_s": (calls["ttft_measured_s"].mean(), calls["ttft_simulated_s"].mean()),
        "throughput_qps": tuple(
            float(throughput_qps(run.arrival_s[done], run.finish_s[done])) for run in (measured, simulated)
        ),
    }
    summary = pd.DataFrame(
        [dict(metric=name, measured=real, simulated=model) for name, (real, model) in pairs.items()]
    )
    summary["error"] = summary["simulated"] / summary["measured"] - 1
    spread = pd.DataFrame(
        [
            dict(of=name, n=len(error), mean_abs=error.abs().mean(), p95_abs=error.abs().quantile(0.95))
            for name, error in (("calls", calls["latency_error"]), ("queries", queries["error"]))
        ]
    )
    return Fidelity(calls, queries, summary, spread, int((~np.isfinite(measured.call_finish_s)).sum()))


def shortened(workload: Workload, prompts: int, outputs: int) -> Workload:
    """The same queries with prompts and what they share cut to 1/`prompts`, and outputs to 1/`outputs`, at least one token.

    Makes of a trace for GPUs one for servers that are as fast or as small as a laptop allows.
    """
    if prompts < 1 or outputs < 1:
        raise InputError(f"shortened: prompts={prompts} and outputs={outputs} must be 1 or more")
    template, context = workload.template_tokens // prompts, workload.context_tokens // prompts
    return replace(
        workload,
        # one token of its own, behind what is shared
        input_tokens=np.maximum(workload.input_tokens // prompts, template + context + 1),
        output_tokens=np.maximum(workload.output_tokens // outputs, 1),
        template=np.where(template > 0, workload.template, -1),
        template_tokens=template,
        context=np.where(context > 0, workload.context, -1),
        context_tokens=context,
    )


def call_overhead_s(measured: Replay, api_s: float) -> np.ndarray:
    """float64[n]: what came between a call's release and its engine in a replay: the client's own lateness and the API's time.

    Siblings that are released together reach the server one after the other; the first of them may get a step of its own, so
    each call's lateness counts, not only their mean.
    """
    late = measured.sent_s - measured.release_s
    known = measured.lateness_s
    return api_s + np.where(np.isfinite(late), late, np.median(known) if len(known) else 0.0)


def with_overhead(workload: Workload, overhead_s: float | np.ndarray) -> Workload:
    """The workload as the engines see it: each call comes later by what lies before them (one for all, or float64[n])."""
    return replace(workload, tool_time_s=workload.tool_time_s + overhead_s)


def simulate_measured(
    workload: Workload,
    instances: Sequence[InstanceSpec],
    overhead_s: float | np.ndarray,
    policy: Policy | str,
    *,
    shared: str = "template",
    base_slo: float | None = None,
) -> Result:
    """The simulation of what is replayed on such instances. Compare it by `compare_runs` with the same overhead.

    The scheduler believes the stages' median lengths, but no call longer than it is: a forced length is sent as `max_tokens`,
    by which the gateway bounds its own belief.
    """
    cluster = Cluster("measured", tuple(instances))
    return simulate(
        with_overhead(workload, overhead_s),
        cluster,
        policy,
        base_slo=base_slo,
        engine=EngineOptions(batching="chunked", prefix_caching=shared),
        estimates=_believed(workload, cluster, shared),
    )


def simulate_placed(
    workload: Workload,
    instances: Sequence[InstanceSpec],
    overhead_s: float | np.ndarray,
    policy: Policy | str,
    placement: np.ndarray,
    *,
    shared: str = "template",
    base_slo: float,
) -> Result:
    """`simulate_measured` with every call on the instance where a replay had it (int[n]; any for those that are -1).

    Queues are the policy's. What is left of the error is the engines' and the queues', without that of decisions.
    """
    policy, cluster, m = load_policy(policy), Cluster("measured", tuple(instances)), len(instances)
    at = np.where(placement >= 0, placement, np.arange(workload.n_calls) % m)
    believed = _believed(workload, cluster, shared)
    # beliefs are given call by call, so a stage may be split into one for each instance
    medians = {
        name: np.repeat(getattr(believed, name), m)
        for name in ("input_median", "output_median", "cached_median")
    }
    split = replace(
        with_overhead(workload, overhead_s),
        stage=workload.stage * m + at,
        stage_names=tuple(f"{stage} at {i}" for stage in workload.stage_names for i in range(m)),
    )
    return simulate(
        split,
        cluster,
        replace(policy, dispatch=f"{__name__}:as_placed", dispatch_params={}),
        base_slo=base_slo,
        engine=EngineOptions(batching="chunked", prefix_caching=shared),
        estimates=replace(believed, **medians),
    )


def _believed(workload: Workload, cluster: Cluster, shared: str) -> Estimates:
    believed = estimate(workload, instance_views(cluster), prefix_caching=shared)
    return replace(believed, output_tokens=np.minimum(believed.output_tokens, workload.output_tokens))


def drawn_lateness(lateness_s: np.ndarray, runs: int, seed: int) -> np.ndarray:
    """float64[runs, n]: each call as late as it was in one of the replays (float64[R, n]), drawn anew for each call and run.

    It keeps which calls come late, such as the last of many siblings, and lets two calls that came at nearly the same time
    change places, as they do from replay to replay.
    """
    rng = np.random.Generator(np.random.PCG64([seed, 5]))
    picked = rng.integers(len(lateness_s), size=(runs, lateness_s.shape[1]))
    return lateness_s[picked, np.arange(lateness_s.shape[1])]


def replay_and_simulate(
    workload: Workload,
    urls: Sequence[str],
    instances: Sequence[InstanceSpec],
    overhead_s: float,
    policy: Policy | str,
    *,
    model: str,
    shared: str = "template",
    salt: int = 0,
    **options: Any,
) -> tuple[Fidelity, Replay, Result]:
    """Replay a workload on servers without a coordinator, simulate it with their measured profiles, and compare.

    overhead_s  what the API adds to a call (its profile tells); `call_overhead_s` adds the client's part

    policy  `vllm` (calls in turn, FCFS), `OLDEST_QUERY` (calls in turn, by vLLM's priorities), `BY_QUERY` (queries in turn,
            FCFS) or `BY_QUERY_OLDEST`
    shared  what prompts share: off, template or full; the servers must have prefix caching on for the latter two
    salt    another one for each replay on the same servers: their prefix caches must begin cold, as the simulation does
    options further ones of `replay`
    """
    policy = load_policy(policy)
    if policy.dispatch not in ("round_robin", BY_QUERY.dispatch) or policy.queue not in (
        "fcfs",
        OLDEST_QUERY.queue,
    ):
        raise InputError(
            f"policy {policy.name}: plain servers can't follow it; give vllm, OLDEST_QUERY, BY_QUERY or BY_QUERY_OLDEST, or"
            " replay through the gateway"
        )
    placement = workload.query % len(urls) if policy.dispatch == BY_QUERY.dispatch else None
    priority = workload.query.astype(np.int64) if policy.queue == OLDEST_QUERY.queue else None
    measured = replay(
        workload,
        list(urls),
        model=model,
        placement=placement,
        priority=priority,
        prompts=Prompts(workload, shared, salt),
        **options,
    )
    before_s = call_overhead_s(measured, overhead_s)
    simulated = simulate_measured(workload, instances, before_s, policy, shared=shared)
    return compare_runs(workload, measured, simulated, before_s), measured, simulated
