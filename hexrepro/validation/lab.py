"""Servers to measure, and what was measured of them: launched or given, profiled, replayed against; each result is kept.

A `Lab` starts its servers only when something is to be measured that is not there yet. Its folder holds

    profile.yaml                  the step times fitted through the API, one entry a server
    profile_SERVER.csv            what was measured of a server, and what its fit says
    gateway_s.json                what the gateway added to some calls, in seconds
    cores.json                    how much servers that compute slow each other down by sharing a core
    POLICY_LOAD_REPEAT.npz        one replay
    servers/, gateway.log         what servers and gateway printed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from hexrepro.cluster.profiles import load_cluster
from hexrepro.cluster.types import Cluster
from hexrepro.errors import InputError
from hexrepro.scheduling import Policy
from hexrepro.scheduling.views import instance_views
from hexrepro.serving.learning import Beliefs
from hexrepro.validation import core_sharing
from hexrepro.validation.completion_stream import body, session, stream
from hexrepro.validation.endpoint_design import Design
from hexrepro.validation.launch import ServerSpec, launch, terminable
from hexrepro.validation.others_cpu import OthersCpu
from hexrepro.validation.profile_endpoint import profile_endpoint, write_profiles
from hexrepro.validation.prompts import Prompts
from hexrepro.validation.replay import Replay, replay
from hexrepro.validation.through_gateway import gateway_headers, gateway_instance
from hexrepro.validation.tiny_model import FIRST_WORD
from hexrepro.workload.types import Workload

PROFILE = "profile.yaml"
DIRECT = "fixed"  # the policy of this name needs no gateway: queries in turn straight to the servers
GATEWAY_PAIRS = 25  # calls by which the gateway's share is measured
STOP_S = 15.0


@dataclass(frozen=True)
class Fleet:
    """The servers of one setting: `specs` of those to launch, or `urls` of those that run.

    kv_blocks, block_size  where /metrics does not tell
    concurrency            calls that a server runs at a time, None as measured
    """

    name: str
    names: tuple[str, ...]
    specs: tuple[ServerSpec, ...] = ()
    urls: tuple[str, ...] = ()
    model: str | None = None
    api_key_env: str | None = None
    kv_blocks: int | None = None
    block_size: int | None = None
    concurrency: int | None = None
    design: Design = field(default_factory=Design)

    @property
    def api_key(self) -> str | None:
        if self.api_key_env is None:
            return None
        if not os.environ.get(self.api_key_env):
            raise InputError(
                f"servers.{self.name}.api_key_env: {self.api_key_env!r} must name an environment variable that holds the key"
            )
        return os.environ[self.api_key_env]


class About(NamedTuple):
    """When a replay began, and how many cores of this machine others kept busy (NaN: servers are elsewhere)."""

    began: str
    others_cores: float


class Lab:
    """Use as a context manager: what it started is ended, however the block ends."""

    def __init__(
        self, fleet: Fleet, folder: Path, shared: str, mode: str, say: Callable[[str], None]
    ) -> None:
        """shared: what prompts share, as the simulator's `prefix_caching`; mode: the gateway's; say: gets lines of progress."""
        self.fleet, self.folder, self.shared, self.mode, self.say = fleet, folder, shared, mode, say
        self._running = contextlib.ExitStack()
        self._urls: list[str] = []

    def __enter__(self) -> Lab:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._running.enter_context(terminable())
        return self

    def __exit__(self, *exception) -> None:
        self._running.__exit__(*exception)

    @property
    def urls(self) -> list[str]:
        """The servers' base URLs; launches them where that has not been done."""
        if not self._urls:
            if self.fleet.specs:
                self.say(f"{self.fleet.name}: launching {len(self.fleet.specs)} vLLM servers")
                servers = self._running.enter_context(
                    launch(self.fleet.specs, self.folder / "servers", say=self.say)
                )
                self._urls = [server.url for server in servers]
            else:
                self._urls = list(self.fleet.urls)
        return self._urls

    def core_slowdown(self) -> float | None:
        """How many times as long work takes on a server's core while the other servers' cores work too; None where servers have
        no cores of their own, or sleep."""
        cores = [core for spec in self.fleet.specs if spec.pace is None for core in spec.cores]
        if len(cores) < 2:
            return None
        file = self.folder / "cores.json"
        if not file.exists():
            file.write_text(json.dumps(core_sharing.slowdown(cores)))
        return float(json.loads(file.read_text()))

    # ---- the profile ---------------------------------------------------------------------------------------

    @property
    def profile_file(self) -> Path:
        return self.folder / PROFILE

    def profile(self, workload: Workload) -> None:
        """Measure every server through its API, one after the other, unless that is there. Nothing else is known of them.

        Said, where that is so: in what the workload goes beyond what was measured."""
        if self.profile_file.exists():
            when = datetime.fromtimestamp(self.profile_file.stat().st_mtime, UTC)
            self.say(f"{self.fleet.name}: profile kept from {when.isoformat(timespec='seconds')}")
            return
        found = {}
        fleet = self.fleet
        for name, url in zip(fleet.names, self.urls, strict=True):
            begin = time.monotonic()
            one = profile_endpoint(
                url, model=fleet.model, design=fleet.design, api_key=fleet.api_key, seed=_now_ms()
            )
            found[name] = replace(
                one,
                kv_blocks=fleet.kv_blocks or one.kv_blocks,
                block_size=fleet.block_size or one.block_size,
                max_num_seqs=fleet.concurrency or one.max_num_seqs,
            )
            fit = ", ".join(f"{kind} {e.mape:.1%}" for kind, e in one.errors.items())
            self.say(
                f"{fleet.name}: {name} profiled in {time.monotonic() - begin:.0f} s, error of the fit: {fit}"
            )
            one.measurements.to_csv(self.folder / f"profile_{name}.csv", index=False, float_format="%.6g")
            for warning in (*one.warnings, *one.extrapolates(workload)):
                self.say(f"{fleet.name}: {name}: {warning}")
        part = self.profile_file.with_suffix(".part")
        write_profiles(part, found)
        part.replace(self.profile_file)

    def cluster(self) -> Cluster:
        """The instances as profiled."""
        return profiled(self.fleet, self.folder)

    @property
    def profiles(self) -> dict[str, Any]:
        """The profile file's content."""
        return yaml.safe_load(self.profile_file.read_text())

    @property
    def api_s(self) -> np.ndarray:
        """float64[M]: what each server's API adds to a call."""
        gpus = self.profiles["gpus"]
        return np.array([gpus[name]["fit"]["overhead_s"] for name in self.fleet.names])

    # ---- the gateway ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gateway(self, policy: Policy, workload: Workload) -> Iterator[str]:
        """`python -m hexrepro.serving` in a process of its own, with a cluster file of the profiles; its URL.

        It believes of the trace what the simulated scheduler believes, and learns nothing more.
        """
        cluster_file, policy_file = self.folder / "cluster.yaml", self.folder / "policy.yaml"
        cluster_file.write_text(
            yaml.safe_dump(self._cluster_file(workload), sort_keys=False), encoding="utf-8"
        )
        parts = {f.name: getattr(policy, f.name) for f in fields(Policy)}
        policy_file.write_text(yaml.safe_dump({k: _plain(v) for k, v in parts.items()}), encoding="utf-8")
        words = [sys.executable, "-m", "hexrepro.serving", f"cluster={cluster_file}", f"policy={policy_file}"]
        words += ["port=0", f"mode={self.mode}", "coordinator.window=0", "coordinator.plan_window=0"]
        words += ["timeouts.first_byte_s=3600", "timeouts.chunk_s=600", "max_waiting=100000"]
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        with (self.folder / "gateway.log").open("ab") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C reaches only us, who end it
            )
        try:
            line = process.stdout.readline().decode()
            if "hexrepro gateway on" not in line:
                raise InputError(f"the gateway did not start; see {self.folder / 'gateway.log'}")
            yield line.split()[3].removesuffix("/v1:")
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def _cluster_file(self, workload: Workload) -> dict[str, Any]:
        model = self.profiles["model"]
        entries = []
        for name, url in zip(self.fleet.names, self.urls, strict=True):
            entry = {"gpu": name, "url": url, "api_key_env": self.fleet.api_key_env}
            entries.append({k: v for k, v in entry.items() if v is not None})
        return dict(
            name=self.fleet.name,
            model=model,
            models=[model],
            profile=self.profile_file.name,
            instances=entries,
            workflows={workload.name: beliefs_of(workload, self.cluster(), self.shared)},
        )

    def gateway_s(self, policy: Policy, workload: Workload) -> np.ndarray:
        """float64[k], seconds that the gateway added to k calls: each beside an equal one to the server that it chose."""
        file = self.folder / "gateway_s.json"
        if not file.exists():
            with self.gateway(policy, workload) as url:
                self._pairs(url)  # connections are made, code is loaded
                added = self._pairs(url)
            file.write_text(json.dumps(added))
        return np.maximum(json.loads(file.read_text()), 0.0)

    def _pairs(self, gateway_url: str) -> list[float]:
        # read here, not between the calls that are timed
        model = self.profiles["model"]
        where = gateway_instance([spec.name for spec in self.cluster().instances])

        async def measure() -> list[float]:
            rng, added = np.random.Generator(np.random.PCG64(_now_ms())), []
            async with session(api_key=self.fleet.api_key) as client:
                for _ in range(GATEWAY_PAIRS):
                    ask = body(model, rng.integers(FIRST_WORD, 500, 8).tolist(), 1)
                    through = await stream(client, gateway_url, ask)
                    ask = body(model, rng.integers(FIRST_WORD, 500, 8).tolist(), 1)
                    direct = await stream(client, self.urls[where(through)], ask)
                    added.append((through.finish_s - through.sent_s) - (direct.finish_s - direct.sent_s))
            return added

        return asyncio.run(measure())

    # ---- replays -------------------------------------------------------------------------------------------

    def replay(
        self, workload: Workload, policy: Policy, key: str, base_slo_s: float, **limits: float
    ) -> tuple[Replay, About, bool]:
        """One replay of a workload with arrivals, through a fresh gateway, and whether it was kept from before."""
        file = self.folder / f"{key}.npz"
        same = json.dumps([base_slo_s, *(_plain(getattr(policy, f.name)) for f in fields(Policy))])
        if (kept := _load(file, workload, same)) is not None:
            return (*kept, True)
        self.urls  # noqa: B018 -- what has to be launched is launched before the time is taken
        began = datetime.now(UTC).isoformat(timespec="seconds")
        # prompts that no server has seen: their prefix caches must begin cold, as the simulation does
        salt = _now_ms()
        options = dict(model=self.profiles["model"], prompts=Prompts(workload, self.shared, salt), **limits)
        if policy.name == DIRECT:
            placement = workload.query % len(self.urls)
            options |= dict(api_key=self.fleet.api_key, placement=placement)
            others = OthersCpu()
            measured = replay(workload, self.urls, **options)
            others_cores = others.cores()
        else:
            names = [spec.name for spec in self.cluster().instances]
            with self.gateway(policy, workload) as url:
                others = OthersCpu()
                measured = replay(
                    workload,
                    url,
                    headers=gateway_headers(workload, f"{key}-{salt}", base_slo_s, workload.name),
                    instance_of=gateway_instance(names),
                    **options,
                )
                others_cores = others.cores()
        about = About(began, others_cores if self.fleet.specs else np.nan)
        _save(file, measured, same, about)
        return measured, about, False


def profiled(fleet: Fleet, folder: Path) -> Cluster:
    """The instances as a lab's profile file has them."""
    instances = [{"gpu": name} for name in fleet.names]
    return load_cluster(
        dict(name=fleet.name, profile=str((folder / PROFILE).resolve()), instances=instances), "measured"
    )


def beliefs_of(workload: Workload, cluster: Cluster, shared: str) -> dict[str, Any]:
    """What the simulated scheduler believes of a workload's stages, as a gateway's cluster file says it."""
    known = Beliefs.of(workload, instance_views(cluster), prefix_caching=shared)
    names = list(known.stages)
    stages = {
        name: dict(zip(("input_tokens", "output_tokens", "cached_tokens"), lengths, strict=True))
        for name, lengths in known.stages.items()
    }
    remaining: dict[str, list[dict[str, float]]] = {}
    for (stage, _), after in sorted(known.remaining.items()):
        remaining.setdefault(names[stage], []).append({names[s]: n for s, n in after.items()})
    return dict(stages=stages, remaining=remaining)


def _save(file: Path, measured: Replay, same: str, about: About) -> None:
    arrays = {f.name: getattr(measured, f.name) for f in fields(Replay)}
    arrays["errors"] = json.dumps(measured.errors)
    arrays["stopped"] = json.dumps(measured.stopped)
    part = file.with_suffix(".part.npz")
    np.savez(part, **arrays, same=same, **about._asdict())
    part.replace(file)


def _load(file: Path, workload: Workload, same: str) -> tuple[Replay, About] | None:
    """A replay that was kept; None where there is none of this policy, SLO and these arrivals."""
    if not file.exists():
        return None
    with np.load(file) as kept:
        arrays = dict(kept)
    about = About(str(arrays.pop("began")), float(arrays.pop("others_cores")))
    if str(arrays.pop("same")) != same or not np.array_equal(arrays["arrival_s"], workload.arrival_s):
        return None
    errors = {int(call): why for call, why in json.loads(str(arrays.pop("errors"))).items()}
    return Replay(errors=errors, stopped=json.loads(str(arrays.pop("stopped"))), **arrays), about


def _plain(value: Any) -> Any:
    return {k: float(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def names_of(kinds: Sequence[str]) -> tuple[str, ...]:
    """Distinct names: a letter behind those that come more than once."""
    return tuple(
        f"{kind}{chr(ord('a') + list(kinds[:i]).count(kind))}" if list(kinds).count(kind) > 1 else kind
        for i, kind in enumerate(kinds)
    )
