"""What a stop waits for."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.results import RunPaths
from payload.supervise.stopping import Stopping, Wakeups


@pytest.fixture
def wakeups() -> Iterator[Wakeups]:
    """Signals of this process, counted."""
    before = signal.getsignal(signal.SIGTERM)
    yield Wakeups([signal.SIGTERM])
    signal.signal(signal.SIGTERM, before)
    signal.set_wakeup_fd(-1)


def test_a_wish_waits_for_a_checkpoint_and_the_limit_does_not(
    tmp_path: Path, wakeups: Wakeups
) -> None:
    paths = RunPaths(tmp_path)
    limited = Stopping(paths, wakeups, owner_pid=None, grace_s=0.0, limit_s=-1.0)
    assert (limited.heed(), limited.limited) == ("ask", True)
    assert (limited.heed(saving=True), limited.kind) == ("end", "expired")
    signal.raise_signal(signal.SIGTERM)
    wished = Stopping(paths, wakeups, owner_pid=None, grace_s=0.0)
    assert wished.heed() == "ask"
    assert (wished.heed(saving=True), wished.kind) == (None, "graceful")
    assert (wished.heed(), wished.kind) == ("end", "expired")
