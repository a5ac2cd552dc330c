"""Which instances take calls: failures take one out, probes bring it back, and what waits for any instance is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hexrepro.serving.config import Settings
from hexrepro.serving.coordinator import Coordinator
from hexrepro.serving.metrics import Metrics
from hexrepro.serving.upstream import Upstream

log = logging.getLogger("hexrepro.serving")


@dataclass
class Health:
    """Whether an instance takes calls.

    It is down after one refused connection, or `limit` other failures in a row, probes included: a server that is merely
    overloaded answers some. It is tried again after a pause that doubles with every failure until a call succeeds.
    """

    limit: int = 3
    pause_s: float = 0.5
    longest_s: float = 30.0
    up: bool = True
    failures: int = 0  # of calls, in a row
    probe_failures: int = 0  # the same of probes
    pauses: int = 0  # since the last call that succeeded

    def failed(self, kind: str) -> bool:
        """Note a failure; True if the instance is to be taken out now."""
        if kind == "probe":
            self.probe_failures += 1
        else:
            self.failures += 1
        if self.up and (kind == "refused" or max(self.failures, self.probe_failures) >= self.limit):
            self.up = False
            self.pauses += 1
            return True
        return False

    def probe_failed(self) -> None:
        """It is down, and still is."""
        self.pauses += 1

    def revived(self) -> None:
        """It answers probes. One more failure takes it out again."""
        self.up = True
        self.failures, self.probe_failures = self.limit - 1, 0

    def succeeded(self) -> None:
        self.failures = self.probe_failures = self.pauses = 0

    @property
    def next_pause_s(self) -> float:
        return min(self.longest_s, self.pause_s * 2.0 ** min(max(self.pauses - 1, 0), 30))


class Watch:
    """Looks after the instances. `on_out(m)` and `on_back(m)` are called once the coordinator knows."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        settings: Settings,
        coordinator: Coordinator,
        metrics: Metrics,
        on_out: Callable[[int], None],
        on_back: Callable[[int], None],
    ) -> None:
        self._upstreams, self._settings = upstreams, settings
        self._coordinator, self._metrics = coordinator, metrics
        self._on_out, self._on_back = on_out, on_back
        s = settings
        self.health = [
            Health(limit=s.failures, pause_s=s.pause_s, longest_s=s.longest_pause_s) for _ in upstreams
        ]
        self._someone_up = asyncio.Event()
        self._someone_up.set()
        self._down = [asyncio.Event() for _ in upstreams]

    def start(self) -> list[asyncio.Task]:
        """The tasks that probe; whoever starts them ends them."""
        return [asyncio.create_task(self._look_after(m)) for m in range(len(self._upstreams))]

    def failed(self, m: int, kind: str) -> None:
        """A call or a probe has failed at instance m."""
        if self.health[m].failed(kind):
            self._take_out(m, kind)

    async def somebody(self, timeout_s: float) -> None:
        """Wait until any instance takes calls, but not longer than that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._someone_up.wait()

    def wake(self) -> None:
        """Those who wait for an instance look again."""
        self._someone_up.set()

    def _take_out(self, m: int, why: str) -> None:
        name, pause_s = self._upstreams[m].name, self.health[m].next_pause_s
        log.warning("%s is out (%s), next try in %.1f s", name, why, pause_s)
        self._coordinator.instance_down(m)
        if not self._coordinator.is_open.any():
            self._someone_up.clear()
        self._on_out(m)
        self._down[m].set()

    def _bring_back(self, m: int) -> None:
        log.info("%s is back", self._upstreams[m].name)
        self.health[m].revived()
        self._down[m].clear()
        self._coordinator.instance_up(m)
        self._someone_up.set()
        self._on_back(m)

    async def _look_after(self, m: int) -> None:
        while True:
            try:
                await (self._while_up if self.health[m].up else self._while_down)(m)
            except Exception:  # a fault of ours: without this task, the instance would never come back
                log.exception("looking after %s failed", self._upstreams[m].name)
                await asyncio.sleep(self._settings.probe_every_s)

    async def _while_up(self, m: int) -> None:
        """Probe it now and then: an instance without calls may be gone, too."""
        health = self.health[m]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.probe_every_s):
                await self._down[m].wait()
        if not health.up:
            return
        kind = await self._upstreams[m].probe()
        if kind is None:
            health.probe_failures = 0
        elif health.up:
            self._metrics.failures.labels(self._upstreams[m].name, kind).inc()
            self.failed(m, kind)

    async def _while_down(self, m: int) -> None:
        await asyncio.sleep(self.health[m].next_pause_s)
        if await self._upstreams[m].probe() is None:
            self._bring_back(m)
        else:
            self.health[m].probe_failed()
