"""Times the calls that profiling sends to an endpoint: prompts alone, calls that decode together, and prompts among those."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import aiohttp
import numpy as np

from hexrepro.cluster.latency import CallFit
from hexrepro.errors import InputError
from hexrepro.validation.completion_stream import CallFailed, Streamed, body, stream
from hexrepro.validation.endpoint_design import LEAST_STEPS, Design

LEAST_S, MOST_REPEATS = 0.4, 25  # a prompt is sent again until this time has passed, but not more often


class Probe:
    """Sends calls to one endpoint and times them. `sent` counts them; `say` gets a line for each part."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        url: str,
        vocabulary: tuple[int, int],
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.client, self.url, self.vocabulary, self.say = client, url, vocabulary, say
        self.rng = np.random.Generator(np.random.PCG64([seed, 4]))
        self.model = ""
        self.sent = 0  # calls

    async def choose(self, model: str | None) -> int | None:
        """Ask for this model (None: the first that is served); the most tokens of a call, if the endpoint tells."""
        async with self.client.get(f"{self.url}/v1/models") as response:
            content = await response.json(content_type=None) if response.status == 200 else None
        models = content.get("data") if isinstance(content, dict) else None
        if not models:
            raise InputError(
                f"profile of {self.url}: /v1/models answers {response.status}; is it an OpenAI-compatible server?"
            )
        by_name = {entry["id"]: entry for entry in models}
        self.model = model or models[0]["id"]
        if self.model not in by_name:
            raise InputError(
                f"profile of {self.url}: model is {self.model!r}; it serves {', '.join(by_name)}"
            )
        return by_name[self.model].get("max_model_len")

    async def metrics(self) -> dict[str, float]:
        """vLLM's metrics by name without prefix and labels, summed over these; the cache's size. Empty where there are none."""
        async with self.client.get(f"{self.url}/metrics") as response:
            return read_metrics(await response.text()) if response.status == 200 else {}

    async def call(
        self, prompt_tokens: int, output_tokens: int, on_first: Callable[[float], None] | None = None
    ) -> Streamed:
        """One call with a prompt that was never there before."""
        prompt = self.rng.integers(self.vocabulary[0], self.vocabulary[1] + 1, prompt_tokens).tolist()
        self.sent += 1
        request = body(self.model, prompt, output_tokens)
        return await stream(self.client, self.url, request, progress=True, on_first=on_first)

    async def side_by_side(self, burst: int) -> int | None:
        """How many of `burst` calls run together; None when all do.

        Those that do have their first token before the first of them ends. A slow API may take longer than that to hand in all
        of them, so the count must be the same with calls three times as long.
        """
        counts: list[int] = []
        for tokens in (24, 72, 216, 648):
            if burst < 2 or (len(counts) > 1 and counts[-1] == counts[-2]):
                break
            begun: list[float] = []
            calls = [asyncio.create_task(self.call(4, tokens, begun.append)) for _ in range(burst)]
            try:
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                counts.append(len(begun))
            finally:  # the others are of no use: a closed connection ends them
                for call in calls:
                    call.cancel()
                ended = await asyncio.gather(*calls, return_exceptions=True)
            for error in ended:
                if isinstance(error, Exception):
                    raise error
            await asyncio.sleep(0.2)
            if counts[-1] == burst:
                return None
        if counts:
            self.say(f"{counts[-1]} of {burst} calls run side by side")
        return counts[-1] if counts else None

    async def prefills(self, design: Design) -> tuple[list[dict], float]:
        """A row for each prompt's length, and how much the same prompt's time varies (mean coefficient of variation)."""
        rows, variation = [], []
        for length in design.prompts:
            seconds = []
            # short prompts are cheap, and it is they that tell the API's share
            while len(seconds) < design.repeats or (sum(seconds) < LEAST_S and len(seconds) < MOST_REPEATS):
                answer = await self.call(length, 1)
                seconds.append(answer.first_token_s - answer.sent_s)
                _refuse_cached(answer)
            variation.append(np.std(seconds, ddof=1) / np.mean(seconds) if len(seconds) > 1 else np.nan)
            self.say(f"prompt of {length} tokens: {np.median(seconds) * 1e3:.1f} ms")
            # the median: a hiccup of the machine only ever adds
            rows.append(
                dict(kind="prefill", calls=1, length=length, together=1, seconds=float(np.median(seconds)))
            )
        return rows, float(np.nanmean(variation)) if design.repeats > 1 else float("nan")

    async def decodes(self, design: Design, limit: int | None) -> list[dict]:
        """Decode windows of the levels within the limit, and of the limit itself."""
        rows = []
        levels = sorted({min(level, limit or level) for level in design.concurrency})
        for together in levels:
            for context in design.contexts:
                # staggered prompts take steps of their own before all decode: give the first ones tokens enough
                tokens = design.decode_tokens + 2 * together
                windows = []
                for _ in range(design.decode_repeats):
                    answers = await asyncio.gather(*(self.call(context, tokens) for _ in range(together)))
                    if found := decode_window(answers, context):
                        windows.append(found)
                if not windows:
                    continue
                window = sorted(windows, key=lambda w: w["seconds"] / w["steps"])[len(windows) // 2]
                rows.append(dict(kind="decode", calls=0, length=context, together=together) | window)
                self.say(
                    f"{together} calls of {context} tokens: {window['seconds'] / window['steps'] * 1e3:.2f} ms a step"
                )
        if len(rows) < 3:
            raise InputError(
                f"profile of {self.url}: only {len(rows)} levels of concurrency gave a measurement; give more decode_tokens"
            )
        return rows

    async def held_out(self, design: Design, fit: CallFit, budget: int, limit: int | None) -> list[dict]:
        """Prompts that come while others decode: the time of the newcomer's first token, against the model's."""
        rows = []
        for together, length in design.held_out:
            if limit is not None and together + 1 > limit:
                continue
            # long enough to decode until the newcomer's prompt is through
            tokens = design.decode_tokens + 4 * -(-length // budget) + 8
            running = [asyncio.create_task(self.call(64, tokens)) for _ in range(together)]
            await asyncio.sleep(max(12 * fit.model.base_s, 3 * fit.overhead_s))
            answer = await self.call(length, 2)
            others = await asyncio.gather(*running)
            row = _mixed(others, answer, length, fit, budget)
            if row:
                rows.append(row | dict(kind="held_out", together=together, length=length))
        return rows


def decode_window(answers: Sequence[Streamed], context: int) -> dict[str, float] | None:
    """Steps in which all of these calls decode: their number, seconds, and S and K summed over them.

    None when there are fewer than LEAST_STEPS.
    """
    begin = max(a.first_token_s for a in answers)
    end = min(a.finish_s for a in answers)
    per_step, reads, spans = [], 0.0, []
    for answer in answers:
        inside = [(t, k) for t, k in answer.progress if begin <= t <= end]
        if len(inside) < 2 or inside[-1][1] - inside[0][1] < LEAST_STEPS:
            return None
        (t0, k0), (t1, k1) = inside[0], inside[-1]
        per_step.append((t1 - t0) / (k1 - k0))
        spans.append(k1 - k0)
        # the step that yields token k reads the prompt and k - 2 tokens
        reads += context + (k0 + 1 + k1) / 2 - 2
    steps = float(np.mean(spans))
    return dict(
        seconds=float(np.mean(per_step)) * steps,
        steps=steps,
        sequences=len(answers) * steps,
        kv_tokens=reads * steps,
        prefill_tokens=0.0,
        prefill_context=0.0,
    )


def _mixed(
    others: Sequence[Streamed], answer: Streamed, length: int, fit: CallFit, budget: int
) -> dict[str, float] | None:
    """The newcomer's prompt among decoding calls, as its longest gap between two tokens of another call shows it.

    The gap is one step, from token to token; with the prompt in several chunks it is the one of the first. None where the
    others had ended, or their tokens came several a chunk.
    """
    gaps = []
    for other in others:
        times = [(t, k) for t, k in other.progress if other.first_token_s < t]
        for (t0, k0), (t1, k1) in pairwise(times):
            if answer.sent_s < t1 and t0 < answer.first_token_s and k1 - k0 == 1:
                gaps.append((t1 - t0, k0))
    if len(gaps) < len(others):
        return None
    seconds, at = max(gaps)
    chunk = min(length, budget - len(others))
    kv = len(others) * (64 + at - 1)
    predicted = fit.model.step_s(chunk, chunk * chunk / 2, len(others) + 1, kv)
    return dict(
        calls=0, steps=1, prefill_tokens=chunk, prefill_context=chunk * chunk / 2, sequences=len(others) + 1,
        kv_tokens=kv, seconds=seconds, predicted_s=predicted,
    )  # fmt: skip


def _refuse_cached(answer: Streamed) -> None:
    if answer.cached_tokens:
        raise CallFailed(
            f"{answer.cached_tokens} tokens of a new prompt were cached: the endpoint has seen these prompts; give another seed"
        )


def read_metrics(text: str) -> dict[str, float]:
    """vLLM's Prometheus text: each metric's name without `vllm:` and labels -> its value, summed over labels; and the numbers
    among the labels of `cache_config_info` (block_size, num_gpu_blocks)."""
    values: dict[str, float] = {}
    for name, labels, value in re.findall(r"^vllm:(\w+)(?:\{(.*)\})? ([-+.\deE]+|NaN)$", text, re.MULTILINE):
        if name == "cache_config_info":
            for key in ("block_size", "num_gpu_blocks"):
                found = re.search(rf'\b{key}="(\d+)"', labels)
                if found:
                    values[key] = float(found.group(1))
        elif not name.endswith("_bucket"):
            values[name] = values.get(name, 0.0) + float(value)
    return values
