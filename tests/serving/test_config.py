"""The gateway's files: what they give, and that a mistake is named with its file and field."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import yaml

from hexrepro.errors import InputError
from hexrepro.paths import conf_dir
from hexrepro.serving.config import Settings, load_serving, parse_overrides, read_cluster, read_settings
from hexrepro.serving.options import Options
from hexrepro.serving.upstream import Timeouts

GOOD = {
    "name": "ours",
    "model": "llama-3.1-70b",
    "models": ["llama"],
    "instances": [
        {"gpu": "a100", "url": "http://127.0.0.1:8001/v1"},
        {"gpu": "l40s", "url": "http://127.0.0.1:8002/", "concurrency": 7, "max_num_seqs": 64},
    ],
}


def write(tmp_path, content):
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_cluster_file(tmp_path) -> None:
    serving = read_cluster(write(tmp_path, GOOD))
    assert [i.name for i in serving.cluster.instances] == ["a100-0", "l40s-0"]
    assert serving.urls == ("http://127.0.0.1:8001", "http://127.0.0.1:8002")
    assert serving.concurrency == (256, 7)
    assert serving.models == ("llama",)
    assert serving.settings == Settings()


def test_what_is_believed_of_a_workflow(tmp_path) -> None:
    lengths = {"input_tokens": 11748, "output_tokens": 678, "cached_tokens": 9158}
    content = GOOD | {"workflows": {"chess": {"stages": {"candidate": lengths}}}}
    beliefs = read_cluster(write(tmp_path, content)).beliefs
    assert beliefs.stages == {"chess/candidate": (11748.0, 678.0, 9158.0)}


def test_keys_come_from_the_environment(tmp_path, monkeypatch) -> None:
    content = GOOD | {"tenants": [{"name": "gold", "key_env": "GOLD_KEY", "max_under_way": 3}]}
    path = write(tmp_path, content)
    monkeypatch.delenv("GOLD_KEY", raising=False)
    with pytest.raises(InputError, match=r"cluster.yaml: tenants\[0\].key_env.*GOLD_KEY"):
        read_cluster(path)
    monkeypatch.setenv("GOLD_KEY", "secret")
    (tenant,) = read_cluster(path).tenants
    assert (tenant.name, tenant.key, tenant.max_under_way) == ("gold", "secret", 3)
    assert "secret" not in repr(tenant)


def test_a_profile_file_of_ones_own_is_found_beside_the_cluster_file(tmp_path) -> None:
    latency = {
        "base_s": 0.01,
        "prefill_token_s": 1e-5,
        "prefill_context_s": 0,
        "sequence_s": 0,
        "kv_token_s": 0,
    }
    profile = {"model": "tiny", "view": "measured", "gpus": {"cpu": {"latency": latency, "kv_blocks": 100}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(profile))
    content = {"name": "c", "profile": "mine.yaml", "instances": [{"gpu": "cpu", "url": "http://h:1"}]}
    serving = read_cluster(write(tmp_path, content))
    assert serving.cluster.instances[0].latency.base_s == 0.01
    assert serving.models == ("tiny",)


def _planned(remaining) -> dict:
    return {"w": {"stages": {"s": {"input_tokens": 5, "output_tokens": 5}}, "remaining": remaining}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"instances": []}, "instances must be a list"),
        ({"instances": ["a100"]}, r"instances\[0\] is 'a100'"),
        ({"instances": [{"gpu": "a100"}]}, r"instances\[0\]: url is None"),
        ({"instances": [{"gpu": "a100", "url": "10.0.0.1:80"}]}, r"instances\[0\]: url is '10.0.0.1:80'"),
        ({"instances": [{"gpu": "a100", "url": "http://h", "count": 2}]}, r"instances\[0\]: count must be 1"),
        ({"instances": [{"gpu": "tpu", "url": "http://h"}]}, r"cluster.yaml: instances\[0\]: gpu is 'tpu'"),
        ({"instances": [{"gpu": "a100", "url": "http://h", "slots": 2}]}, "slots"),
        ({"instances": [{"gpu": "a100", "url": "http://h", "concurrency": -1}]}, r"\[0\]: concurrency is -1"),
        ({"instances": [{"gpu": "a100", "url": "http://h"}] * 2}, "two instances have the same url"),
        ({"models": "llama"}, "models is 'llama'"),
        ({"tenants": [{"nam": "x"}]}, r"tenants\[0\]"),
        ({"tenants": [{"name": "x"}, {"name": "x"}]}, "equal names"),
        ({"workflows": {"w": {"stages": {"s": {"input_tokens": 5}}}}}, "w.stages.s: output_tokens is None"),
        ({"workflows": _planned({"s": {"t": 1.0}})}, "w.remaining must map stages to lists"),
        ({"workflows": _planned({"s": [{"t": 1.0}]})}, r"w.remaining.s\[0\]: stage 't' is not among"),
        (
            {"workflows": _planned({"s": [{}, {"s": -1}]})},
            r"w.remaining.s\[1\]: s is -1; it must be a number",
        ),
        ({"shape": 3}, "shape"),
    ],
)
def test_a_mistake_in_the_cluster_file_is_named(tmp_path, change, says) -> None:
    path = write(tmp_path, GOOD | change)
    with pytest.raises(InputError, match=says) as error:
        read_cluster(path)
    assert str(path) in str(error.value)


def test_the_settings_file_holds_the_defaults() -> None:
    content = yaml.safe_load((conf_dir() / "serving" / "gateway.yaml").read_text())
    assert content == asdict(Settings())
    assert read_settings({}) == Settings()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["port=eighty"], "port='eighty' must be a whole number"),
        (["mode=fast"], "mode='fast' is unknown"),
        (["timeouts.connect_s=0"], "serving.timeouts: connect_s=0.0 must be above 0"),
        (["timeouts.conect_s=1"], "conect_s"),
        (["coordinator.window=-1"], "coordinator: window=-1"),
        (["ask_usage=1"], "ask_usage=1 must be true or false"),
        (["colour=red"], "colour"),
        (["port"], "not of the form name=value"),
        ([], "cluster is missing"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(arguments, says) -> None:
    with pytest.raises(InputError, match=says):
        load_serving(parse_overrides(arguments) | ({"cluster": "x.yaml"} if arguments else {}))


@pytest.mark.parametrize(
    ("make", "name", "whole"),
    [
        (Options, "slo_s", "window"),
        (Settings, "drain_s", "port"),
        (lambda **values: Settings(timeouts=Timeouts(**values)), "connect_s", None),
    ],
)
@pytest.mark.parametrize("wrong", [True, "1", math.nan, math.inf, -1.0])
def test_numbers_are_checked_alike_wherever_settings_come_from(make, name, whole, wrong) -> None:
    """Also where they are made in Python."""
    with pytest.raises(InputError, match=f"{name}={wrong!r} must be (a number|above 0|0 or more)"):
        make(**{name: wrong})
    make(**{name: 7})
    if whole:
        with pytest.raises(InputError, match=f"{whole}=1.5 must be a whole number"):
            make(**{whole: 1.5})
        make(**{whole: 0})


def test_settings_and_policy_from_the_command_line(tmp_path) -> None:
    path = write(tmp_path, GOOD)
    arguments = [f"cluster={path}", "policy=eft", "mode=engine", "timeouts.chunk_s=5", "coordinator.slo_s=30"]
    serving = load_serving(parse_overrides(arguments))
    assert serving.policy == "eft"
    assert serving.settings.mode == "engine"
    assert serving.settings.timeouts.chunk_s == 5.0
    assert serving.settings.coordinator.slo_s == 30.0


def test_the_example_is_one() -> None:
    serving = read_cluster(conf_dir() / "serving" / "example_cluster.yaml")
    assert len(serving.urls) == 4
    assert serving.concurrency == (256, 256, 64, 256)
    assert serving.beliefs.stages["chess/candidate"] == (11748.0, 678.0, 9158.0)
