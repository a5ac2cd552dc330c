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

`endpoint_design.py` says what is sent, `endpoint_probe.py` sends and times it, `endpoint_fit.py` fits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pandas as pd
import yaml

from hexrepro.cluster.latency import FitErrors, LatencyModel, fit_errors
from hexrepro.cluster.types import InstanceSpec
from hexrepro.errors import InputError
from hexrepro.validation.completion_stream import CallFailed, session
from hexrepro.validation.endpoint_design import Design
from hexrepro.validation.endpoint_fit import features, fit_budget
from hexrepro.validation.endpoint_probe import Probe
from hexrepro.validation.tiny_model import FIRST_WORD, TinyModel
from hexrepro.workload.types import Workload

VLLM_SEQUENCES = 256  # vLLM's default; taken where the measurement did not reach the limit


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


async def measure(
    url: str,
    *,
    model: str | None = None,
    design: Design | None = None,
    vocabulary: tuple[int, int] = (FIRST_WORD, TinyModel.vocabulary - 1),
    max_num_batched_tokens: int | None = None,
    seed: int = 0,
    limit_s: float = 900.0,
    api_key: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Profile the endpoint at `url`, which should have nothing else to do, nor the machine if it shares one with others: four
    paced servers on two cores measured together had prompts' step times up to 8 % off, one after the other 0.5 %.

    model, vocabulary        the served model's name (None: the first of /v1/models), and the token ids to draw prompts from
    max_num_batched_tokens   where it is known; else the fit chooses
    seed                     of the prompts: another one, other prompts, so that none is in the prefix cache
    limit_s                  InputError when it takes longer
    api_key                  sent as a bearer token
    progress                 called with a line for each part
    """
    try:
        async with asyncio.timeout(limit_s), session(api_key=api_key) as client:
            probe = Probe(client, url.rstrip("/"), vocabulary, seed, progress or (lambda text: None))
            return await _measure(probe, model, design or Design(), max_num_batched_tokens)
    except TimeoutError:
        raise InputError(
            f"profile of {url}: not done after {limit_s:g} s; give more time or a smaller design"
        ) from None
    except CallFailed as error:
        raise InputError(f"profile of {url}: a call failed: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise InputError(f"profile of {url}: it does not answer ({type(error).__name__}: {error})") from None


async def _measure(probe: Probe, model: str | None, design: Design, budget: int | None) -> Profile:
    max_tokens = await probe.choose(model)
    design = design.within(max_tokens) if max_tokens else design
    before = await probe.metrics()
    busy = before.get("num_requests_running", 0) + before.get("num_requests_waiting", 0)
    if busy:
        raise InputError(f"profile of {probe.url}: {busy:g} calls are under way there; it must be idle")
    await probe.call(16, 4)  # the first call of a connection and of a server is slow
    prefills, noise = await probe.prefills(design)
    sequences = await probe.side_by_side(design.burst)
    frame = pd.DataFrame(prefills + await probe.decodes(design, sequences))
    fit, chosen, how = fit_budget(frame, budget)
    frame = features(frame, chosen)
    frame["predicted_s"] = fit.predicted_s
    errors = {"all": fit.errors}
    for kind in ("decode", "prefill"):
        of = frame[frame["kind"] == kind]
        errors[kind] = fit_errors(of["predicted_s"], of["seconds"])
    if held := await probe.held_out(design, fit, chosen, sequences):
        errors["held_out"] = fit_errors([h["predicted_s"] for h in held], [h["seconds"] for h in held])
        frame = pd.concat([frame, pd.DataFrame(held)], ignore_index=True)
    after = await probe.metrics()
    blocks, size = after.get("num_gpu_blocks"), after.get("block_size")
    told = "told by /metrics" if blocks else "not told: give it"
    most = max(*design.concurrency, design.burst)
    served = after.get("request_success_total", 0) - before.get("request_success_total", 0)
    return Profile(
        url=probe.url,
        model=probe.model,
        latency=fit.model,
        overhead_s=fit.overhead_s,
        errors=errors,
        noise=noise,
        max_num_batched_tokens=chosen,
        max_num_seqs=VLLM_SEQUENCES if sequences is None else sequences,
        # vLLM's null block is among the blocks it tells
        kv_blocks=int(blocks) - 1 if blocks else None,
        block_size=int(size) if size else None,
        found=dict(
            max_num_batched_tokens=how,
            max_num_seqs=f"not reached with {most}; vLLM's default taken"
            if sequences is None
            else "measured",
            kv_blocks=told,
            block_size=told,
        ),
        reach=dict(
            prompt_tokens=max(*design.prompts, *design.contexts),
            sequences=int(frame.loc[frame["kind"] == "decode", "together"].max()),
            kv_tokens=int((frame["kv_tokens"] / frame["steps"]).max()),
        ),
        measurements=frame,
        warnings=_warnings(served - probe.sent, errors["all"].mape),
    )


def _warnings(others: float, mape: float) -> tuple[str, ...]:
    """others: calls that somebody else sent meanwhile; mape: of the fit."""
    said = []
    if others > 0:
        said.append(f"{others:g} calls of somebody else were served meanwhile: measure again, alone")
    if mape > 0.1:
        said.append(f"the linear model fits badly ({mape:.0%}): results on it are rough")
    return tuple(said)


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
