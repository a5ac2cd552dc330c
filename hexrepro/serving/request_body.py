"""The body of a request, as far as it may be long and may be slow."""

from __future__ import annotations

import asyncio

from aiohttp import web

from hexrepro.serving.protocol import Refused


async def read_body(request: web.Request, most_bytes: int, limit_s: float) -> bytes:
    """All of it; the application's `client_max_size` is `most_bytes` too, for bodies that do not tell their length. Raises
    Refused."""
    too_large = Refused(
        413,
        f"The body is larger than {most_bytes} bytes.",
        code="body_too_large",
        kind="invalid_request_error",
    )
    if (request.content_length or 0) > most_bytes:
        raise too_large
    try:
        if request.content.is_eof():  # it has come together with its head
            return await request.read()
        async with asyncio.timeout(limit_s):
            return await request.read()
    except TimeoutError:
        raise Refused(
            408, "The body did not come in time.", code="body_timeout", kind="invalid_request_error"
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError:
        raise Refused(400, "The body cannot be read.", code="invalid_body") from None
