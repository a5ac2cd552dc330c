"""Whether somebody else keeps the machine busy on which we measure (Linux; elsewhere it is not known)."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


class OthersCpu:
    """How many cores other programs than ours keep busy on this machine, from its making to `cores`; NaN where /proc is not.

    Ours are this process and what was started in sessions of its own by it: servers and gateway.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._begin = self._read()

    def cores(self) -> float:
        (t0, all0, ours0), (t1, all1, ours1) = self._begin, self._read()
        return max((all1 - all0) - (ours1 - ours0), 0.0) / (t1 - t0)  # in this order NaN stays NaN

    def _read(self) -> tuple[float, float, float]:
        """Time, CPU seconds of all programs, CPU seconds of ours."""
        try:
            tick = os.sysconf("SC_CLK_TCK")
            user, nice, system = map(int, (self._proc / "stat").read_text().split()[1:4])
            parents, used, session = {}, {}, {}
            for file in self._proc.glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    number, rest = int(file.parent.name), file.read_text().rpartition(")")[2].split()
                    parents[number], session[number] = int(rest[1]), int(rest[3])
                    used[number] = sum(map(int, rest[11:15]))
            own = {n for n, parent in parents.items() if parent == os.getpid()} | {os.getpid()}
            sessions = {session.get(n) for n in own}
            ours = sum(used[n] for n in used if n in own or session[n] in sessions - {session[os.getpid()]})
            return time.monotonic(), (user + nice + system) / tick, ours / tick
        except (OSError, ValueError):
            return time.monotonic(), float("nan"), float("nan")
