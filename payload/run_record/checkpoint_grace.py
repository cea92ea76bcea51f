"""The time that ranks take to save, which nobody who ends a run may take from them."""

from __future__ import annotations

import time

from payload.run_record.run_files import RankProgress, RunPaths, last_record

START_PHASES = ("load", "calibration", "start", "kernels", "weights")
"""Phases of a rank before it trains, in this order."""
SAVING_PHASES = ("sync check", "checkpoint", "end")
"""Phases of a rank from the last pass of a stop to its own end."""


class CheckpointWatch:
    """Looks at rank 0's heartbeat, which changes with each part of a checkpoint."""

    def __init__(self, paths: RunPaths, *, stall_timeout_s: float) -> None:
        """`stall_timeout_s`: how long one part may take."""
        self._paths = paths
        self._stall_timeout_s = stall_timeout_s
        self._last: RankProgress | None = None
        self._changed_s = 0.0

    def is_progressing(self) -> bool:
        """Return whether rank 0 is at its checkpoint and has shown something new; ask often."""
        seen = _rank_0(self._paths)
        if seen is None or seen.phase not in SAVING_PHASES:
            return False
        if seen != self._last:
            self._last, self._changed_s = seen, time.monotonic()
        return time.monotonic() - self._changed_s < self._stall_timeout_s


class GracePeriod:
    """How long ranks whose supervisor died may go on: until they have saved, on the head."""

    def __init__(self, paths: RunPaths, *, grace_s: float, stall_timeout_s: float) -> None:
        """The time runs from now. `grace_s` is what a stop would have given them."""
        self._watch = CheckpointWatch(paths, stall_timeout_s=stall_timeout_s)
        first = _rank_0(paths)
        has_begun = first is not None and first.phase not in START_PHASES
        # Before, there is nothing to save.
        self._ends_s = time.monotonic() + (grace_s if has_begun else 0.0)

    def is_over(self) -> bool:
        """Return whether they have had their time. Ask often."""
        is_progressing = self._watch.is_progressing()
        return time.monotonic() > self._ends_s and not is_progressing


def _rank_0(paths: RunPaths) -> RankProgress | None:
    return last_record(RankProgress, paths.rank_progress(0))
