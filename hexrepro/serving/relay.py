"""Passing a stream on to its client, at the client's pace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from aiohttp import HttpVersion11, web

from hexrepro.serving.connections import Lost
from hexrepro.serving.events import Events
from hexrepro.serving.upstream import Stream, Timeouts

_UNREAD = 65536  # bytes that a client may leave unread before its server is told to wait


class Relay:
    """One stream on its way. Pieces go from socket to socket as they come; this task is woken only at the end of the stream
    and when the client is slow."""

    def __init__(
        self, request: web.Request, response: web.StreamResponse, events: Events, timeouts: Timeouts
    ) -> None:
        self._request, self.response, self._events, self._timeouts = request, response, events, timeouts
        self._last = b""
        self._chunked = request.version >= HttpVersion11
        if self._chunked:
            response.enable_chunked_encoding()

    async def begin(self, stream: Stream) -> None:
        """Send the head and the first events."""
        self._writer = await self.response.prepare(self._request)
        self._transport = self._request.transport
        if self._transport is None:
            raise ConnectionResetError
        events = self._events.feed(stream.first)
        if self._events.ended:
            self._last = events
        else:
            await self._write(self.response.write(events), len(events))

    async def rest(self, stream: Stream) -> None:
        """Send the rest, but for the very end. Raises Lost, TimeoutError (the server's faults), ConnectionResetError."""
        connection, events = stream.connection, self._events
        while not events.ended:
            await connection.pass_on(self._forward)
            if events.ended:
                return
            if connection.complete:
                raise Lost("it ended early")
            connection.limit(0)  # it is the client that keeps us waiting
            await self._for_client(self._writer.drain())
            connection.limit(self._timeouts.chunk_s, silence=True)

    async def end(self, more: bytes = b"") -> None:
        """Send the last events and `more`. Raises ConnectionResetError."""
        last = self._last + more
        await self._write(self.response.write_eof(last), len(last))

    def _forward(self, data: bytes) -> bool:
        """Called by the server's connection; False hands the control back to `rest`."""
        data = self._events.feed(data)
        if self._events.ended:
            self._last = data  # goes out together with the end
            return False
        if data:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return self._transport.get_write_buffer_size() <= _UNREAD and not self._transport.is_closing()

    async def _write(self, sending: Awaitable[None], size: int) -> None:
        if self._transport.get_write_buffer_size() + size < _UNREAD // 2:
            await sending  # it goes at once
        else:
            await self._for_client(sending)

    async def _for_client(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._timeouts.client_s):
                await sending
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read") from None
