"""Workloads made from others: several on the same instances, tenants, and another share of cached prompts.

Everything drawn at random here is fixed by a seed: it belongs to the workload, not to a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hexrepro.errors import InputError
from hexrepro.workload.types import Workload, concat


def interleave(workloads: Sequence[Workload], seed: int = 0, name: str | None = None) -> Workload:
    """Several workloads without arrivals as one, their queries in random order, each workload's own order kept.

    Given to one Poisson process of the summed rate, this is the superposition of one Poisson process a workload: the
    marks of a superposition are independent, and given how often each occurs every order is equally likely.
    """
    whole = concat(workloads, name)
    owner = np.repeat(np.arange(len(workloads)), [w.n_queries for w in workloads])
    drawn = np.random.Generator(np.random.PCG64(seed)).permutation(owner)
    order = np.empty(len(owner), np.int64)
    order[np.argsort(drawn, kind="stable")] = np.arange(len(owner))  # of each workload's queries, in turn
    return whole.take(order)


def with_random_tenants(
    workload: Workload,
    names: Sequence[str],
    slo_scales: Sequence[float],
    shares: Sequence[float],
    seed: int = 0,
) -> Workload:
    """The queries given to tenants at random; each tenant gets its share of the queries, to the next whole number.

    ``slo_scales``: what multiplies the base SLO of a tenant's queries.
    """
    wanted = np.asarray(shares, np.float64) / np.sum(shares) * workload.n_queries
    upto = np.rint(np.cumsum(wanted)).astype(np.int64)
    tenant = np.repeat(np.arange(len(names)), np.diff(upto, prepend=0))
    tenant = np.random.Generator(np.random.PCG64(seed)).permutation(tenant)
    return workload.with_tenants(tenant, names, np.asarray(slo_scales, np.float64)[tenant])


def with_cached_share(workload: Workload, share: float) -> Workload:
    """The same calls, whose prompts now share a template of about this share of them, and no context.

    The calls of one stage and template share one prefix, which has one length: ``share`` times their mean prompt, but
    no more than the shortest of them less one token (a prompt's last token is always computed). What share an engine
    then finds in its cache also depends on its blocks and evictions; it reports that.
    """
    if not 0.0 <= share <= 1.0:
        raise InputError(f"workload {workload.name!r}: cached share is {share!r}; it must be from 0 to 1")
    key = workload.stage.astype(np.int64) * (int(workload.template.max()) + 2) + workload.template + 1
    _, kind = np.unique(key, return_inverse=True)
    tokens = workload.input_tokens.astype(np.int64)
    mean = np.bincount(kind, tokens) / np.bincount(kind)
    shortest = np.full(len(mean), np.iinfo(np.int64).max)
    np.minimum.at(shortest, kind, tokens)
    shared = np.minimum(np.rint(share * mean).astype(np.int64), shortest - 1)
    return workload.with_prefixes(np.where(shared[kind] > 0, kind, -1), shared[kind])
