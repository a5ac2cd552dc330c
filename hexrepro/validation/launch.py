"""Real vLLM servers on this machine, started together and ended together.

    specs = [ServerSpec("a100-0", pace=LatencyModel(0.026, ...), pace_scale=0.3), ServerSpec("computing")]
    with launch(specs, "runs/servers") as servers:
        servers[0].url

A server with a `pace` sleeps modelled step times (`paced_worker.py`); one without computes. vLLM runs in a Python of its own,
which HEXREPRO_VLLM_PYTHON names. What the servers print goes to files. At the end of the block, however it ends, every process
that was started here is ended, and no other.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hexrepro.cluster.latency import LatencyModel
from hexrepro.cluster.types import InstanceSpec
from hexrepro.errors import InputError
from hexrepro.validation.paced_worker import VARIABLE
from hexrepro.validation.tiny_model import TinyModel, write_tiny_model

PYTHON_VARIABLE = "HEXREPRO_VLLM_PYTHON"
SCHEDULING = ("fcfs", "priority")
READY_S = 240.0  # by then a server is up: 20 to 40 s on a quiet core
STOP_S = 10.0  # from SIGTERM to SIGKILL; vLLM takes 2
POLL_S = 0.25


@dataclass(frozen=True)
class ServerSpec:
    """One server.

    model                   dimensions of a tiny random model, or what vLLM's --model takes
    pace, pace_scale        step times to sleep (LatencyModel) and a factor on all of them; None: compute
    kv_blocks, block_size   usable KV blocks and their tokens (blocks only with a tiny model; else see `arguments`); vLLM's
                            attention on CPUs, which a paced server has too, takes multiples of 32 tokens
    max_model_len           prompt and output together; None: what the model and its KV pool can hold
    stream_interval         tokens a streamed chunk holds; the first comes alone. Fewer chunks load the machine less
    cores                   cores that it may run on, by `taskset`; none given: all
    port                    0: any free one
    arguments               further arguments of vLLM's server
    """

    name: str
    model: TinyModel | str = field(default_factory=TinyModel)
    pace: LatencyModel | None = None
    pace_scale: float = 1.0
    kv_blocks: int = 4096
    block_size: int = 32
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    scheduling: str = "priority"
    prefix_caching: bool = True
    stream_interval: int = 1
    served_name: str = "hexrepro"
    host: str = "127.0.0.1"
    port: int = 0
    cores: tuple[int, ...] = ()
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        what = f"server {self.name!r}"
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.-]+", self.name):
            raise InputError(
                f"{what}: name must be of letters, digits, '-', '_' and '.'; it names the log file"
            )
        for name in ("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "stream_interval"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{what}: {name} is {value!r}; it must be a whole number of at least 1")
        if self.scheduling not in SCHEDULING:
            raise InputError(
                f"{what}: scheduling is {self.scheduling!r}; it must be one of {', '.join(SCHEDULING)}"
            )
        if not 0 <= self.port < 65536:
            raise InputError(f"{what}: port is {self.port!r}; it must be 1 to 65535, or 0 for any free one")
        if not self.pace_scale > 0:
            raise InputError(f"{what}: pace_scale is {self.pace_scale!r}; it must be above 0")
        if self.pace is not None and not isinstance(self.pace, LatencyModel):
            raise InputError(f"{what}: pace is {self.pace!r}; it must be a LatencyModel")

    @property
    def longest(self) -> int | None:
        """The most tokens that a call may have; None where only the server knows."""
        if self.max_model_len is not None or not isinstance(self.model, TinyModel):
            return self.max_model_len
        return min(self.model.max_tokens, self.kv_blocks * self.block_size)

    def instance(self) -> InstanceSpec:
        """What was configured, as the simulator's instance (paced servers only)."""
        if self.pace is None:
            raise InputError(f"server {self.name!r} computes; only profiling tells its step times")
        return InstanceSpec(
            name=self.name,
            gpu=self.name,
            model=self.served_name,
            view="configured",
            tensor_parallel=1,
            latency=LatencyModel(*(self.pace_scale * self.pace.coefficients).tolist()),
            kv_blocks=self.kv_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def command(self, python: str, model_directory: str, port: int) -> list[str]:
        """The command line."""
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model_directory]
        words += ["--served-model-name", self.served_name, "--host", self.host, "--port", str(port)]
        words += ["--block-size", str(self.block_size), "--max-num-seqs", str(self.max_num_seqs)]
        words += ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        words += ["--scheduling-policy", self.scheduling, "--stream-interval", str(self.stream_interval)]
        words += ["--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"]
        # cached tokens in the usage of every answer; no line in the log for every call
        words += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        if isinstance(self.model, TinyModel):
            # one block more: vLLM keeps a null block for itself
            kv_bytes = (self.kv_blocks + 1) * self.block_size * self.model.kv_bytes_per_token
            words += ["--load-format", "dummy", "--dtype", "float32", "--enforce-eager"]
            words += ["--kv-cache-memory-bytes", str(kv_bytes)]
        if self.longest is not None:
            words += ["--max-model-len", str(self.longest)]
        if self.pace is not None:
            words += ["--worker-cls", "hexrepro.validation.paced_worker.PacedWorker"]
        words += self.arguments
        if self.cores:
            words = ["taskset", "-c", ",".join(map(str, self.cores)), *words]
        return words


@dataclass
class Server:
    """A running server."""

    spec: ServerSpec
    port: int
    log: Path
    process: subprocess.Popen
    started_s: float
    ready_s: float | None = None  # seconds that it took to answer; None: not yet

    @property
    def url(self) -> str:
        return f"http://{self.spec.host}:{self.port}"

    def has_ended(self) -> bool:
        """Whether the process is over. It is not reaped yet, so its number still belongs to it and its children."""
        if self.process.returncode is not None:
            return True
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, options) is not None

    def failure(self) -> str:
        """What its log says about why it ended: the last error in it, and its last lines."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        # the markers under a traceback's source lines say nothing
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip(" ^~")]
        # vLLM ends with a summary that sends the reader upwards; the cause stands before it
        errors = [
            line
            for line in lines
            if re.search(r"\b(\w*Error|\w*Exception|error):", line)
            and "Engine core initialization failed" not in line
        ]
        tail = [line[-200:] for line in (errors[-1:] + lines[-2:])]
        return " | ".join(dict.fromkeys(tail)) or "its log is empty"


@contextlib.contextmanager
def launch(
    specs: Sequence[ServerSpec],
    directory: str | Path,
    *,
    python: str | None = None,
    ready_s: float = READY_S,
    say=lambda text: print(text, file=sys.stderr, flush=True),
) -> Iterator[list[Server]]:
    """Start a server for each spec, wait until all answer, and end them when the block ends.

    `directory` gets the tiny models and the logs (NAME.log). `python` is the interpreter that has vLLM; else
    HEXREPRO_VLLM_PYTHON names it. `say` gets a line for each server that is ready. InputError when a server ends or isn't ready
    after `ready_s`.
    """
    specs = list(specs)
    names = [spec.name for spec in specs]
    if not specs or len(set(names)) != len(names):
        raise InputError(f"servers: names are {names}; give at least one, and each a name of its own")
    if any(spec.cores for spec in specs) and shutil.which("taskset") is None:
        raise InputError("servers: cores are given, but this machine has no taskset; leave cores away")
    python = python or vllm_python()
    directory = Path(directory).resolve()
    path = _importable(directory)
    ports = _ports(specs)
    servers: list[Server] = []
    with terminable():
        try:
            for spec, port in zip(specs, ports, strict=True):
                servers.append(_start(spec, port, directory, python, path))
            _wait(servers, ready_s, say)
            yield servers
        finally:
            _stop(servers)


def vllm_python() -> str:
    """The Python that has vLLM: HEXREPRO_VLLM_PYTHON, or this one."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        if shutil.which(named) is None:
            raise InputError(f"{PYTHON_VARIABLE} is {named!r}; there is no such program")
        return named
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # a bare folder is not vLLM
        raise InputError(f"no vLLM in this Python; set {PYTHON_VARIABLE} to a Python that has it")
    return sys.executable


def _importable(directory: Path) -> Path:
    """A folder from which vLLM's Python imports `hexrepro.validation.paced_worker`, and nothing else of ours.

    The package as a whole would bring its neighbours in site-packages into vLLM's environment, which pins other versions.
    """
    root = directory / "python"
    package = root / "hexrepro" / "validation"
    try:
        package.mkdir(parents=True, exist_ok=True)
        for folder in (package.parent, package):
            (folder / "__init__.py").write_text("")
        shutil.copyfile(Path(__file__).with_name("paced_worker.py"), package / "paced_worker.py")
    except OSError as error:
        raise InputError(f"servers: {directory} cannot be written ({error.strerror})") from None
    return root


def _ports(specs: Sequence[ServerSpec]) -> list[int]:
    """A free port for each; all are held until the last is found, so that none comes twice."""
    ports = []
    with contextlib.ExitStack() as held:
        for spec in specs:
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((spec.host, spec.port))
            except OSError as error:
                raise InputError(
                    f"server {spec.name!r}: port {spec.port} of {spec.host} cannot be used ({error.strerror}); give another,"
                    " or 0 for any free one"
                ) from None
            ports.append(probe.getsockname()[1])
    return ports


def _start(spec: ServerSpec, port: int, directory: Path, python: str, path: Path) -> Server:
    model = spec.model
    if isinstance(model, TinyModel):
        folder = "tiny_" + "_".join(map(str, asdict(model).values()))
        model = str(write_tiny_model(directory / "models" / folder, model))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", VARIABLE)
    }
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(path),
    }
    if isinstance(spec.model, TinyModel):
        environment |= {
            # without it the engine core spins beside the worker, and two instances starve each other
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, len(spec.cores))),
        }
    if spec.pace is not None:
        environment[VARIABLE] = json.dumps(asdict(spec.pace) | {"scale": spec.pace_scale})
    log = directory / f"{spec.name}.log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                spec.command(python, model, port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=directory,
                # a group of its own: its children end with it, and Ctrl-C reaches only us, who end it in order
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"server {spec.name!r}: {python} cannot be started ({error.strerror})") from None
    return Server(spec, port, log, process, time.monotonic())


def _wait(servers: Sequence[Server], ready_s: float, say) -> None:
    waiting = list(servers)
    begin = time.monotonic()
    while waiting:
        for server in list(waiting):
            passed = time.monotonic() - server.started_s
            if server.has_ended():
                raise InputError(
                    f"server {server.spec.name!r} (port {server.port}) ended after {passed:.0f} s before it was ready:"
                    f" {server.failure()} (log: {server.log})"
                )
            if _answers(server):
                server.ready_s = passed
                waiting.remove(server)
                ready = len(servers) - len(waiting)
                say(
                    f"server {server.spec.name}: ready after {passed:.1f} s at {server.url} ({ready}/{len(servers)})"
                )
        if waiting and time.monotonic() - begin > ready_s:
            server = waiting[0]
            raise InputError(
                f"server {server.spec.name!r} (port {server.port}) is not ready after {ready_s:g} s: {server.failure()}"
                f" (log: {server.log})"
            )
        if waiting:
            time.sleep(POLL_S)


def _answers(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=1.0) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _stop(servers: Sequence[Server]) -> None:
    """End the servers and their children: SIGTERM, and SIGKILL for those that do not go."""
    patience_s = STOP_S
    try:
        for server in servers:
            _signal(server, signal.SIGTERM)
        until = time.monotonic() + patience_s
        while time.monotonic() < until and not all(server.has_ended() for server in servers):
            time.sleep(0.05)
    finally:  # also when a second Ctrl-C cuts the patience short
        for server in servers:
            _signal(server, signal.SIGKILL)
            server.process.wait()


def _signal(server: Server, number: int) -> None:
    """To the whole group. It can't be another's: its leader is not reaped before `_stop` is done."""
    if server.process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server.process.pid, number)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end this process by way of an exception, so that it ends its servers first."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    def end(number, frame):
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
