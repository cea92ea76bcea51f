"""What a supervisor that died left behind: its ranks save and end by themselves."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from payload.checkpoint_watch import CheckpointWatch
from payload.errors import ConfigError, PreflightError
from payload.launch.liveness import START_PHASES
from payload.results import DEFAULT_GRACE_S, RankProgress, RunPaths, RunState, read_json
from payload.run_config import RunConfig
from payload.supervise.processes import kill_until_none, processes_of, signal_process

_LOOK_S = 0.2
_KILL_S = 10.0


class Farewell:
    """How long ranks without a supervisor may go on, on the head: until they have saved."""

    def __init__(self, paths: RunPaths, config: RunConfig) -> None:
        """The time runs from now, and is the one that a stop would have had."""
        self._watch = CheckpointWatch(paths, patience_s=config.limits.hang_timeout_s)
        self._ends_s = time.monotonic() + _grace_s(paths)
        first = _rank_0(paths)
        if first is None or first.phase in START_PHASES:
            # Nothing to save yet.
            self._ends_s = time.monotonic()

    def is_over(self) -> bool:
        """Whether they have had their time. Ask often."""
        gets_on = self._watch.gets_on()
        return time.monotonic() > self._ends_s and not gets_on


def see_off(paths: RunPaths, config: RunConfig, *, pause: Callable[[float], bool]) -> None:
    """Wait on the head until nothing of an earlier supervisor's ranks is left.

    `pause` sleeps, and says false when somebody wants the run to stop. Raises PreflightError.
    """
    farewell = Farewell(paths, config)
    first = _rank_0(paths)
    if first is not None:
        # Its own wrapper may not have seen that nobody was there, before we were.
        signal_process(first.pid, signal.SIGTERM, run_dir=paths.root)
    while processes_of(paths.root) and not farewell.is_over() and pause(_LOOK_S):
        continue
    left = kill_until_none(paths.root, timeout_s=_KILL_S)
    if left:
        raise PreflightError(
            f"processes {sorted(left)} of an earlier supervisor of this run could not be ended. "
            "End them, and start the run again."
        )


def _rank_0(paths: RunPaths) -> RankProgress | None:
    try:
        return read_json(RankProgress, paths.rank_progress(0))
    except ConfigError:
        return None


def _grace_s(paths: RunPaths) -> float:
    try:
        state = read_json(RunState, paths.state)
    except ConfigError:
        state = None
    return state.grace_s if state else DEFAULT_GRACE_S
