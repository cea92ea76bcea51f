"""Measures how much of some cores other programs use while this process works on them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

MOST_OTHERS = 0.2
"""Largest share of the cores that other programs may use during a measurement of speed."""
_BUSY_FIELDS = (1, 2, 3, 6, 7, 8)
"""Fields of /proc/stat: user, nice, system, irq, softirq, and steal by other virtual machines."""


class CoreUse:
    """Processor time of all programs on some cores since the creation of this object."""

    def __init__(
        self, cores: Collection[int] | None = None, *, stat: Path = Path("/proc/stat")
    ) -> None:
        """Begin to count.

        `cores` are logical CPUs; the default is all CPUs that this process may run on.
        """
        self._cores = _own_cores() if cores is None else cores
        self._stat = stat
        self._began = (self._busy_s(), time.process_time(), time.perf_counter())

    def others(self) -> float:
        """Return the share of the cores' time that other programs used; 0 if it is unknown."""
        busy_s, own_s, now_s = self._began
        passed_s = (time.perf_counter() - now_s) * len(self._cores)
        now_busy_s = self._busy_s()
        if busy_s is None or now_busy_s is None:
            return 0.0
        used_s = now_busy_s - busy_s - (time.process_time() - own_s)
        return min(1.0, max(0.0, used_s / passed_s))

    def _busy_s(self) -> float | None:
        try:
            lines = self._stat.read_text(encoding="ascii").splitlines()
        except OSError:  # not Linux
            return None
        rows = (line.split() for line in lines)
        names = {f"cpu{core}" for core in self._cores}
        ticks = sum(int(row[i]) for row in rows if row and row[0] in names for i in _BUSY_FIELDS)
        return ticks / os.sysconf("SC_CLK_TCK")


def _own_cores() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)
