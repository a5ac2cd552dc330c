"""Traces: how long a million calls take to load in each format, and to simulate.

The trace is Trace 1 (CHESS DAGs), larger, with Poisson arrivals. Formats that have no dependencies (Mooncake, Azure) hold
the same calls as queries of their own. Loads are measured in turns, in one process with everything imported; the simulated
cluster is Hetero-1 on one core, with as many queries as it can serve and with five times as many.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from hexrepro.workload import FORMATS, Workload, arrival_times, generate, read, write
from hexrepro.workload.formats.prefixes import to_blocks
from hexrepro.workload.workflow import load_workflow

QUERIES = 52_100  # some 19.2 calls each
ROUNDS = 3
BLOCK_TOKENS = 512  # of the hash ids written
SERVED_QPS, OVERLOAD = 0.4, 5  # what Hetero-1 serves of this trace, about


def run() -> dict[str, float]:
    """Measure, print, and return the figures."""
    console = Console()
    with tempfile.TemporaryDirectory() as directory, console.status("making the trace") as status:
        workload = generate("trace1", n_queries=QUERIES)
        workload = workload.with_arrivals(arrival_times("poisson", QUERIES, SERVED_QPS))
        files = {}
        for name, file in write_files(workload, Path(directory)):
            status.update(f"wrote {name}")
            files[name] = file
        loads: dict[str, list[float]] = {name: [] for name in files}
        for i in range(ROUNDS):
            for name, file in files.items():
                status.update(f"loading {name}, {i + 1}/{ROUNDS}")
                loads[name].append(_seconds(lambda file=file: read(file, strict=True)))
        sizes = {name: file.stat().st_size for name, file in files.items()}
        status.update("simulating")
        loaded = read(files["parquet"]).workload
        simulated = simulate(loaded)

    table = Table(
        "format",
        "file, MB",
        "load, s",
        "range",
        "calls/s",
        title=f"{workload.n_calls:,} calls loaded",
        box=None,
    )
    for name, times in loads.items():
        middle = statistics.median(times)
        table.add_row(
            name,
            f"{sizes[name] / 1e6:,.0f}",
            f"{middle:.2f}",
            f"{min(times):.2f}-{max(times):.2f}",
            f"{workload.n_calls / middle:,.0f}",
        )
    console.print(table)
    console.print()
    table = Table(
        "queries/s", "simulate, s", "calls/s", title="the same calls simulated, hexgen_flow", box=None
    )
    for rate_qps, seconds in simulated.items():
        table.add_row(f"{rate_qps:g}", f"{seconds:.2f}", f"{workload.n_calls / seconds:,.0f}")
    console.print(table)
    figures = {f"load_{name}_s": statistics.median(times) for name, times in loads.items()}
    return figures | {f"simulate_at_{rate_qps:g}_qps_s": seconds for rate_qps, seconds in simulated.items()}


def write_files(w: Workload, directory: Path) -> Iterator[tuple[str, Path]]:
    """The workload in every format, as (name, file), one after the other."""
    for name, file in (
        ("parquet", "t.parquet"),
        ("agentic_mooncake", "t.jsonl"),
        ("released_json", "t.json"),
    ):
        write(w, directory / file, name, BLOCK_TOKENS)
        yield name, directory / file
    rows = {"mooncake": _mooncake, "azure": _azure, "call_log": _call_log, "workflow_csv": _workflow_csv}
    assert set(rows) | {"parquet", "agentic_mooncake", "released_json"} == set(FORMATS)
    for name, lines in rows.items():
        with (directory / name).open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines(w))
        yield name, directory / name


def simulate(w: Workload) -> dict[float, float]:
    """Seconds to simulate the workload once, by queries/s."""
    from hexrepro.cluster import load_cluster
    from hexrepro.simulator import simulate_grid

    cluster = load_cluster("hetero1", "silicon")

    def once(workload: Workload, rate_qps: float) -> None:
        times = (workload.arrival_s * (SERVED_QPS / rate_qps))[None]
        simulate_grid(workload, cluster, "hexgen_flow", arrivals_s=times, workers=1)

    once(w.take(np.arange(min(50, w.n_queries))), SERVED_QPS)  # compiles
    rates = (SERVED_QPS, SERVED_QPS * OVERLOAD)
    return {
        rate: statistics.median(_seconds(lambda rate=rate: once(w, rate)) for _ in range(ROUNDS))
        for rate in rates
    }


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _mooncake(w: Workload) -> Iterator[str]:
    ids, starts = to_blocks(
        w.template, w.template_tokens, w.context, w.context_tokens, w.input_tokens, BLOCK_TOKENS
    )
    arrival_ms = (w.arrival_s[w.query] * 1000).astype(np.int64).tolist()
    lengths = zip(arrival_ms, w.input_tokens.tolist(), w.output_tokens.tolist(), strict=True)
    starts = starts.tolist()
    for i, (ms, input_tokens, output_tokens) in enumerate(lengths):
        blocks = ids[starts[i] : starts[i + 1]].tolist()
        yield f'{{"timestamp": {ms}, "input_length": {input_tokens}, "output_length": {output_tokens}, "hash_ids": {blocks}}}'


def _azure(w: Workload) -> Iterator[str]:
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    since = np.datetime64("2023-11-16T18:17:03") + (w.arrival_s[w.query] * 1e6).astype("timedelta64[us]")
    times = np.datetime_as_string(since).tolist()
    for when, a, b in zip(times, w.input_tokens.tolist(), w.output_tokens.tolist(), strict=True):
        yield f"{when.replace('T', ' ')}0,{a},{b}"


def _call_log(w: Workload) -> Iterator[str]:
    """As if each call took a second, and those beside each other began together."""
    waits: list[list[int]] = [[] for _ in range(w.n_calls)]
    end_s = [0.0] * w.n_calls
    offsets, successors = w.succ_offsets.tolist(), w.successors.tolist()
    arrival_s = (w.arrival_s[w.query] + 1.7e9).tolist()
    stages = [w.stage_names[s] for s in w.stage.tolist()]
    columns = (
        w.query.tolist(),
        w.input_tokens.tolist(),
        w.template_tokens.tolist(),
        w.output_tokens.tolist(),
    )
    for i, (query, input_tokens, cached_tokens, output_tokens) in enumerate(zip(*columns, strict=True)):
        start_s = max([arrival_s[i], *(end_s[b] for b in waits[i])])  # prerequisites come first
        end_s[i] = start_s + 1.0
        for after in successors[offsets[i] : offsets[i + 1]]:
            waits[after].append(i)
        row = {
            "query": str(query),
            "call": i,
            "after": waits[i],
            "stage": stages[i],
            "tenant": "default",
            "slo_s": 60.0,
            "model": "m",
            "issued_s": start_s,
            "first_token_s": None,
            "finished_s": end_s[i],
            "input_tokens": input_tokens,
            "cached_tokens": cached_tokens,
            "output_tokens": output_tokens,
            "instance": "i",
            "ended": "done",
        }
        yield json.dumps(row, separators=(",", ":"))


def _workflow_csv(w: Workload) -> Iterator[str]:
    """Without the texts, which the script that writes such files has and we have not."""
    names = load_workflow("chess").released_names
    yield "Text2SQLRequest_id,step_name,input_length,output_length"
    columns = (w.query.tolist(), w.stage.tolist(), w.input_tokens.tolist(), w.output_tokens.tolist())
    for query, stage, a, b in zip(*columns, strict=True):
        yield f"Text2SQLRequest_{query + 1},{names[w.stage_names[stage]]},{a},{b}"
