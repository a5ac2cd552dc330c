"""Many calls over four instances of which one dies and comes back, one hangs for a while, and one becomes slow.

Short here; `HEXREPRO_SOAK_CALLS=20000 python -m pytest tests/serving/test_soak.py -s` is the long form.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import os
import time

import aiohttp

from tests.serving.scripted import HASTY, Act, Server, ask, running, settled

CALLS = int(os.environ.get("HEXREPRO_SOAK_CALLS", "800"))
CLIENTS = 48
WHOLE = "t0 t1 t2 "


class _Forgetful(Server):
    """Remembers only which calls came."""

    def __init__(self) -> None:
        super().__init__(lambda body, number: self.now)
        self.now = Act(first_s=0.002)
        self.seen = collections.Counter()
        self.bodies = self
        self.headers = self

    def append(self, content: dict) -> None:
        if "user" in content:
            self.seen[content["user"]] += 1

    def __len__(self) -> int:
        return self.seen.total()


def _resident_mb() -> float:
    gc.collect()
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0


async def _one(session: aiohttp.ClientSession, url: str, i: int) -> tuple[str, str]:
    """(how it ended, the text that came)"""
    stream = i % 2 == 0
    body = ask(
        3,
        user=str(i),
        stream=stream,
        hexrepro={"query": f"q{i // 5}", "stage": f"s{i % 5}", "final": i % 5 == 4},
    )
    async with session.post(url, json=body) as answer:
        if answer.status != 200:
            assert (await answer.json())["error"]["message"]
            return f"status {answer.status}", ""
        if not stream:
            return "done", (await answer.json())["choices"][0]["message"]["content"]
        text, end = "", "cut"
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            assert end == "cut", "something came after the end"
            if line.startswith(b"data: [DONE]"):
                end = "done"
                continue
            event = json.loads(line[6:])
            if "error" in event:
                end = "error event"
            elif event["choices"]:
                text += event["choices"][0]["delta"]["content"]
        return end, text


def test_no_call_is_lost_and_none_is_answered_twice() -> None:
    servers = [_Forgetful() for _ in range(4)]
    dies, hangs, slows, _ = servers
    ends: dict[int, tuple[str, str]] = {}

    async def accidents() -> None:
        async def share(of: float) -> None:
            while len(ends) < of * CALLS:
                await asyncio.sleep(0.002)

        await share(0.2)
        await dies.stop()
        await share(0.35)
        hangs.now = Act(fault="hang")
        await share(0.45)
        slows.now = Act(first_s=0.05)
        await share(0.6)
        await dies.start()
        await share(0.7)
        hangs.now = Act(first_s=0.002)
        await share(0.8)
        hangs.now = Act(fault="abort", after=1)  # answers break off after a token
        await share(0.85)
        hangs.now = Act(first_s=0.002)

    async def everything() -> tuple[float, float]:
        async with running(servers, concurrency=8, patience_s=10.0, timeouts=HASTY) as gateway:
            work = iter(range(CALLS))
            memory = []

            async def client(session: aiohttp.ClientSession) -> None:
                for i in work:
                    if i == CALLS // 3:
                        memory.append(_resident_mb())
                    assert i not in ends
                    ends[i] = await _one(session, gateway.url + "/v1/chat/completions", i)

            trouble = asyncio.create_task(accidents())
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                async with asyncio.timeout(60 + CALLS / 50):
                    await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
            await trouble
            await settled(gateway)
            assert gateway.coordinator.queries_under_way <= CALLS // 5
            memory.append(_resident_mb())
            return memory[0], memory[-1]

    began_s = time.perf_counter()
    before_mb, after_mb = asyncio.run(everything())
    counts = collections.Counter(end for end, _ in ends.values())
    print(
        f"{CALLS} calls in {time.perf_counter() - began_s:.1f} s: {dict(counts)};"
        f" memory {before_mb:.0f} -> {after_mb:.0f} MB; sent to the servers {sum(map(len, servers))} times"
    )
    assert set(ends) == set(range(CALLS))
    assert all(text == WHOLE for end, text in ends.values() if end == "done")
    assert all(len(text) < len(WHOLE) for end, text in ends.values() if end != "done")
    assert "cut" not in counts  # every failure has been told to its client
    assert counts["done"] >= 0.9 * CALLS
    attempts = sum((s.seen for s in servers), collections.Counter())
    assert max(attempts.values()) <= 3
    assert all(str(i) in attempts for i, (end, _) in ends.items() if end == "done")
    assert after_mb - before_mb < 30
    assert len(dies) > 0
    assert dies.finished > 0
