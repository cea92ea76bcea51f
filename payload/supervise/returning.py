"""The nodes between two attempts: all must be there again, and free of the last one's processes.

This is where a node that is gone for good would be replaced: `wait_for_nodes` would ask for another
machine instead of giving up, and the run folder's inventory, hosts, ranks and plan would be written
anew before the next attempt reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from payload.supervise.stream import NodeStream

_RETURN_S = 60.0
"""A machine that restarts is back by then, or counts as gone."""

_LOOK_S = 0.5


def wait_for_nodes(
    streams: Sequence[NodeStream],
    *,
    pause: Callable[[float], bool],
    timeout_s: float = _RETURN_S,
) -> str | None:
    """What keeps the run from being started again, in words, or None.

    `pause` sleeps, and says false when somebody wants the run to stop.
    """
    for stream in streams:
        stream.ask_to_end()
    ends = time.monotonic() + timeout_s
    while True:
        found = {stream.node.name: stream.wait_ended(0.0) for stream in streams}
        if all(left == [] for left in found.values()):
            return None
        stuck = [name for name, left in found.items() if left]
        if stuck:
            return f"processes on {', '.join(stuck)} could not be ended"
        if time.monotonic() > ends or not pause(_LOOK_S):
            away = [name for name, left in found.items() if left is None]
            return f"{', '.join(away)} did not come back within {timeout_s:.0f} s"
