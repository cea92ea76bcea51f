"""How fast the run goes: the newest step times of metrics.jsonl, read as it grows."""

from __future__ import annotations

import json
import os
import statistics
from collections import deque
from pathlib import Path

_RECENT = 50


class StepTimes:
    """Of one attempt: rows that are there already are another one's."""

    def __init__(self, metrics: Path) -> None:
        self._path = metrics
        self._offset = metrics.stat().st_size if metrics.exists() else 0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def median_s(self) -> float | None:
        """Of the last steps; None before the first."""
        self._read()
        return statistics.median(self._recent) if self._recent else None

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                # A resumed run's file is cut back to its checkpoint before it grows again.
                self._offset = min(self._offset, file.seek(0, os.SEEK_END))
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        whole, end, _ = content.rpartition(b"\n")
        self._offset += len(whole) + len(end)
        for line in whole.splitlines():
            try:
                self._recent.append(float(json.loads(line)["step_time_s"]))
            except (ValueError, KeyError, TypeError):
                continue
