"""Measures an OpenAI-compatible endpoint through its API, and fits the step-time model to what it sees.

    profile = profile_endpoint("http://127.0.0.1:8000")
    profile.latency, profile.overhead_s, profile.errors
    write_profiles("ours.yaml", {"a100": profile})           # load_cluster reads it, named as `profile:` in a cluster config

Nothing is taken from a configuration: step times come from the times of streamed tokens, and so do the token budget of a step
and the number of sequences that run side by side. Two kinds of measurements go into one fit (`fit_calls`):

decode   c calls run together; between the last one's first token and the first one's end every step decodes all c. Its mean
         is base_s + sequence_s * c + kv_token_s * K, with nothing of the API in it, which delays all tokens alike.
prefill  one call alone, one token out: the time to it has the prompt's steps in it, and what the API adds to a call.

A third kind is held out and tells how far the fit can be trusted: prompts that come while others decode.
`/metrics`, where vLLM's is there, adds the KV blocks, and tells whether somebody else is using the endpoint.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pandas as pd
import yaml

from hexrepro.cluster.latency import CallFit, FitErrors, LatencyModel, fit_calls, fit_errors
from hexrepro.cluster.types import InstanceSpec
from hexrepro.errors import InputError
from hexrepro.validation.completion_stream import CallFailed, Streamed, body, session, stream
from hexrepro.validation.tiny_model import FIRST_WORD, TinyModel
from hexrepro.workload.types import Workload

BUDGETS = (
    256,
    512,
    1024,
    2048,
    4096,
    8192,
    16384,
    32768,
)  # token budgets of a step that the fit chooses among
LEAST_STEPS = 6  # decode steps that a window must have
LEAST_S, MOST_REPEATS = 0.4, 25  # a prompt is sent again until this time has passed, but not more often
VLLM_SEQUENCES = 256  # vLLM's default; taken where the measurement did not reach the limit


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


@dataclass(frozen=True)
class Profile:
    """What was measured of an endpoint."""

    url: str
    model: str
    latency: LatencyModel
    overhead_s: float  # what the API adds to a call, once
    errors: dict[str, FitErrors]  # of the fit: all, decode, prefill; and held_out, which was not in it
    noise: float  # mean coefficient of variation of the same prompt's time
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_blocks: int | None  # None: the endpoint does not tell
    block_size: int | None
    found: dict[str, str]  # how each of the four above is known
    reach: dict[str, int]  # how far it was measured: prompt_tokens, sequences, kv_tokens
    measurements: pd.DataFrame  # kind, calls, steps, prefill_tokens, ..., seconds, predicted_s
    warnings: tuple[str, ...] = ()

    def instance(
        self,
        name: str,
        gpu: str | None = None,
        *,
        kv_blocks: int | None = None,
        block_size: int | None = None,
    ) -> InstanceSpec:
        """The simulator's instance. KV memory must be given where the endpoint does not tell it."""
        blocks, size = kv_blocks or self.kv_blocks, block_size or self.block_size
        if blocks is None or size is None:
            raise InputError(
                f"profile of {self.url}: the endpoint does not tell its KV memory; give kv_blocks and block_size"
            )
        return InstanceSpec(
            name=name,
            gpu=gpu or name,
            model=self.model,
            view="measured",
            tensor_parallel=1,
            latency=self.latency,
            kv_blocks=blocks,
            block_size=size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def extrapolates(self, workload: Workload) -> list[str]:
        """In what a workload goes beyond what was measured, in words; empty: in nothing that is known beforehand."""
        said = []
        longest = int(workload.input_tokens.max())
        if longest > self.reach["prompt_tokens"]:
            said.append(f"prompts of up to {longest} tokens, measured up to {self.reach['prompt_tokens']}")
        held = int((workload.input_tokens.astype(np.int64) + workload.output_tokens).max())
        if held > self.reach["kv_tokens"]:
            said.append(f"a call of {held} KV tokens, measured up to {self.reach['kv_tokens']} in a batch")
        return said

    def lines(self) -> list[str]:
        """The profile in words."""
        ms = {name: value * 1e3 for name, value in asdict(self.latency).items()}
        out = [
            f"{self.url}, model {self.model}",
            "step time in ms: "
            + ", ".join(f"{name.removesuffix('_s')} {value:.4g}" for name, value in ms.items()),
            f"the API adds {self.overhead_s * 1e3:.1f} ms to a call",
            "error of the fit: "
            + ", ".join(
                f"{kind} {e.mape:.1%} (worst {e.max:.1%}, n={e.n})" for kind, e in self.errors.items()
            ),
            f"the same prompt varies by {self.noise:.1%}",
        ]
        for name in ("max_num_batched_tokens", "max_num_seqs", "kv_blocks", "block_size"):
            out.append(f"{name} {getattr(self, name)}: {self.found[name]}")
        reach = ", ".join(f"{name} {value}" for name, value in self.reach.items())
        return [*out, f"measured up to {reach}; beyond, it extrapolates", *self.warnings]


def profile_endpoint(url: str, **options: Any) -> Profile:
    """`measure`, for callers without an event loop."""
    return asyncio.run(measure(url, **options))


def profile_endpoints(urls: Sequence[str], *, together: bool = False, **options: Any) -> list[Profile]:
    """`measure` for several endpoints, one after the other; `together` for those that share nothing with each other or with us.

    On one machine that costs accuracy: four paced servers on two cores measured together had prompts' step times up to 8 % off,
    one after the other 0.5 %.
    """

    async def both() -> list[Profile]:
        if together:
            return await asyncio.gather(*(measure(url, **options) for url in urls))
        return [await measure(url, **options) for url in urls]

    return asyncio.run(both())


async def measure(
    url: str,
    *,
    model: str | None = None,
    design: Design = Design(),
    vocabulary: tuple[int, int] = (FIRST_WORD, TinyModel.vocabulary - 1),
    max_num_batched_tokens: int | None = None,
    seed: int = 0,
    limit_s: float = 900.0,
    api_key: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Profile the endpoint at `url`, which should have nothing else to do.

    model, vocabulary        the served model's name (None: the first of /v1/models), and the token ids to draw prompts from
    max_num_batched_tokens   where it is known; else the fit chooses
    seed                     of the prompts: another one, other prompts, so that none is in the prefix cache
    limit_s                  InputError when it takes longer
    api_key                  sent as a bearer token
    progress                 called with a line for each part
    """
    try:
        async with asyncio.timeout(limit_s), session(api_key=api_key) as client:
            probe = _Probe(client, url.rstrip("/"), vocabulary, seed, progress or (lambda text: None))
            return await probe.profile(model, design, max_num_batched_tokens)
    except TimeoutError:
        raise InputError(
            f"profile of {url}: not done after {limit_s:g} s; give more time or a smaller design"
        ) from None
    except CallFailed as error:
        raise InputError(f"profile of {url}: a call failed: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise InputError(f"profile of {url}: it does not answer ({type(error).__name__}: {error})") from None


class _Probe:
    def __init__(self, client, url: str, vocabulary, seed: int, say: Callable[[str], None]) -> None:
        self.client, self.url, self.vocabulary, self.say = client, url, vocabulary, say
        self.rng = np.random.Generator(np.random.PCG64([seed, 4]))
        self.model = ""
        self.sent = 0  # calls

    async def profile(self, model: str | None, design: Design, budget: int | None) -> Profile:
        self.model, max_tokens = await self._served(model)
        design = design.within(max_tokens) if max_tokens else design
        before = await self.metrics()
        warnings = []
        busy = before.get("num_requests_running", 0) + before.get("num_requests_waiting", 0)
        if busy:
            raise InputError(f"profile of {self.url}: {busy:g} calls are under way there; it must be idle")
        await self.call(16, 4)  # the first call of a connection and of a server is slow
        rows: list[dict] = []
        prefills, noise = await self._prefills(design)
        rows += prefills
        sequences = await self._side_by_side(design.burst)
        rows += await self._decodes(design, sequences)
        frame = pd.DataFrame(rows)
        fit, chosen, how = _fit(frame, budget)
        frame = _features(frame, chosen)
        frame["predicted_s"] = fit.predicted_s
        held = await self._held_out(design, fit, chosen, sequences)
        errors = {"all": fit.errors}
        for kind in ("decode", "prefill"):
            of = frame[frame["kind"] == kind]
            errors[kind] = fit_errors(of["predicted_s"], of["seconds"])
        if held:
            errors["held_out"] = fit_errors([h["predicted_s"] for h in held], [h["seconds"] for h in held])
            frame = pd.concat([frame, pd.DataFrame(held)], ignore_index=True)
        after = await self.metrics()
        served = after.get("request_success_total", 0) - before.get("request_success_total", 0)
        if served > self.sent:
            warnings.append(
                f"{served - self.sent:g} calls of somebody else were served meanwhile: measure again, alone"
            )
        if errors["all"].mape > 0.1:
            warnings.append(
                f"the linear model fits badly ({errors['all'].mape:.0%}): results on it are rough"
            )
        reached = sequences is not None
        blocks, size = after.get("num_gpu_blocks"), after.get("block_size")
        told = "told by /metrics" if blocks else "not told: give it"
        if reached:
            sequences_how = "measured"
        else:
            sequences_how = f"not reached with {max(*design.concurrency, design.burst)}; vLLM's default taken"
        return Profile(
            url=self.url,
            model=self.model,
            latency=fit.model,
            overhead_s=fit.overhead_s,
            errors=errors,
            noise=noise,
            max_num_batched_tokens=chosen,
            max_num_seqs=sequences if reached else VLLM_SEQUENCES,
            # vLLM's null block is among the blocks it tells
            kv_blocks=int(blocks) - 1 if blocks else None,
            block_size=int(size) if size else None,
            found=dict(
                max_num_batched_tokens=how,
                max_num_seqs=sequences_how,
                kv_blocks=told,
                block_size=told,
            ),
            reach=dict(
                prompt_tokens=max(*design.prompts, *design.contexts),
                sequences=int(frame.loc[frame["kind"] == "decode", "together"].max()),
                kv_tokens=int((frame["kv_tokens"] / frame["steps"]).max()),
            ),
            measurements=frame,
            warnings=tuple(warnings),
        )

    async def _served(self, model: str | None) -> tuple[str, int | None]:
        async with self.client.get(f"{self.url}/v1/models") as response:
            content = await response.json(content_type=None) if response.status == 200 else None
        models = content.get("data") if isinstance(content, dict) else None
        if not models:
            raise InputError(
                f"profile of {self.url}: /v1/models answers {response.status}; is it an OpenAI-compatible server?"
            )
        by_name = {entry["id"]: entry for entry in models}
        name = model or models[0]["id"]
        if name not in by_name:
            raise InputError(f"profile of {self.url}: model is {name!r}; it serves {', '.join(by_name)}")
        return name, by_name[name].get("max_model_len")

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

    async def _side_by_side(self, burst: int) -> int | None:
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

    async def _prefills(self, design: Design) -> tuple[list[dict], float]:
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

    async def _decodes(self, design: Design, limit: int | None) -> list[dict]:
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

    async def _held_out(self, design: Design, fit: CallFit, budget: int, limit: int | None) -> list[dict]:
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


def _features(frame: pd.DataFrame, budget: int) -> pd.DataFrame:
    """The measurements with the terms of the model; those of prompts depend on the token budget of a step."""
    frame = frame.copy()
    prompt = frame["kind"] == "prefill"
    length = frame.loc[prompt, "length"].astype(float)
    frame.loc[prompt, "steps"] = np.ceil(length / budget)
    frame.loc[prompt, "sequences"] = np.ceil(length / budget)
    frame.loc[prompt, "prefill_tokens"] = length
    frame.loc[prompt, "prefill_context"] = length**2 / 2
    frame.loc[prompt, "kv_tokens"] = 0.0
    return frame


def _fit(frame: pd.DataFrame, budget: int | None) -> tuple[CallFit, int, str]:
    """The fit, the token budget that it chose, and how sure that is."""
    kinds = frame["kind"].to_numpy()
    weights = np.where(kinds == "decode", 1 / np.sum(kinds == "decode"), 1 / np.sum(kinds == "prefill"))
    longest = frame.loc[frame["kind"] == "prefill", "length"].max()
    # with a budget above the longest prompt none is chunked: all those look alike
    tried = (
        [budget]
        if budget
        else [b for b in BUDGETS if b < longest] + [min(b for b in (*BUDGETS, 2**30) if b >= longest)]
    )
    fits = {}
    for candidate in tried:
        x = _features(frame, candidate)
        columns = ("calls", "steps", "prefill_tokens", "prefill_context", "sequences", "kv_tokens", "seconds")
        fit = fit_calls(*(x[c].to_numpy(float) for c in columns), weights=weights)
        fits[candidate] = fit, float(np.sum(weights * (fit.predicted_s / x["seconds"] - 1) ** 2))
    ranked = sorted(fits, key=lambda b: fits[b][1])
    best = ranked[0]
    if budget:
        how = "given"
    elif len(ranked) > 1 and fits[ranked[1]][1] < 1.5 * fits[best][1]:
        how = f"chosen by the fit, but {ranked[1]} fits nearly as well: give it if you know it"
    elif best >= longest:
        how = f"no prompt of up to {longest} tokens was cut"
    else:
        how = "chosen by the fit"
    return fits[best][0], best, how


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


def write_profiles(path: str | Path, profiles: Mapping[str, Profile], *, view: str = "measured") -> None:
    """A hardware profile file as `load_cluster` reads it: instance kind -> its profile. All must serve one model."""
    models = {profile.model for profile in profiles.values()}
    if len(models) != 1:
        raise InputError(
            f"profiles: the endpoints serve {', '.join(sorted(models)) or 'nothing'}; one file is of one model"
        )
    gpus = {}
    for name, profile in profiles.items():
        spec = profile.instance(name)
        gpus[name] = dict(
            latency={key: float(f"{value:.6g}") for key, value in asdict(spec.latency).items()},
            fit={
                kind: {"n": e.n, "mape": round(e.mape, 4), "max": round(e.max, 4)}
                for kind, e in profile.errors.items()
            }
            | {"overhead_s": float(f"{profile.overhead_s:.4g}")},
            notes="\n".join(profile.lines()),
            kv_blocks=spec.kv_blocks,
            block_size=spec.block_size,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
        )
    content = dict(
        model=models.pop(), view=view, source="measured through the endpoints' API by hexrepro", gpus=gpus
    )
    Path(path).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
