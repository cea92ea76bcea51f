"""Locks of a stack, and detection of stale locks."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from payload.core.one_line import joined_lines
from payload.core.printable_text import printable

_BUSY = re.compile(r"stack is currently locked|Another update is currently in progress")
# The message's format in self-managed backends: pkg/backend/diy/lock.go.
_HOLDER = re.compile(
    r"created by (?P<user>[^\s@]{1,64})@(?P<host>[^\s()]{1,253}) \(pid (?P<pid>[0-9]{1,10})\) at "
    r"(?P<time>[0-9TZ:.+-]{1,40})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """One lock of a stack."""

    user: str
    host: str
    pid: int
    since_unix: float | None
    since: str

    def __str__(self) -> str:
        return f"{self.user}@{self.host} (process {self.pid}) since {self.since}"

    def is_stale(self, *, host: str, boot_unix: float | None) -> bool:
        """Return whether the process that took the lock no longer exists.

        `host` is this machine, which booted at `boot_unix`.
        """
        if self.host != host:
            return False
        if boot_unix is not None and self.since_unix is not None and self.since_unix < boot_unix:
            return True
        return not _exists(self.pid)


def is_busy(text: str) -> bool:
    """Return whether Pulumi printed that the stack is locked."""
    return _BUSY.search(joined_lines(text, longest=None)) is not None


def locks_in(text: str) -> list[Lock]:
    """Return the locks that Pulumi's message lists; empty if the backend does not list locks."""
    return [
        Lock(
            user=found["user"],
            host=found["host"],
            pid=int(found["pid"]),
            since_unix=_unix(found["time"]),
            since=found["time"],
        )
        for found in _HOLDER.finditer(printable(text))
    ]


def are_stale(locks: list[Lock]) -> bool:
    """Return whether there are locks, and all of them are stale and were taken on this machine."""
    host, boot_unix = socket.gethostname(), _boot_unix()
    return bool(locks) and all(each.is_stale(host=host, boot_unix=boot_unix) for each in locks)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _boot_unix() -> float | None:
    """Return when this machine booted; None if no clock of the system counts the time in sleep
    mode."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.time() - time.clock_gettime(clock)


def _unix(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).astimezone(UTC).timestamp()
    except (OverflowError, ValueError):
        return None
