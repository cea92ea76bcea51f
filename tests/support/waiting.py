"""Waiting for something that another process does."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 60.0
"""Only a test that fails waits for so long: other programs may hold the machine."""


def wait_until(condition: Callable[[], bool], *, what: str, timeout_s: float = DEADLINE_S) -> None:
    """Return once `condition` holds; fail when it does not within the deadline."""
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)
