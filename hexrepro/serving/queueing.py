"""The calls that wait for one instance: least key first, ties in order of arrival, as many at once as the instance takes.

In mode `gateway` a call stays here until it is its turn. In mode `engine` it is handed over at once with its key as vLLM's
`priority`, and the lane only keeps count of who is believed to run there.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Entry:
    key: float
    number: int
    call: Hashable | None  # None: withdrawn
    tokens: float

    def __lt__(self, other: _Entry) -> bool:
        return (self.key, self.number) < (other.key, other.number)


class Lane:
    """One instance's queue. `slots` calls run at once, as long as their `tokens` (KV) fit in `capacity` together; one always
    does."""

    def __init__(self, slots: int, capacity: float = float("inf")) -> None:
        self.slots, self.capacity = slots, capacity
        self._heap: list[_Entry] = []
        self._waiting: dict[Hashable, _Entry] = {}
        self._running: dict[Hashable, float] = {}
        self._tokens = 0.0
        self._number = 0

    def put(self, call: Hashable, key: float, tokens: float = 0.0) -> None:
        """A call waits. One that comes back stands behind those of equal key."""
        entry = _Entry(key, self._number, call, tokens)
        self._number += 1
        self._waiting[call] = entry
        heapq.heappush(self._heap, entry)

    def admit(self) -> list[Hashable]:
        """The calls whose turn it is now, in order; they count as running from here on."""
        admitted = []
        while self._waiting and len(self._running) < self.slots:
            while self._heap[0].call is None:
                heapq.heappop(self._heap)
            head = self._heap[0]
            if self._running and self._tokens + head.tokens > self.capacity:
                break  # the head waits for room; nobody overtakes it
            heapq.heappop(self._heap)
            self._start(head)
            admitted.append(head.call)
        if not self._waiting:
            self._heap.clear()
        return admitted

    def start(self, call: Hashable) -> bool:
        """The call is seen to run, whatever was believed; False if that was known."""
        entry = self._waiting.get(call)
        if entry is None:
            return False
        self._start(_Entry(entry.key, entry.number, call, entry.tokens))
        self._withdraw(entry)
        return True

    def _start(self, entry: _Entry) -> None:
        del self._waiting[entry.call]
        self._running[entry.call] = entry.tokens
        self._tokens += entry.tokens

    def remove(self, call: Hashable) -> None:
        """The call has finished, or has been withdrawn."""
        if call in self._running:
            self._tokens -= self._running.pop(call)
            if not self._running:
                self._tokens = 0.0
        elif (entry := self._waiting.pop(call, None)) is not None:
            self._withdraw(entry)

    def _withdraw(self, entry: _Entry) -> None:
        """Of an entry that waits no more: it stays in the heap until it comes up, or there are too many of them."""
        entry.call = None
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [e for e in self._heap if e.call is not None]
            heapq.heapify(self._heap)

    @property
    def free(self) -> int:
        """Slots for calls that come now; none where calls wait."""
        return 0 if self._waiting else max(0, self.slots - len(self._running))

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> list[Hashable]:
        """The waiting calls, in order."""
        return [entry.call for entry in sorted(self._waiting.values())]

    def __len__(self) -> int:
        return len(self._waiting)


def priority(key: float) -> int:
    """A key as an integer of 64 bits that orders as the key does: the number that its bits spell, mirrored below 0.

    Exact: two keys that differ at all get different priorities.
    """
    (bits,) = struct.unpack("<q", struct.pack("<d", key + 0.0))  # + 0.0 makes -0.0 the same as 0.0
    return bits if bits >= 0 else -(bits & 0x7FFFFFFFFFFFFFFF)
