"""Kills every process of a session, as the crash of a machine does."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def kill_session(leader: int) -> None:
    """Send SIGKILL to all processes of the session, also to those in other process groups."""
    for path in Path("/proc").iterdir():
        with suppress(ProcessLookupError, ValueError):
            if os.getsid(number := int(path.name)) == leader:
                os.kill(number, signal.SIGKILL)
