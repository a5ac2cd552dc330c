"""What profiling sends to an endpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hexrepro.errors import InputError

# token budgets of a step that the fit chooses among
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
LEAST_STEPS = 6  # decode steps that a window must have


@dataclass(frozen=True)
class Design:
    """What is sent. Times add up to about (decode_tokens * levels * contexts * decode_repeats + repeats * prompts) steps.

    concurrency    how many calls decode side by side, level by level
    contexts       prompt lengths of decoding calls
    decode_tokens  output tokens of each
    prompts        lengths of the prompts that are timed alone
    repeats        how often each is sent at least
    decode_repeats how often each level decodes at each context; the median counts
    held_out       (calls that decode, prompt that comes while they do)
    burst          short calls sent at once to see how many run side by side; 0: not tried
    """

    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] = (64, 2048)
    decode_tokens: int = 40
    # on either side of each likely token budget: a prompt that just does not fit takes one step more
    prompts: tuple[int, ...] = (16, *(length for b in BUDGETS[:6] for length in (b, b + 16)))
    repeats: int = 3
    decode_repeats: int = 1
    held_out: tuple[tuple[int, int], ...] = ((3, 1000), (5, 3000))
    burst: int = 64

    def __post_init__(self) -> None:
        least = {"concurrency": 1, "contexts": 1, "prompts": 1}
        for name, minimum in least.items():
            values = getattr(self, name)
            if len(set(values)) < 2 or not all(isinstance(v, int) and v >= minimum for v in values):
                raise InputError(
                    f"profile design: {name} is {values}; it must hold two or more whole numbers from {minimum}"
                )
        if len(set(self.prompts)) < 4:
            raise InputError(f"profile design: prompts is {self.prompts}; the fit needs four lengths or more")
        if self.decode_tokens < LEAST_STEPS + 4 or min(self.repeats, self.decode_repeats) < 1:
            raise InputError(
                f"profile design: decode_tokens={self.decode_tokens} must be at least {LEAST_STEPS + 4}, and"
                f" repeats={self.repeats} and decode_repeats={self.decode_repeats} at least 1"
            )

    def within(self, max_tokens: int) -> Design:
        """The design without what an endpoint that takes `max_tokens` a call can't serve."""
        contexts = tuple(c for c in self.contexts if c + self.decode_tokens <= max_tokens)
        prompts = tuple(p for p in self.prompts if p + 1 <= max_tokens)
        if len(contexts) < 2:
            contexts = (
                max(1, (max_tokens - self.decode_tokens) // 8),
                max(2, max_tokens - self.decode_tokens),
            )
        if len(prompts) < 4:
            prompts = tuple(int(x) for x in np.linspace(1, max_tokens - 1, 8))
        held_out = tuple((c, p) for c, p in self.held_out if p + 4 * self.decode_tokens <= max_tokens)
        return replace(self, contexts=contexts, prompts=prompts, held_out=held_out)
