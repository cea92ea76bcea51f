"""Locks a run folder for its supervisor; the kernel releases the lock when the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from payload.core.errors import UsageError
from payload.core.files import move_aside, require_file
from payload.core.symlink_safety import no_follow
from payload.run_record.run_files import RunPaths
from payload.run_record.suggested_run_commands import run_command

FORCE_SIGNAL = signal.SIGUSR1
"""Signal that makes a supervisor kill its run immediately. After a SIGTERM, the ranks can save
first."""

# Retry for some time, because `is_supervised` takes the lock for an instant.
_RETRY_S = 2.0


class RunLock:
    """The lock that a supervisor holds while it runs.

    Raises UsageError if another supervisor holds the lock.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._descriptor = -1

    def __enter__(self) -> Self:
        if self._paths.lock.is_symlink():
            move_aside(self._paths.lock)
        self._descriptor = no_follow(str(self._paths.lock), os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + _RETRY_S
        while not _try_lock(self._descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                os.close(self._descriptor)
                raise UsageError(
                    f"run {self._paths.run_id} has a supervisor already. Follow it with: "
                    + run_command("logs -f", self._paths)
                )
            time.sleep(0.05)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)


@contextmanager
def start_lock(paths: RunPaths) -> Iterator[None]:
    """Prevent other commands on this machine from starting or removing the run within the block.

    The block must last until the supervisor has its RunLock. Raises OSError, and UsageError if
    another command is in such a block or has just removed the run.
    """
    lock = paths.root / ".start.lock"
    require_file(lock)
    with open(lock, "ab", opener=no_follow) as held:
        deadline = time.monotonic() + _RETRY_S
        while not _try_lock(held.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"another command is starting, ending or removing run {paths.run_id}. See the "
                    "status of the run with: " + run_command("status", paths)
                )
            time.sleep(0.05)
        if not lock.exists():
            raise UsageError(f"run {paths.run_id} was just removed.")
        yield


def is_supervised(paths: RunPaths) -> bool:
    """Return True if a running supervisor holds the run's lock."""
    try:
        descriptor = no_follow(str(paths.lock), os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return False  # no supervisor locks through a symlink
        raise
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
