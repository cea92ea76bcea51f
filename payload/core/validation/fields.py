"""CONTRACT: limits, pattern, choices and messages that a dataclass field declares."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

MAX_SECONDS = 1e11
"""Limit of durations and Unix times in records: over three thousand years."""
MAX_TEXT_CHARS = 2**16
"""Longest string in a record; error messages and paths are far shorter."""


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
    unit: str = "",
) -> Any:
    """Declare a dataclass field with limits on its value.

    `low` and `high` are the smallest and largest number; `above` is an exclusive minimum. `pattern`
    must match the whole string, and every string in a container; `wanted` describes the pattern.
    `choices` are the allowed values, or a function that returns them. `key` is the field's name in
    the JSON object, if that name differs from the field's name in Python.

    In an error message about this field, `refusal` replaces the text about the limits, and `fix`
    replaces the remedy for the whole record. `unit` is the unit of the number, for documentation.
    """
    metadata = {
        **{"low": low, "above": above, "high": high, "pattern": pattern, "wanted": wanted},
        **{"choices": choices, "max_items": max_items, "max_chars": max_chars},
        **{"key": key, "refusal": refusal, "fix": fix, "unit": unit},
    }
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
