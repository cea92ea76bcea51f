"""Measures the phases from the start of this process to the first training step."""

from __future__ import annotations

import os
import time
from pathlib import Path


class StartClock:
    """The seconds of each phase before training, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.perf_counter() - process_age_s()

    def lap(self, part: str) -> None:
        """Record the time since the last lap as `part`."""
        now_s = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def line(self) -> str:
        """Return a line such as `ready in 6.2 s: imports 3.1, group 0.3, ...`."""
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.seconds.items())
        return f"ready in {sum(self.seconds.values()):.1f} s: {parts}"


def process_age_s() -> float:
    """Return the seconds since this process began, to 0.01 s; 0 if not on Linux."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, AttributeError):
        return 0.0
