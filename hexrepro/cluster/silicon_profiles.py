"""Profiles from kernel measurements: the view `silicon`, with the derived A6000 and its alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hexrepro.cluster import catalogue, silicon
from hexrepro.cluster.catalogue import BUDGET, UTILIZATION
from hexrepro.cluster.latency import LatencyModel
from hexrepro.cluster.profile_parts import (
    MAX_NUM_SEQS,
    PUBLISHED_DECODE_S,
    RELEASED_CODE,
    Profile,
    new_profile,
    price_of,
    rounded_coefficients,
    standard_workflow_s,
    wrapped,
)
from hexrepro.cluster.shapes import LLAMA_70B, ModelShape
from hexrepro.cluster.silicon import DATASHEETS, Kernels, Silicon, Step
from hexrepro.cluster.types import kv_blocks

SILICON_NOTES = """\
Step times added up from kernel measurements (GEMM, attention, all-reduce; 16-bit weights and KV), fitted by
non-negative least squares of the relative error over a grid: decodes at batch 1-256 and contexts 512-16k,
prefill chunks of 1-8192 tokens behind 0-14k computed ones, and mixed steps within 2048 tokens, as far as
their KV fits; each kind weighs the same. No time of the engine's own (scheduling, sampling, launch) is in
it. check holds pairs in seconds: what the package gives, what the fit gives.
{fit}{interconnect}- KV capacity: {utilization:.2f} of the memory, less weights, activations and the
  package's reserve for runtime and communication.
"""

DENSE_FIT_NOTES = """\
- Steps of 64 to 256 tokens fit worst: there GEMMs change from memory-bound to compute-bound.
"""

EXPERTS_FIT_NOTES = """\
- The fit is poor, since a mixture of experts is not linear: a step reads more experts with every token until
  all are read. It is made for batches up to 64 and chunks from 256 tokens. Beyond batch 64 it gives too much
  (at 256 two to three times the package's time), for chunks under 256 tokens too little (down to a quarter).
"""

INTERCONNECT_NOTES = """\
- The L40S numbers hang on the all-reduce: {share:.0%} of a 1024-token prefill on four cards (no NVLink), at
  {four:.1f} GB/s of bus bandwidth. On two cards of that machine the package measured {two:.1f} GB/s, near
  what PCIe 4.0 gives. So four cards of it are slow (no direct access between some of them, it seems).
  The gpus l40s-p2p and a6000-p2p are the same cards with the two-card all-reduce, times 1.5 for the larger
  ring: name them in a cluster config to see how much hangs on it.
"""

MORE_GPUS_NOTES = """\
- {names}: made by `python -m hexrepro.cluster profile`, the same fit of the same grid. Their tensor_parallel
  is the fewest GPUs that hold the weights and {least:,} tokens of KV (four of CHESS's longest prompts); it
  stands with each.
- How sure: a100, l40s, {names} rest on the package's kernel timings on these very cards (vLLM {old} on the
  A100, 0.24 on the others: the A100 may look a little slower for it), a6000 is derived. No step of ours on such
  a card was compared with them, and a real engine adds its own time to every step, which counts most where steps
  are short (b200, h200). {reached}The fit's own error stands under fit.
- Not in the package (0.12.0): the A6000, the PCIe versions of A100 and H100, and vLLM kernels of L4 and A30.
"""

A6000_DERIVATION = """\
Not in the package. Derived from its A100: base_s and sequence_s times {decode:.3f}, the published ratio of
decode times, which is the only measurement of an A6000 that there is; prefill_token_s and prefill_context_s
times {compute:.3f}, the data sheets' ratio of dense tensor FLOP/s, since prefill is bound by arithmetic and
the published prefills are prefix-cached and do not show it; kv_token_s times {bandwidth:.3f}, their ratio of
memory bandwidth.
- What it leaves open: the published pair says nothing of four cards without an NVSwitch. a6000-allreduce
  takes the package's L40S instead, kernel by kernel: the same class of card and interconnect, the all-reduce
  kept as it is, every other kernel scaled by its roofline on the data sheets (864 to 768 GB/s, 362.05 to
  154.8 TFLOPS dense). a6000-p2p is that with the all-reduce of two cards, see notes.
- Alternatives, in seconds: cold prefill of 4096 tokens, decode at batch 1 and at batch 32 (1024 tokens), all
  from the five coefficients:
{table}
- Against the published latencies, decode at batch 1 and 1024 tokens: a6000-allreduce is {to_l40s:.3f} times
  the L40S (published {pub_l40s:.3f}) and {to_a100:.2f} times the A100 (published {pub_a100:.2f}). The package's
  L40S, which is not derived, is as far off: {l40s_a100:.2f} times the A100 (published {pub_l40s_a100:.2f}).
  The published runs had no such gap between A100 and PCIe cards: likely one card each with 4-bit weights, so
  no all-reduce.
- Faster than it can be: at the data sheet's bandwidth four A6000 need {roof:.1f} ms to read the 16-bit weights, as every
  decode step does, and base_s is {base:.1f} ms. It is kept since the published ratio is all that was measured. The
  package's cards take {least:.2f} to {most:.2f} times that bound; a6000-p2p takes {p2p:.2f} times, a6000-allreduce {slow:.2f}.
"""


def silicon_profile(
    shape: ModelShape, tensor_parallel: int, *, variants: bool, more: Sequence[tuple[str, int | None]] = ()
) -> Profile:
    """The silicon view of one model; `variants` adds the GPUs with another interconnect or derivation, and `more` further
    GPUs of the package, each with its tensor parallelism (None: as many as it needs)."""
    a100, l40s = Silicon(shape, "a100_sxm", tensor_parallel), Silicon(shape, "l40s", tensor_parallel)

    def on_a6000(step: Step, kernels: Kernels) -> Kernels:
        sheets = DATASHEETS["l40s"], DATASHEETS["a6000"]
        return silicon.scale_by_datasheet(kernels, step, shape, tensor_parallel, *sheets)

    gpus = {
        "a100": _silicon_gpu("a100", a100, a100.kernels),
        "a6000": {},
        "l40s": _silicon_gpu("l40s", l40s, l40s.kernels),
    }
    by_kernel = _silicon_gpu("a6000", l40s, lambda step: on_a6000(step, l40s.kernels(step)))
    by_kernel["about"] = (
        f"derived from the L40S kernel by kernel, see derivation in {LLAMA_70B.name}_silicon.yaml"
    )
    gpus["a6000"] = by_kernel
    interconnect = ""
    if variants:
        two_cards = Silicon(shape, "l40s", 2)

        def p2p(step: Step) -> Kernels:
            two = two_cards.kernels(step)
            # a ring all-reduce moves 2 (n-1)/n of the message: 1.5 with four cards, 1 with two
            return {
                name: 1.5 * two[name] if silicon.is_communication(name) else seconds
                for name, seconds in l40s.kernels(step).items()
            }

        gpus["a6000"] = _from_a100(gpus["a100"], by_kernel)
        gpus["a6000-allreduce"] = by_kernel
        gpus["a6000-p2p"] = _silicon_gpu("a6000", l40s, lambda step: on_a6000(step, p2p(step)))
        gpus["a6000-p2p"]["about"] = "a6000-allreduce with the all-reduce of two cards, see notes"
        gpus["l40s-p2p"] = _silicon_gpu("l40s", l40s, p2p)
        gpus["l40s-p2p"]["about"] = "l40s with the all-reduce of two cards, see notes"
        prefill = Step("prefill", 1024, 0, 0, 0)
        kernels = l40s.kernels(prefill)
        interconnect = INTERCONNECT_NOTES.format(
            share=sum(s for name, s in kernels.items() if silicon.is_communication(name))
            / sum(kernels.values()),
            four=_bus_bandwidth(l40s, prefill) / 1e9,
            two=_bus_bandwidth(two_cards, prefill) / 1e9,
        )
        gpus["a6000"]["derivation"] = _a6000_derivation(gpus, on_a6000, a100, l40s)
    source = [silicon.data_versions(engine.system) for engine in (a100, l40s)]
    fit_notes = EXPERTS_FIT_NOTES if shape.experts else DENSE_FIT_NOTES
    notes = SILICON_NOTES.format(fit=fit_notes, interconnect=interconnect, utilization=UTILIZATION)
    made = [catalogue.make(shape, catalogue.gpu(gpu), cards) for gpu, cards in more]
    for (gpu, _), new in zip(more, made, strict=True):
        gpus[new.name] = new.entry | price_of(gpu)
        source += [new.source] if new.source not in source else []
    if made:
        notes += _more_notes(shape, gpus, [new.name for new in made])
    profile = new_profile(shape.name, "silicon", source, notes, gpus, BUDGET)
    profile["tensor_parallel"] = tensor_parallel
    return profile


def _more_notes(shape: ModelShape, gpus: dict[str, Profile], names: list[str]) -> str:
    reached = ""
    if not shape.experts:
        shares = []
        for name in ("a100", "l40s", *names):
            entry, gpu = gpus[name], catalogue.gpu(name)
            weights = entry["kv_capacity"]["weights_bytes"] / entry["kv_capacity"]["tensor_parallel"]
            shares.append(f"{name} {weights / gpu.bandwidth / entry['check']['decode_1x512'][0]:.0%}")
        reached = (
            "A sign of their worth: the share of the data sheet's memory bandwidth at which a decode of batch 1 reads the"
            f" weights is {', '.join(shares)}. "
        )
    return MORE_GPUS_NOTES.format(
        names=", ".join(names),
        least=catalogue.LEAST_KV_TOKENS,
        old=silicon.vllm_version("a100_sxm"),
        reached=reached,
    )


def _silicon_gpu(gpu: str, engine: Silicon, kernels: Callable[[Step], Kernels]) -> Profile:
    shape, tensor_parallel = engine.shape, engine.tensor_parallel
    memory = engine.memory(UTILIZATION, BUDGET, MAX_NUM_SEQS)
    weights = memory.pop("weights_bytes")
    capacity = {
        "gpu_memory_bytes": DATASHEETS[gpu].memory_bytes,
        "weights_bytes": weights * tensor_parallel,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "kv_bytes_per_value": 2.0,
        "tensor_parallel": tensor_parallel,
        "gpu_memory_utilization": UTILIZATION,
        "reserve_bytes": sum(memory.values()),
    }
    blocks = kv_blocks(**capacity)
    fitted = silicon.fit_silicon(kernels, shape, blocks * 16)
    entry = catalogue.fitted_entry(kernels, fitted, blocks, capacity)
    check = entry.pop("check")
    if shape is LLAMA_70B:
        check["standard_workflow_s"] = _workflow_s(fitted.fit.model)
    return entry | RELEASED_CODE[gpu] | {"check": check}


def _workflow_s(model: LatencyModel) -> dict[str, float]:
    return {
        "cold": round(standard_workflow_s(model, BUDGET), 2),
        "template_cached": round(standard_workflow_s(model, BUDGET, template_cached=True), 2),
    }


def _a6000_factors() -> tuple[float, float, float]:
    """An A6000's time over an A100's: decoding (published), arithmetic and memory traffic (data sheets)."""
    a100, a6000 = DATASHEETS["a100"], DATASHEETS["a6000"]
    decode = PUBLISHED_DECODE_S["a6000"] / PUBLISHED_DECODE_S["a100"]
    return decode, a100.flops / a6000.flops, a100.bandwidth / a6000.bandwidth


def _from_a100(a100: Profile, by_kernel: Profile) -> Profile:
    """The A6000 derived from the A100; its memory is known, and is that of the other derivation."""
    decode, compute, bandwidth = _a6000_factors()
    factors = {
        "base_s": decode,
        "prefill_token_s": compute,
        "prefill_context_s": compute,
        "sequence_s": decode,
        "kv_token_s": bandwidth,
    }
    model = LatencyModel(**{name: value * factors[name] for name, value in a100["latency"].items()})
    return {
        "latency": rounded_coefficients(model),
        "kv_blocks": by_kernel["kv_blocks"],
        "kv_capacity": dict(by_kernel["kv_capacity"]),
        **RELEASED_CODE["a6000"],
        "about": "derived from the A100, see derivation",
        "check": {"standard_workflow_s": _workflow_s(model)},
    }


def _bus_bandwidth(engine: Silicon, step: Step) -> float:
    """Bytes/s over a link in the step's all-reduces: 2 (n-1)/n of the message, NCCL's bus bandwidth."""
    cards, message = engine.tensor_parallel, 2 * (step.n + step.b) * engine.shape.hidden
    return engine.shape.layers * message * 2 * (cards - 1) / cards / engine.kernels(step)["ar_1"]


def _a6000_derivation(
    gpus: dict[str, Profile], on_a6000: Callable[[Step, Kernels], Kernels], a100: Silicon, l40s: Silicon
) -> str:
    one = Step("decode", 0, 0, 1, 1024)
    seconds = {
        "a100": sum(a100.kernels(one).values()),
        "l40s": sum(l40s.kernels(one).values()),
        "a6000": sum(on_a6000(one, l40s.kernels(one)).values()),
    }
    published = PUBLISHED_DECODE_S
    models = {
        name: LatencyModel(**gpus[name]["latency"])
        for name in ("a6000", "a6000-allreduce", "a6000-p2p", "l40s")
    }
    table = "\n".join(
        f"    {name:24} {m.solo_latency_s(4096, 0, 1, BUDGET):7.3f} {m.step_s(0, 0, 1, 1024):7.4f}"
        f" {m.step_s(0, 0, 32, 32 * 1024):7.4f}"
        for name, m in models.items()
    )
    decode, compute, bandwidth = _a6000_factors()
    shape, cards = a100.shape, a100.tensor_parallel
    # all weights but the table of embeddings, of which a step reads a row a token
    read = gpus["a100"]["kv_capacity"]["weights_bytes"] - 2 * shape.vocabulary * shape.hidden
    read_s = {gpu: read / cards / sheet.bandwidth for gpu, sheet in DATASHEETS.items()}
    above = {
        name: gpus[name]["latency"]["base_s"] / read_s[name.partition("-")[0]]
        for name in ("a100", "l40s", "a6000-p2p", "a6000-allreduce")
    }
    text = A6000_DERIVATION.format(
        to_l40s=seconds["a6000"] / seconds["l40s"],
        pub_l40s=published["a6000"] / published["l40s"],
        to_a100=seconds["a6000"] / seconds["a100"],
        pub_a100=published["a6000"] / published["a100"],
        pub_l40s_a100=published["l40s"] / published["a100"],
        l40s_a100=seconds["l40s"] / seconds["a100"],
        decode=decode,
        compute=compute,
        bandwidth=bandwidth,
        table=table,
        roof=1e3 * read_s["a6000"],
        base=1e3 * models["a6000"].base_s,
        least=min(above["a100"], above["l40s"]),
        most=max(above["a100"], above["l40s"]),
        p2p=above["a6000-p2p"],
        slow=above["a6000-allreduce"],
    )
    return wrapped(text)
