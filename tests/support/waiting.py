"""Waiting for the actions of other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 60.0
"""Deadline that only a failing test reaches; other programs can slow the machine."""


def wait_until(condition: Callable[[], bool], *, what: str, timeout_s: float = DEADLINE_S) -> None:
    """Wait until `condition` holds; fail after the deadline."""
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)
