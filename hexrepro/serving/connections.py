"""HTTP/1.1 connections to one model server, as little of it as a gateway needs: kept alive, one call at a time on each, and an
answer that can be handed on as it comes off the socket, without a task being woken for every piece of it.

A general client (aiohttp's) takes several times the processor time for the same, and that was most of the gateway's own.
Parsing is httptools' (llhttp, the parser of Node.js).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

KEEP_IDLE_S = 3.0  # vLLM closes idle connections after 5 s; ours must not be used just as that happens
_TAIL_S = 1.0  # for the last bytes of an answer whose user has all that matters

Sink = Callable[[bytes], bool]


class Lost(Exception):
    """The connection ended before the answer did."""


class Connection(asyncio.Protocol):
    """One connection, with one exchange at a time: `send`, then `whole` or `piece` and `pass_on`, then `release` or `close`.

    status, content_type, retry_after  of the present answer; status 0 until it is known
    complete                           the answer is all there
    heard                              something of it has come
    reused                             an earlier call went over this connection
    """

    def __init__(self, pool: Pool) -> None:
        self._pool, self._loop = pool, asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.reused, self.idle_since_s = False, 0.0
        self._begin()
        self._busy = False

    def _begin(self) -> None:
        self.status, self.content_type, self.retry_after = 0, "", ""
        self.heard = self.complete = False
        self._pieces: list[bytes] = []
        self._sink: Sink | None = None
        self._error: Exception | None = None
        self._sized = self._reusable = self._released = self._held = self._piecewise = False
        self._silence_s = self._heard_s = 0.0
        self._busy = True

    # ---- for those who call --------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes) -> None:
        self._begin()
        if self._transport is None:
            self._error = Lost("closed")
        elif len(body) < 65536:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    def limit(self, seconds: float, *, silence: bool = False) -> None:
        """From now on: TimeoutError after so long, or (`silence`) once nothing has come for so long. 0: no limit."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._silence_s = seconds if silence else 0.0
        self._heard_s = self._loop.time()
        if seconds:
            self._timer = self._loop.call_later(seconds, self._late)

    async def whole(self) -> bytes:
        """The body, or what has not been taken of it. Raises Lost, TimeoutError."""
        while not self.complete:
            await self._wait()
        return self._take()

    async def piece(self) -> bytes:
        """What has come since it was last asked; b"" at the end. Raises Lost, TimeoutError."""
        self._piecewise = True
        while not self._pieces and not self.complete:
            await self._wait()
        self._piecewise = False
        return self._take()

    async def pass_on(self, sink: Sink) -> None:
        """Call `sink` with what comes, as it comes, until the end or until it returns False; then nothing more is read until
        somebody asks. Raises Lost, TimeoutError."""
        self._resume()
        if self._pieces and not sink(self._take()):
            self._hold()
            return
        if self.complete:
            return
        self._sink = sink
        try:
            await self._wait()
        finally:
            self._sink = None

    def release(self) -> None:
        """The answer has served its purpose: the connection is kept for another, if it is fit for that (soon)."""
        if self._transport is None:
            return
        self._released = True
        self._resume()
        if self.complete:
            self._settle()
        else:
            self.limit(_TAIL_S)

    def close(self) -> None:
        """Tear it; the server sees that nobody waits for the answer any more."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    # ---- inside --------------------------------------------------------------------------------------------

    def _take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _wait(self) -> None:
        if self._error is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.close()
        self._wake()

    def _late(self) -> None:
        self._timer = None
        # one timer that is set anew when it goes off: at every piece it would cost more than the piece
        left_s = self._heard_s + self._silence_s - self._loop.time() if self._silence_s else 0.0
        if left_s > 1e-3:
            self._timer = self._loop.call_later(left_s, self._late)
        else:
            self._fail(TimeoutError())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hold(self) -> None:
        """Nobody takes what comes: leave it to the server's side of the connection."""
        if not self.complete and self.usable:
            self._held = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._held and self.usable:
            self._transport.resume_reading()
        self._held = False

    def _settle(self) -> None:
        """The answer is complete and nobody needs it: to the pool, or away."""
        self._stop_timer()
        self._busy = False
        if self._reusable and self.usable:
            self.reused, self.idle_since_s = True, self._loop.time()
            self._pool.idle.append(self)
        else:
            self.close()

    # ---- from the socket -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pool.open.add(self)

    def data_received(self, data: bytes) -> None:
        if not self._busy:  # nobody has asked anything
            self.close()
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(Lost(f"not HTTP: {type(error).__name__}"))
            return
        if self._silence_s:
            self._heard_s = self._loop.time()
        if self._sink is not None and self._pieces:
            try:
                more = self._sink(self._take())
            except Exception as error:
                self._fail(error)
                return
            if not more:
                self._sink = None
                self._hold()
                self._wake()
        if self.complete:
            if self._released:
                self._settle()
            else:
                self._wake()
        elif self._piecewise and self._pieces:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._pool.open.discard(self)
        self._stop_timer()
        if self._busy and not self.complete:
            if self.status and not self._sized and error is None and self._error is None:
                self.complete = True  # an answer without a length ends with its connection
            else:
                self._error = self._error or Lost("closed")
            self._wake()

    # ---- from the parser -----------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-type":
                self.content_type = value.decode("latin-1")
            case b"retry-after":
                self.retry_after = value.decode("latin-1")
            case b"content-length" | b"transfer-encoding":
                self._sized = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue and its like: the answer is yet to come
            self.status = 0
            return
        self._reusable = self._parser.should_keep_alive()
        self.complete = True


class Pool:
    """The connections to one server; as many as there are calls, kept `KEEP_IDLE_S` for the next."""

    def __init__(self, url: str, connect_s: float) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if secure else 80)
        self._ssl = ssl.create_default_context() if secure else None
        self._connect_s = connect_s
        self.idle: list[Connection] = []  # the one used last at the end
        self.open: set[Connection] = set()

    async def get(self, *, fresh: bool = False) -> Connection:
        """A connection that is free. Raises OSError (TimeoutError among them)."""
        loop = asyncio.get_running_loop()
        while self.idle and not fresh:
            connection = self.idle.pop()
            if connection.usable and loop.time() - connection.idle_since_s < KEEP_IDLE_S:
                return connection
            connection.close()
        async with asyncio.timeout(self._connect_s):
            _, connection = await loop.create_connection(
                lambda: Connection(self), self._host, self._port, ssl=self._ssl
            )
        return connection

    def prune(self) -> None:
        """Close what has been idle for too long."""
        now_s = asyncio.get_running_loop().time()
        fresh = [c for c in self.idle if c.usable and now_s - c.idle_since_s < KEEP_IDLE_S]
        for connection in set(self.idle).difference(fresh):
            connection.close()
        self.idle = fresh

    def close(self) -> None:
        """Tear all connections; calls under way on them fail."""
        for connection in list(self.open):
            connection.close()
        self.idle.clear()


def retry_after_s(text: str) -> float | None:
    """Seconds of a Retry-After header; None where it says none (a date counts as none)."""
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if 0 <= seconds < float("inf"):
            return seconds
    return None
