"""Errors for models that GGUF cannot describe, or that cannot be read from GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.models.gguf_header import Array, GgufHeader, Value

_SINGLE = (
    *("_token_id", ".add_bos_token", ".add_eos_token", ".add_space_prefix", ".chat_template"),
    *("tokenizer.ggml.model", "tokenizer.ggml.pre"),
)
"""Endings of tokenizer keys that must have a single value, although transformers accepts arrays."""
FIX = "Use a folder in the Hugging Face layout, with safetensors."


def refuse_import(where: str, key: str, value: object, problem: str) -> NoReturn:
    """Raise CheckpointError for a GGUF file that would be read as a different model."""
    raise CheckpointError(f"{where}: {key} = {shown(value)}: {problem}. {FIX}")


def require_single_values(
    header: GgufHeader, own: Mapping[str, Value], kind: str, *, where: str
) -> None:
    """Raise CheckpointError for an array that would be read as a number or a text.

    `own` are the metadata of the architecture `kind`, without its prefix.
    """
    others = {key: value for key, value in header.values.items() if key.endswith(_SINGLE)}
    for key, value in {**{f"{kind}.{key}": own[key] for key in own}, **others}.items():
        if isinstance(value, Array):
            refuse_import(where, key, value, "must be a single value, not an array")


def refuse_export(where: str, key: str, value: object) -> NoReturn:
    """Raise CheckpointError for a config.json that llama.cpp would compute differently."""
    raise CheckpointError(
        f"{where}: {key} = {shown(value)}: with this value, a GGUF file would give "
        "different results in llama.cpp. Use --format hf."
    )
