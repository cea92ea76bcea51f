"""Stop requests, and the checkpoints that they wait for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.run_record.run_files import RunPaths, StopRequest, last_record, write_json
from payload.supervise import stop_requests as stopping
from payload.supervise.stop_requests import Stopping, Wakeups


@pytest.fixture
def wakeups() -> Iterator[Wakeups]:
    """Signals of this process, counted."""
    before = signal.getsignal(signal.SIGTERM)
    yield Wakeups([signal.SIGTERM])
    signal.signal(signal.SIGTERM, before)
    signal.set_wakeup_fd(-1)


def test_a_request_waits_for_a_checkpoint_and_the_limit_does_not(
    tmp_path: Path, wakeups: Wakeups
) -> None:
    paths = RunPaths(tmp_path)
    limited = Stopping(paths, wakeups, owner_pid=None, grace_s=0.0, limit_s=-1.0)
    assert (limited.next_action(), limited.by_limit) == ("stop", True)
    assert (limited.next_action(saving=True), limited.kind) == ("kill", "expired")
    signal.raise_signal(signal.SIGTERM)
    stopping = Stopping(paths, wakeups, owner_pid=None, grace_s=0.0)
    assert stopping.next_action() == "stop"
    assert (stopping.next_action(saving=True), stopping.kind) == (None, "graceful")
    assert (stopping.next_action(), stopping.kind) == ("kill", "expired")


def test_a_request_that_comes_while_the_one_before_is_read_is_not_lost(
    tmp_path: Path, wakeups: Wakeups, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path)
    first, second = (StopRequest(pids=(os.getpid(),), grace_s=grace_s) for grace_s in (60.0, 0.5))
    newer = [second]

    def read_and_wish(cls: type[StopRequest], path: Path) -> StopRequest | None:
        request = last_record(cls, path)
        if newer:
            write_json(paths.stop_request, newer.pop())
        return request

    monkeypatch.setattr(stopping, "last_record", read_and_wish)
    asked = Stopping(paths, wakeups, owner_pid=None, grace_s=1000.0)
    write_json(paths.stop_request, first)
    signal.raise_signal(signal.SIGTERM)
    assert (asked.next_action(), asked.grace_s) == ("stop", 60.0)
    signal.raise_signal(signal.SIGTERM)
    assert (asked.next_action(), asked.grace_s) == (None, 0.5)
    assert not list(tmp_path.iterdir())


def test_a_request_that_precedes_the_supervisor_is_kept(tmp_path: Path, wakeups: Wakeups) -> None:
    paths = RunPaths(tmp_path)
    asked = Stopping(paths, wakeups, owner_pid=None, grace_s=1000.0)
    write_json(paths.stop_request, StopRequest(pids=(os.getpid(),), grace_s=60.0))
    asked.discard_old_request()
    signal.raise_signal(signal.SIGTERM)
    assert (asked.next_action(), asked.by_system, asked.grace_s) == ("stop", False, 60.0)
