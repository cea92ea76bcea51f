"""Gives ranks time to save a checkpoint before their run is ended."""

from __future__ import annotations

import time

from payload.run_record.run_files import RankProgress, RunPaths, last_record

START_PHASES = ("load", "calibration", "start", "kernels", "weights")
"""Phases of a rank before it trains, in this order."""
SAVING_PHASES = ("sync check", "checkpoint", "end")
"""Phases of a rank after the last micro-batch before a stop, until the rank exits."""


class CheckpointWatch:
    """Watches rank 0's heartbeat, which changes with each part of a checkpoint."""

    def __init__(self, paths: RunPaths, *, stall_timeout_s: float) -> None:
        """`stall_timeout_s` is the longest time for one part of a checkpoint."""
        self._paths = paths
        self._stall_timeout_s = stall_timeout_s
        self._last: RankProgress | None = None
        self._changed_s = 0.0

    def is_progressing(self) -> bool:
        """Return True if rank 0 is saving a checkpoint and its heartbeat has not stalled.

        Call this often, because a change of the heartbeat is noticed only during a call.
        """
        progress = _rank_0(self._paths)
        if progress is None or progress.phase not in SAVING_PHASES:
            return False
        if progress != self._last:
            self._last, self._changed_s = progress, time.monotonic()
        return time.monotonic() - self._changed_s < self._stall_timeout_s


class GracePeriod:
    """The time in which ranks can save after their supervisor was killed; used on the head."""

    def __init__(self, paths: RunPaths, *, grace_s: float, stall_timeout_s: float) -> None:
        """Start the clock. `grace_s` is the grace period of a normal stop."""
        self._watch = CheckpointWatch(paths, stall_timeout_s=stall_timeout_s)
        first = _rank_0(paths)
        has_begun = first is not None and first.phase not in START_PHASES
        # Before training begins, ranks have nothing to save.
        self._ends_s = time.monotonic() + (grace_s if has_begun else 0.0)

    def is_over(self) -> bool:
        """Return True if the grace period is over and no checkpoint progresses. Call it often."""
        is_progressing = self._watch.is_progressing()
        return time.monotonic() > self._ends_s and not is_progressing


def _rank_0(paths: RunPaths) -> RankProgress | None:
    return last_record(RankProgress, paths.rank_progress(0))
