"""What servers answer, as far as the gateway reads it: streams of server-sent events, errors in them, and usage."""

from __future__ import annotations

import json
import re
from typing import Any

from hexrepro.serving.connections import Lost
from hexrepro.serving.protocol import Refused

_MAX_EVENT = 16 * 2**20  # bytes; what never ends is no event
# events that say more than a token: usage with numbers in it (many servers put a null into every event), or an error
_TELLING = re.compile(rb'"usage":\s*\{|"error":\s*[^\sn]')
_DECODER = json.JSONDecoder()


class Events:
    """A stream of server-sent events on its way through: cut at event boundaries, counted, and its usage read.

    events  with output so far
    done    the closing `[DONE]` has come
    error   the server put an error into the stream
    usage   of the last event that carried one
    """

    __slots__ = ("_hide", "_left", "done", "error", "events", "usage")

    def __init__(self, hide_usage: bool = False) -> None:
        self._left, self._hide = b"", hide_usage
        self.events, self.done, self.error = 0, False, False
        self.usage: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.done or self.error

    def feed(self, chunk: bytes) -> bytes:
        """Take what the server sent; returns the whole events that go on to the client. No JSON is read but where usage or an
        error may be. Raises Lost."""
        data = self._left + chunk if self._left else chunk
        if b"\r\n" in data:
            data = data.replace(b"\r\n", b"\n")
        cut = data.rfind(b"\n\n") + 2
        if cut < 2:
            cut = 0
        self._left = data[cut:]
        if len(self._left) > _MAX_EVENT:
            raise Lost("an event without end")
        if not cut:
            return b""
        whole = data[:cut] if self._left else data
        # text inside an event has its line ends escaped: a line that begins with data: is an event's own
        self.events += whole.count(b"\ndata:") + whole.startswith(b"data:")
        if b"[DONE]" in whole and (b"data: [DONE]\n\n" in whole or b"data:[DONE]\n\n" in whole):
            self.done = True
            self.events -= 1
        if (b'"usage"' in whole or b'"error"' in whole) and _TELLING.search(whole):
            return self._look(whole)
        return whole

    def _look(self, whole: bytes) -> bytes:
        kept = []
        for event in whole.split(b"\n\n")[:-1]:
            keep = True
            if b'"usage"' in event or b'"error"' in event:
                content = _content(event)
                if isinstance(content.get("usage"), dict):
                    self.usage = content["usage"]
                    if content.get("choices") == []:
                        keep = not self._hide
                        self.events -= 1
                if content.get("error"):
                    self.error = True
            if keep:
                kept.append(event + b"\n\n")
        return b"".join(kept)


def _content(event: bytes) -> dict[str, Any]:
    try:
        content = json.loads(event.partition(b"data:")[2])
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def error_event(refused: Refused) -> bytes:
    """The error as the last event of a stream that had begun."""
    return b"data: " + json.dumps(refused.body).encode() + b"\n\n"


def usage_of(raw: bytes) -> dict[str, Any] | None:
    """`usage` of a whole answer, if it has one. Read from its end: an answer with log probabilities is megabytes of JSON."""
    at = raw.rfind(b'"usage":')  # inside a text its quotes would be escaped
    if at < 0:
        return None
    try:
        usage, _ = _DECODER.raw_decode(raw[at + 8 :].decode().lstrip())
    except ValueError:
        return None
    return usage if isinstance(usage, dict) else None


def usage_tokens(usage: dict[str, Any] | None) -> tuple[int | None, int | None, int | None]:
    """(prompt, cached, output) tokens as the server counted them; None where it does not say."""
    if usage is None:
        return None, None, None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    found = (usage.get("prompt_tokens"), cached, usage.get("completion_tokens"))
    return tuple(x if type(x) is int and x >= 0 else None for x in found)
