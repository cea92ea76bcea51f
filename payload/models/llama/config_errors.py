"""The error for a config.json that transformers would not compute as the file states."""

from __future__ import annotations

from typing import NoReturn

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown

FIX = "Use a folder in the Hugging Face layout, with its own config.json."


def refuse(where: str, key: str, value: object, problem: str) -> NoReturn:
    """Raise CheckpointError for the value of a key."""
    raise CheckpointError(f"{where}: {key} = {shown(value)}: {problem}. {FIX}")
