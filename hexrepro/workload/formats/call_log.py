"""The call log that the gateway and agents write: JSON lines, a finished call a line.

Fields (see `hexrepro.serving.call_log.CallRecord`): query, call, after, stage, tenant, slo_s, issued_s, finished_s (Unix
seconds), input_tokens, cached_tokens, output_tokens, ended, model; others are passed over. Numbers of calls need only
differ inside a query, so that a log may go on after a restart. From these:

- A query arrives when its first call was issued; arrivals are seconds from the log's first call.
- A call's tool time is the time from the last end of what it waited for (or from its query's arrival) to its issue.
- A failed call (``ended`` is not done) has no true output. If the query went on and ended well, the call is taken out and
  those that waited for it wait for what it waited for; the time that it cost is part of their tool time. If the query's
  last call to end failed, what the query would have asked is not known: the query is left out, and counted.
- SLOs keep their ratios: scale 1 is the median of the queries' slo_s, and 1 where there is none.
- ``cached_tokens`` say how much was shared, not with what. The calls of a stage are taken to share a template of the
  median that was cached of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hexrepro.workload.dag import csr, levels
from hexrepro.workload.formats.build import Calls, build, distinct_pairs
from hexrepro.workload.formats.json_lines import read_jsonl
from hexrepro.workload.formats.report import Report, counted
from hexrepro.workload.formats.rows import Field, Rows, trace_name
from hexrepro.workload.types import Workload

_TOKENS = "a whole number of tokens from 1"
_TIME = "Unix time in seconds"
FIELDS = {
    "query": Field("text", "the id of the call's query"),
    "call": Field("int", "a number that no other call of its query has"),
    "after": Field("ints", "a list of calls of the query, by number"),
    "stage": Field("text", "the name of a stage"),
    "tenant": Field("text", "the name of a tenant"),
    "model": Field("text", "the name of a model"),
    "ended": Field("text", "done, failed, broken, rejected, cancelled or refused_REASON"),
    "slo_s": Field("float", "seconds, or null"),
    "issued_s": Field("float", _TIME),
    "finished_s": Field("float", _TIME),
    "input_tokens": Field("int", _TOKENS),
    "output_tokens": Field("int", _TOKENS),
    "cached_tokens": Field("int", "a whole number of tokens from 0, or null"),
}
CLOCK_S = 1e-3  # a call issued this much before the end of what it waited for is not worth a word


def read(path: Path, report: Report, block_tokens: int | None = None) -> Workload:
    """The reader of the registry."""
    rows = read_jsonl(path, report, FIELDS, cut_off_is_fine=True)
    n = len(rows)
    stage_names, stage = rows.words("stage", default="call")
    tenant_names, tenant = rows.words("tenant", default="default")
    ended_names, ended = rows.words("ended", default="done")
    _, query = rows.words("query")
    _, query = np.unique(query * len(tenant_names) + tenant, return_inverse=True)  # ids are a tenant's own
    done = np.array([name == "done" for name in ended_names], bool)[ended]
    _note_refused(report, ended_names, ended)
    issued_s, finished_s = rows.number("issued_s"), rows.number("finished_s")
    rows.refuse(finished_s < issued_s, "finished_s", "no earlier than issued_s")
    input_tokens = rows.whole("input_tokens", where=done)
    output_tokens = rows.whole("output_tokens", where=done)
    cached = rows.whole("cached_tokens", least=0, default=-1)
    before, after = _dependencies(rows, query)
    _refuse_unfinished(rows, query, done, finished_s)

    failed = ~done & ~rows.bad
    before, after = _without(failed, before, after, n)
    if failed.any():
        report.note(
            f"{counted(int(failed.sum()), 'failed call')} of queries that went on taken out; the time lost is tool time"
        )
    models = set(rows.columns["model"].drop_null().to_pylist())
    if len(models) > 1:
        report.note(f"calls of {len(models)} models ({', '.join(sorted(models)[:5])}) are taken together")
    start_s = np.full(int(query.max(initial=0)) + 1, np.inf)
    np.minimum.at(start_s, query[~rows.bad], issued_s[~rows.bad])
    calls = Calls(
        query=query,
        stage_names=stage_names,
        stage=stage,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        arrival_s=start_s[query],
        before=before,
        after=after,
        tool_time_s=_tool_times(rows, query, start_s, before, after, issued_s, finished_s),
        skip=failed,
        tenant_names=tenant_names,
        tenant=tenant,
        slo_scale=_slo_scale(rows, query),
        prefixes=lambda kept: _templates(report, stage[kept], input_tokens[kept], cached[kept]),
    )
    workload = build(trace_name(path), rows, calls)
    return workload.with_arrivals(workload.arrival_s - workload.arrival_s[0])


def _note_refused(report: Report, ended_names: tuple[str, ...], ended: np.ndarray) -> None:
    """Say how many calls the gateway turned away, and why: load that was there, and that a replay of the rest lacks."""
    counts = np.bincount(ended, minlength=len(ended_names))
    why = {
        name.removeprefix("refused_"): int(n)
        for name, n in zip(ended_names, counts, strict=True)
        if name.startswith("refused_")
    }
    if why:
        report.note(
            f"{counted(sum(why.values()), 'call')} turned away by the gateway ("
            + ", ".join(f"{reason} {n}" for reason, n in sorted(why.items()))
            + "): tried again, that is tool time; queries that ended so are left out"
        )


def _dependencies(rows: Rows, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(before, after)`` as rows, each pair once; refuses calls whose number is not their own, or that wait for what is
    not a call of their query."""
    import pandas as pd

    n = len(rows)
    right = rows.fields["call"].right
    rows.refuse(rows.missing("call"), "call", right)
    number = rows.columns["call"].fill_null(-1).to_numpy(zero_copy_only=False)
    code, numbers = pd.factorize(number)
    named = np.flatnonzero(~rows.bad)
    key = query[named] * np.int64(len(numbers)) + code[named]
    order = np.argsort(key, kind="stable")
    again = named[order[1:][key[order[1:]] == key[order[:-1]]]]
    twice = np.zeros(n, bool)
    twice[again] = True
    rows.refuse(twice, "call", right)

    keys, first = np.unique(key, return_index=True)
    values, offsets = rows.lists("after")
    after = np.repeat(np.arange(n), np.diff(offsets))
    wanted = pd.Index(numbers).get_indexer(values.to_numpy(zero_copy_only=False).astype(np.int64))
    before, fine = np.full(len(after), -1), wanted >= 0
    if len(keys):
        key = query[after] * np.int64(len(numbers)) + wanted
        at = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        fine &= keys[at] == key
        before[fine] = named[first][at[fine]]
    lost = np.zeros(n, bool)
    lost[after[~fine]] = True
    rows.refuse(lost, "after", "numbers of usable calls of the same query")
    before, after = distinct_pairs(before[fine], after[fine], n)
    stuck = levels(*csr(n, before, after)) < 0
    rows.refuse(stuck, "after", "free of cycles: through others it waits for a call that waits for itself")
    return before, after


def _refuse_unfinished(rows: Rows, query: np.ndarray, done: np.ndarray, finished_s: np.ndarray) -> None:
    """Refuse the last call of each query to end, if it did not end well."""
    order = np.lexsort((finished_s, query))
    last = order[np.append(query[order[1:]] != query[order[:-1]], True)] if len(order) else order
    unfinished = np.zeros(len(rows), bool)
    unfinished[last] = ~done[last]
    rows.refuse(unfinished, "ended", "done: it is the last call of its query, which is therefore not whole")


def _without(
    failed: np.ndarray, before: np.ndarray, after: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """The dependencies when failed calls are taken out and who waited for one waits for what it waited for."""
    import pandas as pd

    while len(before) and failed[before].any():
        through = failed[before]
        into = pd.DataFrame({"first": before, "failed": after})[failed[after]]
        out = pd.DataFrame({"failed": before[through], "then": after[through]})
        joined = into.merge(out, on="failed")
        # what failed and waits for a failed call stays until the next round
        before = np.concatenate([before[~through], joined["first"].to_numpy()])
        after = np.concatenate([after[~through], joined["then"].to_numpy()])
    before, after = distinct_pairs(before, after, n)
    return before[~failed[after]], after[~failed[after]]


def _tool_times(
    rows: Rows,
    query: np.ndarray,
    start_s: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    issued_s: np.ndarray,
    finished_s: np.ndarray,
) -> np.ndarray:
    """Seconds float64[n] from the last prerequisite's end, or the query's arrival, to the call's issue."""
    ready_s = np.full(len(query), -np.inf)
    np.maximum.at(ready_s, after, finished_s[before])
    free = np.isneginf(ready_s)
    ready_s[free] = start_s[query[free]]
    tool_s = issued_s - ready_s
    tool_s[rows.bad] = 0.0
    early = tool_s < -CLOCK_S
    if early.any():
        rows.report.note(
            f"{counted(int(early.sum()), 'call')} issued before the end of what it waited for, by up to {-tool_s.min():.3g} s; "
            "its tool time is 0"
        )
    return np.maximum(tool_s, 0.0)


def _slo_scale(rows: Rows, query: np.ndarray) -> np.ndarray:
    slo_s = rows.columns["slo_s"].to_numpy(zero_copy_only=False).astype(np.float64)
    rows.refuse(~np.isnan(slo_s) & ~(np.isfinite(slo_s) & (slo_s > 0)), "slo_s", "seconds above 0, or null")
    slo_s[rows.bad] = np.nan
    most = np.full(int(query.max(initial=0)) + 1, np.nan)
    np.fmax.at(most, query, slo_s)
    given = most[~np.isnan(most)]
    if len(given) == 0:
        return np.ones(len(query))
    middle = float(np.median(given))
    rows.report.note(f"SLOs keep their ratios; scale 1 is {middle:g} s, the median")
    return np.where(np.isnan(most), 1.0, most / middle)[query]


def _templates(
    report: Report, stage: np.ndarray, input_tokens: np.ndarray, cached: np.ndarray
) -> dict[str, np.ndarray]:
    """A template for each stage, as long as the median that was cached of its calls (-1 = not known)."""
    known = cached >= 0
    tokens = np.zeros(int(stage.max()) + 1, np.int64)
    for s in np.unique(stage[known]):
        tokens[s] = int(np.median(cached[known & (stage == s)]))
    has = (tokens[stage] > 0) & (input_tokens > tokens[stage])
    shared = np.where(has, tokens[stage], 0)
    if known.any():
        total = int(input_tokens[known].sum())
        report.note(
            f"{int(cached[known].sum()) / total:.1%} of the prompt tokens were cached; a template a stage of the median "
            f"stands for {int(shared[known].sum()) / total:.1%}"
        )
    none = np.full(len(stage), -1)
    return {
        "template": np.where(has, stage, -1),
        "template_tokens": shared,
        "context": none,
        "context_tokens": none + 1,
    }
