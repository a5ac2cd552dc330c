"""What a scheduler believes about a call: how long it runs, what comes after it, and its share of the SLO.

The belief rests on history: per stage the median input and output lengths, and how many further steps of each stage a
query takes on average once it has come this far. The true output length of a call that has not finished is never read,
except by the `oracle` estimator, which exists to show what perfect knowledge would give.
"""

from dataclasses import dataclass

import numpy as np

from hexrepro.cluster import latency
from hexrepro.compiled import njit
from hexrepro.errors import InputError
from hexrepro.workload.types import Workload

ESTIMATORS = ("median", "history", "oracle")

# Medians (input, output tokens) that the released scheduler uses for CHESS on BIRD with Llama-3.1-70B, and how often each
# step occurs in its standard workflow of 15, whose length on the idle cluster is the base SLO (facts of the release).
CHESS_STANDARD = {
    "retriever": (308, 5, 4),
    "keywords": (667, 45, 1),
    "candidate": (11748, 678, 1),
    "revise": (5963, 79, 4),
    "unit_tester": (275, 4, 3),
    "generate_unit_test": (1109, 103, 1),
    "evaluate": (961, 22, 1),
}

_solo_terms = njit(latency.solo_terms)


@njit
def solo_latency_s(instance, input_tokens, cached_tokens, output_tokens):
    """Seconds that one call takes on an idle instance (an `INSTANCE` record): t_comp. Output length may be a fraction."""
    steps, prefill, context, sequences, kv_read = _solo_terms(
        float(input_tokens),
        float(cached_tokens),
        max(float(output_tokens), 1.0),
        float(instance.max_num_batched_tokens),
    )
    return (
        instance.base_s * steps
        + instance.prefill_token_s * prefill
        + instance.prefill_context_s * context
        + instance.sequence_s * sequences
        + instance.kv_token_s * kv_read
    )


@njit
def budget_s(slo_s, elapsed_s, stage_mean_s, remaining_s):
    """The call's share of what is left of the SLO: (SLO - elapsed) * t(stage) / (t(stage) + t(stages after it)).

    Recomputed at every stage, so that an overrun shrinks later budgets (it may turn negative: then the call is late).
    Parallel siblings each get the whole stage's budget.
    """
    return (slo_s - elapsed_s) * stage_mean_s / (stage_mean_s + remaining_s)


@njit
def cluster_mean_s(instances, input_tokens, cached_tokens, output_tokens):
    """t_comp averaged over the cluster's instances: the paper's t-bar."""
    total = 0.0
    for m in range(len(instances)):
        total += solo_latency_s(instances[m], input_tokens, cached_tokens, output_tokens)
    return total / len(instances)


@njit
def _cluster_means_s(instances, input_tokens, cached_tokens, output_tokens, out):
    for i in range(len(out)):
        out[i] = cluster_mean_s(instances, input_tokens[i], cached_tokens[i], output_tokens[i])


def cluster_means_s(instances: np.ndarray, input_tokens, cached_tokens, output_tokens) -> np.ndarray:
    """`cluster_mean_s` for arrays of calls: float64[n]."""
    columns = [np.ascontiguousarray(x, np.float64) for x in (input_tokens, cached_tokens, output_tokens)]
    out = np.empty(len(columns[0]))
    _cluster_means_s(instances, *columns, out)
    return out


@dataclass(frozen=True, eq=False)
class Plan:
    """Where each call stands in its query, and what history says comes after that place.

    A place is (stage, how many steps of that stage came before). `position`: int64[n], the place of each call;
    `remaining`: float64[places, stages], steps of each stage that a query takes after that place, on average. Parallel
    calls are one step.
    """

    position: np.ndarray
    remaining: np.ndarray


@dataclass(frozen=True, eq=False)
class Estimates:
    """The scheduler's beliefs about the calls of a workload on a cluster; all float64.

    output_tokens[n] believed length of each call; stage_mean_s[n] and remaining_s[n] as in `views.CALL`;
    input_median[S], output_median[S] per stage. With `window` > 0 (the `history` estimator) these are where it starts:
    the simulator then keeps the medians of the last `window` finished calls of each stage.
    `stage_s[S, M]`, where given, overrides t_comp by a table of stage and instance, whatever the call's input.
    """

    cached_tokens: np.ndarray
    output_tokens: np.ndarray
    stage_mean_s: np.ndarray
    remaining_s: np.ndarray
    input_median: np.ndarray
    output_median: np.ndarray
    cached_median: np.ndarray
    plan: Plan
    window: int = 0
    stage_s: np.ndarray | None = None


def estimate(
    workload: Workload,
    instances: np.ndarray,
    *,
    estimator: str = "median",
    window: int = 100,
    prefix_caching: str = "template",
) -> Estimates:
    """The beliefs that `estimator` forms: `median` (per stage, of the workload), `history` (running medians of the last
    `window` finished calls of a stage, starting from `median`) or `oracle` (true output lengths and true remaining work).

    `instances` is INSTANCE[M]. With prefix caching on, a call's template is believed to be cached everywhere.
    """
    if estimator not in ESTIMATORS:
        raise InputError(f"estimator={estimator!r} is unknown (one of: {', '.join(ESTIMATORS)})")
    if window < 1:
        raise InputError(f"estimator window={window!r} must be at least 1 call")
    cached = (
        workload.template_tokens.astype(np.float64) if prefix_caching != "off" else np.zeros(workload.n_calls)
    )
    input_median = _stage_medians(workload, workload.input_tokens)
    output_median = _stage_medians(workload, workload.output_tokens)
    cached_median = np.minimum(_stage_medians(workload, cached), input_median - 1)
    plan = make_plan(workload)
    stage_s = cluster_means_s(instances, input_median, cached_median, output_median)
    if estimator == "oracle":
        output = workload.output_tokens.astype(np.float64)
        mean_s = cluster_means_s(instances, workload.input_tokens, cached, output)
        remaining_s = np.empty(workload.n_calls)
        _longest_path_s(workload.succ_offsets, workload.successors, mean_s, remaining_s)
    else:
        output = output_median[workload.stage]
        mean_s = stage_s[workload.stage]
        remaining_s = (plan.remaining @ stage_s)[plan.position]
    return Estimates(
        cached_tokens=cached,
        output_tokens=output,
        stage_mean_s=mean_s,
        remaining_s=remaining_s,
        input_median=input_median,
        output_median=output_median,
        cached_median=cached_median,
        plan=plan,
        window=window if estimator == "history" else 0,
    )


def base_slo_s(workload: Workload, instances: np.ndarray, *, prefix_caching: str = "template") -> float:
    """The base SLO in seconds: the standard workflow on the idle cluster, each step at its median and averaged over the
    instances (released code). A workload with other stages than CHESS's gets its own mean number of steps per stage.
    """
    stages = workload.stage_names
    cached = workload.template_tokens if prefix_caching != "off" else np.zeros(workload.n_calls)
    if set(stages) <= set(CHESS_STANDARD):
        input_median, output_median, count = np.array(
            [CHESS_STANDARD[stage] for stage in stages], np.float64
        ).T
    else:
        input_median, output_median = (
            _stage_medians(workload, x) for x in (workload.input_tokens, workload.output_tokens)
        )
        _, steps = _levels(workload)
        count = np.bincount(workload.stage[steps], minlength=len(stages)) / workload.n_queries
    cached_median = np.minimum(_stage_medians(workload, cached), input_median - 1)
    return float(count @ cluster_means_s(instances, input_median, cached_median, output_median))


def _stage_medians(workload: Workload, values: np.ndarray) -> np.ndarray:
    """float64[S]: the median of `values` (one a call) in each stage; 1 where the workload has no call of the stage."""
    order = np.argsort(workload.stage, kind="stable")
    bounds = np.searchsorted(workload.stage[order], np.arange(len(workload.stage_names) + 1))
    groups = np.split(values[order], bounds[1:-1])
    return np.array([np.median(group) if len(group) else 1.0 for group in groups], np.float64)


@njit
def _depths(succ_offsets, successors, depth):
    for c in range(len(depth)):  # calls are in topological order
        for e in range(succ_offsets[c], succ_offsets[c + 1]):
            depth[successors[e]] = max(depth[successors[e]], depth[c] + 1)


@njit
def _longest_path_s(succ_offsets, successors, mean_s, remaining_s):
    for c in range(len(mean_s) - 1, -1, -1):
        longest = 0.0
        for e in range(succ_offsets[c], succ_offsets[c + 1]):
            longest = max(longest, mean_s[successors[e]] + remaining_s[successors[e]])
        remaining_s[c] = longest


def _levels(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """The steps of each query: a step is all calls of one stage at one depth (longest path) of a query.

    Returns step[n], the step of each call, and first[steps], one call of each step, in order of query and depth.
    """
    depth = np.zeros(workload.n_calls, np.int64)
    _depths(workload.succ_offsets, workload.successors, depth)
    key = (workload.query * (depth.max() + 1) + depth) * len(workload.stage_names) + workload.stage
    _, first, step = np.unique(key, return_index=True, return_inverse=True)
    return step, first


def make_plan(workload: Workload) -> Plan:
    """Learn from a workload what comes after each place in a query."""
    stages = len(workload.stage_names)
    step, first = _levels(workload)
    stage, query = workload.stage[first].astype(np.int64), workload.query[first]
    done = np.zeros((len(first) + 1, stages), np.int64)  # steps of each stage before step i, over all queries
    np.cumsum(np.eye(stages, dtype=np.int64)[stage], axis=0, out=done[1:])
    begin = np.searchsorted(query, np.arange(workload.n_queries + 1))
    before = done[:-1] - done[begin[query]]
    after = done[begin[query + 1]] - done[1:]
    occurrence = before[np.arange(len(first)), stage]
    _, place = np.unique(stage * (occurrence.max() + 1) + occurrence, return_inverse=True)
    count = np.bincount(place).astype(np.float64)
    remaining = np.stack([np.bincount(place, weights=after[:, s]) / count for s in range(stages)], axis=1)
    return Plan(place[step], np.ascontiguousarray(remaining))
