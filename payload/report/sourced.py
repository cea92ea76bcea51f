"""A value of the report with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sourced:
    """A value with its source."""

    value: Any
    """The value; None if it is unknown."""
    source: str
    """Where the value comes from: a key in a file, such as `summary.json#steps`, or the name of a
    computation."""
    is_derived: bool = False
