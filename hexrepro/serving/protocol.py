"""OpenAI's protocol as far as the gateway must understand it: requests, error bodies, and streams of server-sent events.

A request is checked for what the gateway itself reads; the rest is the server's to judge and is passed on as it came.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hexrepro.serving import headers as names

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MAX_NAME = 200  # characters of an id or a name
_MAX_SLO_S, _MAX_TOKENS = 1e7, 1e6  # beyond any use; an infinity would spoil the sums that it enters


class Refused(Exception):
    """An answer other than 200, as OpenAI words it. `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(math.ceil(self.retry_after_s))}


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request."""

    path: str
    raw: bytes
    body: dict[str, Any]
    model: str
    stream: bool
    wants_usage: bool  # the client itself asked for usage at the end of the stream
    max_tokens: int | None
    characters: int  # of the prompt, where it is text
    prompt_ids: int | None  # tokens of the prompt, where it is given as ids
    query: str | None
    stage: str
    tenant: str
    slo_s: float | None
    final: bool
    output_tokens: float | None

    def upstream_body(self, **extra: Any) -> bytes:
        """What goes to the server: the request without our field, with `extra` fields. As it came, where that will do."""
        if names.BODY_FIELD in self.body or any(name in self.body for name in extra):
            body = {k: v for k, v in self.body.items() if k != names.BODY_FIELD} | extra
            return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        if not extra:
            return self.raw
        more = json.dumps(extra, separators=(",", ":"))[1:]
        return self.raw.rstrip()[:-1] + b"," + more.encode()  # an object with at least `model` in it


def read_request(path: str, raw: bytes, headers: Mapping[str, str], models: tuple[str, ...]) -> Asked:
    """Check a request. Raises Refused with OpenAI's words and the name of the field."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise Refused(400, "The body is not valid JSON.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refused(400, "The body must be a JSON object.", code="invalid_json")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise _bad("model", "must be the name of a model", model)
    if models and model not in models:
        raise Refused(
            404,
            f"The model {model[:_MAX_NAME]!r} does not exist; there is {', '.join(models)}.",
            param="model",
            code="model_not_found",
        )
    stream = body.get("stream", False)
    if stream is None:
        stream = False
    if not isinstance(stream, bool):
        raise _bad("stream", "must be true or false", stream)
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _bad("stream_options", "must be an object", options)
    max_tokens = None
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _bad(name, "must be a whole number of at least 1", value)
        max_tokens = value if max_tokens is None else max_tokens
    characters, ids = _messages(body) if path == CHAT else _prompt(body)
    place = _place(body, headers)
    return Asked(
        path=path,
        raw=raw,
        body=body,
        model=model,
        stream=stream,
        wants_usage=bool(options and options.get("include_usage")),
        max_tokens=max_tokens,
        characters=characters,
        prompt_ids=ids,
        **place,
    )


def _messages(body: dict) -> tuple[int, None]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad("messages", "must be a list of at least one message", messages)
    characters = 0
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _bad(f"messages[{i}]", "must be an object with a role", message)
        content = message.get("content")
        if isinstance(content, str):
            characters += len(content)
        elif isinstance(content, list):
            for part in content:
                if not isinstance(part, dict):
                    raise _bad(f"messages[{i}].content", "must be text or a list of objects", part)
                text = part.get("text")
                characters += len(text) if isinstance(text, str) else 0
        elif content is not None:
            raise _bad(f"messages[{i}].content", "must be text or a list of objects", content)
    return characters, None


def _prompt(body: dict) -> tuple[int, int | None]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return len(prompt), None
    if isinstance(prompt, list) and prompt:
        if all(isinstance(p, str) for p in prompt):
            return sum(map(len, prompt)), None
        if all(type(p) is int for p in prompt):
            return 0, len(prompt)
        if all(isinstance(p, list) and p and all(type(i) is int for i in p) for p in prompt):
            return 0, sum(map(len, prompt))
    raise _bad("prompt", "must be text, a list of texts, token ids, or a list of lists of token ids", prompt)


def _place(body: dict, headers: Mapping[str, str]) -> dict[str, Any]:
    """Where the call belongs; a field in the body wins over its header."""
    ours = body.get(names.BODY_FIELD)
    if ours is None:
        ours = {}
    elif not isinstance(ours, dict):
        raise _bad(names.BODY_FIELD, f"must be an object with {', '.join(names.FIELDS)}", ours)
    for name in ours:
        if name not in names.FIELDS:
            raise Refused(
                400,
                f"{names.BODY_FIELD}.{str(name)[:_MAX_NAME]} is unknown; the fields are {', '.join(names.FIELDS)}.",
                param=f"{names.BODY_FIELD}.{str(name)[:_MAX_NAME]}",
            )

    def find(name: str) -> tuple[Any, str]:
        if ours.get(name) is not None:
            return ours[name], f"{names.BODY_FIELD}.{name}"
        return headers.get(names.FIELDS[name]), names.FIELDS[name]

    def text(name: str) -> str | None:
        value, where = find(name)
        if value is None or value == "":
            return None
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or len(value) > _MAX_NAME:
            raise _bad(where, f"must be text of at most {_MAX_NAME} characters", value)
        return value

    def number(name: str, most: float) -> float | None:
        value, where = find(name)
        if value is None:
            return None
        try:
            if isinstance(value, bool):
                raise ValueError
            found = float(value)
            if not 0 < found <= most:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise _bad(where, f"must be a number above 0 and at most {most:,.0f}", value) from None
        return found

    final, where = find("final")
    if isinstance(final, str):
        final = {"true": True, "1": True, "false": False, "0": False, "": False}.get(final.lower(), final)
    if not isinstance(final, bool | None):
        raise _bad(where, "must be true or false", final)
    workflow, stage = text("workflow"), text("stage") or "call"
    return {
        "query": text("query"),
        "stage": f"{workflow}/{stage}" if workflow else stage,
        "tenant": text("tenant") or "",
        "slo_s": number("slo_s", _MAX_SLO_S),
        "final": bool(final),
        "output_tokens": number("output_tokens", _MAX_TOKENS),
    }


def _bad(param: str, want: str, got: Any) -> Refused:
    if got is None:
        return Refused(400, f"{param} is missing; it {want}.", param=param, code="missing_field")
    # no more of what was sent than its type: it may hold the user's prompt
    kind = {"dict": "object", "list": "list", "str": "text", "bool": "true or false"}.get(
        type(got).__name__, "number"
    )
    shown = repr(got) if isinstance(got, int | float) else kind
    return Refused(400, f"{param} {want}; got {shown}.", param=param, code="invalid_value")


class Events:
    """A stream of server-sent events on its way through: cut at event boundaries, counted, and its usage read.

    tokens_events  events with output so far
    done           the closing `[DONE]` has come
    error          the server put an error into the stream
    usage          of the last event that carried one
    """

    __slots__ = ("_hide", "_left", "done", "error", "events", "usage")

    def __init__(self, hide_usage: bool = False) -> None:
        self._left, self._hide = b"", hide_usage
        self.events, self.done, self.error = 0, False, False
        self.usage: dict[str, Any] | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Take what the server sent; returns the whole events that go on to the client."""
        data = self._left + chunk if self._left else chunk
        if b"\r\n" in data:
            data = data.replace(b"\r\n", b"\n")
        cut = data.rfind(b"\n\n") + 2
        if cut < 2:
            self._left = data
            return b""
        self._left = data[cut:]
        whole = data[:cut] if self._left else data
        # text inside an event has its line ends escaped: a line that begins with data: is an event's own
        self.events += whole.count(b"\ndata:") + whole.startswith(b"data:")
        if b"[DONE]" in whole and (b"data: [DONE]\n\n" in whole or b"data:[DONE]\n\n" in whole):
            self.done = True
            self.events -= 1
        if b'"usage"' in whole or b'"error"' in whole:
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
    """`usage` of a whole answer, if it has one."""
    try:
        body = json.loads(raw)
    except ValueError:
        return None
    usage = body.get("usage") if isinstance(body, dict) else None
    return usage if isinstance(usage, dict) else None


def usage_tokens(usage: dict[str, Any] | None) -> tuple[int | None, int | None, int | None]:
    """(prompt, cached, output) tokens as the server counted them; None where it does not say."""
    if usage is None:
        return None, None, None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    found = (usage.get("prompt_tokens"), cached, usage.get("completion_tokens"))
    return tuple(x if type(x) is int and x >= 0 else None for x in found)
