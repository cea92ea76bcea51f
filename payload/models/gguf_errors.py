"""Errors for models that GGUF cannot describe, or that cannot be read from GGUF."""

from __future__ import annotations

from typing import NoReturn

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown

FIX = "Use a folder in the Hugging Face layout, with safetensors."


def refuse_import(where: str, key: str, value: object, problem: str) -> NoReturn:
    """Raise CheckpointError for a GGUF file that would be read as a different model."""
    raise CheckpointError(f"{where}: {key} = {shown(value)}: {problem}. {FIX}")


def refuse_export(where: str, key: str, value: object) -> NoReturn:
    """Raise CheckpointError for a config.json that llama.cpp would compute differently."""
    raise CheckpointError(
        f"{where}: {key} = {shown(value)}: with this value, a GGUF file would give "
        "different results in llama.cpp. Use --format hf."
    )
