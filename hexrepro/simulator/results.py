"""What a simulation returns: plain arrays, times in seconds."""

from dataclasses import dataclass

import numpy as np

# What is counted of each instance, in the order in which the kernel writes it; `busy_s` comes before these.
INSTANCE_COUNTS = (
    "steps",
    "preemptions",
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "peak_kv_blocks",
)


@dataclass(frozen=True, eq=False)
class GridResult:
    """R runs of one workload (q queries, n calls) on M instances. Call arrays are None unless `detail` was asked for."""

    arrival_s: np.ndarray  # float64[R, q]
    finish_s: np.ndarray  # float64[R, q], when the query's last call finished
    slo_s: np.ndarray  # float64[R, q]
    busy_s: np.ndarray  # float64[R, M], time inside steps
    steps: np.ndarray  # float64[R, M], engine steps
    preemptions: np.ndarray  # float64[R, M]
    prefill_tokens: np.ndarray  # float64[R, M], computed, recomputation included
    decode_tokens: np.ndarray  # float64[R, M]
    cached_tokens: np.ndarray  # float64[R, M], prompt tokens found in the prefix cache
    peak_kv_blocks: np.ndarray  # float64[R, M]
    release_s: np.ndarray | None = (
        None  # float64[R, n], prerequisites and tool time over; dispatched in that moment
    )
    admit_s: np.ndarray | None = None  # float64[R, n], first scheduled
    first_token_s: np.ndarray | None = None  # float64[R, n]
    call_finish_s: np.ndarray | None = None  # float64[R, n]
    budget_s: np.ndarray | None = None  # float64[R, n], the call's share of the SLO when it was dispatched
    estimate_s: np.ndarray | None = None  # float64[R, n], t_comp on its instance
    instance: np.ndarray | None = None  # int32[R, n]
    call_cached_tokens: np.ndarray | None = None  # int32[R, n], prefix hit at first admission
    call_preemptions: np.ndarray | None = None  # int32[R, n]

    @property
    def latency_s(self) -> np.ndarray:
        """float64[R, q]: from the query's arrival to the end of its last call."""
        return self.finish_s - self.arrival_s

    @property
    def makespan_s(self) -> np.ndarray:
        """float64[R]: from the first arrival to the last finish."""
        return self.finish_s.max(axis=1) - self.arrival_s.min(axis=1)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def run(self, i: int) -> "Result":
        """One run of the grid."""
        return Result(**{name: None if x is None else x[i] for name, x in vars(self).items()})


@dataclass(frozen=True, eq=False)
class Result:
    """One run: the fields of `GridResult` without their first axis."""

    arrival_s: np.ndarray
    finish_s: np.ndarray
    slo_s: np.ndarray
    busy_s: np.ndarray
    steps: np.ndarray
    preemptions: np.ndarray
    prefill_tokens: np.ndarray
    decode_tokens: np.ndarray
    cached_tokens: np.ndarray
    peak_kv_blocks: np.ndarray
    release_s: np.ndarray
    admit_s: np.ndarray
    first_token_s: np.ndarray
    call_finish_s: np.ndarray
    budget_s: np.ndarray
    estimate_s: np.ndarray
    instance: np.ndarray
    call_cached_tokens: np.ndarray
    call_preemptions: np.ndarray

    @property
    def latency_s(self) -> np.ndarray:
        """float64[q]: from the query's arrival to the end of its last call."""
        return self.finish_s - self.arrival_s

    @property
    def end_s(self) -> float:
        """When the last query finished."""
        return float(self.finish_s.max())

    @property
    def utilisation(self) -> np.ndarray:
        """float64[M]: the share of time that each instance spent in steps, from the first arrival to the end."""
        return self.busy_s / (self.end_s - self.arrival_s.min())
