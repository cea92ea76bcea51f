"""Sleeping until a signal comes, and who wants the run to stop, and how.

A signal, the owner's death, or a limit that is reached asks for a stop.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from payload.core.files import discard
from payload.core.interrupts import Presses
from payload.run_record.run_files import RunPaths, StopRequest, last_record
from payload.run_record.run_lock import FORCE_SIGNAL

Stop = Literal["none", "graceful", "forced", "expired"]


class Wakeups:
    """Counts the named signals and ends a sleep when one comes. For the main thread, once.

    Handlers only count; the caller acts when it wakes. Of SIGINT, presses are counted.
    """

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._presses = Presses()
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
        if number != signal.SIGINT or self._presses.is_new():
            self.counts[signal.Signals(number)] += 1


class Stopping:
    """One run's requests to stop, over all of its attempts."""

    def __init__(
        self,
        paths: RunPaths,
        wakeups: Wakeups,
        *,
        owner_pid: int | None,
        grace_s: float,
        limit_s: float | None = None,
    ) -> None:
        """`limit_s`: after so long, the run is asked to stop."""
        self.limited = False
        """Return True if a limit of the run asked."""
        self.by_system = False
        """Return True for a signal that no command sent, as at a shutdown of the machine."""
        self._limit_at_s = float("inf") if limit_s is None else time.monotonic() + limit_s
        self.kind: Stop = "none"
        self.grace_s = grace_s
        self._paths = paths
        self._wakeups = wakeups
        self._told = 0
        self._kept: StopRequest | None = None
        self._owner_pid = owner_pid
        self._deadline_s = 0.0

    def heed(self, *, saving: bool = False) -> Literal["ask", "end"] | None:
        """Return the next action after a new request, or after an old one that took too long.

        A checkpoint that gets on (`saving`) may take longer, unless it is the limit that asked.
        """
        counts = self._wakeups.counts
        told = counts[signal.SIGTERM] + counts[signal.SIGINT] + counts[signal.SIGHUP]
        orphaned = self._owner_pid is not None and os.getppid() != self._owner_pid
        # Two graceful requests are still graceful: two people may type `stop`.
        forced = counts[FORCE_SIGNAL] or counts[signal.SIGINT] >= 2
        if forced and self.kind != "forced":
            self.kind = "forced"
            return "end"
        if told > self._told:
            self._told = told
            # Only a person at a terminal sends SIGINT.
            asked = self._take_wish() or counts[signal.SIGINT] > 0
            self.by_system |= self.kind == "none" and not asked
        if (told or orphaned) and self.kind == "none":
            self.ask()
            return "ask"
        if self.kind == "none":
            self.limited = time.monotonic() > self._limit_at_s
            if self.limited:
                self.ask()
                return "ask"
        patient = saving and not self.limited
        if self.kind == "graceful" and time.monotonic() > self._deadline_s and not patient:
            self.kind = "expired"
            return "end"
        return None

    def limit(self, limit_s: float) -> bool:
        """Ask for a stop after so long; return False where an earlier limit stays."""
        ends_s = time.monotonic() + limit_s
        is_earlier = ends_s < self._limit_at_s
        self._limit_at_s = min(self._limit_at_s, ends_s)
        return is_earlier

    def ask(self) -> None:
        """Begin a stop that lets the ranks save first."""
        self.kind = "graceful"
        self._deadline_s = time.monotonic() + self.grace_s

    def forget_old_wish(self) -> None:
        """Remove one that came too late for the last supervisor; ours may be there already."""
        self._kept = self._pull()

    def _take_wish(self) -> bool:
        """Heed what a command left; during a stop, the time that it brings counts from now."""
        request = self._pull() or self._kept
        self._kept = None
        if request is None:
            return False
        if request.grace_s is not None:
            self.grace_s = request.grace_s
            if self.kind == "graceful":
                self._deadline_s = time.monotonic() + self.grace_s
        return True

    def _pull(self) -> StopRequest | None:
        """Take the request that is meant for this supervisor out of the run's folder.

        It is renamed before it is read: removed by its name after that, it might be a newer one.
        """
        pulled = self._paths.stop_request.with_suffix(".taken")
        try:
            self._paths.stop_request.replace(pulled)
        except OSError:
            return None
        request = last_record(StopRequest, pulled)
        discard(pulled)
        return request if request is not None and os.getpid() in request.pids else None
