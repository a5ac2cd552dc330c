"""The prompts of a workload, as token ids that share what the workload says that they share."""

from __future__ import annotations

import numpy as np

from hexrepro.errors import InputError
from hexrepro.simulator.engine import PREFIX_CACHING
from hexrepro.validation.tiny_model import FIRST_WORD, TinyModel
from hexrepro.workload.types import Workload


class Prompts:
    """Token ids of a workload's prompts: template, context, and a rest that is the call's own.

    `shared` says what calls really share, as in the simulator's `prefix_caching`: off, template, or full (template and
    context). `salt` makes the prompts of one replay differ from those of another on the same server, whose prefix cache
    outlives a replay. `vocabulary`: the ids to draw from, first and last.
    """

    def __init__(
        self,
        workload: Workload,
        shared: str = "template",
        salt: int = 0,
        vocabulary: tuple[int, int] = (FIRST_WORD, TinyModel.vocabulary - 1),
    ) -> None:
        if shared not in PREFIX_CACHING:
            raise InputError(f"replay: shared is {shared!r}; it must be one of {', '.join(PREFIX_CACHING)}")
        if not 0 <= vocabulary[0] < vocabulary[1]:
            raise InputError(
                f"replay: vocabulary is {vocabulary}; it must be the first and the last token id"
            )
        self.workload, self.shared, self.salt, self.vocabulary = workload, shared, salt, vocabulary
        self._segments: dict[tuple[int, int, int], np.ndarray] = {}

    def tokens(self, call: int) -> np.ndarray:
        """int64[input_tokens]: the prompt of a call."""
        w = self.workload
        template, context = int(w.template[call]), int(w.context[call])
        parts = []
        if template >= 0 and self.shared != "off":
            parts.append(self._shared((1, template, 0), int(w.template_tokens[call])))
        if context >= 0 and self.shared == "full":
            parts.append(self._shared((2, context, template + 1), int(w.context_tokens[call])))
        own = int(w.input_tokens[call]) - sum(map(len, parts))
        return np.concatenate([*parts, self._draw((3, call, 0), own)])

    def _shared(self, key: tuple[int, int, int], n: int) -> np.ndarray:
        if key not in self._segments:
            self._segments[key] = self._draw(key, n)
        return self._segments[key]

    def _draw(self, key: tuple[int, int, int], n: int) -> np.ndarray:
        rng = np.random.Generator(np.random.PCG64([self.salt, *key]))
        return rng.integers(self.vocabulary[0], self.vocabulary[1] + 1, n)
