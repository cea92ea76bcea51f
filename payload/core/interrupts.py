"""Count presses of Ctrl-C rather than signals, as one press can arrive as two signals.

`timeout -s INT` signals its command, and then the process group that contains the command.
"""

from __future__ import annotations

import math
import signal
import time
from types import FrameType

PRESS_S = 0.3
"""A signal within this time of a press belongs to that press."""


class Presses:
    """Distinguishes a new press from a second signal of the same press.

    To be used in signal handlers.
    """

    def __init__(self) -> None:
        self._last_s = -math.inf

    def is_new(self) -> bool:
        """Record a signal that arrives now; return True if it is a new press.

        Waits `PRESS_S` for further signals of a new press. Python would run their handler only
        after the next call of C code, such as a long matmul, and they would count as a new press.
        """
        now_s = time.monotonic()
        if now_s - self._last_s < PRESS_S:
            return False
        self._last_s = now_s
        time.sleep(PRESS_S)  # runs the handlers of signals that arrive now
        return True


def interrupt_once() -> None:
    """Make each press of Ctrl-C raise KeyboardInterrupt only once.

    A second signal would interrupt the handling of the first, such as a warning about costs.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # SIGINT is ignored, as for a script's background job
    presses = Presses()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if presses.is_new():
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
