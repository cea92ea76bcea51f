"""Ctrl-C: two signals of one key press are one request, and a second press is another."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from payload.core.interrupts import PRESS_S, Interrupts, interrupt_once
from payload.supervise.stop_requests import Wakeups
from payload.train.__main__ import StopSignal

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Advances the clock; the signal handlers are restored after the test."""
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def pass_by(seconds: float) -> None:
        now_s[0] += seconds

    yield pass_by
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def press() -> None:
    """Send the signals of `timeout -s INT`: one to the process, and one to its group."""
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def test_a_run_that_is_followed_counts_presses(later: Callable[[float], None]) -> None:
    with Interrupts() as found:
        press()
        assert found.count == 1
        later(2 * PRESS_S)
        press()
        assert found.count == 2


def test_a_signal_that_arrives_while_another_is_handled_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A press waits for further signals of itself; `kill` in this time is another request."""
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 1:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", wait)
    with Interrupts() as found:
        signal.raise_signal(signal.SIGINT)
    assert found.count == 2 and waited == [PRESS_S]


def test_a_supervisor_counts_presses(later: Callable[[float], None]) -> None:
    found = Wakeups([signal.SIGINT, signal.SIGTERM])
    press()
    assert found.counts[signal.SIGINT] == 1
    later(2 * PRESS_S)
    press()
    assert found.counts[signal.SIGINT] == 2


def test_a_rank_ends_at_once_at_the_second_press(
    later: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    found = StopSignal()
    press()
    assert found.requested()
    assert capsys.readouterr().err.count("Ctrl-C again to stop immediately") == 1
    later(2 * PRESS_S)
    with pytest.raises(KeyboardInterrupt):
        press()


def test_any_other_command_is_interrupted_once_a_press(later: Callable[[float], None]) -> None:
    interrupt_once()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # while it lists the leftovers
    later(2 * PRESS_S)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_signals_of_the_system_are_one_request_however_many_arrive(
    later: Callable[[float], None],
) -> None:
    interrupt_once(by_system=True)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    later(7.5)
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_what_was_ignored_stays_ignored(later: Callable[[float], None]) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    interrupt_once(by_system=True)
    press()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGHUP)


def test_one_press_during_a_long_call_of_c_code_is_one_request(
    later: Callable[[float], None],
) -> None:
    """The attack: `timeout -s INT` on a busy machine, between whose two signals time goes by.

    Python runs the handler of the second signal only after the call of C code that began before it.
    """
    found = StopSignal()

    def send() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        later(10 * PRESS_S)  # the duration of the call

    sender = threading.Thread(target=send)
    sender.start()
    while not found.requested():
        pass
    try:
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 2_000_000)  # handles no signal
        sender.join()
    except KeyboardInterrupt:
        pytest.fail("the second signal counted as another press")
    assert found.number == signal.SIGINT
