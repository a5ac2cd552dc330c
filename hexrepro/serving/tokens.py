"""How long a prompt is, before it is sent: exact where it comes as token ids, else asked of a server or estimated.

The estimate divides characters by the characters a token of that stage, as the servers' own counts have shown them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from hexrepro.serving.protocol import CHAT, Asked

_CHARACTERS_PER_TOKEN = 4.0  # English and SQL under a BPE tokenizer, until a server has counted
_STEP = 0.1  # weight of a new count
_MAX_STAGES = 256


class PromptTokens:
    """Counts prompts. `ask(asked)` counts one at a server, None if it cannot; None for `ask`: never asked."""

    def __init__(
        self, ask: Callable[[Asked], Awaitable[int | None]] | None = None, remembered: int = 10_000
    ) -> None:
        self._ask, self._remembered = ask, remembered
        self._counts: OrderedDict[bytes, int] = OrderedDict()  # the oldest first
        self._ratio: dict[str, float] = {}

    def known(self, asked: Asked) -> int | None:
        """The prompt's tokens if nobody need be asked, else None."""
        if asked.prompt_ids is not None:
            return asked.prompt_ids
        if self._ask is None or not _one_text(asked):
            return self.estimate(asked)
        return self._counts.get(_key(asked))

    async def ask(self, asked: Asked) -> int:
        """Have a server count, and remember that; an estimate if it does not."""
        found = await self._ask(asked)
        if found is None:
            return self.estimate(asked)
        self._counts[_key(asked)] = found
        if len(self._counts) > self._remembered:
            self._counts.popitem(last=False)
        return found

    def estimate(self, asked: Asked) -> int:
        ratio = self._ratio.get(asked.stage, _CHARACTERS_PER_TOKEN)
        return max(1, round(asked.characters / ratio))

    def learn(self, asked: Asked, prompt_tokens: int) -> None:
        """A server has counted the prompt."""
        if asked.prompt_ids is not None or prompt_tokens < 1 or asked.characters < 1:
            return
        seen = asked.characters / prompt_tokens
        known = self._ratio.get(asked.stage)
        if known is not None:
            self._ratio[asked.stage] = known + _STEP * (seen - known)
        elif len(self._ratio) < _MAX_STAGES:
            self._ratio[asked.stage] = seen


def _one_text(asked: Asked) -> bool:
    """Whether vLLM's `/tokenize` takes it: messages, or one prompt."""
    return asked.path == CHAT or isinstance(asked.body.get("prompt"), str)


def _key(asked: Asked) -> bytes:
    """Stands for a prompt, and is shorter."""
    text = asked.body.get("messages") or asked.body.get("prompt")
    return hashlib.blake2b(
        repr((asked.model, text, asked.body.get("tools"))).encode(errors="surrogatepass"), digest_size=16
    ).digest()
