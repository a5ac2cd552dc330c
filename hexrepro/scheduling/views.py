"""What a scheduling rule may look at: one call, and the state of each instance.

Both are NumPy records, so that the same compiled rule runs inside the simulator and under the gateway. They hold what a
live coordinator knows and nothing more: a call's true output length is not among the fields (the *oracle boundary*).
"""

import numba
import numpy as np
from numba import types

from hexrepro.errors import InputError

CALL = np.dtype(
    [
        ("sequence", np.int64),  # 0, 1, 2, ...: how many calls were dispatched before this one
        ("query", np.int64),
        ("tenant", np.int64),
        ("stage", np.int64),
        ("input_tokens", np.int64),
        ("cached_tokens", np.int64),  # of the input, expected in every instance's prefix cache
        ("output_tokens", np.float64),  # estimated
        ("now_s", np.float64),
        ("arrival_s", np.float64),  # of the query
        ("slo_s", np.float64),  # of the query, end to end, from its arrival
        ("stage_mean_s", np.float64),  # the stage's execution time, mean over the cluster: the paper's t-bar
        ("remaining_s", np.float64),  # the same, summed over the stages expected after this one
        ("budget_s", np.float64),  # the share of the SLO that is this call's: the paper's t_SLO
        ("draw", np.float64, (2,)),  # two uniform random numbers in [0, 1) of this call's own
        # Known only to queue rules, which run after dispatch:
        ("instance", np.int64),
        ("t_comp_s", np.float64),  # estimated execution time on that instance
    ],
    align=True,
)

INSTANCE = np.dtype(
    [
        ("running", np.int64),  # calls in the batch
        ("waiting", np.int64),  # calls in the queue
        ("waiting_s", np.float64),  # estimated execution time of the calls in the queue
        ("outstanding_s", np.float64),  # the same, batch included; a call counts whole until it finishes
        ("dispatched_s", np.float64),  # the same, of every call ever sent here
        ("prefill_tokens", np.float64),  # prompt tokens of outstanding calls that are still to be computed
        ("output_tokens", np.float64),  # estimated output tokens of outstanding calls
        ("kv_tokens", np.float64),  # estimated KV tokens of outstanding calls when they end
        ("base_s", np.float64),  # the latency model: one step costs base_s + prefill_token_s * prefill tokens
        (
            "prefill_token_s",
            np.float64,
        ),  # + prefill_context_s * sum(chunk * context) + sequence_s * sequences
        ("prefill_context_s", np.float64),  # + kv_token_s * KV tokens read
        ("sequence_s", np.float64),
        ("kv_token_s", np.float64),
        ("max_num_seqs", np.int64),
        ("max_num_batched_tokens", np.int64),
        ("block_size", np.int64),
        ("kv_capacity_tokens", np.int64),
        ("load_weight", np.float64),  # the released score's k
        ("kind", np.int64),  # instances of one kind share their latency model
    ],
    align=True,
)

SPEEDS = (
    "base_s",
    "prefill_token_s",
    "prefill_context_s",
    "sequence_s",
    "kv_token_s",
)  # the latency model's fields

_Call = numba.from_dtype(CALL)
_Instances = numba.from_dtype(INSTANCE)[::1]
_Params = types.float64[::1]

# dispatch(call, t_comp_s, instances, params) -> index of the instance; t_comp_s[m] is the call's estimate on instance m
DISPATCH = types.int64(_Call, types.float64[::1], _Instances, _Params)
# queue(call, params) -> key; the least key is served first, ties in order of arrival at the instance
QUEUE = types.float64(_Call, _Params)


def instance_views(cluster) -> np.ndarray:
    """INSTANCE[M] for an idle `Cluster`."""
    views = np.zeros(len(cluster.instances), INSTANCE)
    kinds: dict = {}
    for view, spec in zip(views, cluster.instances, strict=True):
        for field in SPEEDS:
            view[field] = getattr(spec.latency, field)
        view["max_num_seqs"] = spec.max_num_seqs
        view["max_num_batched_tokens"] = spec.max_num_batched_tokens
        view["block_size"] = spec.block_size
        view["kv_capacity_tokens"] = spec.kv_blocks * spec.block_size
        view["load_weight"] = spec.load_weight
        view["kind"] = kinds.setdefault((spec.latency, spec.max_num_batched_tokens), len(kinds))
    return views


def believe(views: np.ndarray, configured: np.ndarray, m: int, factor: float) -> None:
    """Instance m takes `factor` times as long as in `configured` (INSTANCE[M]): change `views`, and number the kinds anew."""
    check_factor(m, factor)
    for name in SPEEDS:
        views[name][m] = configured[name][m] * factor
    kinds: dict[tuple, int] = {}
    for view in views:
        key = (*(float(view[name]) for name in SPEEDS), int(view["max_num_batched_tokens"]))
        view["kind"] = kinds.setdefault(key, len(kinds))


def check_factor(m: int, factor: float) -> None:
    """Refuse what is no change of an instance's speed."""
    if not 0 < factor < np.inf:
        raise InputError(f"instance {m}: factor={factor!r} must be a positive number")
