"""CONTRACT: what a dataclass's field declares of its value: limits, pattern, choices, message."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

MAX_SECONDS = 1e11
"""Over three thousand years: no time that a record has is longer, nor so long after 1970."""
MAX_TEXT_CHARS = 2**16
"""Longest string in a record: an error message or a path is far shorter."""


def checked(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    pattern: re.Pattern[str] | None = None,
    wanted: str = "",
    choices: tuple[Any, ...] | Callable[[], Sequence[Any]] | None = None,
    max_items: int | None = None,
    max_chars: int = MAX_TEXT_CHARS,
    default_factory: Callable[[], Any] | None = None,
    key: str | None = None,
    refusal: str = "",
    fix: str = "",
) -> Any:
    """Declare a dataclass field with the limits of its value.

    `low` and `high` are the smallest and largest number; `above` is not allowed itself. `pattern`
    must match a string whole, and every string in a container; `wanted` describes what matches.
    `choices` are the allowed values, as those of a Literal, or a function that returns them. `key`
    is the field's name in the JSON object, where it differs. In a message `refusal` follows the
    value in place of what the limits say, and `fix` replaces the record's.
    """
    metadata = {
        **{"low": low, "above": above, "high": high, "pattern": pattern, "wanted": wanted},
        **{"choices": choices, "max_items": max_items, "max_chars": max_chars},
        **{"key": key, "refusal": refusal, "fix": fix},
    }
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
