"""Profiles of the user's own: from a table of batches, from the package, from an endpoint; and what goes wrong."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hexrepro.cluster import load_cluster, load_profile, read_profile
from hexrepro.cluster.__main__ import main
from hexrepro.cluster.batches import batch_terms, made_of_batches
from hexrepro.cluster.latency import FitErrors, LatencyModel
from hexrepro.cluster.profile_files import write_profile
from hexrepro.cluster.profile_parts import rounded, rounded_coefficients
from hexrepro.errors import InputError
from tests.oracle import Oracle, OracleInstance, first_come, only_instance
from tests.strategies import make_instance, make_workload

needs_package = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="needs aiconfigurator-core"
)

TRUTH = (0.0125, 6e-5, 2e-9, 3e-4, 8e-8)


def by_oracle(input_tokens, output_tokens, batch, budget, max_num_seqs):
    """Seconds until the last of `batch` equal calls has ended, by the plain step-by-step simulator."""
    call = dict(input_tokens=input_tokens, output_tokens=output_tokens)
    workload = make_workload([dict(arrival_s=0.0, calls=[call])] * batch)
    spec = make_instance("a", TRUTH, 500, max_num_seqs=max_num_seqs, budget=budget)
    oracle = Oracle(workload, [OracleInstance.from_spec(spec)], only_instance, first_come)
    return float(max(oracle.run().finish_s))


def by_terms(*batch):
    steps, prefill, context, sequences, kv_read = batch_terms(*batch)
    return float(np.dot(TRUTH, [steps, prefill, context, sequences, kv_read]))


@settings(max_examples=25)
@given(
    st.integers(1, 300),
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(32, 256),
    st.sampled_from([4, 256]),
)
def test_a_batch_takes_the_steps_that_the_oracle_takes(input_tokens, output_tokens, batch, budget, seats):
    if batch > seats:
        seats = 256
    args = (input_tokens, output_tokens, batch, budget, seats)
    assert by_terms(*args) == pytest.approx(by_oracle(*args), rel=1e-9)


def rows(noise=0.0):
    rng = np.random.default_rng(0)
    for i in (64, 700, 3000):
        for o in (1, 16, 64):
            for b in (1, 4, 12):
                yield i, o, b, (0.02 + by_terms(i, o, b, 1024)) * rng.normal(1.0, noise)


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "batches.csv"
    pd.DataFrame(rows(), columns=["input", "output", "batch", "latency"]).to_csv(file, index=False)
    return file


def test_a_fit_finds_what_made_the_times(table):
    made = made_of_batches(table, "mine", kv_tokens=100_000, max_num_batched_tokens=1024)
    assert list(made.entry["latency"].values()) == pytest.approx(TRUTH, rel=1e-3)
    assert made.entry["fit"]["overhead_s"] == pytest.approx(0.02, rel=1e-3)
    assert {kind: made.entry["fit"][kind]["n"] for kind in ("all", "prefill", "alone", "together")} == {
        "all": 27, "prefill": 9, "alone": 6, "together": 12,
    }  # fmt: skip
    assert made.entry["fit"]["all"]["max"] < 1e-3
    assert any("12 sequences a step, the engine takes 256" in warning for warning in made.warnings())


def test_noise_shows_in_the_errors(tmp_path):
    file = tmp_path / "noisy.csv"
    pd.DataFrame(rows(0.1), columns=["input", "output", "batch", "latency"]).to_csv(file, index=False)
    made = made_of_batches(file, "mine", kv_tokens=100_000, max_num_batched_tokens=1024)
    assert 0.03 < made.entry["fit"]["all"]["mape"] < 0.12


def test_batches_of_one_say_nothing_of_batching(tmp_path):
    file = tmp_path / "alone.csv"
    alone = [row for row in rows() if row[2] == 1]
    pd.DataFrame(alone, columns=["input", "output", "batch", "latency"]).to_csv(file, index=False)
    made = made_of_batches(file, "mine", kv_tokens=100_000, max_num_batched_tokens=1024)
    assert made.entry["latency"]["sequence_s"] == 0.0
    # one sequence a step: its cost goes with the step's
    assert made.entry["latency"]["base_s"] == pytest.approx(TRUTH[0] + TRUTH[3], rel=1e-3)
    assert any("nothing is known of batching" in warning for warning in made.warnings())


def test_rows_that_do_not_tell_the_coefficients_apart(tmp_path):
    """All prompts equal: the cost of a token and that of the context behind it are one number."""
    file = tmp_path / "equal.csv"
    equal = [row for row in rows() if row[0] == 700]
    pd.DataFrame(equal, columns=["input", "output", "batch", "latency"]).to_csv(file, index=False)
    made = made_of_batches(file, "mine", kv_tokens=100_000, max_num_batched_tokens=16384)
    assert any("tell only" in warning for warning in made.warnings())


def test_a_limit_beyond_what_was_measured_is_said(table):
    """The engine's limits, not the defaults, decide what extrapolates."""
    made = made_of_batches(table, "mine", kv_tokens=20_000, max_num_batched_tokens=1024, max_num_seqs=12)
    assert not [w for w in made.warnings() if "sequences" in w]
    made.entry["max_num_seqs"] = 512
    assert [w for w in made.warnings() if "12 sequences a step, the engine takes 512" in w]


def test_from_a_table_to_a_cluster(table, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["profile", "--csv", "batches.csv", "--model", "m", "--max-num-batched-tokens", "1024"]
    command += ["--kv-tokens", "20000", "--price", "0.8", "--price-source", "our invoice"]
    assert main([*command, "--gpu", "one", "--trace", "trace1", "--out", "m.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "m, view measured" in printed
    assert "warning: trace1 has calls of up to" in printed
    assert (tmp_path / "m.png").stat().st_size > 10_000
    assert main([*command, "--gpu", "two", "--tensor-parallel", "2", "--out", "m.yaml", "--add"]) == 0
    config = {
        "name": "ours", "profile": str(tmp_path / "m.yaml"),
        "instances": [{"gpu": "one", "count": 2}, {"gpu": "two", "price_per_hour": 3.0}],
    }  # fmt: skip
    cluster = load_cluster(config, "measured")
    assert [i.name for i in cluster.instances] == ["one-0", "one-1", "two-0"]
    assert list(cluster.instances[2].latency.coefficients) == pytest.approx(TRUTH, rel=1e-3)
    assert cluster.instances[0].kv_tokens == 20000
    assert cluster.price_per_hour == pytest.approx(2 * 0.8 + 2 * 3.0)  # `two` has two GPUs an instance
    assert "price_source: our invoice" in (tmp_path / "m.yaml").read_text()


def refused(argv, capsys):
    """What the command says on stderr: one line."""
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("hexrepro: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("input,output,latency\n1,1,1\n", "column batch is missing"),
        ("input,output,batch,latency\n1,1,1,1\n5,x,1,1\n", "row 3, column output: 'x'"),
        ("input,output,batch,latency\n1,1,1,-1\n", "row 2, column latency"),
        ("input,output,batch,latency\n1,1.5,1,1\n", "row 2, column output: 1.5; it must be a whole number"),
        ("input,output,batch,latency\n1,1,1,1\n", "1 different batches are too few"),
        ("input,output,batch,latency\n" + 9 * "64,64,1,1.0\n", "1 different batches are too few"),
        ("input,output,batch,latency\n64,1,1,0.05\n700,1,1,0.09\n", "2 different batches are too few"),
        ("input,output,batch,latency\n", "has no rows"),
        ("input,output,batch,latency\n64,64,1,inf\n", "row 2, column latency: inf"),
        ("input,output,batch,latency\n64,64,1,nan\n", "row 2, column latency: nan"),
        ("input,output,batch,latency\n64,64,1000000000000,1\n", "and at most 1e+06"),
        ("input,output,batch,latency\n1e300,64,1,1\n", "row 2, column input"),
        ("input;output;batch;latency\n64;64;1;1\n", "the file has input;output;batch;latency"),
        ("", "cannot be read"),
        ("\x00\x01\xff", "own.csv"),
        ("input,output,batch,latency\n1,1,1,1,1,1\n1,1,1,1,1,1,1\n", "cannot be read"),
    ],
)
def test_a_damaged_table(content, said, tmp_path, capsys):
    file = tmp_path / "own.csv"
    file.write_text(content, encoding="latin-1")
    command = ["profile", "--csv", str(file), "--model", "m", "--gpu", "g", "--kv-tokens", "1000"]
    error = refused([*command, "--out", str(tmp_path / "out.yaml")], capsys)
    assert said in error
    assert not (tmp_path / "out.yaml").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--gpu", "a100"], "--model is missing"),
        (["--gpu", "g", "--csv", "none.csv", "--model", "m", "--kv-tokens", "90"], "none.csv: cannot be read"),
        (["--gpu", "g", "--csv", "batches.csv", "--model", "m"], "--kv-tokens is missing"),
        (["--gpu", "g,h", "--csv", "batches.csv", "--model", "m"], "give one name"),
        (["--gpu", "g", "--csv", "batches.csv", "--endpoint", "http://x"], "two sources"),
        (["--gpu", "g", "--csv", "batches.csv", "--model", "m", "--price", "-1"], "--price -1.0"),
        (["--gpu", "g", "--csv", "batches.csv", "--model", "m", "--kv-tokens", "90", "--out", "x.txt"], "end in .yaml"),
        (["--gpu", "g", "--csv", "batches.csv", "--model", "m", "--kv-tokens", "90", "--out", "no/x.yaml"], "no directory"),
        (["--gpu", "g", "--csv", "batches.csv", "--model", "m", "--kv-tokens", "90", "--out", "there.yaml"], "--add adds"),
        (["--gpu", "g", "--endpoint", "http://127.0.0.1:9"], "profile of http://127.0.0.1:9"),
        (["--gpu", "g", "--endpoint", "127.0.0.1:9"], "must begin with http://"),
        (["--gpu", "g", "--endpoint", "http://127.0.0.1:9", "--kv-dtype", "fp8"], "--kv-dtype is for computed profiles"),
        (["--gpu", "g", "--csv", "batches.csv", "--model", "m", "--kv-tokens", "9"], "at least a block"),
        (["--gpu", "", "--csv", "batches.csv", "--model", "m", "--kv-tokens", "90"], "it must name a GPU"),
        (["--gpu", "g", "--csv", "batches.csv", "--model", "", "--kv-tokens", "90"], "--model is missing"),
        (["--gpu", "g", "--csv", "batches.csv", "--model", "m", "--kv-tokens", "90", "--trace", "no.json"], "no.json"),
        (["--gpu", "g", "--csv", "batches.csv", "--model", "m", "--kv-tokens", "90", "--quantisation", "fp8"],
         "--quantisation is for computed profiles"),
        (["--gpu", "a100,a100", "--model", "m"], "several different ones"),
        (["--gpu", "a100,h100", "--model", "m", "--price", "2"], "give it with one GPU"),
        (["--gpu", "a100", "--model", "m", "--kv-tokens", "90"], "--kv-tokens is for measured profiles"),
    ],
)  # fmt: skip
def test_mistakes_on_the_command_line(argv, said, table, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text("")
    assert said in refused(["profile", *argv], capsys)


def test_a_model_with_an_owner_has_a_file_without(table, tmp_path, monkeypatch, capsys):
    """Servers name their model as Hugging Face does: owner/name is no folder."""
    monkeypatch.chdir(tmp_path)
    assert (
        main(["profile", "--csv", "batches.csv", "--gpu", "g", "--kv-tokens", "9000", "--model", "meta/m"])
        == 0
    )
    assert read_profile("m_measured.yaml")["model"] == "meta/m"


def test_what_can_not_be_read_does_not_replace_what_could(table, tmp_path):
    path = tmp_path / "m.yaml"
    made = made_of_batches(table, "mine", kv_tokens=20_000)
    content = {"model": "m", "view": "measured", "gpus": {"mine": made.entry}}
    before = write_profile(content, path, "a command").read_bytes()
    content["gpus"]["other"] = made.entry | {"kv_blocks": 0}
    with pytest.raises(InputError, match=r"gpus.other: .*kv_blocks is 0"):
        write_profile(content, path, "a command")
    assert path.read_bytes() == before
    with pytest.raises(InputError, match="cannot be written"):
        write_profile(content | {"gpus": {"mine": made.entry}}, path / "below.yaml", "a command")


class _Server(BaseHTTPRequestHandler):
    """Lists a model, and has no /metrics; takes its time where told to."""

    wait_s = 0.0

    def do_GET(self):
        time.sleep(self.wait_s)
        known = self.path == "/v1/models"
        with contextlib.suppress(OSError):
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "owner/served"}]}' if known else b"")

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_endpoint_is_asked_before_it_is_measured(server, tmp_path, monkeypatch, capsys):
    """What would be refused after minutes of measuring is refused at once."""
    pytest.importorskip("aiohttp")
    from hexrepro.validation import profile_endpoint as module

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "profile_endpoint", None)  # is not reached
    command = ["profile", "--endpoint", server, "--gpu", "g"]
    assert f"--kv-tokens is missing: {server}" in refused(command, capsys)
    (tmp_path / "served_measured.yaml").write_text("")
    assert "served_measured.yaml is there already" in refused([*command, "--kv-tokens", "9000"], capsys)
    monkeypatch.setattr(_Server, "wait_s", 0.3)
    monkeypatch.setattr("hexrepro.cluster.own_profiles.ANSWERS_S", 0.1)
    assert "no answer within" in refused(command, capsys)


def test_a_file_of_another_model_is_not_added_to(table, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["profile", "--csv", "batches.csv", "--gpu", "g", "--kv-tokens", "9000", "--out", "m.yaml"]
    assert main([*command, "--model", "m"]) == 0
    before = (tmp_path / "m.yaml").read_bytes()
    assert "is of m, view measured" in refused([*command, "--model", "other", "--add"], capsys)
    assert (tmp_path / "m.yaml").read_bytes() == before


coefficient = st.floats(0, 1e-2).map(rounded)
entries = st.fixed_dictionaries(
    {
        "latency": st.builds(
            LatencyModel, st.floats(1e-4, 0.1), coefficient, coefficient, coefficient, coefficient
        ).map(rounded_coefficients),
        "kv_blocks": st.integers(1, 10**6),
        "tensor_parallel": st.integers(1, 8),
        "max_num_seqs": st.integers(1, 1024),
        "price_per_hour": st.none() | st.floats(0.01, 20).map(rounded),
        "price_source": st.text(st.characters(blacklist_categories=("C",)), max_size=40),
    }
)


@settings(max_examples=40)
@given(
    st.dictionaries(st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True), entries, min_size=1, max_size=3)
)
def test_a_profile_written_and_read_is_the_same(tmp_path_factory, gpus):
    path = tmp_path_factory.mktemp("profile") / "m_silicon.yaml"
    content = {
        "model": "m",
        "view": "silicon",
        "source": ["x"],
        "notes": "a\nb\n",
        "block_size": 16,
        "gpus": gpus,
    }
    write_profile(content, path, "a command")
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == content
    read = read_profile(path)
    assert (read["model"], read["view"]) == ("m", "silicon")
    for name, entry in gpus.items():
        assert rounded_coefficients(read["gpus"][name]["latency"]) == entry["latency"]
        assert all(
            read["gpus"][name][key] == entry[key]
            for key in ("kv_blocks", "tensor_parallel", "max_num_seqs", "price_per_hour")
        )


def test_an_endpoint_s_measurements_become_a_profile(tmp_path, monkeypatch, capsys):
    """The measuring itself is tested with the endpoint's own module; here its result is given."""
    pytest.importorskip("aiohttp")
    from hexrepro.validation import profile_endpoint as module

    frame = pd.DataFrame(
        {
            "kind": ["decode", "prefill", "held_out"],
            "seconds": [0.1, 0.2, 0.3],
            "predicted_s": [0.1, 0.21, 0.33],
        }
    )
    errors = {"all": FitErrors(2, 0.02, 0.05, 0.99), "held_out": FitErrors(1, 0.1, 0.1, float("nan"))}
    found = module.Profile(
        url="http://x", model="served", latency=LatencyModel(*TRUTH), overhead_s=0.004, errors=errors, noise=0.01,
        max_num_batched_tokens=4096, max_num_seqs=64, kv_blocks=None, block_size=None,
        found=dict.fromkeys(("max_num_batched_tokens", "max_num_seqs", "kv_blocks", "block_size"), "made up"),
        reach={"prompt_tokens": 8000, "sequences": 8, "kv_tokens": 20000}, measurements=frame, warnings=("odd",),
    )  # fmt: skip
    monkeypatch.setattr(module, "profile_endpoint", lambda url, **options: found)
    out = tmp_path / "ours.yaml"
    command = ["profile", "--endpoint", "http://x", "--gpu", "ours", "--out", str(out)]
    assert "give kv_blocks" in refused(command, capsys)
    assert main([*command, "--kv-tokens", "32000"]) == 0
    printed = capsys.readouterr().out
    assert "warning: odd" in printed
    assert "up to 8 sequences a step, the engine takes 64" in printed
    cluster = load_cluster({"name": "c", "profile": str(out), "instances": [{"gpu": "ours"}]}, "measured")
    (spec,) = cluster.instances
    assert (spec.model, spec.kv_blocks, spec.max_num_seqs, spec.max_num_batched_tokens) == (
        "served",
        2000,
        64,
        4096,
    )
    assert list(spec.latency.coefficients) == pytest.approx(TRUTH)


@needs_package
def test_what_is_shipped_is_what_the_command_makes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--model", "llama-3.1-70b", "--gpu", "h100,a100"]) == 0
    made, shipped = read_profile("llama-3.1-70b_silicon.yaml"), load_profile("llama-3.1-70b", "silicon")
    for gpu in ("h100", "a100"):
        assert made["gpus"][gpu]["latency"].coefficients == pytest.approx(
            shipped["gpus"][gpu]["latency"].coefficients, rel=1e-4
        )
        assert made["gpus"][gpu]["kv_blocks"] == shipped["gpus"][gpu]["kv_blocks"]
        assert made["gpus"][gpu]["tensor_parallel"] == 4
        assert made["gpus"][gpu]["price_per_hour"] == shipped["gpus"][gpu]["price_per_hour"]
    assert "h100: 4 GPUs an instance, 481104 tokens of KV" in capsys.readouterr().out


@needs_package
def test_a_model_by_its_config(tmp_path, monkeypatch, capsys):
    """A config.json equal to a known model's gives that model's profile; half as many layers, half the time and weights."""
    from aiconfigurator_core.sdk.utils import get_model_config_from_model_path

    monkeypatch.chdir(tmp_path)
    config = dict(get_model_config_from_model_path("Qwen/Qwen3-8B")["raw_config"])
    for name, layers in (("same", 36), ("half", 18)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        assert main(["profile", "--model", f"{name}.json", "--gpu", "h100"]) == 0
    assert main(["profile", "--model", "qwen/qwen3-8b", "--gpu", "h100"]) == 0
    known, same, half = (
        yaml.safe_load((tmp_path / f"{name}_silicon.yaml").read_text())["gpus"]["h100"]
        for name in ("qwen3-8b", "same", "half")
    )
    assert same["latency"] == known["latency"]
    assert half["latency"]["prefill_token_s"] == pytest.approx(
        known["latency"]["prefill_token_s"] / 2, rel=0.15
    )
    assert half["kv_capacity"]["weights_bytes"] < 0.7 * known["kv_capacity"]["weights_bytes"]


@needs_package
def test_quantisation_and_parallelism_have_their_own_entries(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["profile", "--model", "Qwen/Qwen3-8B", "--gpu", "h100", "--out", "q.yaml"]
    assert main(command) == 0
    assert main([*command, "--add", "--quantisation", "fp8", "--tensor-parallel", "2"]) == 0
    gpus = read_profile("q.yaml")["gpus"]
    assert list(gpus) == ["h100", "h100-tp2-fp8"]
    # decoding reads the weights: half the bytes on twice the cards
    assert gpus["h100-tp2-fp8"]["latency"].base_s < 0.6 * gpus["h100"]["latency"].base_s
    assert gpus["h100-tp2-fp8"]["kv_blocks"] > 2 * gpus["h100"]["kv_blocks"]


@needs_package
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "Qwen/Qwen3-99B", "--gpu", "h100"], "did you mean Qwen/Qwen3-"),
        (["--model", "Qwen/Qwen3-8B", "--gpu", "h1000"], "did you mean h100?"),
        (["--model", "Qwen/Qwen3-8B", "--gpu", "l4"], "no vLLM kernels"),
        (
            ["--model", "Qwen/Qwen3-8B", "--gpu", "a100", "--quantisation", "fp8"],
            "--quantisation fp8: aiconfigurator-core",
        ),
        (
            ["--model", "Qwen/Qwen3-8B", "--gpu", "a100", "--quantisation", "int3"],
            "vLLM kernels of a100, only bfloat16",
        ),
        (
            ["--model", "Qwen/Qwen3-8B", "--gpu", "h100", "--kv-dtype", "int8"],
            "--kv-dtype int8: aiconfigurator-core",
        ),
        (
            [
                "--model",
                "deepseek-ai/DeepSeek-V3",
                "--gpu",
                "b200",
                "--tensor-parallel",
                "8",
                "--quantisation",
                "nvfp4",
            ],
            "only in the checkpoint's own formats",
        ),
        (["--model", "llama-3.1-70b", "--gpu", "a6000"], "a shipped profile has it"),
        (["--model", "zzz", "--gpu", "h100"], "is not in aiconfigurator-core. Give a name"),
        (["--model", "llama-3.1-70b", "--gpu", "h100", "--tensor-parallel", "1"], "no KV budget"),
        (["--model", "none.json", "--gpu", "h100"], "none.json: cannot be read"),
        (["--model", "broken.json", "--gpu", "h100"], "broken.json: is not valid JSON (line 1"),
        (["--model", "empty.json", "--gpu", "h100"], "'architectures' is missing"),
        (["--model", "half.json", "--gpu", "h100"], "half.json"),
    ],
)
def test_what_the_package_does_not_know(argv, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "half.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    error = refused(["profile", *argv], capsys)
    assert said in error
    assert not list(tmp_path.glob("*.yaml"))


@needs_package
def test_the_list(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    for known in ("rtx-pro-6000", "meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b, silicon: a100, a6000"):
        assert known in printed
    assert main(["list", "--gpu", "h100"]) == 0
    printed = capsys.readouterr().out
    assert "fp8_block" in printed
    assert "PASS" in printed
