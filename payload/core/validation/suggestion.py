"""The hint "Did you mean ...?" for a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.75) -> str | None:
    """Return the most similar known name, or None if no known name is similar enough."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.75) -> str:
    """Return the hint with a leading space; empty if no known name is similar."""
    near = nearest(name, known, cutoff=cutoff)
    return "" if near is None else f" Did you mean {near}?"
