"""Which instance serves a call. One function a rule; see `views.py` for what it may look at."""

from hexrepro.compiled import njit
from hexrepro.scheduling.rules import dispatch_rule


@dispatch_rule()
def round_robin(call, t_comp_s, instances, params):
    """The instances in turn, call by call (vLLM behind a plain load balancer)."""
    return call.sequence % len(instances)


@dispatch_rule()
def uniform_random(call, t_comp_s, instances, params):
    """Any instance, with equal chances."""
    return int(call.draw[0] * len(instances))


@dispatch_rule()
def power_of_two(call, t_comp_s, instances, params):
    """Of two instances drawn at random, the one with fewer ongoing calls (Ray Serve's default router)."""
    n = len(instances)
    first = int(call.draw[0] * n)
    if n == 1:
        return first
    second = (first + 1 + int(call.draw[1] * (n - 1))) % n
    load_first = instances[first].running + instances[first].waiting
    load_second = instances[second].running + instances[second].waiting
    return second if load_second < load_first else first


@dispatch_rule()
def least_outstanding_work(call, t_comp_s, instances, params):
    """The instance with the least estimated work; ties to the faster, then to the lower index."""
    best = 0
    for m in range(1, len(instances)):
        work, least = instances[m].outstanding_s, instances[best].outstanding_s
        if work < least or (work == least and t_comp_s[m] < t_comp_s[best]):
            best = m
    return best


@dispatch_rule(alpha=0.5, beta=1.0, waiting_only=0.0)
def workload_balanced(call, t_comp_s, instances, params):
    """HexGen-Flow's score: (1 - alpha) * B / t_queue(m) - alpha * t_comp(m), the highest wins.

    The paper leaves B undefined. Here B = beta * t_mean^2, with t_mean the cluster's mean execution time of this stage, so
    that both terms are seconds and alpha weighs like with like. t_queue is the estimated work at the instance (with
    `waiting_only`: of the calls in its queue), at least one engine step, so that an empty queue has a finite score. Ties
    go to the smaller t_comp, then to the lower index.
    """
    alpha, beta, waiting_only = params[0], params[1], params[2]
    b = beta * call.stage_mean_s * call.stage_mean_s
    best = -1
    best_score = 0.0
    for m in range(len(instances)):
        queue_s = instances[m].waiting_s if waiting_only else instances[m].outstanding_s
        queue_s = max(queue_s, instances[m].base_s + instances[m].sequence_s)
        score = (1.0 - alpha) * b / queue_s - alpha * t_comp_s[m]
        if best < 0 or score > best_score or (score == best_score and t_comp_s[m] < t_comp_s[best]):
            best = m
            best_score = score
    return best


@dispatch_rule(alpha=0.5)
def as_released(call, t_comp_s, instances, params):
    """The score of the authors' released simulator, relative to the first instance (base).

    alpha * t_comp(base) / t_comp(m) - (1 - alpha) * k(m) * W(m) / W(base), with W(m) the estimated time of all work ever
    sent to m, which never shrinks, and k = `load_weight` (0.5 on A6000 and L40S, 1 on A100). The first of equals wins.
    """
    alpha = params[0]
    best = -1
    best_score = 0.0
    for m in range(len(instances)):
        load = instances[m].dispatched_s
        if instances[0].dispatched_s > 0.0:
            load /= instances[0].dispatched_s
        score = alpha * t_comp_s[0] / t_comp_s[m] - (1.0 - alpha) * instances[m].load_weight * load
        if best < 0 or score > best_score:
            best = m
            best_score = score
    return best


@njit
def _decode_step_s(instance, sequences, kv_tokens):
    return instance.base_s + instance.sequence_s * sequences + instance.kv_token_s * kv_tokens


@dispatch_rule()
def least_waiting_time(call, t_comp_s, instances, params):
    """QLM's estimate of the waiting time: output tokens outstanding over the instance's token rate; the least wins.

    QLM (arXiv 2407.00047) profiles the rate at a full batch: here as many calls of this call's size as the KV memory and
    `max_num_seqs` hold. Prompts do not count, as in its estimator.
    """
    best = -1
    least_s = 0.0
    for m in range(len(instances)):
        at = instances[m]
        call_tokens = call.input_tokens + call.output_tokens
        batch = max(1.0, min(at.kv_capacity_tokens / call_tokens, float(at.max_num_seqs)))
        wait_s = at.output_tokens / batch * _decode_step_s(at, batch, batch * call_tokens)
        if best < 0 or wait_s < least_s or (wait_s == least_s and t_comp_s[m] < t_comp_s[best]):
            best = m
            least_s = wait_s
    return best


@dispatch_rule()
def earliest_finish(call, t_comp_s, instances, params):
    """The instance where the call is predicted to finish first; no parameter.

    The prediction counts the batch and the queue: prompts that wait are computed first; then this call decodes in a
    batch of all outstanding calls, as many as the KV memory and `max_num_seqs` hold at once; what exceeds the batch
    has to decode before it.
    """
    best = -1
    earliest_s = 0.0
    for m in range(len(instances)):
        at = instances[m]
        sequences = at.running + at.waiting + 1.0
        kv_tokens = at.kv_tokens + call.input_tokens + call.output_tokens
        fit = min(1.0, at.kv_capacity_tokens / kv_tokens)
        batch = max(1.0, min(sequences * fit, at.max_num_seqs))
        step_s = _decode_step_s(at, batch, kv_tokens * batch / sequences)
        own = call.input_tokens - call.cached_tokens
        prefill_s = at.prefill_token_s * (at.prefill_tokens + own)
        prefill_s += at.prefill_context_s * own * (call.cached_tokens + 0.5 * own)
        queue_s = at.output_tokens * (1.0 - batch / sequences) / batch * step_s
        finish_s = prefill_s + queue_s + call.output_tokens * step_s
        if best < 0 or finish_s < earliest_s:
            best = m
            earliest_s = finish_s
    return best
