"""One LLM call: OpenAI's client, the gateway's headers, and the record of the call.

Answers are streamed, for the time of the first token, and so that a client that goes away stops the server. Any
OpenAI-compatible server will do; what is not the gateway ignores the headers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import openai

from hexrepro.errors import InputError
from hexrepro.serving import headers as names
from hexrepro.serving.call_log import CallLog, CallRecord
from hexrepro.text2sql.prompts import SYSTEM

# the HTTP library that this release of openai uses: httpx, or httpx2
httpx = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])

WORKFLOW = "chess"  # the stages are those of data/workloads/workflows/chess.yaml
_PASSING = (408, 409, 429)  # these and 5xx may be over at the next call; other 4xx will not


class Unanswered(Exception):
    """A call that failed in a way that the next one may not."""

    def __init__(self, call: int, why: str) -> None:
        super().__init__(why)
        self.call = call


@dataclass(frozen=True)
class Query:
    """What all calls of one question say of themselves."""

    id: str
    slo_s: float | None = None
    tenant: str = ""

    def headers(self) -> dict[str, str]:
        found = {names.QUERY: self.id, names.WORKFLOW: WORKFLOW}
        if self.tenant:
            found[names.TENANT] = self.tenant
        if self.slo_s is not None:
            found[names.SLO] = f"{self.slo_s:g}"
        return found


@dataclass
class Answer:
    """An answer as it comes in. Times in Unix seconds; token counts None where the server does not give them."""

    call: int
    issued_s: float
    text: str = ""
    first_token_s: float | None = None
    finished_s: float = 0.0
    instance: str | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class Model:
    """A model behind an OpenAI-compatible endpoint. An async context manager.

    url, key, model    of the endpoint; without a model, the only one that it has is taken
    max_tokens         that an answer may have
    timeout_s          without a sign of life from the server
    log                where records of the calls go
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "none",
        model: str | None = None,
        max_tokens: int = 1024,
        timeout_s: float = 600.0,
        log: CallLog | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(
                f"url {url!r}: must begin with http:// or https://, such as http://127.0.0.1:8080/v1"
            )
        self.url, self.model, self.max_tokens = url.rstrip("/"), model, max_tokens
        self.uncounted = False  # whether token counts had to be estimated
        self._log = log
        self._next = 0 if log is None else _next_number(log.path)
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        # waiting for a turn is the gateway's business: no limit on connections here
        self._client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=key,
            timeout=timeout,
            http_client=openai.DefaultAsyncHttpxClient(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=3.0)
            ),
        )

    async def __aenter__(self) -> Model:
        try:
            if self.model is None:
                self.model = await self._only_model()
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *_exception) -> None:
        await self._client.close()

    async def _only_model(self) -> str:
        try:
            found = [model.id for model in (await self._client.models.list()).data]
        except openai.OpenAIError as error:
            raise self._mistake(error) from error
        if len(found) != 1:
            there = ", ".join(found[:10]) or "none"
            raise InputError(f"model: {self.url} has {there}; name the one to use with --model")
        return found[0]

    async def ask(
        self,
        query: Query,
        stage: str,
        prompt: str,
        *,
        after: Sequence[int] = (),
        temperature: float = 0.0,
        final: bool = False,
        output_tokens: int | None = None,
    ) -> Answer:
        """One call of a query. `after`: the calls whose answers are in the prompt. Raises Unanswered, or InputError where
        no further call would do better (nobody answers, a wrong key, an unknown model)."""
        where = query.headers() | {names.STAGE: stage}
        if final:
            where[names.FINAL] = "true"
        if output_tokens is not None:
            where[names.OUTPUT_TOKENS] = str(output_tokens)
        body = dict(
            model=self.model,
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}],
            max_tokens=self.max_tokens,
            temperature=temperature,
        )
        answer = Answer(self._next, time.time())
        self._next += 1
        ended = "cancelled"
        try:
            await self._stream(body, where, answer)
            ended = "done"
        except openai.APIStatusError as error:
            ended = "failed" if error.status_code >= 500 else "rejected"
            if error.status_code < 500 and error.status_code not in _PASSING:
                raise self._mistake(error) from error
            raise Unanswered(answer.call, _said(error)) from error
        except openai.APITimeoutError as error:
            ended = "failed"
            raise Unanswered(answer.call, "no answer in time") from error
        except openai.APIConnectionError as error:
            ended = "failed"
            raise self._mistake(error) from error
        except (openai.APIError, httpx.HTTPError, ValueError) as error:  # in the middle of a stream
            ended = "broken"
            raise Unanswered(answer.call, f"the answer broke off: {_said(error)}") from error
        finally:
            answer.finished_s = max(time.time(), answer.issued_s)
            self._record(query, stage, tuple(after), prompt, answer, ended)
        return answer

    async def _stream(self, body: dict, where: dict[str, str], answer: Answer) -> None:
        raw = await self._client.chat.completions.with_raw_response.create(
            **body, stream=True, stream_options={"include_usage": True}, extra_headers=where
        )
        answer.instance = raw.headers.get(names.INSTANCE)
        parts = []
        async with raw.parse() as stream:
            async for chunk in stream:
                # reasoning counts as output, but is no part of the answer
                if chunk.choices and chunk.choices[0].delta and answer.first_token_s is None:
                    answer.first_token_s = time.time()
                if chunk.choices and chunk.choices[0].delta and chunk.choices[0].delta.content:
                    parts.append(chunk.choices[0].delta.content)
                if chunk.usage is not None:
                    answer.input_tokens = chunk.usage.prompt_tokens
                    answer.output_tokens = chunk.usage.completion_tokens
                    details = chunk.usage.prompt_tokens_details
                    answer.cached_tokens = None if details is None else details.cached_tokens
        answer.text = "".join(parts)

    def _record(
        self, query: Query, stage: str, after: tuple[int, ...], prompt: str, answer: Answer, ended: str
    ) -> None:
        if answer.input_tokens is None:  # some 4 characters are a token
            answer.input_tokens = max(1, (len(SYSTEM) + len(prompt)) // 4)
            answer.output_tokens = len(answer.text) // 4
            self.uncounted |= ended == "done"
        if ended == "done":  # an answer without text has a token too: its end
            answer.output_tokens = max(1, answer.output_tokens or 0)
        if self._log is None:
            return
        record = CallRecord(
            query=query.id,
            call=answer.call,
            after=after,
            stage=f"{WORKFLOW}/{stage}",  # as the gateway names it,
            tenant=query.tenant,
            slo_s=query.slo_s,
            model=self.model or "",
            issued_s=answer.issued_s,
            first_token_s=answer.first_token_s,
            finished_s=answer.finished_s,
            input_tokens=answer.input_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens or 0,
            instance=answer.instance,
            ended=ended,
        )
        self._log.write([record])

    async def end(self, query: Query) -> None:
        """Tell the gateway that no further calls will come, where none of them could be marked as the last."""
        where = f"{self.url.removesuffix('/v1')}/hexrepro/queries/{query.id}"
        patient = self._client.with_options(max_retries=0, timeout=5.0)
        with contextlib.suppress(openai.OpenAIError, httpx.HTTPError):  # it would find out by itself
            await patient.delete(
                where, cast_to=httpx.Response, options={"headers": {names.TENANT: query.tenant}}
            )

    def _mistake(self, error: openai.OpenAIError) -> InputError:
        """What the user can do about it."""
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return InputError(
                f"{self.url}: the API key was not accepted ({_said(error)}); set OPENAI_API_KEY to a valid one"
            )
        if isinstance(error, openai.NotFoundError):
            return InputError(
                f"{self.url}: {_said(error)} (check --model and --url, which mostly ends in /v1)"
            )
        if isinstance(error, openai.APIStatusError):
            return InputError(f"{self.url}: the call was refused with {error.status_code}: {_said(error)}")
        return InputError(f"{self.url}: nobody answers there; start the gateway or give another --url")


def _said(error: Exception) -> str:
    body = getattr(error, "body", None)
    text = body.get("message") if isinstance(body, dict) else None
    return " ".join(str(text or error).split()).rstrip(".")[:300] or type(error).__name__


def _next_number(path: Path) -> int:
    """The least number that is free in a log that may be there already (and that nobody else writes to meanwhile)."""
    most = -1
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                most = max(most, int(json.loads(line)["call"]))
    return most + 1
