"""CONTRACT: a GPT-2 model's folder in the Hugging Face layout: its files, and its config.json.

Such a folder comes from the hub, from another trainer or from a checkpoint: it is read as what
others wrote.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from payload.errors import CheckpointError
from payload.model_shape import ModelShape
from payload.untrusted import build, checked, parse_json, read_bytes, shown

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Every file that a tokenizer may consist of; a folder has some of them."""

_WEIGHTS_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_FIX = "Name a folder in the Hugging Face GPT-2 layout."


@dataclass(frozen=True, slots=True, kw_only=True)
class HfConfig:
    """What of a GPT-2's config.json decides its sizes and its arithmetic."""

    model_type: str
    n_layer: int = checked(low=1, high=10_000)
    n_head: int = checked(low=1, high=10_000)
    n_embd: int = checked(low=1, high=2**20)
    n_positions: int = checked(low=1, high=2**24)
    vocab_size: int = checked(low=1, high=2**24)
    activation_function: str = "gelu_new"
    n_inner: int | None = None
    """Width of the MLP; None = 4 x n_embd."""
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tileforge_bias: bool = True
    """False where Tileforge trained without biases; the file then has zeros."""

    def shape(self) -> ModelShape:
        """Return the model's sizes."""
        return ModelShape(
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            sequence_length=self.n_positions,
            vocab_size=self.vocab_size,
            bias=self.tileforge_bias,
        )


def read_config(folder: Path) -> HfConfig:
    """Read config.json of `folder`.

    Raises CheckpointError when it is absent or damaged, and for a model that would load without an
    error and compute something else than GPT-2 does.
    """
    path = folder / CONFIG_FILE
    raw = _read_json(path)
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind != "gpt2":
        raise CheckpointError(
            f"{path}: model_type is {shown(kind)}; only 'gpt2' can be loaded. {_FIX}"
        )
    config = build(HfConfig, raw, where=str(path), fix=_FIX, error=CheckpointError)
    _refuse_variants(config, path)
    return config


def weight_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files with the weights, each inside `folder`.

    Raises CheckpointError for a damaged index.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        return (WEIGHTS_FILE,)
    raw = _read_json(index)
    names = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index}: weight_map is missing. {_FIX}")
    for name in names.values():
        if not isinstance(name, str) or not _WEIGHTS_NAME.fullmatch(name):
            raise CheckpointError(
                f"{index}: {shown(name)} does not name a safetensors file of its folder. {_FIX}"
            )
    return tuple(sorted(set(names.values())))


def _read_json(path: Path) -> object:
    try:
        content = read_bytes(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. {_FIX}") from None
    return parse_json(content, where=str(path), fix=_FIX, error=CheckpointError)


def _refuse_variants(config: HfConfig, path: Path) -> None:
    width = 4 * config.n_embd
    for key, wanted in (
        ("tie_word_embeddings", (True,)),
        ("scale_attn_weights", (True,)),
        ("scale_attn_by_inverse_layer_idx", (False,)),
        ("layer_norm_epsilon", (1e-5,)),
        ("n_inner", (None, width)),
        ("activation_function", ("gelu_new", "gelu")),
    ):
        value = getattr(config, key)
        if value not in wanted:
            raise CheckpointError(
                f"{path}: {key} = {shown(value)}; only {' or '.join(map(str, wanted))}, as in "
                f"GPT-2 itself, can be loaded. {_FIX}"
            )
    if config.n_embd % config.n_head:
        raise CheckpointError(
            f"{path}: n_embd = {config.n_embd} is not a multiple of n_head = {config.n_head}. "
            f"{_FIX}"
        )
