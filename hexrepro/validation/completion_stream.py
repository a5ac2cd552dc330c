"""One streamed completion of forced length, with the times at which its tokens came: what replay and profiling send.

The prompt goes as token ids and the length is forced (`max_tokens = min_tokens`, `ignore_eos`), so the server does exactly the
work that was asked for; an answer of another length is an error. vLLM takes all of it, and so does any server that follows it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

# vLLM closes a connection that was idle for 5 s; ours must not be used just as that happens
KEEP_ALIVE_S = 2.0


class CallFailed(Exception):
    """A call that did not end well; the message says how, in one line, without the prompt."""


@dataclass
class Streamed:
    """How one call went. Times are of `time.perf_counter`."""

    sent_s: float
    first_token_s: float
    finish_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # of the prompt; None where the server does not tell
    headers: Mapping[str, str]
    # time and tokens so far, one a chunk; only where asked for
    progress: list[tuple[float, int]] = field(default_factory=list)


def session(connections: int = 0, api_key: str | None = None) -> aiohttp.ClientSession:
    """A client session without limits of its own (0 connections: as many as it takes)."""
    connector = aiohttp.TCPConnector(limit=connections, keepalive_timeout=KEEP_ALIVE_S)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None), headers=headers
    )


def body(model: str, prompt: Sequence[int], output_tokens: int, **more: Any) -> dict[str, Any]:
    """The request of one call. `more` are further fields of it, such as `priority`."""
    return dict(
        model=model,
        prompt=list(prompt),
        max_tokens=output_tokens,
        min_tokens=output_tokens,
        ignore_eos=True,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        **more,
    )


async def stream(
    client: aiohttp.ClientSession,
    url: str,
    request: dict[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    progress: bool = False,
    on_first: Callable[[float], None] | None = None,
) -> Streamed:
    """Send a request of `body` to `url` (the server's base, such as http://127.0.0.1:8000) and read its stream to the end.

    `progress` notes the time of every chunk, with the number of tokens so far; `on_first` is called with the time of the first
    token as it comes. CallFailed for everything that goes wrong.
    """
    if progress:
        request = request | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    try:
        async with asyncio.timeout(timeout_s):
            return await _stream(client, url, request, headers or {}, progress, on_first)
    except TimeoutError:
        raise CallFailed(f"no end after {timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise CallFailed(f"{type(error).__name__}: {error}") from None


async def _stream(
    client: aiohttp.ClientSession,
    url: str,
    request: dict[str, Any],
    headers: Mapping[str, str],
    progress: bool,
    on_first: Callable[[float], None] | None,
) -> Streamed:
    payload = json.dumps(request).encode()
    headers = {"Content-Type": "application/json", **headers}
    sent_s = time.perf_counter()
    first_s = last_s = 0.0
    chunks = 0
    seen: list[tuple[float, int]] = []
    usage: dict[str, Any] | None = None
    done = False
    async with client.post(f"{url.rstrip('/')}/v1/completions", data=payload, headers=headers) as response:
        if response.status != 200:
            raise CallFailed(f"HTTP {response.status}: {_message(await response.text())}")
        rest = b""
        async for data in response.content.iter_any():
            now = time.perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].strip()
                if event == b"[DONE]":
                    done, last_s = True, now
                    continue
                # most chunks are only counted: reading them all would load a core at high rates
                bare = b'"choices":[]' in event
                if progress or bare or b'"usage":{' in event or event.startswith(b'{"error"'):
                    content = json.loads(event)
                    if "error" in content:
                        raise CallFailed(f"error in the stream: {_message(event.decode())}")
                    usage = content.get("usage") or usage
                    bare = not content.get("choices")
                if bare:
                    continue
                chunks += 1
                if first_s == 0.0:
                    first_s = now
                    if on_first:
                        on_first(now)
                if progress:
                    seen.append((now, usage["completion_tokens"] if usage else chunks))
    if not done or first_s == 0.0:
        raise CallFailed(f"the stream broke off after {chunks} chunks")
    if usage is None:
        raise CallFailed("the stream tells no usage; the server must know stream_options.include_usage")
    got, wanted = usage["completion_tokens"], request["max_tokens"]
    if got != wanted or usage["prompt_tokens"] != len(request["prompt"]):
        raise CallFailed(
            f"{usage['prompt_tokens']} prompt and {got} output tokens where {len(request['prompt'])} and {wanted} were asked"
            " for; the server must know min_tokens and ignore_eos"
        )
    details = usage.get("prompt_tokens_details") or {}
    return Streamed(
        sent_s=sent_s,
        first_token_s=first_s,
        finish_s=last_s,
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=got,
        cached_tokens=details.get("cached_tokens"),
        headers=response.headers,
        progress=seen,
    )


def _message(text: str) -> str:
    """The message in an OpenAI-style error, else the text's beginning; one line."""
    try:
        content = json.loads(text)
        error = content.get("error", content)
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, AttributeError):
        pass
    return " ".join(str(text).split())[:300]
