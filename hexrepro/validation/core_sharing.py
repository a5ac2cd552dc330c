"""Whether the cores that servers are pinned to are cores of their own, or two hardware threads of one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from hexrepro.errors import InputError

SECONDS = 1.5

# what a computing server does, in small: multiply float32 matrices, one thread, and count how often until the time is over
_WORK = """
import os, sys, time
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.sched_setaffinity(0, {int(sys.argv[1])})
import numpy as np
a, b = np.full((8, 256), 0.5, np.float32), np.full((256, 768), 0.5, np.float32)
a @ b
print("ready", flush=True)
sys.stdin.readline()
until, done = time.perf_counter() + float(sys.argv[2]), 0
while time.perf_counter() < until:
    for _ in range(20):
        a @ b
    done += 1
print(done, flush=True)
"""


def slowdown(cores: Sequence[int], seconds: float = SECONDS) -> float:
    """How many times as long work on one of these cores takes while the others work too; 1: they share nothing."""
    alone = [_work([core], seconds)[0] for core in cores]
    together = _work(cores, seconds)
    return sum(alone) / sum(together)


def _work(cores: Sequence[int], seconds: float) -> list[int]:
    """What each core gets done when all begin at once."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORK, str(core), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for core in cores
    ]
    try:
        for worker in workers:
            if worker.stdout.readline() != "ready\n":
                raise InputError(f"cores {list(cores)}: nothing can be run there")
        for worker in workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
        return [int(worker.stdout.readline()) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
