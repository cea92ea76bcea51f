"""Skips the tests that boot a kernel with NFS on a host that cannot boot the kernel."""

from __future__ import annotations

import pytest

from tests.nfs.kernel import missing
from tests.support.left_out import leave_out


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests if this host cannot boot the kernel."""
    problem = missing()
    if problem:
        unwanted = [item for item in items if item.get_closest_marker("nfs")]
        why = f"that boot a kernel with NFS: {problem}."
        leave_out(config, items, unwanted, folder="tests/nfs", why=why)
