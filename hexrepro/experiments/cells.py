"""The unit of work of a comparison: one policy on one cluster view, trace and rate, at all arrival seeds.

A cell is computed in one or two compiled calls (the choice of alpha, then the reported runs) and kept in the cache as
Parquet files: one row a query, one row an instance, and one row a call where these are wanted.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hexrepro import simulator
from hexrepro.cluster.types import Cluster
from hexrepro.experiments.cache import code_version, fingerprint, write_atomically
from hexrepro.report.metrics import quantile
from hexrepro.scheduling import Policy
from hexrepro.scheduling.sources import digest
from hexrepro.simulator import EngineOptions
from hexrepro.simulator.results import INSTANCE_COUNTS
from hexrepro.workload.types import Workload

_META = b"hexrepro"
KINDS = ("queries", "calls", "instances")


@dataclass(frozen=True, eq=False)
class Setting:
    """What all policies of one table share: the cluster in one view, the workload, and its arrivals.

    arrivals_s: float64[R, Q], one row a reported seed; selection_arrivals_s: float64[S, Q], arrivals of other seeds, on
    which alpha is chosen. rate_qps is None when the arrivals are those recorded in the file; arrivals names their
    process. The workload holds the trace and what runs beside it; rate_qps and base_slo_s are the trace's.
    """

    profile: str
    trace: str
    arrivals: str
    rate_qps: float | None
    workload: Workload
    cluster: Cluster
    scale_out: int
    engine: EngineOptions
    estimator: str
    base_slo_s: float
    slo_scale: float
    arrivals_s: np.ndarray
    seeds: np.ndarray
    selection_arrivals_s: np.ndarray
    selection_seeds: np.ndarray

    @property
    def slo_s(self) -> float:
        """The SLO of a query whose own scale is 1."""
        return self.slo_scale * self.base_slo_s

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self)


@dataclass(frozen=True, eq=False)
class Cell:
    """A policy in a setting. `alphas` are the candidates to choose from; empty when the policy is run as it is."""

    setting: Setting
    policy: Policy
    alphas: tuple[float, ...] = ()

    @cached_property
    def key(self) -> str:
        """Its name in the cache."""
        return fingerprint(
            code_version(), self.setting.fingerprint, self.policy, _rule_sources(self.policy), self.alphas
        )


@dataclass(frozen=True, eq=False)
class CellResult:
    """A finished cell: the alpha it ran with, the mean P95 of each candidate, its queries' times, and its files.

    arrival_s, finish_s: float64[R, Q]; finish is inf for a query that did not finish. engine: metric -> float64[R], how
    the instances were used. files: one of each kind that was asked for. cached: whether it was there already.
    """

    alpha: float | None
    candidate_p95_s: dict[float, float]
    arrival_s: np.ndarray
    finish_s: np.ndarray
    engine: dict[str, np.ndarray]
    files: dict[str, Path]
    cached: bool


def get(cell: Cell, directory: Path, workers: int | None = None, calls: bool = True) -> CellResult:
    """The cell from the cache, or computed and put there; with or without the rows of its calls."""
    kinds = [kind for kind in KINDS if calls or kind != "calls"]
    files = {kind: directory / f"{cell.key}.{kind}.parquet" for kind in kinds}
    cached = all(file.exists() for file in files.values())
    if cached:
        try:
            return _read(cell, files, cached)
        except (pa.ArrowInvalid, OSError, KeyError, ValueError):
            pass  # damaged from outside: compute it anew
    _compute(cell, files, workers)
    return _read(cell, files, False)


def _read(cell: Cell, files: dict[str, Path], cached: bool) -> CellResult:
    table = pq.read_table(files["queries"], columns=["arrival_s", "finish_s"])
    instances = pq.read_table(files["instances"])
    meta = json.loads(table.schema.metadata[_META])
    shape = cell.setting.arrivals_s.shape
    arrival_s, finish_s = (table[name].to_numpy().reshape(shape) for name in ("arrival_s", "finish_s"))
    per_run = {
        name: instances[name].to_numpy().reshape(len(cell.setting.seeds), -1)
        for name in ("utilisation", "preemptions", "prefill_tokens", "cached_tokens")
    }
    for file in files.values():
        os.utime(file)  # the cache forgets what was not used for longest
    return CellResult(
        alpha=meta["alpha"],
        candidate_p95_s={float(a): p95 for a, p95 in meta["candidate_p95_s"].items()},
        arrival_s=arrival_s,
        finish_s=finish_s,
        engine={
            "utilisation": per_run["utilisation"].mean(axis=1),
            "preemptions": per_run["preemptions"].sum(axis=1),
            "cached_share": per_run["cached_tokens"].sum(axis=1)
            / (per_run["cached_tokens"] + per_run["prefill_tokens"]).sum(axis=1),
        },
        files=files,
        cached=cached,
    )


def _compute(cell: Cell, files: dict[str, Path], workers: int | None) -> None:
    s, policy, candidates = cell.setting, cell.policy, {}
    common = {"base_slo": s.slo_s, "engine": s.engine, "estimates": s.estimator, "workers": workers}
    if cell.alphas:
        candidates = _candidate_p95_s(cell, common)
        policy = policy.with_params(alpha=min(candidates, key=candidates.get))  # the least alpha of equals
    alpha = policy.dispatch_rule.defaults.get("alpha")
    alpha = policy.dispatch_params.get("alpha", alpha)
    grid = simulator.simulate_grid(
        s.workload,
        s.cluster,
        policy,
        arrivals_s=s.arrivals_s,
        seeds=s.seeds,
        detail="calls" in files,
        **common,
    )
    meta = {_META: json.dumps({"alpha": alpha, "candidate_p95_s": candidates}).encode()}
    tables = {"queries": _queries, "calls": _calls, "instances": _instances}
    for kind, file in files.items():
        whole = tables[kind](cell, grid).replace_schema_metadata(meta)
        write_atomically(
            file,
            lambda part, whole=whole: pq.write_table(whole, part, **parquet_options(whole.schema)),
        )


def _candidate_p95_s(cell: Cell, common: dict) -> dict[float, float]:
    """Mean P95 latency over the selection seeds for each candidate alpha, in one call of alphas × seeds runs."""
    s, n = cell.setting, len(cell.setting.selection_seeds)
    params = np.stack([cell.policy.with_params(alpha=alpha).dispatch_vector for alpha in cell.alphas])
    grid = simulator.simulate_grid(
        s.workload,
        s.cluster,
        cell.policy,
        arrivals_s=np.tile(s.selection_arrivals_s, (len(cell.alphas), 1)),
        dispatch_params=np.repeat(params, n, axis=0),
        seeds=np.tile(s.selection_seeds, len(cell.alphas)),
        **common,
    )
    p95_s = quantile(grid.latency_s, 0.95).reshape(len(cell.alphas), n).mean(axis=1)
    return {float(alpha): float(p95) for alpha, p95 in zip(cell.alphas, p95_s, strict=True)}


def _queries(cell: Cell, grid) -> pa.Table:
    s = cell.setting
    runs, queries = s.arrivals_s.shape
    return pa.table(
        {
            "seed": np.repeat(s.seeds.astype(np.int32), queries),
            "query": np.tile(np.arange(queries, dtype=np.int32), runs),
            "tenant": _named(np.tile(s.workload.tenant, runs), s.workload.tenant_names),
            "arrival_s": s.arrivals_s.ravel(),
            "finish_s": grid.finish_s.ravel(),
            "latency_s": grid.latency_s.ravel(),
            "slo_s": grid.slo_s.ravel(),
        }
    )


def _calls(cell: Cell, grid) -> pa.Table:
    s, w = cell.setting, cell.setting.workload
    runs = len(s.seeds)
    first_call = w.query_offsets[w.query]
    columns = {
        "seed": np.repeat(s.seeds.astype(np.int32), w.n_calls),
        "query": np.tile(w.query, runs),
        "call": np.tile(np.arange(w.n_calls, dtype=np.int32) - first_call, runs),
        "stage": _named(np.tile(w.stage, runs), w.stage_names),
        "input_tokens": np.tile(w.input_tokens, runs),
        "output_tokens": np.tile(w.output_tokens, runs),
        "instance": _named(grid.instance.ravel(), [i.name for i in s.cluster.instances]),
        "release_s": grid.release_s,
        "admit_s": grid.admit_s,
        "first_token_s": grid.first_token_s,
        "finish_s": grid.call_finish_s,
        "cached_tokens": grid.call_cached_tokens,
        "preemptions": grid.call_preemptions,
        "budget_s": grid.budget_s,
        "estimate_s": grid.estimate_s,
    }
    return pa.table({name: x.ravel() if isinstance(x, np.ndarray) else x for name, x in columns.items()})


def _instances(cell: Cell, grid) -> pa.Table:
    s = cell.setting
    runs, instances = grid.busy_s.shape
    columns = {
        "seed": np.repeat(s.seeds.astype(np.int32), instances),
        "instance": _named(np.tile(np.arange(instances), runs), [i.name for i in s.cluster.instances]),
        "utilisation": grid.busy_s / grid.makespan_s[:, None],
        "busy_s": grid.busy_s,
    }
    for name in INSTANCE_COUNTS:
        columns[name] = getattr(grid, name).astype(np.int64)
    return pa.table({name: x.ravel() if isinstance(x, np.ndarray) else x for name, x in columns.items()})


def _named(index: np.ndarray, names) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(index.astype(np.int32)), pa.array(list(names)))


def parquet_options(schema: pa.Schema) -> dict:
    """Times are noise to a dictionary; split by byte they compress well. Everything else repeats."""
    times = [f.name for f in schema if pa.types.is_floating(f.type)]
    return {
        "compression": "zstd",
        "use_dictionary": [f.name for f in schema if f.name not in times],
        "use_byte_stream_split": times,
    }


def _rule_sources(policy: Policy) -> tuple[str, ...]:
    """Digests of the policy's rules with all they use: they may lie outside the package."""
    return tuple(digest(rule.function) for rule in (policy.dispatch_rule, policy.queue_rule))
