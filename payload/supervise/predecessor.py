"""What a supervisor that died left behind: its ranks save and end by themselves."""

from __future__ import annotations

import signal
from collections.abc import Callable

from payload.checkpoint_watch import Farewell
from payload.errors import PreflightError
from payload.results import RankProgress, RunPaths, last_record
from payload.supervise.processes import kill_until_none, processes_of, signal_process

_LOOK_S = 0.2
_KILL_S = 10.0


def see_off(paths: RunPaths, farewell: Farewell, *, pause: Callable[[float], bool]) -> None:
    """Wait on the head until nothing of an earlier supervisor's ranks is left.

    `pause` sleeps, and says false when somebody wants the end at once. Raises PreflightError.
    """
    first = last_record(RankProgress, paths.rank_progress(0))
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
