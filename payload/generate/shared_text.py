"""Finds the common start or end of several texts, and an unfinished marker at the end of a text."""

from __future__ import annotations

from collections.abc import Sequence


def common_start(texts: Sequence[str]) -> str:
    """Return the longest text with which all texts begin."""
    shortest = min(texts, key=len)
    size = 0
    while size < len(shortest) and len({text[size] for text in texts}) == 1:
        size += 1
    return shortest[:size]


def common_end(texts: Sequence[str]) -> str:
    """Return the longest text with which all texts end."""
    return common_start([text[::-1] for text in texts])[::-1]


def unfinished(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
