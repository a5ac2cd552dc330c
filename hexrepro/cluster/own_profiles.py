"""The work behind `python -m hexrepro.cluster`: show what is known, and make, print, draw and write a profile."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from hexrepro.cluster.profile_files import Made, print_table, write_profile
from hexrepro.cluster.profile_parts import Profile, new_profile, price_of, rounded, rounded_coefficients
from hexrepro.cluster.profiles import read_profile, shipped_profiles
from hexrepro.errors import InputError

if TYPE_CHECKING:
    from hexrepro.workload.types import Workload

ANSWERS_S = 20  # a server that takes longer to list its models is not worth measuring

SILICON_NOTES = """\
Step times added up from kernel measurements (GEMM, attention, all-reduce), fitted by non-negative least squares of the relative
error over a grid of decodes, prefill chunks and mixed steps within 2048 tokens, as far as their KV fits; each kind weighs the
same. No time of the engine's own (scheduling, sampling, launch) is in it, and no run on the real GPU was compared with it.
check holds pairs in seconds: what the package gives, what the fit gives.
"""
MEASURED_NOTES = (
    "Measured by the user; fit has the errors by kind of measurement, reach how far it was measured.\n"
)


def show(gpu: str | None) -> None:
    """Print what aiconfigurator-core knows, and the shipped profiles; or which models run on one GPU."""
    from hexrepro.cluster import catalogue

    if gpu is not None:
        found = catalogue.gpu(gpu)
        print(f"{found.name}: {found.memory_bytes / 2**30:.0f} GiB, kernels of vLLM {found.vllm}")
        print(f"quantisations of weights: {', '.join(catalogue.timed_in(gpu))}")
        print(f"quantisations of KV: {', '.join(catalogue.timed_in(gpu, 'generation_attention'))}")
        print("models, and what the package's own test of them on this GPU gave:")
        tests = catalogue.supported(found.system)
        for name in catalogue.model_names():
            print(f"  {name:<55} {tests.get(name, 'not tested')}")
        return
    print("GPUs (--gpu), memory, and the vLLM whose kernels were timed:")
    for each in catalogue.gpus().values():
        timed = f"vLLM {each.vllm}" if each.vllm else "no vLLM kernels: cannot be computed"
        print(f"  {each.name:<14} {each.memory_bytes / 2**30:4.0f} GiB  {timed}")
    print("models (--model; or a config.json of another size of the same kinds):")
    print("".join(f"  {name}\n" for name in catalogue.model_names()), end="")
    print("shipped profiles (model, view; GPUs):")
    for model, view in shipped_profiles():
        names = ", ".join(_gpus_of(model, view))
        print(f"  {model}, {view}: {names}")
    print("`list --gpu GPU` shows the quantisations, and which models run on it")


def _gpus_of(model: str, view: str) -> list[str]:
    from hexrepro.cluster.profiles import load_profile

    return list(load_profile(model, view)["gpus"])


def profile(options: argparse.Namespace) -> None:
    """Make the profile that the command line asks for."""
    view = "measured" if options.endpoint or options.csv else "silicon"
    trace = _checked(options, view)
    # a mistake shows before anything is computed or measured
    served = _first_model(options)
    name = options.model or served or options.gpu
    if view == "silicon":
        from hexrepro.cluster import catalogue

        name = catalogue.model(options.model).name
    out = options.out or Path(f"{name.rpartition('/')[2]}_{view}.yaml")
    _check_out(out, options.add)
    model, made = _made(options)
    content = _read(out, model, view) if options.add and out.exists() else _new(model, view)
    for gpu, each in zip(options.gpu.split(","), made, strict=True):
        content["gpus"][each.name] = each.entry | _price(options, view, gpu)
        if each.source not in content["source"]:
            content["source"].append(each.source)
    shown = content | {"gpus": {each.name: content["gpus"][each.name] for each in made}}
    print_table(shown)
    for each in made:
        gpus = each.entry["tensor_parallel"]
        print(f"{each.name}: {gpus} GPU{'s' * (gpus > 1)} an instance, {each.kv_tokens} tokens of KV")
        for warning in (*each.warnings(), *(each.beyond(trace) if trace else ())):
            print(f"  warning: {warning}")
    write_profile(content, out, f"python -m hexrepro.cluster profile {_arguments(options)}")
    print(f"wrote {out}")
    print(f"wrote {_draw(made, model, view, out)}")


def _checked(options: argparse.Namespace, view: str) -> Workload | None:
    """Refuse what does not go together; returns the trace that was named."""
    gpus = options.gpu.split(",")
    if options.endpoint and options.csv:
        raise InputError("--endpoint and --csv are two sources; give one")
    if options.endpoint and not re.match("https?://.", options.endpoint):
        raise InputError(f"--endpoint {options.endpoint}: it must begin with http:// or https://")
    if not all(gpus) or len(set(gpus)) < len(gpus):
        raise InputError(f"--gpu {options.gpu}: it must name a GPU, or several different ones: h100,h200")
    if view == "measured" and len(gpus) > 1:
        raise InputError(f"--gpu {options.gpu}: measurements are of one GPU; give one name")
    if not options.model and not options.endpoint:
        raise InputError("--model is missing; `python -m hexrepro.cluster list` shows the names")
    for field in ("name", "price"):
        if getattr(options, field) is not None and len(gpus) > 1:
            raise InputError(
                f"--{field} {getattr(options, field)}: give it with one GPU, not with {len(gpus)}"
            )
    if options.price is not None and not (math.isfinite(options.price) and options.price > 0):
        raise InputError(f"--price {options.price}: it must be $ per GPU and hour, above 0")
    other = ("kv_tokens",) if view == "silicon" else ("quantisation", "kv_dtype")
    for field in other:
        if getattr(options, field) is not None:
            whose = "measured" if view == "silicon" else "computed"
            raise InputError(f"--{field.replace('_', '-')} is for {whose} profiles; leave it out")
    if options.csv and options.kv_tokens is None:
        raise InputError(
            "--kv-tokens is missing: the size of the KV cache, which the server logs as it starts"
        )
    if options.kv_tokens is not None and options.kv_tokens < 16:
        raise InputError(f"--kv-tokens {options.kv_tokens}: it must be at least a block, 16 tokens")
    if options.trace is None:
        return None
    from hexrepro.workload import generate, load, trace_names

    return generate(options.trace) if options.trace in trace_names() else load(options.trace)


def _first_model(options: argparse.Namespace) -> str | None:
    """The model that an endpoint serves; InputError where it is too slow, or does not tell its KV memory and nobody else did.

    None where it does not answer as it should: `profile_endpoint` then says what is wrong with it.
    """
    url = options.endpoint and options.endpoint.rstrip("/")
    served = url and _get(f"{url}/v1/models", r'"id"\s*:\s*"([^"]+)"')
    if served and options.kv_tokens is None and not _get(f"{url}/metrics", r'num_gpu_blocks="(\d+)"'):
        raise InputError(
            f"--kv-tokens is missing: {url} does not tell its KV memory; vLLM logs it as it starts (GPU KV cache size)"
        )
    return served


def _get(url: str, pattern: str) -> str | None:
    """What the pattern's group finds in a server's answer; None without such an answer."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=ANSWERS_S) as answer:
            found = re.search(pattern, answer.read(1_000_000).decode("utf-8", "replace"))
            return found and found.group(1)
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise InputError(f"{url}: no answer within {ANSWERS_S} s") from None
        return None


def _made(options: argparse.Namespace) -> tuple[str, list[Made]]:
    if options.endpoint:
        return _of_endpoint(options)
    if options.csv:
        from hexrepro.cluster.batches import made_of_batches

        limits = {
            name: value
            for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel")
            if (value := getattr(options, name)) is not None
        }
        made = made_of_batches(
            options.csv, options.name or options.gpu, kv_tokens=options.kv_tokens, **limits
        )
        return options.model, [made]
    from hexrepro.cluster import catalogue

    shape = catalogue.model(options.model)
    asked = (options.tensor_parallel, options.quantisation, options.kv_dtype, options.name)
    made = [catalogue.make(shape, catalogue.gpu(name), *asked) for name in options.gpu.split(",")]
    for each in made:
        for limit in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(options, limit) is not None:
                each.entry[limit] = getattr(options, limit)
    return shape.name, made


def _of_endpoint(options: argparse.Namespace) -> tuple[str, list[Made]]:
    try:
        from hexrepro.validation.profile_endpoint import profile_endpoint
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is missing: pip install 'hexrepro[serving]'") from error
    found = profile_endpoint(
        options.endpoint,
        model=options.model,
        max_num_batched_tokens=options.max_num_batched_tokens,
        progress=lambda line: print(f"  {line}", flush=True),
    )
    blocks = options.kv_tokens // (found.block_size or 16) if options.kv_tokens else None
    spec = found.instance(
        options.name or options.gpu, kv_blocks=blocks, block_size=found.block_size or (16 if blocks else None)
    )
    rows = found.measurements
    reach = {
        "context_tokens": int(found.reach["prompt_tokens"]),
        "sequences": int(found.reach["sequences"]),
        "kv_tokens": int(found.reach["kv_tokens"]),
    }
    entry: Profile = {
        "tensor_parallel": options.tensor_parallel or 1,
        "latency": rounded_coefficients(found.latency),
        "fit": {
            kind: {"n": e.n, "mape": round(e.mape, 4), "max": round(e.max, 4)}
            for kind, e in found.errors.items()
        }
        | {"overhead_s": rounded(found.overhead_s)},
        "notes": "\n".join(found.lines()),
        "reach": reach,
        "kv_blocks": spec.kv_blocks,
        "block_size": spec.block_size,
        "max_num_seqs": options.max_num_seqs or spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
    }
    kinds, seconds, predicted = (rows[c].to_numpy() for c in ("kind", "seconds", "predicted_s"))
    source = "measured through an endpoint's API by hexrepro"
    made = Made(
        spec.name,
        entry,
        kinds.astype(str),
        seconds.astype(float),
        predicted.astype(float),
        reach,
        source,
        tuple(found.warnings),
    )
    return found.model, [made]


def _new(model: str, view: str) -> Profile:
    notes = SILICON_NOTES if view == "silicon" else MEASURED_NOTES
    content = new_profile(model, view, [], notes, {}, 2048)
    del content["tensor_parallel"]  # each GPU has its own
    return content


def _check_out(out: Path, add: bool) -> None:
    if out.exists() and not add:
        raise InputError(f"{out} is there already; --add adds to it, --out FILE writes another")
    if out.suffix not in (".yaml", ".yml"):
        raise InputError(f"--out {out}: the name must end in .yaml")
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out {out}: there is no directory {out.parent}")


def _read(out: Path, model: str, view: str) -> dict[str, Any]:
    known = read_profile(out)  # checked
    if (known["model"], known["view"]) != (model, view):
        raise InputError(
            f"{out}: is of {known['model']}, view {known['view']}; this is of {model}, view {view}"
        )
    content = yaml.safe_load(out.read_text(encoding="utf-8"))
    source = content.get("source") or []
    return content | {"source": source if isinstance(source, list) else [source]}


def _price(options: argparse.Namespace, view: str, gpu: str) -> Profile:
    if options.price is not None:
        return {
            "price_per_hour": options.price,
            "price_source": options.price_source or "given by the user, without a source",
        }
    return price_of(gpu) if view == "silicon" else {"price_per_hour": None}


def _arguments(options: argparse.Namespace) -> str:
    """The command line again, as a comment of the file: without places and prices, which are in the file or no matter."""
    skip = ("command", "out", "add", "trace", "price", "price_source")
    told = [
        f"--{name.replace('_', '-')} {shlex.quote(Path(value).name if name == 'csv' else str(value))}"
        for name, value in vars(options).items()
        if name not in skip and value is not None
    ]
    return " ".join(told)


def _draw(made: list[Made], model: str, view: str, out: Path) -> Path:
    """What was measured against what the fit gives, and the error, by kind; one row a GPU."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    from hexrepro.report.style import BLUE, GREEN, ORANGE, PAGE_IN, RED, drawing, headline, save

    colours = (BLUE, ORANGE, GREEN, RED)
    x = "measured (ms)" if view == "measured" else "sum of its kernels (ms)"
    with drawing(PAGE_IN, 0.5 + 2.1 * len(made), len(made), 2) as (figure, axes):
        for (left, right), each in zip(axes, made, strict=True):
            ms = each.seconds * 1e3
            ends = np.array([ms.min(), ms.max()])
            left.plot(ends, ends, color="0.6", lw=0.8, zorder=0)
            right.axhline(0, color="0.6", lw=0.8, zorder=0)
            for kind, colour in zip(dict.fromkeys(each.kinds), colours, strict=False):
                of = each.kinds == kind
                left.plot(ms[of], each.predicted_s[of] * 1e3, ".", color=colour, ms=3, alpha=0.7, label=kind)
                right.plot(
                    ms[of],
                    100 * (each.predicted_s[of] / each.seconds[of] - 1),
                    ".",
                    color=colour,
                    ms=3,
                    alpha=0.7,
                )
            left.set(xscale="log", yscale="log", xlabel=x, ylabel=f"{each.name}: fitted (ms)")
            right.set(xscale="log", xlabel=x, ylabel="error of the fit (%)")
            left.legend(frameon=False, loc="upper left")
            for ax, axis in ((left, left.xaxis), (left, left.yaxis), (right, right.xaxis)):
                axis.set_minor_formatter(
                    NullFormatter() if np.ptp(np.log10(ax.get_xlim())) > 1 else ScalarFormatter()
                )
        headline(figure, f"{model}: the step-time model against what it was fitted to")
    return save(figure, out.with_suffix(""))[0]
