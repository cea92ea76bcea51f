"""Whether a checkpoint is being written: time that a stop must not take from it."""

from __future__ import annotations

import time

from payload.errors import ConfigError
from payload.results import RankProgress, RunPaths, read_json

SAVING_PHASES = ("sync check", "checkpoint", "end")
"""What a rank does from the last pass of a stop to its own end."""


class CheckpointWatch:
    """Looks at rank 0's sign of life, which changes with each part of a checkpoint."""

    def __init__(self, paths: RunPaths, *, patience_s: float) -> None:
        """`patience_s`: how long one part may take."""
        self._path = paths.rank_progress(0)
        self._patience_s = patience_s
        self._last: RankProgress | None = None
        self._changed_s = 0.0

    def gets_on(self) -> bool:
        """Whether rank 0 is at its checkpoint and has shown something new in time. Ask often."""
        try:
            seen = read_json(RankProgress, self._path)
        except ConfigError:
            return False
        if seen is None or seen.phase not in SAVING_PHASES:
            return False
        if seen != self._last:
            self._last, self._changed_s = seen, time.monotonic()
        return time.monotonic() - self._changed_s < self._patience_s
