"""Provides an interruptible sleep, and collects requests to stop the run.

A signal, the end of the owner process, or a reached limit requests a stop.
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
    """Counts signals and ends a sleep when a signal arrives.

    Only the main thread may use this class, with only one instance.

    Signal handlers only count; the caller acts after it wakes up. SIGINT counts once per key press.
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
        # The parent process may have blocked these signals.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`; return immediately if a signal arrived since the last sleep."""
        ready, _, _ = select.select([self._receiver], [], [], seconds)
        if ready:
            self._receiver.recv(4096)

    def close(self) -> None:
        """Ignore the signals from now on, so that a late signal cannot change the exit status.

        Without this, Python would restore the default handlers when the interpreter shuts down.
        """
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _count(self, number: int, _frame: object) -> None:
        if number != signal.SIGINT or self._presses.is_new():
            self.counts[signal.Signals(number)] += 1


class Stopping:
    """Tracks the requests to stop one run, over all attempts."""

    def __init__(
        self,
        paths: RunPaths,
        wakeups: Wakeups,
        *,
        owner_pid: int | None,
        grace_s: float,
        limit_s: float | None = None,
    ) -> None:
        """Requests a stop of the run after `limit_s`, if it is given."""
        self.by_limit = False
        """True if a limit of the run requested the stop."""
        self.by_system = False
        """True if a signal did not come from a command, as at a shutdown of the machine."""
        self._limit_at_s = float("inf") if limit_s is None else time.monotonic() + limit_s
        self.kind: Stop = "none"
        self.grace_s = grace_s
        self._paths = paths
        self._wakeups = wakeups
        self._count_before = 0
        self._kept_request: StopRequest | None = None
        self._owner_pid = owner_pid
        self._deadline_s = 0.0

    def next_action(self, *, saving: bool = False) -> Literal["stop", "kill"] | None:
        """Return the action for a new stop request, or for an old request that took too long.

        A checkpoint that makes progress (`saving`) may take longer, except after a stop that a
        limit requested.
        """
        counts = self._wakeups.counts
        count = counts[signal.SIGTERM] + counts[signal.SIGINT] + counts[signal.SIGHUP]
        orphaned = self._owner_pid is not None and os.getppid() != self._owner_pid
        # Two graceful requests are still graceful: two people may run `stop`.
        forced = counts[FORCE_SIGNAL] or counts[signal.SIGINT] >= 2
        if forced and self.kind != "forced":
            self.kind = "forced"
            return "kill"
        if count > self._count_before:
            self._count_before = count
            # Only a user at a terminal sends SIGINT.
            by_user = self._take_request() or counts[signal.SIGINT] > 0
            self.by_system |= self.kind == "none" and not by_user
        if (count or orphaned) and self.kind == "none":
            self._begin_stop()
            return "stop"
        if self.kind == "none":
            self.by_limit = time.monotonic() > self._limit_at_s
            if self.by_limit:
                self._begin_stop()
                return "stop"
        patient = saving and not self.by_limit
        if self.kind == "graceful" and time.monotonic() > self._deadline_s and not patient:
            self.kind = "expired"
            return "kill"
        return None

    def limit(self, limit_s: float) -> bool:
        """Request a stop after `limit_s` seconds; return False if an earlier limit applies."""
        ends_s = time.monotonic() + limit_s
        is_earlier = ends_s < self._limit_at_s
        self._limit_at_s = min(self._limit_at_s, ends_s)
        return is_earlier

    def _begin_stop(self) -> None:
        """Begin a stop that lets the ranks save first."""
        self.kind = "graceful"
        self._deadline_s = time.monotonic() + self.grace_s

    def discard_old_request(self) -> None:
        """Discard a stop request to an earlier supervisor; keep a request to this supervisor."""
        self._kept_request = self._remove_request()

    def _take_request(self) -> bool:
        """Process the stop request of a command; return False if there is no request.

        If the run is already stopping, the grace period of the request starts now.
        """
        request = self._remove_request() or self._kept_request
        self._kept_request = None
        if request is None:
            return False
        if request.grace_s is not None:
            self.grace_s = request.grace_s
            if self.kind == "graceful":
                self._deadline_s = time.monotonic() + self.grace_s
        return True

    def _remove_request(self) -> StopRequest | None:
        """Remove the request for this supervisor from the run's folder and return it.

        The file is renamed before it is read, so that a newer request is not removed by mistake.
        """
        renamed = self._paths.stop_request.with_suffix(".taken")
        try:
            self._paths.stop_request.replace(renamed)
        except OSError:
            return None
        request = last_record(StopRequest, renamed)
        discard(renamed)
        return request if request is not None and os.getpid() in request.pids else None
