"""Synthetic traces with the statistics of the paper's.

A trace is described by tables (``data/workloads/*.yaml``): quantiles of each step's prompt and output length,
how many queries make how many calls of the optional and repeated steps, and the correlations between these
numbers inside a query. The generator is a Gaussian copula over those tables:

1. every query draws one normal number for each quantity; their correlations are chosen so that those of the
   lengths come out as the table says;
2. calls of a repeated step (revisions, evaluations) mix their query's number with one of their own;
3. a quantity's numbers are replaced by the table's quantiles at their ranks, so that the marginals hold in
   each trace, not only on average over seeds.

A trace may hold fewer distinct queries than queries; the others are exact repeats with the same prompts. So
few distinct queries (17 in Trace 2) have correlations of their own; of a number of draws the one nearest to
the table is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from hexrepro.errors import InputError
from hexrepro.paths import data_dir
from hexrepro.workload.dag import barrier_edges, concat_ranges, csr
from hexrepro.workload.types import Workload
from hexrepro.workload.workflow import Workflow, load_workflow, read_yaml, shared_prefixes

TRIES = 40  # draws of which the nearest to the table is taken ...
FEW_QUERIES = 300  # ... when a trace has no more distinct queries than this; more come near by themselves


@dataclass(frozen=True)
class TraceTables:
    """What is known about a trace: counts, lengths and correlations, with their provenance."""

    name: str
    provenance: str
    confidence: str
    workflow: Workflow
    queries: int
    spread_by: str  # the count whose table the trace holds exactly
    distinct: dict[int, int] | None  # distinct queries by that count; None = all queries are distinct
    second_half_repeats: bool
    counts: dict[str, dict[int, float]]  # count -> {calls in a query: number of queries}
    lengths: dict[str, tuple[np.ndarray, np.ndarray]]  # 'step.input' -> (levels in [0, 1], tokens)
    offsets: dict[str, tuple[str, int]]  # 'step.input' -> (other quantity, tokens added to it)
    same_in_query: dict[str, float]  # share of a repeated step's variance that is its query's
    correlations: tuple[
        tuple[str, str, float], ...
    ]  # Pearson, over distinct queries, of a query's mean lengths

    @cached_property
    def copula(self) -> np.ndarray:
        """Correlations of the normal numbers behind the quantities (float64[k, k])."""
        return _copula(self)


@dataclass(frozen=True)
class Draw:
    """The numbers of d distinct queries."""

    counts: dict[str, np.ndarray]  # count -> int64[d]
    times: np.ndarray  # int64[d, steps], how often each step comes
    lengths: dict[str, np.ndarray]  # 'step.input' -> tokens of the step's calls, query after query


def trace_names() -> list[str]:
    """Names of the traces that :func:`generate` knows."""
    return sorted(path.stem for path in (data_dir() / "workloads").glob("*.yaml"))


def generate(name: str, seed: int = 0, n_queries: int | None = None) -> Workload:
    """A synthetic trace, without arrivals.

    ``name``: one of :func:`trace_names`, or the path of a table file. ``n_queries``: the paper's number when
    None; any other keeps the statistics, the share of distinct queries among them. Same name, seed and size,
    same trace.
    """
    tables = load_tables(name)
    if n_queries is None:
        n_queries = tables.queries
    if isinstance(n_queries, bool) or not isinstance(n_queries, (int, np.integer)) or n_queries < 1:
        raise InputError(f"workload {name!r}: n_queries is {n_queries!r}; it must be a whole number from 1")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise InputError(f"workload {name!r}: seed is {seed!r}; it must be a whole number from 0")
    rng = np.random.Generator(np.random.PCG64(int(seed)))
    order, spread = _plan(tables, int(n_queries), rng)
    # how often each distinct query comes; every one comes at least once
    weight = np.bincount(order, minlength=len(spread))
    tries = TRIES if len(spread) <= FEW_QUERIES else 1
    draws = [_draw(tables, spread, weight, tables.copula, rng) for _ in range(tries)]
    return _build(tables, min(draws, key=lambda draw: _distance(tables, draw, weight))).take(order)


# ---- which queries, how often, in which order --------------------------------------------------------------


def _plan(tables: TraceTables, n_queries: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """``order`` int[n_queries], the distinct query at each place of the trace, and ``spread`` int[d], the
    value of the count ``spread_by`` of each distinct query."""
    first = -(-n_queries // 2) if tables.second_half_repeats else n_queries
    table = tables.counts[tables.spread_by]
    values = np.array(list(table), np.int64)
    share = np.array(list(table.values()), float)
    wanted = _apportion(share / share.sum() * first)
    if tables.distinct is None:
        kinds = wanted
    else:
        base = tables.queries / 2 if tables.second_half_repeats else tables.queries
        base_wanted = share / share.sum() * base
        ratio = np.array([tables.distinct[int(v)] for v in values]) / base_wanted
        kinds = np.minimum(wanted, np.maximum(1, np.rint(ratio * wanted).astype(np.int64)))
    spread = np.repeat(values, kinds)
    first_kind = np.cumsum(kinds) - kinds
    # every distinct query once, and the rest of its stratum's places at random
    extra = wanted - kinds
    which = (rng.random(int(extra.sum())) * np.repeat(kinds, extra)).astype(np.int64)
    drawn = np.repeat(first_kind, extra) + which
    order = rng.permutation(np.concatenate([np.arange(len(spread)), drawn]))
    if tables.second_half_repeats:
        order = np.concatenate([order, order[: n_queries - first]])
    return order, spread


def _apportion(quota: np.ndarray) -> np.ndarray:
    """Whole numbers next to ``quota`` with the same sum (largest remainders; ties to the first)."""
    whole = np.floor(quota + 1e-9).astype(np.int64)
    missing = round(float(quota.sum())) - int(whole.sum())
    whole[np.argsort(whole - quota, kind="stable")[:missing]] += 1
    return whole


# ---- correlated numbers ------------------------------------------------------------------------------------


def _quantities(tables: TraceTables) -> list[str]:
    """The numbers of a query that the copula draws: what varies. The one that is given comes first."""
    rest = [count for count in tables.workflow.counts if count != tables.spread_by]
    varying = [quantity for quantity, (_, tokens) in tables.lengths.items() if tokens[0] < tokens[-1]]
    return [tables.spread_by, *rest, *varying]


def _latent(
    tables: TraceTables, spread: np.ndarray, correlation: np.ndarray, rng: np.random.Generator
) -> dict:
    """A standard normal number for each quantity and distinct query (float64[d]), with that correlation
    matrix."""
    names = _quantities(tables)
    d, k = len(spread), len(names)
    normal = rng.standard_normal((d, k))
    # the given count: the sorted numbers go to the queries in order of their count, ties in random order
    by_count = np.lexsort((rng.random(d), spread))
    normal[by_count, 0] = np.sort(normal[:, 0])
    if (
        d > k + 2
    ):  # make the sample's own correlations exactly 0 (and the first column stays itself but for its scale)
        normal -= normal.mean(axis=0)
        own = np.linalg.cholesky(normal.T @ normal / d)
        normal = np.linalg.solve(own, normal.T).T
    mixed = normal @ np.linalg.cholesky(correlation).T
    return {name: mixed[:, i] for i, name in enumerate(names)}


def _copula(tables: TraceTables) -> np.ndarray:
    """Correlations of the normal numbers (float64[k, k]) that give the lengths the table's correlations.

    Lengths are less correlated than the normal numbers behind them, the more so the further from normal they
    are. So start from the table, look at a large sample, and add what is missing, a few times (known as NORTA
    fitting). What the table does not name is 0, as near as a correlation matrix allows.
    """
    names = _quantities(tables)
    pairs = [(names.index(a), names.index(b)) for a, b, _ in tables.correlations]
    target = np.array([r for _, _, r in tables.correlations])
    share = tables.distinct or tables.counts[tables.spread_by]
    d = 2000
    spread = np.repeat(
        list(share), _apportion(np.array(list(share.values()), float) / sum(share.values()) * d)
    )
    asked = target.copy()
    matrix = _correlation_matrix(len(names), pairs, asked)
    for _ in range(6 if pairs else 0):
        draw = _draw(tables, spread, np.ones(d), matrix, np.random.Generator(np.random.PCG64(0)))
        asked = np.clip(asked + target - _correlations(tables, draw), -0.995, 0.995)
        matrix = _correlation_matrix(len(names), pairs, asked)
    return matrix


def _correlation_matrix(k: int, pairs: list[tuple[int, int]], values: np.ndarray) -> np.ndarray:
    """The correlation matrix float64[k, k] with these values, or one near it where they contradict each
    other."""
    matrix = np.eye(k)
    for (i, j), r in zip(pairs, values, strict=True):
        matrix[i, j] = matrix[j, i] = r
    for _ in range(50):  # alternate between positive eigenvalues and a diagonal of ones
        eigenvalues, vectors = np.linalg.eigh(matrix)
        if eigenvalues[0] >= 1e-6:
            break
        matrix = (vectors * np.maximum(eigenvalues, 1e-4)) @ vectors.T
        scale = np.sqrt(np.diag(matrix))
        matrix /= scale[:, None] * scale
    return matrix


def _draw(
    tables: TraceTables,
    spread: np.ndarray,
    weight: np.ndarray,
    correlation: np.ndarray,
    rng: np.random.Generator,
) -> Draw:
    """One draw of the distinct queries' counts and lengths."""
    workflow = tables.workflow
    d = len(spread)
    latent = _latent(tables, spread, correlation, rng)
    counts = _counts(tables, spread, weight, latent)
    times = np.ones((d, len(workflow.steps)), np.int64)
    lengths: dict[str, np.ndarray] = {}
    for s, step in enumerate(workflow.steps):
        if step.times:
            times[:, s] = counts[step.times]
        if step.only_with:
            times[:, s] *= counts[step.only_with] > 0
        owner = np.repeat(np.arange(d), times[:, s])
        for quantity in (f"{step.name}.input", f"{step.name}.output"):
            if quantity in tables.offsets:
                other, added = tables.offsets[quantity]
                lengths[quantity] = lengths[other] + added
                continue
            if quantity not in latent:
                lengths[quantity] = np.full(len(owner), int(tables.lengths[quantity][1][0]))
                continue
            number = latent[quantity][owner]
            if step.times:
                shared = tables.same_in_query.get(quantity, 0.0)
                own = rng.standard_normal(len(owner))
                number = np.sqrt(shared) * number + np.sqrt(1.0 - shared) * own
            lengths[quantity] = _lengths(tables.lengths[quantity], number, weight[owner])
    return Draw(counts, times, lengths)


def _levels(latent: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The rank of each entry as a level in (0, 1), each entry counting ``weight`` times."""
    order = np.argsort(latent, kind="stable")
    upto = np.cumsum(weight[order])
    level = np.empty(len(latent))
    level[order] = (upto - weight[order] / 2) / upto[-1] if len(latent) else 0.0
    return level


def _counts(
    tables: TraceTables, spread: np.ndarray, weight: np.ndarray, latent: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """How often the optional and repeated steps come in each distinct query (int64[d])."""
    counts = {tables.spread_by: spread}
    for name in tables.workflow.counts:
        if name == tables.spread_by:
            continue
        values = np.array(sorted(tables.counts[name]), np.int64)
        share = np.array([tables.counts[name][int(v)] for v in values], float)
        upto = np.cumsum(share)[:-1] / share.sum()
        counts[name] = values[np.searchsorted(upto, _levels(latent[name], weight), side="right")]
    return counts


def _lengths(table: tuple[np.ndarray, np.ndarray], latent: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Lengths (int64) at the ranks of ``latent``; the least and the greatest rank take the table's ends."""
    level = _levels(latent, weight)
    if len(level) > 1:
        level = (level - level.min()) / (level.max() - level.min())
    return np.rint(np.interp(level, *table)).astype(np.int64)


def _correlations(tables: TraceTables, draw: Draw) -> np.ndarray:
    """Pearson's correlation of each pair that the table names, over the queries that have both (0 where
    undefined)."""
    steps = {step.name: s for s, step in enumerate(tables.workflow.steps)}
    d = len(draw.times)

    def per_query(quantity: str) -> np.ndarray:
        """The count, or the mean length; NaN in a query without such a call."""
        if quantity in draw.counts:
            return draw.counts[quantity].astype(float)
        times = draw.times[:, steps[quantity.rpartition(".")[0]]]
        total = np.bincount(np.repeat(np.arange(d), times), draw.lengths[quantity], d)
        return np.divide(total, times, out=np.full(d, np.nan), where=times > 0)

    values = {quantity: per_query(quantity) for pair in tables.correlations for quantity in pair[:2]}
    found = np.zeros(len(tables.correlations))
    for k, (a, b, _) in enumerate(tables.correlations):
        both = ~(np.isnan(values[a]) | np.isnan(values[b]))
        x, y = values[a][both], values[b][both]
        if len(x) > 2 and np.ptp(x) > 0 and np.ptp(y) > 0:
            x, y = x - x.mean(), y - y.mean()
            found[k] = (x @ y) / np.sqrt((x @ x) * (y @ y))
    return found


def _distance(tables: TraceTables, draw: Draw, weight: np.ndarray) -> float:
    """How far a draw is from the table: the mean error of the correlations, plus the mean relative errors of
    the counts' means and of the quartiles."""
    target = np.array([r for _, _, r in tables.correlations])
    wrong = np.abs(_correlations(tables, draw) - target).mean() if len(target) else 0.0
    for name, number in draw.counts.items():
        mean = sum(calls * share for calls, share in tables.counts[name].items()) / sum(
            tables.counts[name].values()
        )
        if mean > 0:
            wrong += abs((number @ weight) / weight.sum() / mean - 1) / len(draw.counts)
    quartiles = np.array([0.25, 0.5, 0.75])
    varying = set(_quantities(tables)) & set(tables.lengths)
    off = []
    for s, step in enumerate(tables.workflow.steps):
        owner = np.repeat(np.arange(len(weight)), draw.times[:, s])
        for quantity in (f"{step.name}.input", f"{step.name}.output"):
            if quantity in varying and len(owner):
                wanted = np.interp(quartiles, *tables.lengths[quantity])
                found = np.sort(np.repeat(draw.lengths[quantity], weight[owner]))
                off.append(np.abs(found[(quartiles * len(found)).astype(np.int64)] / wanted - 1).mean())
    return float(wrong + np.mean(off)) if off else float(wrong)


# ---- from numbers to calls ---------------------------------------------------------------------------------


def _build(tables: TraceTables, draw: Draw) -> Workload:
    """The distinct queries as a workload."""
    workflow, times = tables.workflow, draw.times
    d = len(times)
    calls_each = times.sum(axis=1)
    query_offsets = np.concatenate([[0], np.cumsum(calls_each)])
    start = (
        query_offsets[:-1, None] + np.cumsum(times, axis=1) - times
    )  # the first call of each step of each query
    n = int(query_offsets[-1])

    columns = {c: np.zeros(n, np.int64) for c in ("stage", "template", "group", "input", "output")}
    next_group = np.zeros(d, np.int64)  # of each query: the number of its next barrier group
    for s, step in enumerate(workflow.steps):
        rows = concat_ranges(start[:, s], times[:, s])
        owner = np.repeat(np.arange(d), times[:, s])
        columns["stage"][rows] = workflow.stages.index(step.stage)
        columns["template"][rows] = workflow.template_id(step.template)
        columns["input"][rows] = draw.lengths[f"{step.name}.input"]
        columns["output"][rows] = draw.lengths[f"{step.name}.output"]
        if step.beside_previous:
            next_group -= 1
        columns["group"][rows] = next_group[owner]
        if step.parallel or not step.times:
            next_group += times[:, s] > 0
        else:
            columns["group"][rows] += rows - start[owner, s]
            next_group += times[:, s]

    query = np.repeat(np.arange(d), calls_each)
    before, after = barrier_edges(columns["group"], query)
    succ_offsets, successors = csr(n, before, after)
    return Workload(
        name=tables.name,
        stage_names=workflow.stages,
        stage=columns["stage"],
        input_tokens=columns["input"],
        output_tokens=columns["output"],
        **shared_prefixes(workflow, columns["template"], columns["input"], query),
        tool_time_s=np.zeros(n),
        succ_offsets=succ_offsets,
        successors=successors,
        query_offsets=query_offsets,
        arrival_s=np.full(d, np.nan),
        tenant=np.zeros(d, np.int32),
        tenant_names=("default",),
        slo_scale=np.ones(d),
    )


# ---- the tables --------------------------------------------------------------------------------------------


def load_tables(name: str) -> TraceTables:
    """The tables of a trace, by name or by the path of a YAML file; InputError when something is missing or
    wrong."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if name not in trace_names():
            raise InputError(
                f"unknown workload {name!r}; known are {', '.join(trace_names())}, or a table file *.yaml"
            )
        path = data_dir() / "workloads" / f"{name}.yaml"
    try:
        edited = path.stat().st_mtime_ns
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return _read_tables(path, edited)


@lru_cache(maxsize=64)
def _read_tables(path: Path, edited: int) -> TraceTables:
    """The tables in a file as it was when last ``edited`` (kept, because fitting the copula takes a
    while)."""
    raw = read_yaml(path)
    for key in ("provenance", "confidence", "workflow", "queries", "spread_by", "counts", "lengths"):
        if key not in raw:
            raise InputError(f"{path}: the key {key!r} is missing")
    workflow = load_workflow(raw["workflow"])
    counts = {count: _count_table(path, raw["counts"], count) for count in workflow.counts}
    if raw["spread_by"] not in counts:
        raise InputError(f"{path}: spread_by is {raw['spread_by']!r}; it must be one of {', '.join(counts)}")
    distinct = raw.get("distinct")
    if distinct is not None and set(distinct) != set(counts[raw["spread_by"]]):
        raise InputError(f"{path}: distinct must have the same keys as counts.{raw['spread_by']}")
    lengths, offsets = _length_tables(path, raw["lengths"], workflow)
    tables = TraceTables(
        name=path.stem,
        provenance=str(raw["provenance"]).strip(),
        confidence=str(raw["confidence"]).strip(),
        workflow=workflow,
        queries=int(raw["queries"]),
        spread_by=raw["spread_by"],
        distinct=distinct,
        second_half_repeats=bool(raw.get("second_half_repeats", False)),
        counts=counts,
        lengths=lengths,
        offsets=offsets,
        same_in_query=dict(raw.get("same_in_query", {})),
        correlations=tuple((a, b, float(r)) for a, b, r in raw.get("correlations", [])),
    )
    known = _quantities(tables)
    for a, b, r in tables.correlations:
        for quantity in (a, b):
            if quantity not in known:
                raise InputError(f"{path}: correlations name {quantity!r}; known are {', '.join(known)}")
        if not -1 < r < 1:
            raise InputError(f"{path}: the correlation of {a} and {b} is {r}; it must lie between -1 and 1")
    for quantity, share in tables.same_in_query.items():
        if quantity not in lengths or not 0 <= share <= 1:
            raise InputError(
                f"{path}: same_in_query.{quantity} is {share}; it must be a length's share from 0 to 1"
            )
    return tables


def _count_table(path: Path, raw: dict, count: str) -> dict[int, float]:
    table = raw.get(count)
    if not isinstance(table, dict) or not table:
        raise InputError(
            f"{path}: counts.{count} is {table!r}; it must map calls in a query to a number of queries"
        )
    for calls, queries in table.items():
        if (
            not isinstance(calls, int)
            or calls < 0
            or not isinstance(queries, (int, float))
            or not queries > 0
        ):
            raise InputError(
                f"{path}: counts.{count} holds {calls!r}: {queries!r}; "
                "it must map a whole number from 0 to a number above 0"
            )
    return table


def _length_tables(
    path: Path, raw: dict, workflow: Workflow
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], dict[str, tuple[str, int]]]:
    """``lengths`` and ``offsets`` of `TraceTables`. In the file a length is a whole number (always the same),
    a mapping of percentiles to tokens, or ``{like: other quantity, plus: tokens}``."""
    lengths: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    offsets: dict[str, tuple[str, int]] = {}
    for step in workflow.steps:
        for side in ("input", "output"):
            quantity = f"{step.name}.{side}"
            value = (raw.get(step.name) or {}).get(side)
            least = 1
            if side == "input":
                least += workflow.templates[workflow.template_id(step.template)].tokens
            if isinstance(value, dict) and "like" in value:
                other, added = value["like"], int(value["plus"])
                if other not in lengths:
                    raise InputError(
                        f"{path}: {quantity} is like {other!r}, which must be a length given before it"
                    )
                offsets[quantity] = (other, added)
                shortest = lengths[other][1][0] + added
            else:
                knots = {0: value, 100: value} if isinstance(value, int) else value
                if not isinstance(knots, dict) or len(knots) < 2:
                    raise InputError(
                        f"{path}: {quantity} is {value!r}; it must be tokens or percentiles of tokens"
                    )
                levels = np.array(list(knots), float) / 100
                tokens = np.array(list(knots.values()), float)
                if (
                    levels[0] != 0
                    or levels[-1] != 1
                    or np.any(np.diff(levels) <= 0)
                    or np.any(np.diff(tokens) < 0)
                ):
                    raise InputError(
                        f"{path}: {quantity}: percentiles must run from 0 to 100 and tokens not fall"
                    )
                lengths[quantity] = (levels, tokens)
                shortest = tokens[0]
            if shortest < least:
                raise InputError(
                    f"{path}: {quantity} can be {shortest:.0f} tokens; it must be at least {least} "
                    f"({'one more than the template' if side == 'input' else 'one token'})"
                )
    return lengths, offsets
