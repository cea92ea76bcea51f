"""Tests that cannot run here are left out, and that is said at the end, where it is seen."""

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
    """Take `unwanted` from `items`; `why` ends the sentence that names them."""
    if not unwanted:
        return
    config.hook.pytest_deselected(items=unwanted)
    gone = set(unwanted)
    items[:] = [item for item in items if item not in gone]
    notes(config)[folder] = f"NOT RUN: {len(unwanted)} tests {why}"


def notes(config: pytest.Config) -> dict[str, str]:
    """Return what was left out, by folder. Workers of pytest-xdist send theirs over."""
    return config.stash.setdefault(_NOTES, {})
