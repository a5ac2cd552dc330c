"""One model server as the gateway sees it: sending a call, and telling how it fails."""

from __future__ import annotations

import errno
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from hexrepro.serving.connections import Connection, Lost, Pool, retry_after_s
from hexrepro.serving.protocol import CHAT, COMPLETIONS

_T = TypeVar("_T")
_MAX_EVENT = 16 * 2**20  # bytes; a first event beyond that is no event


class Whole(NamedTuple):
    """An answer in one piece: status 2xx or 4xx."""

    status: int
    content_type: str
    content: bytes


class Stream(NamedTuple):
    """A stream that has begun: `first` holds at least one whole event, the rest comes over the connection."""

    connection: Connection
    first: bytes


class Failed(Exception):
    """The server did not answer as it should.

    kind           refused, timeout, status, broken, busy (429) or missing (404: it does not know the model or the path)
    answer         what it said, where the client may be told when nobody else knows better
    retry_after_s  as it asked
    """

    def __init__(
        self,
        kind: str,
        detail: str,
        status: int = 502,
        *,
        answer: Whole | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.kind, self.status, self.answer, self.retry_after_s = kind, status, answer, retry_after_s

    @property
    def is_sick(self) -> bool:
        """Whether it speaks against the server's health."""
        return self.kind not in ("busy", "missing")


@dataclass(frozen=True)
class Timeouts:
    """Seconds.

    connect_s     until the server accepts the connection
    first_byte_s  until a stream begins, the server's own queue included
    chunk_s       between two chunks of a stream
    total_s       for an answer in one piece
    probe_s       for a look at `/health`
    body_s        until a client has sent all of its request
    client_s      that a client may leave a stream unread
    """

    connect_s: float = 2.0
    first_byte_s: float = 120.0
    chunk_s: float = 60.0
    total_s: float = 600.0
    probe_s: float = 2.0
    body_s: float = 30.0
    client_s: float = 60.0


class Upstream:
    """A server at `url`; `api_key` goes into its Authorization header."""

    def __init__(self, name: str, url: str, timeouts: Timeouts, api_key: str | None = None) -> None:
        self.name, self.url, self.timeouts = name, url.rstrip("/"), timeouts
        self.pool = Pool(self.url, timeouts.connect_s)
        parts = urlsplit(self.url)
        self._prefix = parts.path
        self._common = f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept-Encoding: identity\r\n"
        if api_key:
            self._common += f"Authorization: Bearer {api_key}\r\n"
        self._heads = {path: self._head("POST", path) for path in (CHAT, COMPLETIONS)}

    def _head(self, method: str, path: str) -> bytes:
        """All header lines; the empty line behind them is still to come."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._common}"
        if method == "POST":
            head += "Content-Type: application/json\r\nContent-Length: %d\r\n"
        return head.encode()

    # ---- calls ---------------------------------------------------------------------------------------------

    async def whole(self, path: str, body: bytes, more: bytes = b"") -> Whole:
        """Send a call and read its answer. `more`: further header lines. Raises Failed."""
        head = self._heads[path] % len(body) + more + b"\r\n"
        connection, content = await self._exchange(head, body, self.timeouts.total_s, Connection.whole)
        return self._release(connection, content)

    async def stream(self, path: str, body: bytes, more: bytes = b"") -> Stream | Whole:
        """Send a call and wait for its first event; whole if it is rejected. Raises Failed."""
        head = self._heads[path] % len(body) + more + b"\r\n"
        connection, first = await self._exchange(head, body, self.timeouts.first_byte_s, _first_event)
        if connection.status >= 300:
            return self._release(connection, first)
        kind = problem = ""
        if "event-stream" not in connection.content_type:
            kind, problem = "status", "answered with something else than a stream"
        elif not _has_event(first):
            kind, problem = "broken", "ended its answer before it began"
        elif first.startswith((b'data: {"error"', b'data:{"error"')):
            kind, problem = "status", "answered with an error"
        if kind:
            connection.close()
            raise Failed(kind, f"{self.name} {problem}")
        connection.limit(self.timeouts.chunk_s, silence=True)
        return Stream(connection, first)

    def broke(self, error: Lost | TimeoutError) -> Failed:
        """How a stream ended that did not end well."""
        if isinstance(error, TimeoutError):
            return Failed("timeout", f"{self.name} fell silent", 504)
        return Failed("broken", f"{self.name} broke off its answer")

    def said_error(self) -> Failed:
        """How a stream ended in which the server told of an error."""
        return Failed("status", f"{self.name} answered with an error")

    async def _exchange(
        self, head: bytes, body: bytes, limit_s: float, read: Callable[[Connection], Awaitable[_T]]
    ) -> tuple[Connection, _T]:
        """Send and read; once more where a kept connection turns out to have been closed."""
        fresh = False
        while True:
            try:
                connection = await self.pool.get(fresh=fresh)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    raise Failed("busy", "the gateway has no connection left", 429) from error
                raise Failed("refused", f"{self.name} does not accept connections") from error
            connection.send(head, body)
            connection.limit(limit_s)
            try:
                return connection, await read(connection)
            except Lost as error:
                if connection.reused and not connection.heard:
                    fresh = True  # the server closed it as idle just as the call was sent: it has not seen the call
                    continue
                how = "broke off its answer" if connection.heard else "closed the connection"
                raise Failed("broken", f"{self.name} {how}") from error
            except TimeoutError as error:
                raise Failed("timeout", f"{self.name} did not answer in time", 504) from error
            except BaseException:  # the client has gone
                connection.close()
                raise

    def _release(self, connection: Connection, content: bytes) -> Whole:
        """Give the connection back; what it said, unless that is a failure of the server."""
        connection.release()
        status = connection.status
        answer = Whole(status, connection.content_type or "application/json", content)
        if status < 300 or (status < 500 and status not in _OURS and status >= 400):
            return answer
        said = f"{self.name} answered {status}"
        wait_s = retry_after_s(connection.retry_after)
        if status == 429:
            raise Failed("busy", said, 429, retry_after_s=wait_s)
        if status in (404, 405):
            raise Failed("missing", said, answer=answer)
        raise Failed("status", said, retry_after_s=wait_s)

    # ---- other questions -----------------------------------------------------------------------------------

    async def get(self, path: str, body: bytes | None = None) -> Whole:
        """A short question, answered within `probe_s`. Raises OSError, Lost."""
        # whether it still accepts connections is part of what a probe asks
        connection = await self.pool.get(fresh=body is None)
        head = self._head("GET", path) if body is None else self._head("POST", path) % len(body)
        connection.send(head + b"\r\n", body or b"")
        connection.limit(self.timeouts.probe_s)
        try:
            content = await connection.whole()
        except BaseException:
            connection.close()
            raise
        connection.release()
        return Whole(connection.status, connection.content_type, content)

    async def probe(self) -> str | None:
        """None if `/health` answers with 200, otherwise how it failed. One slow answer is no proof that the server is gone: it
        may be busy with prompts."""
        try:
            return None if (await self.get("/health")).status == 200 else "probe"
        except (TimeoutError, Lost):
            return "probe"
        except OSError as error:
            return None if error.errno in _EXHAUSTED else "refused"

    async def count_tokens(self, body: bytes) -> int | None:
        """What vLLM's `/tokenize` counts; None if it does not."""
        try:
            answer = await self.get("/tokenize", body)
            count = json.loads(answer.content)["count"] if answer.status == 200 else None
        except (OSError, Lost, ValueError, KeyError, TypeError):
            return None
        return count if type(count) is int and count > 0 else None


# files or ports have run out here: that says nothing of the server
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
# not the client's fault: our key for the server, a timeout there, its load, a path or model that it does not have
_OURS = (401, 403, 404, 405, 408, 429)


async def _first_event(connection: Connection) -> bytes:
    """The first pieces of a stream, up to the end of an event at least; all of an answer that is none."""
    first = await connection.piece()
    if connection.status != 200 or "event-stream" not in connection.content_type:
        return first + await connection.whole()
    while not _has_event(first) and not connection.complete:
        first += await connection.piece()
        if len(first) > _MAX_EVENT:
            raise Lost("no event")
    return first


def _has_event(data: bytes) -> bool:
    return b"\n\n" in data or b"\n\r\n" in data
