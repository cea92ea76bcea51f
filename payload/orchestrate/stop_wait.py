"""What `stop` says to a run's supervisor, and how long it waits for the end."""

from __future__ import annotations

import time

from payload.checkpoint_watch import CheckpointWatch
from payload.results import DEFAULT_GRACE_S, RunPaths, StopWish
from payload.run_repair import known_config, known_state

# Beyond the supervisor's own patience with the ranks: killing them and writing it down.
_MARGIN_S = 20.0


class StopWait:
    """Patience with a run that was asked to stop: its supervisor's, and a little more."""

    def __init__(self, paths: RunPaths, wish: StopWish) -> None:
        """The stop was asked for now."""
        grace_s = _grace_s(paths) if wish.grace_s is None else wish.grace_s
        patience_s = known_config(paths).limits.hang_timeout_s
        self._watch = CheckpointWatch(paths, patience_s=patience_s)
        self._began_s = time.monotonic()
        self._ends_s = self._began_s + grace_s + _MARGIN_S

    def is_over(self) -> bool:
        """Whether it has taken longer than it may. Ask often."""
        now = time.monotonic()
        if self._watch.gets_on():
            self._ends_s = max(self._ends_s, now + _MARGIN_S)
        return now > self._ends_s

    def waited_s(self) -> float:
        """So far."""
        return time.monotonic() - self._began_s


def _grace_s(paths: RunPaths) -> float:
    state = known_state(paths)
    return state.grace_s if state else DEFAULT_GRACE_S
