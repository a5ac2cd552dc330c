"""A replay through the gateway: what each call says of itself, and which instance had it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hexrepro.serving import headers as gateway
from hexrepro.validation.completion_stream import Streamed
from hexrepro.workload.types import Workload


def gateway_headers(
    workload: Workload, run: str, base_slo_s: float | None = None, workflow: str | None = None
) -> Callable[[int], Mapping[str, str]]:
    """For `play(headers=...)` against the gateway: says where each call belongs.

    `run` keeps queries of replays apart; `workflow` names the one whose stages the gateway's cluster file tells.
    A query's SLO is `base_slo_s` times its scale; without it, the gateway's own holds. The call that ends its query is named
    where that is one call.
    """
    w = workload
    sinks = np.diff(w.succ_offsets) == 0
    ends = sinks & (np.bincount(w.query, sinks, minlength=w.n_queries)[w.query] == 1)

    def headers(call: int) -> Mapping[str, str]:
        query = int(w.query[call])
        said = {
            gateway.QUERY: f"{run}-{query}",
            gateway.STAGE: w.stage_names[w.stage[call]],
            gateway.TENANT: w.tenant_names[w.tenant[query]],
        }
        if workflow is not None:
            said[gateway.WORKFLOW] = workflow
        if base_slo_s is not None:
            said[gateway.SLO] = f"{base_slo_s * w.slo_scale[query]:.6g}"
        if ends[call]:
            said[gateway.FINAL] = "true"
        return said

    return headers


def gateway_instance(names: Sequence[str]) -> Callable[[Streamed], int]:
    """For `play(instance_of=...)` against the gateway: the place in `names` of the instance that its answer tells, else -1."""
    place = {name: i for i, name in enumerate(names)}
    return lambda answer: place.get(answer.headers.get(gateway.INSTANCE, ""), -1)
