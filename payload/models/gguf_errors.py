"""Errors of models that a GGUF file would not describe, or that are not read from one."""

from __future__ import annotations

from typing import NoReturn

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown

FIX = "Name a folder in the Hugging Face layout, with safetensors."


def refuse_import(where: str, key: str, value: object, problem: str) -> NoReturn:
    """Refuse a GGUF file that would be read as another model. Raises CheckpointError."""
    raise CheckpointError(f"{where}: {key} = {shown(value)}: {problem}. {FIX}")


def refuse_export(where: str, key: str, value: object) -> NoReturn:
    """Refuse a config.json that llama.cpp would compute otherwise. Raises CheckpointError."""
    raise CheckpointError(
        f"{where}: {key} = {shown(value)}: a GGUF file would compute something else. Use "
        "--format hf."
    )
