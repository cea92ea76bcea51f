"""Deselects tests that cannot run on this machine, and lists them at the end of the output."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

_NOTES = pytest.StashKey[dict[str, str]]()


def leave_out(
    config: pytest.Config,
    items: list[pytest.Item],
    unwanted: Sequence[pytest.Item],
    *,
    folder: str,
    why: str,
) -> None:
    """Deselect `unwanted` from `items`; `why` ends the sentence about them."""
    if not unwanted:
        return
    config.hook.pytest_deselected(items=unwanted)
    gone = set(unwanted)
    items[:] = [item for item in items if item not in gone]
    notes(config)[folder] = f"NOT RUN: {len(unwanted)} tests {why}"


def notes(config: pytest.Config) -> dict[str, str]:
    """Return the deselected tests by folder; pytest-xdist's workers send theirs."""
    return config.stash.setdefault(_NOTES, {})
