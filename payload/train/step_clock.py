"""Times the parts of a step on each rank; the times are exchanged together with the loss."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from payload.run_record.metrics_log import TIMED_PARTS, RankTimes, TimedPart

# Up to this number of ranks, every row has times. With more ranks, only some rows have times: the
# means since the last such row.
_RANKS_IN_EVERY_ROW = 8


class StepClock:
    """Measures the parts of this rank's steps and averages the times of all ranks."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._every = max(1, world_size // _RANKS_IN_EVERY_ROW)
        self._own = dict.fromkeys(TIMED_PARTS, 0.0)
        self._sums = [0.0] * (world_size * len(TIMED_PARTS))
        self._steps = 0

    @contextmanager
    def of(self, part: TimedPart) -> Iterator[None]:
        """Add the time of the `with` block to this part."""
        began_s = time.perf_counter()
        yield
        self._own[part] += time.perf_counter() - began_s

    def seconds(self, part: TimedPart) -> float:
        """Return this part's seconds in the current step."""
        return self._own[part]

    def move_compute_to_wait(self, seconds: float) -> None:
        """Move time that collectives took inside forward and backward to `wait`."""
        passes_s = self._own["forward"] + self._own["backward"]
        seconds = min(max(0.0, seconds), passes_s)
        if not seconds:
            return
        for part in ("forward", "backward"):
            self._own[part] *= 1 - seconds / passes_s
        self._own["wait"] += seconds

    def take(self) -> list[float]:
        """Return a vector of all ranks' seconds, zero for other ranks, and reset the seconds."""
        mine = [0.0] * len(self._sums)
        first = self._rank * len(TIMED_PARTS)
        mine[first : first + len(TIMED_PARTS)] = self._own.values()
        self._own = dict.fromkeys(TIMED_PARTS, 0.0)
        return mine

    def add_step(self, of_all_ranks: Sequence[float]) -> RankTimes | None:
        """Add all ranks' seconds of a step; return the means if the step's row records times."""
        self._sums = [total + more for total, more in zip(self._sums, of_all_ranks, strict=True)]
        self._steps += 1
        if self._steps < self._every:
            return None
        # A tenth of a millisecond is enough to distinguish the ranks.
        means = [round(total / self._steps, 4) for total in self._sums]
        parts = {
            part: tuple(means[place :: len(TIMED_PARTS)]) for place, part in enumerate(TIMED_PARTS)
        }
        found = RankTimes(steps=self._steps, **parts)
        self._sums, self._steps = [0.0] * len(self._sums), 0
        return found
