"""Durations as text for people."""

from __future__ import annotations

import math

_DAYS_FROM_S = 2 * 86400
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def as_clock(seconds: float) -> str:
    """Return `0:42`, `12:05` or `3:20:00`; days are in words; `?` if `seconds` is not finite."""
    if not math.isfinite(seconds) or seconds >= _DAYS_FROM_S:
        return in_words(seconds)
    minutes, rest = divmod(math.floor(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_words(seconds: float) -> str:
    """Return `42 s`, `12 min 5 s`, `3 h 20 min` or `2 d 4 h`; `?` if `seconds` is not finite."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = math.floor(seconds + 0.5)
    place = next(index for index, (size, _) in enumerate(_UNITS) if whole >= size)
    (size, unit), (below, small) = _UNITS[place], _UNITS[place + 1]
    rest = whole % size // below
    return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
