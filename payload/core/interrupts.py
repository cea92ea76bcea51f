"""Presses of Ctrl-C are counted, not signals: one request may arrive as two.

`timeout -s INT` signals its command and then its process group, which the command is in, too.
"""

from __future__ import annotations

import math
import signal
import time
from types import FrameType

PRESS_S = 0.2
"""A signal this soon after a press belongs to it: nobody presses again that fast."""


class Presses:
    """Tells a new press from the second signal of the last one."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def is_new(self) -> bool:
        """Note a signal that came now; return whether it is a press of its own."""
        now_s = time.monotonic()
        if now_s - self._last_s < PRESS_S:
            return False
        self._last_s = now_s
        return True


def interrupt_once() -> None:
    """Let a press of Ctrl-C raise KeyboardInterrupt once; for a program as it starts.

    A second one would break off what the first one does, such as saying what costs money.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # ignored, as in the background of a script
    presses = Presses()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if presses.is_new():
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
