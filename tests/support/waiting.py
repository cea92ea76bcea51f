"""Waiting for the actions of other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 600.0
"""Deadline of every wait in a test; other programs may slow the machine, so it only ends a hang."""


def wait_until(condition: Callable[[], bool], *, what: str, timeout_s: float = DEADLINE_S) -> None:
    """Wait until `condition` holds; fail after the deadline."""
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)
