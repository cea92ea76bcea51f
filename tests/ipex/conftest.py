"""Deselects the archived engine's tests where it is not installed."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A marker in pytest's settings would do, but any `-m` by hand takes its place."""
    ipex = [item for item in items if item.get_closest_marker("ipex")]
    if ipex and importlib.util.find_spec("intel_extension_for_pytorch") is None:
        config.hook.pytest_deselected(items=ipex)
        items[:] = [item for item in items if item not in ipex]
