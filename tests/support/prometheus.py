"""Deselects tests whose fixtures need Prometheus if it is not installed."""

from __future__ import annotations

from shutil import which

import pytest

from tests.support.left_out import leave_out

PROGRAMS = ("prometheus", "promtool", "prometheus-node-exporter")
_FIXTURES = {"watched", "promtool"}


def leave_out_without_prometheus(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect and list tests that need Prometheus if it is not installed."""
    missing = [name for name in PROGRAMS if which(name) is None]
    if missing:
        leave_out(
            config,
            items,
            [item for item in items if _FIXTURES & {*getattr(item, "fixturenames", ())}],
            folder="tests/monitoring",
            why=f"that need {', '.join(missing)} (as root on Debian: make test-packages).",
        )
