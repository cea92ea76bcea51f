"""Skips the completion tests of shells that are not installed, with a notice."""

from __future__ import annotations

import shutil

import pytest

from tests.support.left_out import leave_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out completion in absent shells."""
    absent = {shell for shell in ("zsh", "fish") if shutil.which(shell) is None}
    mine = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and item.callspec.params.get("terminal") in absent
    ]
    why = f"of completion: no {' and no '.join(sorted(absent))}; make test-packages installs them."
    leave_out(config, items, mine, folder="tests/cli", why=why)
