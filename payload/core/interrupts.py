"""Requests to end a command: Ctrl-C, SIGTERM (`kill`, `timeout`, a CI job) and SIGHUP.

Presses of Ctrl-C are counted instead of signals, because one press can arrive as two signals. For
example, `timeout -s INT` signals its command, and then the process group that contains the command.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

PRESS_S = 0.3
"""Further signals within this time of a Ctrl-C count as the same Ctrl-C."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Presses:
    """Distinguishes a new press from a second signal of the same press.

    To be used in signal handlers.
    """

    def __init__(self) -> None:
        self._last_s = -math.inf

    def is_new(self) -> bool:
        """Record a signal that arrives now; return True if it is a new press.

        After a new press, waits `PRESS_S` for further signals of the press. Without this wait,
        Python might run the handler of a further signal only after a long call of C code, such as a
        matmul. The signal would then count as a new press.
        """
        now_s = time.monotonic()
        if now_s - self._last_s < PRESS_S:
            return False
        self._last_s = now_s
        time.sleep(PRESS_S)  # runs the handlers of signals that arrive now
        return True


class _Requests:
    """Distinguishes a new request to end from another signal of the same request.

    Only a person repeats a request: `timeout` signals the process and its group, and a terminal
    that closes sends several signals. So any number of SIGTERM and SIGHUP signals count as one
    request.
    """

    def __init__(self) -> None:
        self._presses = Presses()
        self._ended_by_system = False

    def is_new(self, number: int) -> bool:
        """Record a signal; return True if it is a new request."""
        if number == signal.SIGINT:
            return self._presses.is_new()
        is_first, self._ended_by_system = not self._ended_by_system, True
        return is_first


class Interrupts:
    """Counts the requests to end that arrive during the context.

    Every Ctrl-C counts. All SIGTERM and SIGHUP signals together count once.
    """

    def __init__(self) -> None:
        self.count = 0
        self._requests = _Requests()
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            # Ignored signals stay ignored: nohup means that a hangup is not a request to stop.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def exceed(self, handled: int) -> bool:
        """Return whether more than `handled` requests to stop have arrived."""
        return self.count > handled

    def _note(self, number: int, _frame: object) -> None:
        # Not in one expression: further signals are handled, and counted, within `is_new`.
        if self._requests.is_new(number):
            self.count += 1


def interrupt_once(*, by_system: bool = False) -> None:
    """Make each press of Ctrl-C raise KeyboardInterrupt only once.

    A second signal would interrupt the handling of the first, such as a warning about costs.
    `by_system` also makes the first SIGTERM or SIGHUP raise KeyboardInterrupt.
    """
    requests = _Requests()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if requests.is_new(number):
            signal.default_int_handler(number, frame)

    defaults = (signal.default_int_handler, signal.SIG_DFL)
    for number in _SIGNALS if by_system else _SIGNALS[:1]:
        # An ignored signal stays ignored, as for a script's background job, or after nohup.
        if signal.getsignal(number) in defaults:
            signal.signal(number, interrupt)
