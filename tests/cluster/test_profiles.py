"""The shipped profiles against what is known of the hardware, and the reading of clusters and profiles."""

import functools
import subprocess
import sys

import pytest
import yaml

from hexrepro.cluster import kv_blocks, load_cluster, load_profile, read_profile, shipped_profiles
from hexrepro.cluster.profile_parts import PUBLISHED_DECODE_S, standard_workflow_s
from hexrepro.errors import InputError
from hexrepro.paths import conf_dir, data_dir

LLAMA = "llama-3.1-70b"
A100, A6000, L40S = "a100", "a6000", "l40s"


@functools.cache
def latency(gpu, view="silicon", model=LLAMA):
    return load_profile(model, view)["gpus"][gpu]["latency"]


@functools.cache
def shipped_yaml(model, view):
    return yaml.safe_load((data_dir() / "profiles" / f"{model}_{view}.yaml").read_text(encoding="utf-8"))


# --- silicon: what the kernel measurements were seen to give for Llama-3.1-70B at tensor parallel 4 ---


@pytest.mark.parametrize(
    ("gpu", "tokens", "seconds"),
    [
        (A100, 1024, 0.182), (A100, 4096, 0.666), (A100, 12288, 2.13),
        (L40S, 1024, 1.25), (L40S, 4096, 5.13), (L40S, 12288, 15.7),
    ],
)  # fmt: skip
def test_cold_prefill(gpu, tokens, seconds):
    """In one step, within 8 %: five coefficients can not follow every bend of the kernels."""
    assert latency(gpu).step_s(tokens, tokens**2 / 2, 1, 0) == pytest.approx(seconds, rel=0.08)


@pytest.mark.parametrize(
    ("gpu", "batch", "context", "seconds"),
    [(A100, 1, 512, 0.027), (A100, 64, 512, 0.035), (L40S, 1, 512, 0.055), (L40S, 64, 512, 0.121)],
)
def test_decode(gpu, batch, context, seconds):
    """Within 8 %."""
    assert latency(gpu).step_s(0, 0, batch, batch * context) == pytest.approx(seconds, rel=0.08)


def test_decode_with_more_context_than_the_kv_cache_holds():
    """64 x 12288 tokens, 1.6 times the A100s' KV cache, are outside the fit: within 15 % of the 74 ms seen"""
    assert latency(A100).step_s(0, 0, 64, 64 * 12288) == pytest.approx(0.074, rel=0.15)


def test_the_package_gave_what_was_seen():
    """The sampled steps themselves (first of each pair in `check`), to the digits that were noted."""
    seen = {
        A100: (0.182, 0.666, 2.13, 0.027, 0.035, 0.074),
        L40S: (1.25, 5.13, 15.7, 0.055, 0.121, None),
    }
    for gpu, values in seen.items():
        pairs = list(shipped_yaml(LLAMA, "silicon")["gpus"][gpu]["check"].values())
        for value, (sampled, _) in zip(values, pairs[:6], strict=True):
            assert value is None or sampled == pytest.approx(value, rel=0.015)


@pytest.mark.parametrize("gpu", [A100, "a6000-allreduce", L40S])
def test_the_silicon_fits_are_within_a_few_per_cent(gpu):
    fit = shipped_yaml(LLAMA, "silicon")["gpus"][gpu]["fit"]
    for kind in ("decode", "prefill", "mixed"):
        assert fit[kind]["mape"] < 0.08
        assert fit[kind]["max"] < 0.20


def test_the_a6000_is_the_a100_times_the_published_and_data_sheet_ratios():
    """Decode 60.5 : 39.1 ms (published), arithmetic 312 : 154.8 TFLOPS, memory 2039 : 768 GB/s (data sheets)."""
    mine, base = latency(A6000), latency(A100)
    assert mine.base_s / base.base_s == pytest.approx(60.5 / 39.1, rel=1e-4)
    assert mine.sequence_s / base.sequence_s == pytest.approx(60.5 / 39.1, rel=1e-4)
    assert mine.prefill_token_s / base.prefill_token_s == pytest.approx(312 / 154.8, rel=1e-4)
    assert mine.prefill_context_s / base.prefill_context_s == pytest.approx(312 / 154.8, rel=1e-4)
    assert mine.kv_token_s / base.kv_token_s == pytest.approx(2039 / 768, rel=1e-4)


def test_the_other_a6000_lies_where_the_published_latencies_put_it_beside_the_l40s():
    """A6000 : L40S is 1.075 in the published latencies of single requests; within 6 % of it."""
    ratio = latency("a6000-allreduce").step_s(0, 0, 1, 1024) / latency(L40S).step_s(0, 0, 1, 1024)
    assert ratio == pytest.approx(PUBLISHED_DECODE_S[A6000] / PUBLISHED_DECODE_S[L40S], rel=0.06)


def test_a_better_interconnect_only_speeds_cards_up():
    for slow, fast in [("a6000-allreduce", "a6000-p2p"), (L40S, "l40s-p2p")]:
        assert 2 < latency(slow).prefill_token_s / latency(fast).prefill_token_s < 5
        assert latency(fast).step_s(0, 0, 1, 1024) < latency(slow).step_s(0, 0, 1, 1024)


# --- measured: the published single-request latencies ---


@pytest.mark.parametrize(("gpu", "decode_s"), list(PUBLISHED_DECODE_S.items()))
def test_measured_decode(gpu, decode_s):
    """The slope over output tokens of an ordinary fit, within 2 %; batching has no cost in this view."""
    model = latency(gpu, "measured")
    assert model.base_s == pytest.approx(decode_s, rel=0.02)
    assert model.sequence_s == model.kv_token_s == model.prefill_context_s == 0
    # far below a cold prefill
    assert model.prefill_token_s < latency(gpu).prefill_token_s / 5


@pytest.mark.parametrize(
    ("gpu", "seconds"),
    [
        (A100, (1.82, 26.75, 3.18, 3.90, 1.00)),
        (A6000, (2.67, 41.31, 4.82, 6.07, 1.32)),
        (L40S, (2.46, 38.43, 4.44, 5.64, 1.22)),
    ],
)
def test_measured_seconds_per_stage(gpu, seconds):
    """At the medians of keywords, candidate, revise, generate unit test, evaluate: within 5 % (one 12 %)."""
    lengths = [(667, 45), (11748, 678), (5963, 79), (1109, 103), (961, 22)]
    model = latency(gpu, "measured")
    for (inputs, outputs), measured in zip(lengths, seconds, strict=True):
        rel = 0.12 if (gpu, inputs) == (A100, 961) else 0.05
        assert model.solo_latency_s(inputs, 0, outputs, 16384) == pytest.approx(measured, rel=rel)


@pytest.mark.parametrize(("cluster", "base_slo_s"), [("hetero1", 60.2), ("hetero2", 58.9), ("homo", 47.8)])
def test_the_base_slo_of_the_measured_view(cluster, base_slo_s):
    """The standard workflow averaged over the instances: within 1 % of what the released code has."""
    instances = load_cluster(cluster, "measured").instances
    mean = sum(standard_workflow_s(i.latency, i.max_num_batched_tokens) for i in instances) / len(instances)
    assert mean == pytest.approx(base_slo_s, rel=0.01)


def test_the_released_view_has_the_released_decode_steps():
    gpus = load_profile(LLAMA, "released")["gpus"]
    assert {gpu: entry["latency"].base_s for gpu, entry in gpus.items()} == {
        A100: 0.035,
        A6000: 0.058,
        L40S: 0.0545,
    }


# --- every shipped file ---


def test_what_ships():
    assert set(shipped_profiles()) == {
        (LLAMA, "silicon"), (LLAMA, "measured"), (LLAMA, "released"),
        ("qwen3-30b-a3b", "silicon"), ("qwen3-30b-a3b", "measured"),
    }  # fmt: skip


@pytest.mark.parametrize(("model", "view"), shipped_profiles())
def test_kv_blocks_follow_from_their_inputs(model, view):
    for entry in shipped_yaml(model, view)["gpus"].values():
        if "kv_capacity" in entry:
            admitted = 0.95 if view == "released" else 1.0  # of the pool, in the released simulator
            assert int(admitted * kv_blocks(**entry["kv_capacity"])) == entry["kv_blocks"]


@pytest.mark.parametrize(("model", "view"), shipped_profiles())
@pytest.mark.parametrize("cluster", ["hetero1", "hetero2", "homo"])
def test_every_cluster_loads_in_every_view(cluster, model, view):
    loaded = load_cluster(cluster, view, model=model)
    assert loaded.name == cluster
    assert len(loaded) == 4
    # the longest call of the traces fits everywhere
    assert all(i.kv_tokens > 14_131 + 1_078 for i in loaded.instances)
    assert {i.view for i in loaded.instances} == {view}
    assert {i.model for i in loaded.instances} == {model}
    assert [i.load_weight for i in loaded.instances] == [
        1.0 if i.gpu == A100 else 0.5 for i in loaded.instances
    ]


def test_the_papers_clusters():
    names = {
        c: [i.name for i in load_cluster(c, "silicon").instances] for c in ("hetero1", "hetero2", "homo")
    }
    assert names == {
        "hetero1": ["a100-0", "a6000-0", "a100-1", "a6000-1"],
        "hetero2": ["a100-0", "a100-1", "a6000-0", "l40s-0"],
        "homo": ["a100-0", "a100-1", "a100-2", "a100-3"],
    }
    first = load_cluster("hetero1", "silicon").instances[0]
    assert (first.tensor_parallel, first.block_size, first.max_num_seqs, first.max_num_batched_tokens) == (
        4,
        16,
        256,
        2048,
    )
    assert first.price_per_hour == 1.4


# --- a user's own files, and their mistakes ---

COEFFICIENTS = ("base_s", "prefill_token_s", "prefill_context_s", "sequence_s", "kv_token_s")
PROFILE = {
    "model": "ours",
    "view": "measured",
    "max_num_seqs": 64,
    "gpus": {"h100": {"latency": dict.fromkeys(COEFFICIENTS, 1e-3), "kv_blocks": 1000}},
}
CLUSTER = {"name": "lab", "profile": "ours.yaml", "instances": [{"gpu": "h100", "count": 2}]}


def write(folder, profile=PROFILE, cluster=CLUSTER):
    (folder / "ours.yaml").write_text(yaml.safe_dump(profile), encoding="utf-8")
    (folder / "lab.yaml").write_text(yaml.safe_dump(cluster), encoding="utf-8")
    return folder / "lab.yaml"


def changed(base, *keys, **change):
    """A deep copy of `base` with fields changed at a path of keys; None deletes the field."""
    copy = yaml.safe_load(yaml.safe_dump(base))
    place = copy
    for key in keys:
        place = place[key]
    for name, value in change.items():
        if value is None:
            del place[name]
        else:
            place[name] = value
    return copy


def test_a_users_own_profile_and_overrides(tmp_path):
    cluster = changed(
        CLUSTER,
        block_size=32,
        instances=[{"gpu": "h100"}, {"gpu": "h100", "kv_blocks": 7, "max_num_seqs": 8}],
    )
    for path in (write(tmp_path, cluster=cluster), str(write(tmp_path, cluster=cluster))):
        one, two = load_cluster(path, "measured").instances
        assert (one.name, one.model, one.tensor_parallel, one.block_size) == ("h100-0", "ours", 1, 32)
        assert (one.kv_blocks, one.max_num_seqs, one.load_weight) == (1000, 64, 1.0)
        assert (two.kv_blocks, two.max_num_seqs) == (7, 8)


def test_numbers_that_yaml_reads_as_text(tmp_path):
    path = write(tmp_path, changed(PROFILE, "gpus", "h100", "latency", base_s="1e-3"))
    assert load_cluster(path, "measured").instances[0].latency.base_s == 1e-3


def test_a_composed_config_is_as_good_as_a_file():
    from omegaconf import OmegaConf

    config = OmegaConf.create(
        {"name": "x", "model": LLAMA, "instances": [{"gpu": A100, "count": 2}, {"gpu": L40S}]}
    )
    assert [i.name for i in load_cluster(config, "silicon").instances] == ["a100-0", "a100-1", "l40s-0"]


@pytest.mark.parametrize(
    ("keys", "change", "said"),
    [
        (("gpus", "h100", "latency"), {"base_s": -0.1}, ["gpus.h100", "base_s is -0.1", "not negative"]),
        (("gpus", "h100", "latency"), {"base_s": "fast"}, ["gpus.h100", "base_s is 'fast'", "number"]),
        (("gpus", "h100", "latency"), {"kv_token_s": None}, ["gpus.h100.latency", "'kv_token_s' is missing"]),
        (
            ("gpus", "h100", "latency"),
            {"kv_s": 1},
            ["gpus.h100.latency", "'kv_s' is not known", "kv_token_s"],
        ),
        (("gpus", "h100"), {"latency": 3}, ["gpus.h100.latency is 3"]),
        (("gpus", "h100"), {"kv_blocks": None}, ["gpus.h100", "'kv_blocks' is missing"]),
        (("gpus", "h100"), {"kv_blocks": 0}, ["gpus.h100", "kv_blocks is 0", "at least 1"]),
        (("gpus", "h100"), {"block_size": 2.5}, ["gpus.h100", "block_size is 2.5"]),
        (("gpus",), {"h100": 1}, ["gpus.h100 is 1"]),
        ((), {"gpus": []}, ["gpus is []"]),
        ((), {"view": None}, ["'view' is missing"]),
        ((), {"modle": "x"}, ["'modle' is not known"]),
        ((), {"max_num_seqs": -1}, ["max_num_seqs is -1"]),
    ],
)
def test_mistakes_in_a_profile(tmp_path, keys, change, said):
    path = write(tmp_path, changed(PROFILE, *keys, **change))
    with pytest.raises(InputError) as error:
        load_cluster(path, "measured")
    message = str(error.value)
    assert "\n" not in message
    for part in ("ours.yaml", *said):
        assert part in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"instances": [{"gpu": "tpu"}]}, ["instances[0]", "'tpu'", "h100"]),
        ({"instances": [{"gpu": "h100"}, {"gpu": "h100", "count": 0}]}, ["instances[1]", "count is 0"]),
        ({"instances": [{"count": 2}]}, ["instances[0]", "'gpu' is missing"]),
        ({"instances": [{"gpu": "h100", "blocks": 3}]}, ["instances[0]", "'blocks' is not known"]),
        ({"instances": [{"gpu": "h100", "kv_blocks": -3}]}, ["instances[0]", "kv_blocks is -3"]),
        ({"instances": ["h100"]}, ["instances[0] is 'h100'"]),
        ({"instances": "h100"}, ["instances is 'h100'"]),
        ({"instances": None}, ["'instances' is missing"]),
        ({"profile": "theirs.yaml"}, ["theirs.yaml", "cannot be read"]),
        ({"profile": None}, ["model is missing", LLAMA]),
        ({"model": "other"}, ["model is 'other'", "'ours'"]),
        ({"size": 3}, ["'size' is not known"]),
    ],
)
def test_mistakes_in_a_cluster(tmp_path, change, said):
    path = write(tmp_path, cluster=changed(CLUSTER, **change))
    with pytest.raises(InputError) as error:
        load_cluster(path, "measured")
    assert "\n" not in str(error.value)
    for part in said:
        assert part in str(error.value)


def test_other_mistakes(tmp_path):
    path = write(tmp_path)
    with pytest.raises(InputError, match="view 'silicon' is asked for"):
        load_cluster(path, "silicon")
    with pytest.raises(InputError, match=r"'hetero9' is not known; give one of hetero1, hetero1_allreduce"):
        load_cluster("hetero9", "silicon")
    with pytest.raises(InputError, match=r"view 'guess'.*silicon"):
        load_cluster("hetero1", "guess")
    with pytest.raises(InputError, match="model 'gpt'"):
        load_cluster("hetero1", "silicon", model="gpt")
    with pytest.raises(InputError, match=r"none.yaml: cannot be read"):
        load_cluster(tmp_path / "none.yaml", "silicon")
    (tmp_path / "bad.yaml").write_text("name: [", encoding="utf-8")
    with pytest.raises(InputError, match=r"bad.yaml: is not valid YAML"):
        load_cluster(tmp_path / "bad.yaml", "silicon")
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"bad.yaml: cannot be read"):
        load_cluster(tmp_path / "bad.yaml", "silicon")
    (tmp_path / "bad.yaml").write_text("- 1", encoding="utf-8")
    with pytest.raises(InputError, match="holds list"):
        read_profile(tmp_path / "bad.yaml")


def test_paths():
    assert (conf_dir() / "cluster" / "hetero1.yaml").is_file()
    assert (data_dir() / "profiles").is_dir()


def test_importing_the_room_is_cheap():
    """No pandas, scipy, numba or aiconfigurator unless something is fitted."""
    heavy = ("pandas", "scipy", "numba", "aiconfigurator_core")
    code = f"import sys, hexrepro.cluster; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_scale_out_repeats_the_list_in_order():
    once, thrice = load_cluster("hetero1", "silicon"), load_cluster("hetero1", "silicon", scale_out=3)
    assert [i.gpu for i in thrice.instances] == 3 * [i.gpu for i in once.instances]
    assert [i.name for i in thrice.instances[:6]] == [
        "a100-0",
        "a6000-0",
        "a100-1",
        "a6000-1",
        "a100-2",
        "a6000-2",
    ]
    assert thrice.name == once.name
    with pytest.raises(InputError, match="scale_out is 0"):
        load_cluster("hetero1", "silicon", scale_out=0)
