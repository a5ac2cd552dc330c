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
_MAX_SEQUENCES = 16_384  # of one call; vLLM's own bound on n
# of a request: `priority` is for the scheduler to give, else a client could put itself before others, and be spared preemption
_NOT_SENT = (names.BODY_FIELD, "priority")
_COMPLETION_TOKENS = 16  # what /v1/completions generates where nothing is said, at OpenAI and in vLLM


class Refused(Exception):
    """An answer other than 200, as OpenAI words it.

    param   the field at fault
    turned  why a call was turned away that was not at fault: overload, tenant (its limit), no_instance or draining
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        turned: str | None = None,
        retry_after_s: float | None = None,
        more_headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.turned = turned
        self.retry_after_s, self._more_headers = retry_after_s, dict(more_headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return self._more_headers
        return self._more_headers | {"Retry-After": str(math.ceil(self.retry_after_s))}


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request.

    max_tokens     of each sequence; None: whatever the server allows
    sequences      that the server generates: `n` for each of the prompts
    characters     of the prompt, where it is text
    prompt_ids     tokens of the prompt, where it is given as ids
    output_tokens  of each sequence, as the client expects
    wants_usage    the client itself asked for usage at the end of the stream
    trace          header lines that go on to the server
    """

    path: str
    raw: bytes
    body: dict[str, Any]
    model: str
    stream: bool
    wants_usage: bool
    max_tokens: int | None
    sequences: int
    characters: int
    prompt_ids: int | None
    query: str | None
    stage: str
    tenant: str
    slo_s: float | None
    final: bool
    output_tokens: float | None
    trace: bytes = b""

    def upstream_body(self, **extra: Any) -> bytes:
        """What goes to the server: the request without the fields that are ours, with `extra` fields. As it came, where that
        will do."""
        if any(name in self.body for name in (*_NOT_SENT, *extra)):
            body = {k: v for k, v in self.body.items() if k not in _NOT_SENT} | extra
            return json.dumps(body, separators=(",", ":")).encode()  # escaped: a lone surrogate has no UTF-8
        if not extra:
            return self.raw
        more = json.dumps(extra, separators=(",", ":"))[1:]
        return self.raw.rstrip()[:-1] + b"," + more.encode()  # an object with at least `model` in it


def read_request(path: str, raw: bytes, headers: Mapping[str, str], models: tuple[str, ...]) -> Asked:
    """Check a request. Raises Refused with OpenAI's words and the name of the field."""
    try:
        body = json.loads(raw.decode())  # left to itself, json also takes UTF-16, and what we append is not
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
    chat = path == CHAT
    max_tokens = _max_tokens(body, chat)
    characters, ids, prompts = _messages(body) if chat else _prompt(body)
    sequences = prompts * _whole_number(body, "n", least=1, default=1)
    if sequences > _MAX_SEQUENCES:
        raise Refused(
            400, f"n times the prompts must be at most {_MAX_SEQUENCES}; got {sequences}.", param="n"
        )
    place = place_of(body, headers)
    return Asked(
        path=path,
        raw=raw,
        body=body,
        model=model,
        stream=stream,
        wants_usage=bool(options and options.get("include_usage")),
        max_tokens=max_tokens,
        sequences=sequences,
        characters=characters,
        prompt_ids=ids,
        trace=_passed_on(headers),
        **place,
    )


def _passed_on(headers: Mapping[str, str]) -> bytes:
    lines = (f"{name}: {headers[name]}\r\n" for name in names.PASSED_ON if name in headers)
    return "".join(lines).encode(errors="surrogateescape")  # as it came


def _whole_number(body: dict, name: str, *, least: int, default: int | None) -> int | None:
    """A field that is a whole number; `default` where it is not given. Numbers beyond any use count as the largest in use."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _bad(name, f"must be a whole number of at least {least}", value)
    return min(value, int(_MAX_TOKENS))


def _max_tokens(body: dict, chat: bool) -> int | None:
    least = 1 if chat else 0  # /v1/completions takes 0 together with `echo`
    newer = _whole_number(body, "max_completion_tokens", least=1, default=None) if chat else None
    default = _COMPLETION_TOKENS if not chat and "max_tokens" not in body else None
    older = _whole_number(body, "max_tokens", least=least, default=default)
    return older if newer is None else newer


def _messages(body: dict) -> tuple[int, None, int]:
    """(characters, token ids: none, prompts: one)"""
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
    return characters, None, 1


def _prompt(body: dict) -> tuple[int, int | None, int]:
    """(characters, token ids, prompts)"""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return len(prompt), None, 1
    if isinstance(prompt, list) and prompt:
        if all(isinstance(p, str) for p in prompt):
            return sum(map(len, prompt)), None, len(prompt)
        if all(type(p) is int for p in prompt):
            return 0, len(prompt), 1
        if all(isinstance(p, list) and p and all(type(i) is int for i in p) for p in prompt):
            return 0, sum(map(len, prompt)), len(prompt)
    if prompt is None and body.get("prompt_embeds") is not None:  # vLLM's; their length is not told
        return 0, None, 1
    raise _bad("prompt", "must be text, a list of texts, token ids, or a list of lists of token ids", prompt)


def place_of(body: dict, headers: Mapping[str, str]) -> dict[str, Any]:
    """Where a call belongs: these fields of `Asked`. A field in the body wins over its header. Raises Refused."""
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
        if not isinstance(value, str) or len(value) > _MAX_NAME or not value.isprintable():
            # control characters and broken UTF-8 would spoil what the names go into: metrics, logs
            raise _bad(where, f"must be printable text of at most {_MAX_NAME} characters", value)
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
    shown = repr(got)[:50] if isinstance(got, int | float) else kind
    return Refused(400, f"{param} {want}; got {shown}.", param=param, code="invalid_value")
