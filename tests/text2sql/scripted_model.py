"""A scripted model behind a real HTTP server: it knows the questions' SQL, and what mistakes it is to make.

By hand, for a look at the agent without a model (from the root of the repository):

    python -m tests.text2sql.scripted_model --ports 8001 8002
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from hexrepro.text2sql.questions import example_questions, load_questions
from tests.serving.scripted import MODEL, Act, Server

GOLD = {q.question: q.sql for q in load_questions(example_questions())}


@dataclass(frozen=True)
class Prompt:
    """What the model reads out of a prompt."""

    text: str
    question: str
    task: str  # keywords, tables, columns of T, SQL, correct, unit tests, evaluate, choose

    @classmethod
    def of(cls, body: dict) -> Prompt:
        text = body["messages"][-1]["content"]
        return cls(
            text, re.search(r"^Question: (.*)$", text, re.M)[1], re.search(r"^Task: (.*)$", text, re.M)[1]
        )

    @property
    def style(self) -> int:
        """Of a candidate: 1 splits the question, 2 plans."""
        return 1 if "Split the question" in self.text else 2

    @property
    def candidates(self) -> list[str]:
        """The statements that are to be judged."""
        return re.findall(r"^Candidate \d+:\n```sql\n(.*?)\n```", self.text, re.M | re.S)


def fenced(sql: str) -> str:
    return f"First the tables, then the filter.\n```sql\n{sql};\n```\nThat should be it."


def knows(
    prompt: Prompt,
    *,
    first: Callable[[str, int], str] = lambda gold, style: gold,
    corrected: Callable[[str, Prompt], str] = lambda gold, prompt: gold,
) -> str:
    """An answer of a good model. `first(gold, style)`: a candidate's first statement; `corrected`: its later ones."""
    gold = GOLD[prompt.question]
    words = re.findall(r"\w+", gold)
    if prompt.task == "keywords":
        return json.dumps(re.findall(r"[A-Z]\w+(?: [A-Z]\w+)*", prompt.question[1:]))
    if prompt.task == "tables":
        known = re.findall(r"^table (\w+)", prompt.text, re.M)
        return "```json\n" + json.dumps([name for name in known if name in words]) + "\n```"
    if prompt.task.startswith("columns of"):
        return json.dumps(sorted({word for word in words if word.isupper() or "_" in word}))
    if prompt.task == "SQL":
        return fenced(first(gold, prompt.style))
    if prompt.task == "correct":
        return fenced(corrected(gold, prompt))
    if prompt.task == "unit tests":
        return "Here they are:\n- The rows fit the question.\n- Every filter is applied.\n- No column is missing."
    if prompt.task == "evaluate":
        return "\n".join(
            f"{i}: {'pass' if sql == gold else 'fail'}" for i, sql in enumerate(prompt.candidates, 1)
        )
    assert prompt.task == "choose", prompt.task
    return str(prompt.candidates.index(gold) + 1 if gold in prompt.candidates else 1)


class ScriptedModel(Server):
    """`say(prompt, number)` is the answer to each call; `act` of `Server` says what else happens to it."""

    def __init__(self, say: Callable[[Prompt, int], str], act=None, usage: bool = True) -> None:
        super().__init__(act)
        self.say, self.usage = say, usage

    async def _answer(self, request: web.Request, body: dict, act: Act) -> web.StreamResponse:
        if act.status != 200 or act.fault or not body.get("stream"):
            return await super()._answer(request, body, act)
        await asyncio.sleep(act.first_s)
        text = self.say(Prompt.of(body), len(self.bodies) - 1)
        pieces = re.findall(r"\s*\S+\s*", text)[: body.get("max_tokens")]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        whole = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        for piece in pieces:
            choice = {"index": 0, "finish_reason": None, "delta": {"content": piece}}
            await self._event(response, whole | {"choices": [choice]})
            if act.token_s:
                await asyncio.sleep(act.token_s)
        await self._event(response, whole | {"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}]})
        if self.usage:
            prompt = sum(len(message["content"].split()) for message in body["messages"])
            usage = {
                "prompt_tokens": prompt,
                "completion_tokens": len(pieces),
                "total_tokens": prompt + len(pieces),
            }
            usage["prompt_tokens_details"] = {"cached_tokens": prompt // 2}
            await self._event(response, whole | {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


# ---- mistakes that a model makes ---------------------------------------------------------------------------------


def misnamed(gold: str) -> str:
    """A column that there is not: SQLite says so."""
    return re.sub(r"\b(STN_NM|LN_NM|LST_NM|MIN_LATE|CNCL|RGN|VEH_ID|PAX)\b", r"\1X", gold, count=1)


def wrong(gold: str) -> str:
    """Runs, and gives other rows."""
    return f"SELECT COUNT(*), 'of all' FROM ({gold})"


async def _serve(ports: list[int], token_s: float) -> None:
    def say(prompt: Prompt, number: int) -> str:
        return knows(prompt, first=lambda gold, style: misnamed(gold) if style == 1 else wrong(gold))

    servers = []
    for i, port in enumerate(ports):
        act = Act(first_s=0.1 * (i + 1), token_s=token_s * (i + 1))
        servers.append(ScriptedModel(say, lambda body, number, act=act: act))
        servers[-1].port = port
        await servers[-1].start()
        print(f"model {MODEL!r} at {servers[-1].url}/v1", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        for server in servers:
            await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ports", type=int, nargs="+", default=[8001])
    parser.add_argument(
        "--token-s", type=float, default=0.02, help="seconds a token; twice that at the second port"
    )
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options.ports, options.token_s))
