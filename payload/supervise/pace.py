"""How far and how fast an attempt goes: the new rows of metrics.jsonl, read as it grows."""

from __future__ import annotations

import os
import statistics
from collections import deque
from pathlib import Path

from payload.metrics_log import parse_row
from payload.untrusted import open_regular

_RECENT = 50
_MOST_BYTES = 2**24


class StepTimes:
    """Of one attempt: rows that are there already are another one's."""

    def __init__(self, metrics: Path) -> None:
        self._path = metrics
        self._inode, self._offset = _identity(metrics)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._reached: int | None = None

    def median_s(self, *, began_at: int) -> float | None:
        """Return the last steps' median time; None before the first one after `began_at`."""
        self._read(began_at)
        return statistics.median(self._recent) if self._recent else None

    def reached_step(self, *, began_at: int) -> int | None:
        """Return the last step that was finished after `began_at`, or None."""
        self._read(began_at)
        return self._reached

    def _read(self, began_at: int) -> None:
        try:
            with open_regular(self._path) as file:
                found = os.fstat(file.fileno())
                # A resumed run replaces the file by one that ends with its checkpoint.
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                file.seek(self._offset)
                content = file.read(_MOST_BYTES)
        except OSError:
            return
        whole, end, _ = content.rpartition(b"\n")
        self._offset += len(whole) + len(end)
        for line in whole.splitlines():
            row = parse_row(line)
            if row is not None and "loss" in row and row["step"] > began_at:
                self._recent.append(row["step_time_s"])
                self._reached = row["step"]


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_size
