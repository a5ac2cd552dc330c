"""In which order calls that wait at an instance are served: least key first, ties in order of arrival.

A key is computed once, when the call is enqueued. That is enough for rules "by urgency": all waiting calls age at the
same rate, so an order by time left is the order of a fixed point in time.
"""

from hexrepro.scheduling.rules import queue_rule


@queue_rule()
def fcfs(call, params):
    """First come, first served (vLLM's default)."""
    return 0.0


@queue_rule()
def urgency(call, params):
    """HexGen-Flow's PQ: U = t_comp - (t_SLO - waited), the largest first.

    Equal to the latest start time, enqueue + t_SLO - t_comp, smallest first: `waited` grows alike for all.
    """
    return call.now_s + call.budget_s - call.t_comp_s


@queue_rule(calls_per_query=15.0)
def least_laxity(call, params):
    """LLF on single calls: every call has the fixed deadline SLO / calls_per_query after it was issued.

    The rule knows nothing of the workflow; 15 is the length of the standard workflow in the released code.
    """
    return call.now_s + call.slo_s / params[0] - call.t_comp_s


@queue_rule(calls_per_query=15.0, group_s=10.0)
def request_groups(call, params):
    """QLM (arXiv 2407.00047): calls with like deadlines form a group; groups by deadline, within a group FCFS."""
    deadline_s = call.now_s + call.slo_s / params[0]
    return deadline_s // params[1]


@queue_rule(fair=True, input_weight=1.0, output_weight=2.0)
def vtc(call, params):
    """Virtual token counter (arXiv 2401.00588): the client that was served least comes first, within a client FCFS.

    The counters live at the instance, beside its queue: a client is charged `input_weight` a prompt token when its call
    starts and `output_weight` a generated token; a client that comes back is lifted to the least counter in the queue.
    """
    return 0.0
