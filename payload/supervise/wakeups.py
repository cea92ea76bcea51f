"""Sleeping until a signal comes. Handlers only count; the caller acts when it wakes."""

from __future__ import annotations

import select
import signal
import socket
from collections import Counter
from collections.abc import Iterable


class Wakeups:
    """Counts the named signals and ends a sleep when one comes. For the main thread, once."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self.counts: Counter[signal.Signals] = Counter()
        self._receiver, sender = socket.socketpair()
        self._receiver.setblocking(False)
        sender.setblocking(False)
        self._sender = sender
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._numbers = tuple(numbers)
        for number in self._numbers:
            signal.signal(number, self._count)
        # Whoever starts this process may hold them back until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)

    def sleep(self, seconds: float) -> None:
        """Return after `seconds`, or at once when a signal came since the last sleep."""
        ready, _, _ = select.select([self._receiver], [], [], seconds)
        if ready:
            self._receiver.recv(4096)

    def close(self) -> None:
        """Ignore the signals from now on: what comes after the end must not be its cause.

        Python would give them their default effect again when it takes itself down.
        """
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _count(self, number: int, _frame: object) -> None:
        self.counts[signal.Signals(number)] += 1
