"""A model directory that vLLM serves without a download: a Llama of chosen size, and a tokenizer made on the spot.

There are no weights in it (start the server with `--load-format dummy`, which draws them). The vocabulary is the four special
tokens and the words t4, t5, ..., so that a text of n such words is n tokens.

Nothing here needs Transformers or Tokenizers: both files are plain JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hexrepro.errors import InputError

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
FIRST_WORD = len(SPECIAL)  # the least token id that is an ordinary word
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # that vLLM's CPU attention has


@dataclass(frozen=True)
class TinyModel:
    """A Llama's dimensions. The default is the least that vLLM takes: for paced servers, which compute nothing."""

    layers: int = 1
    hidden: int = 32
    heads: int = 1
    kv_heads: int = 1
    vocabulary: int = 512
    max_tokens: int = 32768  # prompt and output together

    def __post_init__(self) -> None:
        for field, least in {
            "layers": 1,
            "hidden": 32,
            "heads": 1,
            "kv_heads": 1,
            "vocabulary": FIRST_WORD + 1,
            "max_tokens": 2,
        }.items():
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(
                    f"tiny model: {field} is {value!r}; it must be a whole number of at least {least}"
                )
        if self.heads % self.kv_heads:
            raise InputError(
                f"tiny model: kv_heads is {self.kv_heads}; it must divide the number of heads, {self.heads}"
            )
        if self.hidden % self.heads or self.head_size not in HEAD_SIZES:
            raise InputError(
                f"tiny model: hidden={self.hidden} and heads={self.heads} make heads of {self.hidden / self.heads:g};"
                f" vLLM's CPU attention has {', '.join(map(str, HEAD_SIZES))}"
            )

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes: a key and a value of 32-bit floats per layer and KV head."""
        return 2 * self.layers * self.kv_heads * self.head_size * 4


def write_tiny_model(directory: str | Path, model: TinyModel = TinyModel()) -> Path:
    """Write config.json, tokenizer.json and tokenizer_config.json; returns the directory. Files there are overwritten."""
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in {
            "config.json": _config(model),
            "tokenizer.json": _tokenizer(model),
            "tokenizer_config.json": _tokenizer_config(model),
        }.items():
            (directory / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"tiny model: {directory} cannot be written ({error.strerror})") from None
    return directory


def _config(model: TinyModel) -> dict:
    return dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=model.hidden,
        intermediate_size=3 * model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_size,
        vocab_size=model.vocabulary,
        max_position_embeddings=model.max_tokens,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        initializer_range=0.02,
        use_cache=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )


def _tokenizer(model: TinyModel) -> dict:
    words = dict(zip(SPECIAL, range(FIRST_WORD), strict=True))
    words |= {f"t{i}": i for i in range(FIRST_WORD, model.vocabulary)}
    special = [
        dict(
            id=i, content=token, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True
        )
        for i, token in enumerate(SPECIAL)
    ]
    return dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=special,
        normalizer=None,
        pre_tokenizer=dict(type="WhitespaceSplit"),
        post_processor=None,
        decoder=None,  # decoded words are joined by blanks
        model=dict(type="WordLevel", vocab=words, unk_token="<unk>"),
    )


def _tokenizer_config(model: TinyModel) -> dict:
    return dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=model.max_tokens,
        clean_up_tokenization_spaces=False,
        # a chat is its messages, one after the other
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    )
