"""The shipped profiles are what `python -m hexrepro.cluster.make_profiles` makes."""

import os
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml

from hexrepro.cluster import load_profile
from hexrepro.cluster.make_profiles import main
from hexrepro.cluster.profile_parts import wrapped
from hexrepro.cluster.shapes import LLAMA_70B, QWEN3_30B
from hexrepro.cluster.silicon import (
    DATASHEETS,
    Silicon,
    Step,
    is_communication,
    scale_by_datasheet,
    steps_grid,
    work_of,
)
from hexrepro.paths import data_dir

SHARED = Path(os.environ.get("HEXREPRO_SHARED", Path(__file__).parents[3] / "shared"))
LATENCIES = [
    SHARED / "data" / "latency" / f"{name}_single_request.csv" for name in ("llama31_70b", "trace4_model")
]

needs_package = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="needs aiconfigurator-core"
)
needs_latencies = pytest.mark.skipif(
    not all(path.is_file() for path in LATENCIES), reason="needs the published latencies (HEXREPRO_SHARED)"
)


def assert_same(made, shipped, place=""):
    """Equal but for the last digits of numbers."""
    if isinstance(shipped, dict):
        assert list(made) == list(shipped), place
        for key in shipped:
            assert_same(made[key], shipped[key], f"{place}.{key}")
    elif isinstance(shipped, list):
        assert len(made) == len(shipped), place
        for i, (a, b) in enumerate(zip(made, shipped, strict=True)):
            assert_same(a, b, f"{place}[{i}]")
    elif place.endswith(".notes"):
        pass  # text, compared without its numbers
    elif isinstance(shipped, float):
        assert made == pytest.approx(shipped, rel=1e-4, abs=2e-4 if ".fit." in place else 0), place
    else:
        assert made == shipped, place


def without_numbers(text):
    return re.sub(r"(?<![\w.])-?\d[\d.,]*(e[-+]?\d+)?", "#", text)


def assert_remade(folder):
    """Byte for byte, but for the last digits of numbers, which another processor may round otherwise."""
    for path in folder.glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        shipped = (data_dir() / "profiles" / path.name).read_text(encoding="utf-8")
        assert without_numbers(text) == without_numbers(shipped), path.name
        assert_same(yaml.safe_load(text), yaml.safe_load(shipped), path.name)


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("llama-3.1-70b", {"a100": 4, "l40s": 4, "h100": 4, "h200": 2, "b200": 1, "rtx-pro-6000": 2}),
        (
            "qwen3-30b-a3b",
            {"a100": 2, "a100-tp1": 1, "l40s": 2, "h100": 1, "h200": 1, "b200": 1, "rtx-pro-6000": 1},
        ),
    ],
)
def test_every_gpu_is_shipped_with_its_number_of_cards_and_a_price_s_source(model, gpus):
    shipped = yaml.safe_load((data_dir() / "profiles" / f"{model}_silicon.yaml").read_text(encoding="utf-8"))
    for gpu, cards in gpus.items():
        entry = shipped["gpus"][gpu]
        assert entry.get("tensor_parallel", shipped["tensor_parallel"]) == cards
        assert entry["kv_blocks"] * 16 >= 50_000
        assert "price_per_hour" in entry
        assert len(entry["price_source"]) > 20
        if entry["price_per_hour"] is not None and gpu not in ("a100", "a100-tp1"):
            assert "read 20" in entry["price_source"]  # a public list price with its day
        assert gpu in shipped["notes"]


# dense 16-bit FLOP/s, bytes/s and bytes of memory of one card, from the data sheets
SHEETS = {
    "a100": (312e12, 2.039e12, 80 * 2**30), "a6000": (154.8e12, 0.768e12, 48 * 2**30),
    "l40s": (362.05e12, 0.864e12, 48 * 2**30),
    "h100": (989.4e12, 3.35e12, 80 * 2**30), "h200": (989.4e12, 4.8e12, 141 * 2**30), "b200": (2250e12, 8e12, 180 * 2**30),
    "rtx-pro-6000": (503.8e12, 1.792e12, 96 * 2**30),
}  # fmt: skip
TOO_FAST = ("llama-3.1-70b", "a6000")  # derived from a published ratio, and the profile says so


@pytest.mark.parametrize("shape", [LLAMA_70B, QWEN3_30B], ids=lambda shape: shape.name)
def test_nothing_is_faster_than_the_hardware(shape):
    """A decode step reads the weights that a token uses, a prompt takes 2 FLOPs a weight and token, and KV fits beside the
    weights."""
    attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    feed_forward = 3 * shape.hidden * shape.intermediate
    of_token = shape.layers * (attention + feed_forward * (shape.experts_per_token or 1))
    weights = (
        shape.layers * (attention + feed_forward * (shape.experts or 1)) + shape.vocabulary * shape.hidden
    )
    kv_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2
    for name, gpu in load_profile(shape.name, "silicon")["gpus"].items():
        card = max((sheet for sheet in SHEETS if name.startswith(sheet)), key=len)
        flops, bandwidth, memory = (gpu["tensor_parallel"] * x for x in SHEETS[card])
        model = gpu["latency"]
        read_s = 2 * (of_token + shape.vocabulary * shape.hidden) / bandwidth
        if (shape.name, name) == TOO_FAST:
            assert 0.85 * read_s < model.step_s(0, 0, 1, 512) < read_s
        else:
            assert model.step_s(0, 0, 1, 512) > read_s, name
            assert model.kv_token_s > kv_bytes / bandwidth, name
        assert model.step_s(2048, 2048**2 / 2, 1, 0) > 2 * of_token * 2048 / flops, name
        assert 0.35 < gpu["kv_blocks"] * gpu["block_size"] * kv_bytes / (0.92 * memory - 2 * weights) < 1.0, (
            name
        )
    if shape.name == TOO_FAST[0]:
        text = (data_dir() / "profiles" / f"{shape.name}_silicon.yaml").read_text(encoding="utf-8")
        assert "Faster than it can be" in text


@needs_latencies
def test_measured_profiles_are_remade(tmp_path, capsys):
    assert main(["--view", "measured", "--latency-csv", *map(str, LATENCIES), "--out", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.yaml"))) == 3
    assert_remade(tmp_path)
    printed = capsys.readouterr().out
    assert "llama-3.1-70b, view measured" in printed
    assert "3.3% / 39%" in printed


@needs_package
def test_silicon_profiles_are_remade(tmp_path, capsys):
    shipped = yaml.safe_load(
        (data_dir() / "profiles" / "llama-3.1-70b_silicon.yaml").read_text(encoding="utf-8")
    )
    installed = f"aiconfigurator-core {version('aiconfigurator-core')}"
    if not shipped["source"][0].startswith(installed + ","):
        pytest.skip(f"the profiles are of another version than {installed}")
    assert main(["--view", "silicon", "--out", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.yaml"))) == 2
    assert_remade(tmp_path)
    assert "4.6% / 20%" in capsys.readouterr().out


@needs_package
@pytest.mark.parametrize("system", ["a100_sxm", "l40s"])
def test_steps_are_composed_as_the_package_does(system):
    """Against the package's own estimate of a forward pass, within 0.5 %."""
    from aiconfigurator_core.sdk import RustForwardPassPerfModel

    whole = RustForwardPassPerfModel.from_native(
        {
            "schema_version": 1, "model_name": LLAMA_70B.package_name, "system_name": system,
            "backend": "vllm", "backend_version": "current", "tp_size": 4, "pp_size": 1,
        }
    )  # fmt: skip
    ours = Silicon(LLAMA_70B, system, 4)
    for step in (
        Step("decode", 0, 0, 8, 1024), Step("decode", 0, 0, 64, 4096), Step("prefill", 2048, 0, 0, 0),
        Step("prefill", 512, 4096, 0, 0), Step("mixed", 1024, 2048, 8, 8192), Step("mixed", 256, 0, 64, 512),
    ):  # fmt: skip
        scheduled = {}
        if step.n:
            scheduled |= {
                "num_prefill_requests": 1, "sum_prefill_tokens": step.n, "sum_prefill_kv_tokens": step.k,
            }  # fmt: skip
        if step.b:
            scheduled |= {"num_decode_requests": step.b, "sum_decode_kv_tokens": step.b * step.c}
        milliseconds = whole.estimate_forward_pass_time_ms({"scheduled_requests": scheduled})
        assert sum(ours.kernels(step).values()) * 1e3 == pytest.approx(milliseconds, rel=5e-3), step


def test_the_grid_covers_all_kinds_within_the_budget():
    steps = list(steps_grid())
    assert {step.kind for step in steps} == {"decode", "prefill", "mixed"}
    assert all(step.n + step.b <= 2048 for step in steps if step.kind == "mixed")
    assert Step("mixed", 100, 50, 4, 1000).features == (100, 100 * 50 + 5000, 5, 4000)


def test_work_of_gemms_is_twice_the_parameters_a_token():
    """All GEMMs of Llama's layers on four cards: 2 FLOPs a parameter and token (less embeddings)."""
    step = Step("prefill", 10, 0, 0, 0)
    gemms = ("qkv_gemm", "proj_gemm", "gate_ffn1_gemm", "ffn2_gemm")
    flops = sum(work_of(name, step, LLAMA_70B, 4)[0] for name in gemms) * 80 * 4 / step.n
    embeddings = 2 * 128256 * 8192
    assert flops == pytest.approx(2 * (70.55e9 - embeddings), rel=1e-3)
    # a mixture of experts computes 8 experts a token, and reads at most all 128
    few, many = (work_of("moe", Step("decode", 0, 0, b, 100), QWEN3_30B, 1) for b in (1, 4096))
    expert = 3 * 2048 * 768
    assert few[0] == 2 * 8 * expert
    assert few[1] == pytest.approx(2 * 8 * expert, rel=1e-3)
    assert many[1] == pytest.approx(2 * 128 * expert, rel=0.05)


def test_scaling_by_datasheet():
    """Bandwidth rules small steps and decode attention, FLOP/s large GEMMs; communication stays."""
    old, new = DATASHEETS["l40s"], DATASHEETS["a6000"]
    kernels = {"qkv_gemm": 1.0, "attention_decode": 1.0, "add_norm_1": 1.0, "ar_1": 1.0}
    small = scale_by_datasheet(kernels, Step("decode", 0, 0, 1, 500), LLAMA_70B, 4, old, new)
    assert small == pytest.approx(
        {"qkv_gemm": 864 / 768, "attention_decode": 864 / 768, "add_norm_1": 864 / 768, "ar_1": 1}
    )
    large = scale_by_datasheet(kernels, Step("prefill", 8192, 0, 0, 0), LLAMA_70B, 4, old, new)
    assert large["qkv_gemm"] == pytest.approx(362.05 / 154.8)
    assert is_communication("ar_2")
    assert not is_communication("moe")


def test_notes_are_wrapped_by_paragraph():
    text = "a\nb\n- " + "long " * 30 + "\n  end\n- two\n    table  1\n    table  2\nlast\n"
    lines = wrapped(text).splitlines()
    assert lines[0] == "a b"
    assert lines[1].startswith("- long")
    assert lines[2].startswith("  long")
    assert lines[-4:] == ["- two", "    table  1", "    table  2", "last"]
    assert all(len(line) <= 100 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "--latency-csv is missing"), (["--latency-csv", "none.csv"], "none.csv: cannot be read")],
)
def test_mistakes_on_the_command_line(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--view", "measured", "--out", "out", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("-1", "row 3, column a6000_latency_s"),
        ("x", "row 3, column a6000_latency_s: 'x'"),
        (None, "column l40s_latency_s"),
    ],
)
def test_mistakes_in_the_latencies(cell, said, capsys, tmp_path):
    import pandas as pd

    frame = pd.DataFrame(
        np.ones((4, 5)),
        columns=["input_tokens", "output_tokens", *(f"{g}_latency_s" for g in ("a100", "a6000", "l40s"))],
    )
    if cell is None:
        frame = frame.drop(columns="l40s_latency_s")
    else:
        frame = frame.astype(object)
        frame.loc[1, "a6000_latency_s"] = cell
    frame.to_csv(tmp_path / "own.csv", index=False)
    assert (
        main(["--view", "measured", "--latency-csv", str(tmp_path / "own.csv"), "--out", str(tmp_path)]) == 2
    )
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "own.csv" in error
    assert "\n" not in error
