"""Says so where the machines of an engine cannot be imitated."""

from __future__ import annotations

import pytest

from tests.launch.exports.pods import can_make_pods
from tests.support.left_out import leave_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what trains unless root may make namespaces."""
    mine = [item for item in items if item.path.name == "test_training_by_exports.py"]
    if mine and not can_make_pods():
        why = "of exported files: they need root on Linux with the right to make namespaces."
        leave_out(config, items, mine, folder="tests/launch/exports", why=why)
