"""`Workload`: what is asked of the cluster, as immutable arrays.

A query is a directed acyclic graph of LLM calls. The arrays hold one row a call, the calls of one query next
to each other and in an order that puts prerequisites first, and one row a query beside them. Lengths are in
tokens, times in seconds. Construction checks everything, so whoever holds a `Workload` need not check again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from hexrepro.errors import InputError
from hexrepro.workload.dag import concat_ranges, csr, edges, refuse_cycle

_CALL_INT = (
    "stage",
    "input_tokens",
    "output_tokens",
    "template",
    "template_tokens",
    "context",
    "context_tokens",
)
_INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class Workload:
    """Queries, their LLM calls and the dependencies between them (n calls, q queries, e dependencies).

    Use :meth:`equals` to compare two workloads; ``==`` is identity.
    """

    name: str
    stage_names: tuple[str, ...]
    stage: np.ndarray  # int32[n], index into stage_names
    input_tokens: np.ndarray  # int32[n], >= 1: the prompt, template and context included
    output_tokens: np.ndarray  # int32[n], >= 1
    template: np.ndarray  # int32[n], id of the prompt prefix shared by calls of a kind; -1 = none
    template_tokens: np.ndarray  # int32[n], its length; 0 = none
    context: np.ndarray  # int32[n], id of the shared segment right behind the template (a schema); -1 = none
    context_tokens: np.ndarray  # int32[n], its length; template + context <= input - 1
    tool_time_s: np.ndarray  # float64[n], from the last prerequisite's end (or the arrival) to the release
    succ_offsets: np.ndarray  # int32[n + 1], CSR: calls that wait for call i are
    successors: np.ndarray  # int32[e], successors[succ_offsets[i]:succ_offsets[i + 1]], ascending
    query_offsets: np.ndarray  # int32[q + 1], calls of query i: query_offsets[i]:query_offsets[i + 1]
    arrival_s: np.ndarray  # float64[q], nondecreasing, >= 0; NaN everywhere = no arrivals yet
    tenant: np.ndarray  # int32[q], index into tenant_names
    tenant_names: tuple[str, ...]
    slo_scale: np.ndarray  # float64[q], multiplies the run's base SLO

    def __post_init__(self) -> None:
        _normalise(self)
        _validate(self)

    # ---- sizes and derived arrays --------------------------------------------------------------------------

    @property
    def n_calls(self) -> int:
        """Number of LLM calls, n."""
        return len(self.stage)

    @property
    def n_queries(self) -> int:
        """Number of queries, q."""
        return len(self.query_offsets) - 1

    @property
    def has_arrivals(self) -> bool:
        """Whether every query has an arrival time (otherwise none has)."""
        return not np.isnan(self.arrival_s[0])

    @cached_property
    def query(self) -> np.ndarray:
        """int32[n]: the query each call belongs to."""
        owner = np.repeat(np.arange(self.n_queries, dtype=np.int32), np.diff(self.query_offsets))
        return _frozen(owner)

    @cached_property
    def n_predecessors(self) -> np.ndarray:
        """int32[n]: how many calls each call waits for."""
        return _frozen(np.bincount(self.successors, minlength=self.n_calls).astype(np.int32))

    def stage_id(self, stage: str) -> int:
        """The index of a stage name; InputError when the workload has no such stage."""
        if stage not in self.stage_names:
            raise InputError(
                f"workload {self.name!r} has no stage {stage!r}; it has {', '.join(self.stage_names)}"
            )
        return self.stage_names.index(stage)

    # ---- workloads made from this one ----------------------------------------------------------------------

    def with_arrivals(self, arrival_s: np.ndarray) -> Workload:
        """The same queries arriving at ``arrival_s`` (float64[q], seconds, nondecreasing)."""
        return replace(self, arrival_s=arrival_s)

    def with_tenants(
        self, tenant: np.ndarray, names: Sequence[str], slo_scale: np.ndarray | float = 1.0
    ) -> Workload:
        """The same queries with tenants (int32[q]), their names, and SLO scales (float64[q], or one for
        all)."""
        scale = np.full(self.n_queries, float(slo_scale)) if np.ndim(slo_scale) == 0 else slo_scale
        return replace(self, tenant=tenant, tenant_names=tuple(names), slo_scale=scale)

    def with_prefixes(self, template: np.ndarray, template_tokens: np.ndarray) -> Workload:
        """The same calls with other shared templates (int32[n] ids, -1 = none, and their lengths), and no contexts."""
        none = np.full(self.n_calls, -1)
        return replace(
            self,
            template=template,
            template_tokens=template_tokens,
            context=none,
            context_tokens=np.zeros(self.n_calls),
        )

    def take(self, query_indices: np.ndarray) -> Workload:
        """The named queries, in that order, repeats allowed. A repeat keeps its template and context ids, so
        prefix caching sees it as the same text. When there are arrivals the queries are put in order of
        arrival."""
        picked = np.asarray(query_indices)
        if picked.ndim != 1 or len(picked) == 0 or picked.dtype.kind not in "iu":
            raise InputError(f"workload {self.name!r}: take() needs a non-empty list of query indices")
        picked = picked.astype(np.int64)
        bad = (picked < 0) | (picked >= self.n_queries)
        if bad.any():
            raise InputError(
                f"workload {self.name!r}: take() got query {picked[bad][0]}; "
                f"it has queries 0 to {self.n_queries - 1}"
            )
        if self.has_arrivals:
            picked = picked[np.argsort(self.arrival_s[picked], kind="stable")]
        calls_each = np.diff(self.query_offsets)[picked].astype(np.int64)
        calls = concat_ranges(self.query_offsets[picked], calls_each)
        offsets = np.concatenate([[0], np.cumsum(calls_each)])
        fan_out = np.diff(self.succ_offsets)[calls].astype(np.int64)
        kept = concat_ranges(self.succ_offsets[calls], fan_out)
        # an edge stays inside its query, so it moves as far as the query's first call does
        shift = np.repeat(np.repeat(offsets[:-1] - self.query_offsets[picked], calls_each), fan_out)
        return replace(
            self,
            **{field: getattr(self, field)[calls] for field in (*_CALL_INT, "tool_time_s")},
            succ_offsets=np.concatenate([[0], np.cumsum(fan_out)]),
            successors=self.successors[kept] + shift,
            query_offsets=offsets,
            arrival_s=self.arrival_s[picked],
            tenant=self.tenant[picked],
            slo_scale=self.slo_scale[picked],
        )

    def renamed(self, name: str) -> Workload:
        """The same workload under another name."""
        return replace(self, name=name)

    def equals(self, other: Workload) -> bool:
        """Whether every field is equal (NaN arrivals count as equal)."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, np.ndarray):
                if not np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f"):
                    return False
            elif mine != theirs:
                return False
        return True

    def __repr__(self) -> str:
        arrivals = "with arrivals" if self.has_arrivals else "no arrivals"
        return f"Workload({self.name!r}, {self.n_queries} queries, {self.n_calls} calls, {arrivals})"


def concat(workloads: Sequence[Workload], name: str | None = None, same_templates: bool = False) -> Workload:
    """Several workloads as one. Stages and tenants are matched by name.

    ``same_templates=True`` says that a template id means the same prompt in all of them (checked by its
    length); otherwise templates are kept apart. Contexts are always kept apart. With arrivals, queries are
    merged in order of arrival; either all of the workloads or none must have them.
    """
    workloads = list(workloads)
    if not workloads:
        raise InputError("concat() needs at least one workload")
    if len({w.has_arrivals for w in workloads}) > 1:
        without = next(w.name for w in workloads if not w.has_arrivals)
        raise InputError(
            f"concat(): workload {without!r} has no arrivals but others have; give all of them, or none"
        )
    stage_names = tuple(dict.fromkeys(stage for w in workloads for stage in w.stage_names))
    tenant_names = tuple(dict.fromkeys(tenant for w in workloads for tenant in w.tenant_names))

    columns: dict[str, list[np.ndarray]] = {}

    def put(field: str, values: np.ndarray) -> None:
        columns.setdefault(field, []).append(values)

    first_call = first_edge = next_template = next_context = 0
    for w in workloads:
        put("stage", np.array([stage_names.index(s) for s in w.stage_names], np.int64)[w.stage])
        put("tenant", np.array([tenant_names.index(t) for t in w.tenant_names], np.int64)[w.tenant])
        put("template", np.where(w.template < 0, -1, w.template + np.int64(next_template)))
        put("context", np.where(w.context < 0, -1, w.context + np.int64(next_context)))
        if not same_templates:
            next_template += int(w.template.max()) + 1
        next_context += int(w.context.max()) + 1
        put("succ_offsets", w.succ_offsets[:-1].astype(np.int64) + first_edge)
        put("successors", w.successors.astype(np.int64) + first_call)
        put("query_offsets", w.query_offsets[:-1].astype(np.int64) + first_call)
        for field in ("input_tokens", "output_tokens", "template_tokens", "context_tokens", "tool_time_s"):
            put(field, getattr(w, field))
        put("arrival_s", w.arrival_s)
        put("slo_scale", w.slo_scale)
        first_call += w.n_calls
        first_edge += len(w.successors)
    put("succ_offsets", np.array([first_edge]))
    put("query_offsets", np.array([first_call]))

    merged = {field: np.concatenate(parts) for field, parts in columns.items()}
    arrival_s = merged.pop("arrival_s")
    whole = Workload(
        name="+".join(w.name for w in workloads) if name is None else name,
        stage_names=stage_names,
        tenant_names=tenant_names,
        arrival_s=np.full(len(arrival_s), np.nan),
        **merged,
    )
    if not workloads[0].has_arrivals:
        return whole
    order = np.argsort(arrival_s, kind="stable")
    return whole.take(order).with_arrivals(arrival_s[order])


# ---- checks ------------------------------------------------------------------------------------------------


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def _normalise(w: Workload) -> None:
    """Give every field its type, as arrays of the workload's own that cannot be written."""
    what = f"workload {w.name!r}"
    if not isinstance(w.name, str) or not w.name:
        raise InputError(f"workload name is {w.name!r}; it must be a non-empty string")
    for field in ("stage_names", "tenant_names"):
        names = getattr(w, field)
        if isinstance(names, str) or not all(isinstance(n, str) and n for n in names) or not names:
            raise InputError(f"{what}: {field} is {names!r}; it must be a tuple of non-empty strings")
        if len(set(names)) != len(names):
            raise InputError(f"{what}: {field} repeats a name ({', '.join(names)}); names must be distinct")
        object.__setattr__(w, field, tuple(names))
    for field in (*_CALL_INT, "succ_offsets", "successors", "query_offsets", "tenant"):
        object.__setattr__(w, field, _integers(getattr(w, field), f"{what}: {field}"))
    for field in ("tool_time_s", "arrival_s", "slo_scale"):
        object.__setattr__(w, field, _floats(getattr(w, field), f"{what}: {field}"))


def _own(array: np.ndarray, given: object) -> np.ndarray:
    """A read-only array that nobody else can write to; a read-only array that owns its memory is shared."""
    somebody_writes = array is given and array.flags.writeable
    if somebody_writes or not array.flags.owndata or not array.flags.c_contiguous:
        array = array.copy()
    return _frozen(array)


def _integers(values: object, what: str) -> np.ndarray:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise InputError(f"{what} must be a list of whole numbers, not {array.ndim}-d {array.dtype}")
    if array.dtype.kind == "f":
        bad = ~np.isfinite(array) | (array != np.floor(array))
        if bad.any():
            at = int(np.argmax(bad))
            raise InputError(f"{what}[{at}] is {array[at]}; it must be a whole number")
    if array.dtype != np.int32:
        bad = (array > _INT32_MAX) | (array < -_INT32_MAX)
        if bad.any():
            at = int(np.argmax(bad))
            raise InputError(f"{what}[{at}] is {array[at]}; it must fit in 32 bits")
    return _own(array.astype(np.int32, copy=False), values)


def _floats(values: object, what: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise InputError(f"{what} must be a list of numbers, not {array.ndim}-d {array.dtype}")
    return _own(array.astype(np.float64, copy=False), values)


def _validate(w: Workload) -> None:
    """InputError for the first thing that is wrong, naming the query and the call."""
    what = f"workload {w.name!r}"
    n, q = w.n_calls, w.n_queries
    if n == 0 or q < 1:
        raise InputError(f"{what} holds no calls; it needs at least one query with one call")
    for field in (*_CALL_INT, "tool_time_s"):
        if len(getattr(w, field)) != n:
            raise InputError(
                f"{what}: {field} has {len(getattr(w, field))} entries; it needs {n}, one a call"
            )
    for field in ("arrival_s", "tenant", "slo_scale"):
        if len(getattr(w, field)) != q:
            raise InputError(
                f"{what}: {field} has {len(getattr(w, field))} entries; it needs {q}, one a query"
            )

    _validate_queries(w, what)
    _validate_calls(w, what)
    _validate_prefixes(w, what)
    _validate_dependencies(w, what)


def _validate_queries(w: Workload, what: str) -> None:
    n, q = w.n_calls, w.n_queries
    if w.query_offsets[0] != 0 or w.query_offsets[-1] != n:
        raise InputError(
            f"{what}: query_offsets runs from {w.query_offsets[0]} to {w.query_offsets[-1]}; "
            f"it must run from 0 to the number of calls, {n}"
        )
    _refuse(
        np.diff(w.query_offsets) < 1,
        lambda i: f"{what}: query {i} has no calls; every query needs at least one",
    )
    _refuse(
        (w.tenant < 0) | (w.tenant >= len(w.tenant_names)),
        lambda i: f"{what}: query {i}: tenant is {w.tenant[i]}; it must be 0 to {len(w.tenant_names) - 1}",
    )
    _refuse(
        ~(np.isfinite(w.slo_scale) & (w.slo_scale > 0)),
        lambda i: f"{what}: query {i}: slo_scale is {w.slo_scale[i]}; it must be a finite number above 0",
    )
    missing = np.isnan(w.arrival_s)
    if missing.all():
        return
    _refuse(
        missing,
        lambda i: (
            f"{what}: query {i}: arrival_s is missing while other queries have one; give all {q}, or none"
        ),
    )
    _refuse(
        ~(np.isfinite(w.arrival_s) & (w.arrival_s >= 0)),
        lambda i: f"{what}: query {i}: arrival_s is {w.arrival_s[i]}; it must be finite and not negative",
    )
    _refuse(
        np.diff(w.arrival_s) < 0,
        lambda i: (
            f"{what}: query {i + 1}: arrival_s is {w.arrival_s[i + 1]}, before query {i}'s {w.arrival_s[i]}; "
            "queries must be in order of arrival"
        ),
    )


def _validate_calls(w: Workload, what: str) -> None:
    def wrong(bad: np.ndarray, field: str, right: str) -> None:
        _refuse(
            bad,
            lambda i: f"{what}: {_call_name(w, i)}: {field} is {getattr(w, field)[i]}; it must be {right}",
        )

    wrong((w.stage < 0) | (w.stage >= len(w.stage_names)), "stage", f"0 to {len(w.stage_names) - 1}")
    wrong(w.input_tokens < 1, "input_tokens", "at least 1")
    wrong(w.output_tokens < 1, "output_tokens", "at least 1")
    wrong(w.template < -1, "template", "an id from 0, or -1 for none")
    wrong(w.context < -1, "context", "an id from 0, or -1 for none")
    wrong(w.template_tokens < 0, "template_tokens", "0 or more")
    wrong(w.context_tokens < 0, "context_tokens", "0 or more")
    wrong((w.template < 0) & (w.template_tokens > 0), "template_tokens", "0 when the call has no template")
    wrong((w.context < 0) & (w.context_tokens > 0), "context_tokens", "0 when the call has no context")
    wrong(~(np.isfinite(w.tool_time_s) & (w.tool_time_s >= 0)), "tool_time_s", "finite and not negative")
    _refuse(
        w.template_tokens.astype(np.int64) + w.context_tokens > w.input_tokens - 1,
        lambda i: (
            f"{what}: {_call_name(w, i)}: template_tokens {w.template_tokens[i]} and context_tokens "
            f"{w.context_tokens[i]} must add up to less than input_tokens, {w.input_tokens[i]}"
        ),
    )


def _validate_prefixes(w: Workload, what: str) -> None:
    """One id, one length: calls that share a prefix must agree on how long it is."""
    first = _first_of(w.template.astype(np.int64) + 1)
    _refuse(
        w.template_tokens != w.template_tokens[first],
        lambda i: (
            f"{what}: {_call_name(w, i)}: template {w.template[i]} has {w.template_tokens[i]} tokens but "
            f"{w.template_tokens[first[i]]} in {_call_name(w, first[i])}; one template has one length"
        ),
    )
    n_contexts = int(w.context.max()) + 2
    key = (w.template.astype(np.int64) + 1) * n_contexts + w.context + 1
    first_pair = _first_of(key)
    _refuse(
        w.context_tokens != w.context_tokens[first_pair],
        lambda i: (
            f"{what}: {_call_name(w, i)}: context {w.context[i]} behind template {w.template[i]} has "
            f"{w.context_tokens[i]} tokens but "
            f"{w.context_tokens[first_pair[i]]} in {_call_name(w, first_pair[i])}; "
            "one context behind one template has one length"
        ),
    )


def _first_of(key: np.ndarray) -> np.ndarray:
    """For each entry, the index of some entry with the same key (the first one); keys are >= 0."""
    n = len(key)
    top = int(key.max()) + 1
    if top <= 8 * n + 1024:  # dense ids: a table is much faster than a sort
        table = np.zeros(top, np.int64)
        table[key[::-1]] = np.arange(n - 1, -1, -1)  # the last write wins, which is the first entry
        return table[key]
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first[inverse]


def _validate_dependencies(w: Workload, what: str) -> None:
    n, e = w.n_calls, len(w.successors)
    offsets = w.succ_offsets
    if len(offsets) != n + 1:
        raise InputError(
            f"{what}: succ_offsets has {len(offsets)} entries; it needs {n + 1}, one a call and one more"
        )
    if offsets[0] != 0 or offsets[-1] != e or np.any(np.diff(offsets) < 0):
        raise InputError(f"{what}: succ_offsets must grow from 0 to the number of dependencies, {e}")
    before, after = edges(offsets, w.successors)
    _refuse(
        (after < 0) | (after >= n),
        lambda k: (
            f"{what}: {_call_name(w, before[k])} has the successor {after[k]}, which does not exist; "
            f"calls are 0 to {n - 1}"
        ),
    )
    query = w.query
    _refuse(
        query[before] != query[after],
        lambda k: (
            f"{what}: {_call_name(w, before[k])} has the successor {_call_name(w, after[k])}; "
            "a dependency must stay inside one query"
        ),
    )
    same_call = before[1:] == before[:-1]
    if np.any(same_call & (after[1:] <= after[:-1])):  # not ascending: sort, then repeats lie side by side
        object.__setattr__(w, "successors", _frozen(csr(n, before, after)[1]))
        after = w.successors
    _refuse(
        same_call & (after[1:] == after[:-1]),
        lambda k: (
            f"{what}: {_call_name(w, before[k])} names the successor {_call_name(w, after[k])} twice; "
            "name it once"
        ),
    )
    backward = after <= before
    if backward.any():
        refuse_cycle(offsets, w.successors, w.query_offsets, what)
        _refuse(
            backward,
            lambda k: (
                f"{what}: {_call_name(w, after[k])} comes before its prerequisite "
                f"{_call_name(w, before[k])}; "
                "put prerequisites first"
            ),
        )


def _call_name(w: Workload, call: int) -> str:
    """Where a call is, in words: its query, and its place in the query."""
    query = int(np.searchsorted(w.query_offsets, call, side="right")) - 1
    stage = int(w.stage[call])
    name = f" ({w.stage_names[stage]})" if 0 <= stage < len(w.stage_names) else ""
    return f"query {query} call {call - int(w.query_offsets[query])}{name}"


def _refuse(bad: np.ndarray, message) -> None:
    """InputError with ``message(index of the first bad entry)`` when any entry is bad."""
    if bad.any():
        raise InputError(message(int(np.argmax(bad))))
