"""One model server as the gateway's client sees it: sending a call, noticing that it fails, and when to try it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
from yarl import URL

from hexrepro.serving.protocol import CHAT, COMPLETIONS


class Failed(Exception):
    """The server did not answer as it should. `kind`: refused, timeout, status, broken or busy (429)."""

    def __init__(self, kind: str, detail: str, status: int = 502) -> None:
        super().__init__(detail)
        self.kind, self.status = kind, status


@dataclass(frozen=True)
class Timeouts:
    """Seconds.

    connect_s     until the server accepts the connection
    first_byte_s  until a stream begins, the server's own queue included
    chunk_s       between two chunks of a stream
    total_s       for an answer in one piece
    probe_s       for a look at `/health`
    """

    connect_s: float = 2.0
    first_byte_s: float = 120.0
    chunk_s: float = 60.0
    total_s: float = 600.0
    probe_s: float = 2.0


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
        return min(self.longest_s, self.pause_s * 2.0 ** min(self.pauses - 1, 30))


class _Silence:
    """Closes a stream that has not been heard of for `limit_s`. One timer that is set anew when it goes off, not at every
    chunk, which would cost more than the chunk itself."""

    def __init__(self, limit_s: float, response: aiohttp.ClientResponse) -> None:
        loop = asyncio.get_running_loop()
        self.now_s, self._later = loop.time, loop.call_later
        self._limit_s, self._response, self.ended = limit_s, response, False
        self.heard_s = self.now_s()
        self._timer = self._later(limit_s, self._look)

    def _look(self) -> None:
        left_s = self.heard_s + self._limit_s - self.now_s()
        if left_s > 1e-3:
            self._timer = self._later(left_s, self._look)
            return
        self.ended = True
        self._response.close()

    def stop(self) -> None:
        self._timer.cancel()


class Upstream:
    """A server at `url`; `api_key` goes into its Authorization header."""

    def __init__(
        self,
        name: str,
        url: str,
        session: aiohttp.ClientSession,
        timeouts: Timeouts,
        health: Health,
        api_key: str | None = None,
    ) -> None:
        self.name, self.url, self.health, self.timeouts = name, url.rstrip("/"), health, timeouts
        self._session = session
        self._urls = {path: URL(self.url + path) for path in (CHAT, COMPLETIONS)}
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # the deadlines are ours (below): aiohttp's would count its own connection pool in
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s)

    async def post(self, path: str, body: bytes) -> aiohttp.ClientResponse:
        """Send a call; the answer has status 2xx or 4xx. The caller closes it. Raises Failed."""
        try:
            response = await self._session.post(
                self._urls[path],
                data=body,
                headers=self._headers,
                timeout=self._timeout,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Failed("refused", f"{self.name} does not accept connections") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Failed("broken", f"{self.name} closed the connection") from error
        if response.status >= 500 or response.status in (408, 429) or 300 <= response.status < 400:
            status = response.status
            response.close()
            kind = "busy" if status == 429 else "status"
            raise Failed(kind, f"{self.name} answered {status}", 429 if status == 429 else 502)
        return response

    async def whole(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """An answer in one piece: (status, content type, body). Raises Failed."""
        response = None
        try:
            async with asyncio.timeout(self.timeouts.total_s):
                response = await self.post(path, body)
                content = await response.read()
        except TimeoutError as error:
            raise Failed("timeout", f"{self.name} did not answer in time", 504) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Failed("broken", f"{self.name} broke off its answer") from error
        finally:
            if response is not None:
                response.close()  # the connection goes back to the pool if all was read
        return response.status, response.headers.get("Content-Type", "application/json"), content

    async def first_chunk(self, path: str, body: bytes) -> tuple[aiohttp.ClientResponse, bytes]:
        """Begin a stream: the open answer and its first bytes, at least one whole event. Raises Failed."""
        response = None
        try:
            async with asyncio.timeout(self.timeouts.first_byte_s):
                response = await self.post(path, body)
                if response.status >= 400:
                    return response, await response.read()
                chunk = more = await response.content.readany()
                while more and b"\n\n" not in chunk and b"\n\r\n" not in chunk:
                    more = await response.content.readany()
                    chunk += more
        except BaseException as error:
            if response is not None:
                response.close()
            if isinstance(error, TimeoutError):
                raise Failed("timeout", f"{self.name} did not answer in time", 504) from error
            if isinstance(error, aiohttp.ClientError | OSError):
                raise Failed("broken", f"{self.name} broke off its answer") from error
            raise
        if "event-stream" not in response.headers.get("Content-Type", ""):
            response.close()
            raise Failed("status", f"{self.name} answered with something else than a stream")
        if not more:
            response.close()
            raise Failed("broken", f"{self.name} ended its answer before it began")
        if chunk.startswith((b'data: {"error"', b'data:{"error"')):
            response.close()
            raise Failed("status", f"{self.name} answered with an error")
        return response, chunk

    async def chunks(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """How the stream goes on. Raises Failed when it breaks or falls silent."""
        silence = _Silence(self.timeouts.chunk_s, response)
        read = response.content.readany
        try:
            while chunk := await read():
                silence.heard_s = silence.now_s()
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            if silence.ended:
                raise Failed("timeout", f"{self.name} fell silent", 504) from error
            raise Failed("broken", f"{self.name} broke off its answer") from error
        finally:
            silence.stop()

    async def probe(self) -> str | None:
        """None if `/health` answers with 200, otherwise how it failed. One slow answer is no proof that the server is gone: it
        may be busy with prompts."""
        try:
            async with asyncio.timeout(self.timeouts.probe_s):
                response = await self._session.get(self.url + "/health", headers=self._headers)
                response.close()
                return None if response.status == 200 else "probe"
        except aiohttp.ClientConnectorError:
            return "refused"
        except (aiohttp.ClientError, OSError, TimeoutError):
            return "probe"

    async def count_tokens(self, body: bytes) -> int | None:
        """What vLLM's `/tokenize` counts; None if it does not."""
        try:
            async with asyncio.timeout(self.timeouts.probe_s):
                response = await self._session.post(self.url + "/tokenize", data=body, headers=self._headers)
                try:
                    count = (await response.json())["count"] if response.status == 200 else None
                finally:
                    response.close()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
            return None
        return count if type(count) is int and count > 0 else None
