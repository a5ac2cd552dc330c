"""The gateway: what it adds to a call, by the rate; and what one decision costs.

The same calls, sent as an open loop (exponential gaps) to fast stub servers directly, through the gateway, and through
`vllm-router` (PyPI) where that is installed; in turns of a second, one of each to a round, so that all see the same machine.

Gateway and router are held on one core (each alone on it in its turn); load generator and stub share the others, one of them
on a machine of two. What these two cost is in the direct calls too, and so drops out of the difference. A call's time begins
when it is really sent: a generator that is late is not the gateway's fault. But a generator that was held up may also have
read late: rounds in which it was, or in which other processes used the gateway's core, are run again. Waiting inside the
gateway counts, as calls do not wait for each other's answers.

Added = the difference of the medians over all calls, with its 95 % interval over the rounds; for the 99th percentiles the
median of the rounds' differences, with the least and the greatest.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from hexrepro.cluster import load_cluster
from hexrepro.errors import InputError
from hexrepro.report.intervals import mean_interval

RATES = (100, 500, 1000)
ROUNDS = 8
SECONDS = 1.0
# a round is run again if in a turn more than 1 % of the calls were sent later than this,
LATE_S = 0.005
# or other processes took more than this share of the gateway's core
OTHERS = 0.1
INSTANCES = 4
DECISIONS = 3000

_PROMPT = "SELECT name FROM singer WHERE age > 30; " * 50  # 2 000 characters


def run() -> dict[str, float]:
    """Measure, print, and return the figures."""
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    figures = decisions(console)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with contextlib.ExitStack() as stack:
        ports, stub = stack.enter_context(_stub(cores))
        targets = {"direct": (ports[0], stub), "gateway": stack.enter_context(_gateway(ports, cores))}
        if shutil.which("vllm-router"):
            targets["vllm-router"] = stack.enter_context(_router(ports, cores))
        stack.enter_context(_held_on(cores[1:2]))
        figures |= _added(console, targets, cores[0] if len(cores) > 1 else None)
    return figures


# ------------------------------------------------------------------------------------------ decisions


def decisions(console: Console) -> dict[str, float]:
    """Microseconds that a call's arrival costs in the coordinator, by the number of instances."""
    from hexrepro.serving.coordinator import Coordinator

    table = Table("instances", "kinds", "P50, µs", "P99, µs", title="One decision (hexgen_flow)", box=None)
    figures = {}
    for instances, unlike in ((4, False), (256, False), (256, True)):
        cluster = load_cluster("hetero2", "silicon", scale_out=instances // 4)
        of = Coordinator(cluster, "hexgen_flow")
        if unlike:  # as if the speed of each had been learned
            for m in range(instances):
                of.believe(m, 1.0 + m / 1000)
        took = np.array([_decide(of, i) for i in range(DECISIONS)])[DECISIONS // 5 :] * 1e6
        p50, p99 = np.quantile(took, [0.5, 0.99])
        kinds = len(set(of.views["kind"].tolist()))
        table.add_row(str(instances), str(kinds), f"{p50:.0f}", f"{p99:.0f}")
        figures[f"decision µs, {instances} instances, {kinds} kinds"] = float(p50)
    console.print(table)
    return figures


def _decide(of, i: int) -> float:
    began = time.perf_counter()
    placement = of.call_arrived(f"q{i % 100}", f"stage{i % 7}", 1000 + i % 50, i * 0.01)
    took = time.perf_counter() - began
    of.started(placement.call, i * 0.01)
    of.first_token(placement.call, i * 0.01)
    of.finished(placement.call, i * 0.01 + 1.0, 50)
    return took


# ------------------------------------------------------------------------------------------ processes


@contextlib.contextmanager
def _process(arguments: list[str], cores: list[int], **options) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **options
    )
    if cores:
        os.sched_setaffinity(process.pid, cores)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _held_on(cores: list[int]) -> Iterator[None]:
    """This process, the load generator, keeps to these cores, and does not stop to collect garbage."""
    before = os.sched_getaffinity(0) if cores else None
    if cores:
        os.sched_setaffinity(0, cores)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if before:
            os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _stub(cores: list[int]) -> Iterator[tuple[list[int], int]]:
    """(ports, process)"""
    arguments = [sys.executable, "-m", "hexrepro.benchmarks.stub_server", str(INSTANCES)]
    with _process(arguments, cores[2:] or cores[1:]) as process:
        yield [int(port) for port in process.stdout.readline().split()], process.pid


@contextlib.contextmanager
def _gateway(ports: list[int], cores: list[int]) -> Iterator[tuple[int, int]]:
    """(port, process)"""
    gpus = [spec.gpu for spec in load_cluster("hetero2", "silicon").instances]
    entries = [
        f"  - {{gpu: {gpu}, url: 'http://127.0.0.1:{p}'}}\n" for gpu, p in zip(gpus, ports, strict=True)
    ]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cluster.yaml"
        file.write_text("name: stubs\nmodel: llama-3.1-70b\nmodels: [m]\ninstances:\n" + "".join(entries))
        arguments = [sys.executable, "-m", "hexrepro.serving", f"cluster={file}", "port=0"]
        with _process(arguments, cores[:1]) as process:
            line = process.stdout.readline()
            if not line:
                raise InputError(
                    "benchmark: the gateway did not start; try python -m hexrepro.serving --help"
                )
            yield int(line.split("/v1")[0].rsplit(":", 1)[1]), process.pid


@contextlib.contextmanager
def _router(ports: list[int], cores: list[int]) -> Iterator[tuple[int, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    urls = [f"http://127.0.0.1:{p}" for p in ports]
    arguments = ["vllm-router", "--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port)]
    with _process([*arguments, "--policy", "round_robin"], cores[:1]) as process:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        time.sleep(1.0)  # it looks at its workers first
        yield port, process.pid


def _cpu_s(pid: int | None) -> float:
    """Processor time that a process has used; NaN where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return math.nan


def _busy_s(core: int | None) -> float:
    """Time that a core has worked for processes, those of other virtual machines included; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text().splitlines():
            if line.startswith(f"cpu{core} "):
                user, nice, system, _idle, _wait, _irq, _softirq, steal = map(int, line.split()[1:9])
                return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
    return 0.0


# ------------------------------------------------------------------------------------------ load


class _Client(asyncio.Protocol):
    """One kept-alive connection; `ask` sends a call and waits for all of its answer."""

    def connection_made(self, transport) -> None:
        self._transport = transport

    async def ask(self, request: bytes) -> tuple[float, float]:
        """(seconds to the first piece of the answer, seconds to its end)"""
        self._received, self._first_s, self._left = b"", 0.0, None
        self._done = asyncio.get_running_loop().create_future()
        self._began_s = time.perf_counter()
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        self._received += data
        if self._left is None:
            head, found, body = self._received.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self._done.set_exception(RuntimeError(head.decode(errors="replace")[:200]))
                return
            lower = head.lower()
            at = lower.find(b"content-length:")
            self._left = int(lower[at + 15 :].split(b"\r\n", 1)[0]) + len(head) + 4 if at >= 0 else -1
            if not body:
                return
        if not self._first_s:
            self._first_s = now_s - self._began_s
        whole = self._received.endswith(b"0\r\n\r\n") if self._left < 0 else len(self._received) >= self._left
        if whole and not self._done.done():
            self._done.set_result((self._first_s, now_s - self._began_s))

    def connection_lost(self, error) -> None:
        self._transport = None
        if not getattr(self, "_done", None) or not self._done.done():
            with contextlib.suppress(AttributeError):
                self._done.set_exception(ConnectionResetError("the server closed the connection"))

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()


class _Load:
    """An open loop of calls to one port."""

    def __init__(self, port: int, stream: bool) -> None:
        self._port, self._idle = port, []
        self._stream = b"true" if stream else b"false"
        self._sent = 0

    def _request(self) -> bytes:
        body = (
            b'{"model":"m","stream":' + self._stream + b',"max_tokens":8,"messages":[{"role":"user","content":"'
            + _PROMPT.encode() + b'"}]}'
        )  # fmt: skip
        self._sent += 1
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"X-Hexrepro-Query: %d-%d\r\nX-Hexrepro-Stage: stage%d\r\nContent-Length: %d\r\n\r\n"
            % (self._port, self._sent // 8, self._sent % 8, len(body))
        ) + body

    async def _one(self, times: list[tuple[float, float]]) -> None:
        connection = None
        while self._idle and connection is None:
            connection = self._idle.pop()
            if not connection.usable:
                connection = None
        if connection is None:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Client, "127.0.0.1", self._port
            )
        times.append(await connection.ask(self._request()))
        self._idle.append(connection)

    async def run(self, rate: float, seconds: float, rng: np.random.Generator) -> tuple[np.ndarray, float]:
        """float64[n, 2], (first piece, end) of each call; and how late calls were sent, P99 in seconds."""
        due = np.cumsum(rng.exponential(1.0 / rate, int(rate * seconds)))
        times: list[tuple[float, float]] = []
        late, tasks = [], []
        began_s = time.perf_counter()
        for at in due:
            wait_s = began_s + at - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            late.append(time.perf_counter() - began_s - at)
            tasks.append(asyncio.create_task(self._one(times)))
        await asyncio.gather(*tasks)
        return np.array(times), float(np.quantile(late, 0.99))


Targets = dict[str, tuple[int, int]]  # name -> (port, process)


@dataclass
class _Measured:
    """One rate and kind of answer.

    turns     name -> float64[n, 2] a round: seconds to the first piece and to the end of each call
    cpu_s     name -> processor time a call (`direct`: of the stub)
    late_s    how late calls were sent, P99 of the worst turn that counts
    others    greatest share of the gateway's core that other processes took in a turn that counts
    again     rounds that were run again
    client    greatest share of a core that load generator and stub took together in a turn
    """

    turns: dict[str, list[np.ndarray]]
    cpu_s: dict[str, float]
    late_s: float = 0.0
    others: float = 0.0
    again: int = 0
    client: float = 0.0


async def _measure(targets: Targets, rate: float, stream: bool, core: int | None) -> _Measured:
    """`core`: the gateway's, None if it has none of its own."""
    rng = np.random.default_rng(1)
    loads = {name: _Load(port, stream) for name, (port, _) in targets.items()}
    for load in loads.values():
        await load.run(rate, SECONDS, rng)  # opens connections
    stub = targets["direct"][1]
    found = _Measured({name: [] for name in targets}, dict.fromkeys(targets, 0.0))
    while len(found.turns["direct"]) < ROUNDS:
        turns, used_s, latest_s, client, others = {}, {}, 0.0, 0.0, 0.0
        for name, load in loads.items():
            busy_s = _busy_s(core)
            before_s, ours_s, began_s = (
                _cpu_s(targets[name][1]),
                time.process_time() + _cpu_s(stub),
                time.perf_counter(),
            )
            turns[name], late_s = await load.run(rate, SECONDS, rng)
            took_s = time.perf_counter() - began_s
            used_s[name] = _cpu_s(targets[name][1]) - before_s
            known_s = 0.0 if name == "direct" else used_s[name]
            others = max(others, (_busy_s(core) - busy_s - known_s) / took_s)
            client = max(client, (time.process_time() + _cpu_s(stub) - ours_s) / took_s)
            latest_s = max(latest_s, late_s)
        if (latest_s > LATE_S or others > OTHERS) and found.again < ROUNDS:
            found.again += 1
            continue
        found.late_s, found.client = max(found.late_s, latest_s), max(found.client, client)
        found.others = max(found.others, others)
        for name in targets:
            found.turns[name].append(turns[name])
            found.cpu_s[name] += used_s[name]
    for name, turns in found.turns.items():
        found.cpu_s[name] /= sum(map(len, turns))
    return found


def _added(console: Console, targets: Targets, core: int | None) -> dict[str, float]:
    try:
        from uvloop import run as run_loop
    except ModuleNotFoundError:
        run_loop = asyncio.run
    table = Table(
        "calls/s", "answer", "through", "P50, ms", "P99, ms", "added P50, ms", "added P99, ms", "first token, added P50",
        "its CPU, ms a call",
        title=f"Latency of a call of {len(_PROMPT)} characters and 8 tokens, {ROUNDS} rounds of {SECONDS:g} s a turn",
        box=None,
    )  # fmt: skip
    figures = {}
    all_measured = []
    for stream in (False, True):
        for rate in RATES:
            with console.status(f"{rate} calls/s"):
                measured = run_loop(_measure(targets, rate, stream, core))
            all_measured.append(measured)
            for name, turns in measured.turns.items():
                p50, p99 = np.quantile(1e3 * np.concatenate(turns)[:, 1], [0.5, 0.99])
                row = [str(rate), "stream" if stream else "whole", name, f"{p50:.2f}", f"{p99:.2f}"]
                if name == "direct":
                    table.add_row(*row, "", "", "", "")
                    continue
                direct = measured.turns["direct"]
                more50, low, high = _difference(turns, direct, 0.5, 1)
                more99 = _differences(turns, direct, 0.99, 1)
                first, _, _ = _difference(turns, direct, 0.5, 0)
                table.add_row(
                    *row, f"{more50:.2f} ({low:.2f}–{high:.2f})",
                    f"{np.median(more99):.2f} ({more99.min():.2f}–{more99.max():.2f})",
                    f"{first:.2f}" if stream else "", f"{1e3 * measured.cpu_s[name]:.2f}",
                )  # fmt: skip
                key = f"{name}, {rate}/s, {'stream' if stream else 'whole'}"
                figures[f"{key}: added P50 ms"] = more50
                figures[f"{key}: added P99 ms"] = float(np.median(more99))
                figures[f"{key}: CPU ms"] = 1e3 * measured.cpu_s[name]
    console.print(table)
    if hasattr(os, "getloadavg"):
        console.print(f"Load average of the machine, this benchmark included: {os.getloadavg()[0]:.1f}.")
    console.print(
        f"Calls were sent at most {1e3 * max(m.late_s for m in all_measured):.1f} ms late (P99 of the worst turn);"
        f" {sum(m.again for m in all_measured)} rounds were run again. Other processes took at most"
        f" {max(m.others for m in all_measured):.0%} of the gateway's core, load generator and stub"
        f" {max(m.client for m in all_measured):.0%} of theirs."
    )
    return figures


def _differences(turns: list[np.ndarray], direct: list[np.ndarray], q: float, column: int) -> np.ndarray:
    """float64[rounds], milliseconds: the quantile of each turn less that of the direct calls of its round."""
    return np.array(
        [
            1e3 * (np.quantile(a[:, column], q) - np.quantile(b[:, column], q))
            for a, b in zip(turns, direct, strict=True)
        ]
    )


def _difference(
    turns: list[np.ndarray], direct: list[np.ndarray], q: float, column: int
) -> tuple[float, float, float]:
    """Milliseconds: the difference over all calls, and its interval over the rounds."""
    whole = np.quantile(np.concatenate(turns)[:, column], q) - np.quantile(
        np.concatenate(direct)[:, column], q
    )
    around = mean_interval(_differences(turns, direct, q, column))
    return 1e3 * float(whole), float(around.low), float(around.high)
