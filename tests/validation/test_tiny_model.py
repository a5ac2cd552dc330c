"""The tiny model's directory: what is in it, and what is refused. That vLLM serves it is tested in test_real_vllm.py."""

from __future__ import annotations

import json

import pytest

from hexrepro.errors import InputError
from hexrepro.validation.tiny_model import TinyModel, write_tiny_model


def test_files_hold_the_chosen_size(tmp_path):
    where = write_tiny_model(
        tmp_path / "a" / "model",
        TinyModel(layers=3, hidden=256, heads=4, kv_heads=2, vocabulary=100, max_tokens=999),
    )
    config = json.loads((where / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["head_dim"]) == (3, 256, 64)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert config["max_position_embeddings"] == 999
    words = json.loads((where / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(words) == config["vocab_size"] == 100
    assert sorted(words.values()) == list(range(100))
    # the ids that config.json gives the special tokens are theirs
    assert words["<s>"] == config["bos_token_id"]
    assert words["</s>"] == config["eos_token_id"]
    assert words["t99"] == 99


def test_kv_bytes_by_hand():
    # keys and values, 3 layers, 2 KV heads of 64, 4 bytes each
    assert TinyModel(layers=3, hidden=256, heads=4, kv_heads=2).kv_bytes_per_token == 2 * 3 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(layers=0), "layers is 0"),
        (dict(vocabulary=4), "vocabulary is 4"),
        (dict(heads=4, kv_heads=3, hidden=256), "kv_heads is 3"),
        (dict(hidden=100, heads=3), "heads of 33.3333"),
        (dict(hidden=48), "heads of 48"),
        (dict(layers=True), "layers is True"),
    ],
)
def test_refuses_what_vllm_would(wrong, says):
    with pytest.raises(InputError, match=says):
        TinyModel(**wrong)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_tiny_model(tmp_path / "file" / "model")
