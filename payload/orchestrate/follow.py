"""Watching one run until it ends, and passing the operator's Ctrl-C on to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from payload.errors import ConfigError
from payload.orchestrate.live import LiveLine
from payload.results import RunPaths, RunState, read_json
from payload.run_lock import FORCE_SIGNAL

_TICK_S = 0.2
_ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Tail:
    """New complete lines of a file that another process appends to."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._rest = b""

    def lines(self) -> list[str]:
        """What came since the last call; a file cut short is read from its start."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def rest(self) -> str:
        """A last line without its end."""
        return self._rest.decode(errors="replace")


class Asks:
    """Counts Ctrl-C, SIGTERM and SIGHUP while it is entered."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Asks:
        for number in _ASKS:
            # What was ignored stays so: nohup means that a hangup is no wish to stop.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def exceed(self, heeded: int) -> bool:
        """Whether there are more of them than were heeded."""
        return self.count > heeded

    def _note(self, _number: int, _frame: object) -> None:
        self.count += 1


def follow_run(
    paths: RunPaths,
    supervisor: subprocess.Popen[bytes],
    *,
    console: Console,
    steps: int,
    nodes: int,
    log_tail: Tail,
    metrics_tail: Tail,
) -> None:
    """Show the run until its supervisor has ended.

    The first Ctrl-C asks for a checkpoint and an end, the second for an end at once.
    """
    heeded = 0
    with Asks() as asks, LiveLine(console, steps=steps, nodes=nodes) as live:
        while True:
            ended = supervisor.poll() is not None
            for line in log_tail.lines():
                live.say(line)
            show_steps(metrics_tail, live)
            show_state(paths, live, stopping=heeded > 0)
            if ended:
                break
            if asks.count > heeded:
                heeded = _pass_on(supervisor, live, heeded=heeded)
            with suppress(subprocess.TimeoutExpired):
                supervisor.wait(_TICK_S)
        if log_tail.rest():
            live.say(log_tail.rest())


def follow_log(tail: Tail, *, show: Callable[[str], None], alive: Callable[[], bool]) -> None:
    """Show a log's lines until the run has ended."""
    going = True
    while going:
        going = alive()
        for line in tail.lines():
            show(line)
        if going:
            time.sleep(_TICK_S)
    if tail.rest():
        show(tail.rest())


def show_steps(tail: Tail, live: LiveLine) -> None:
    """The new steps of a metrics.jsonl."""
    for line in tail.lines():
        row = json.loads(line)
        if "loss" in row:
            live.step(row)


def show_state(paths: RunPaths, live: LiveLine, *, stopping: bool) -> None:
    """What the run as a whole is doing, and what happened to it."""
    try:
        state = read_json(RunState, paths.state)
    except ConfigError:
        state = None
    word = state.status if state else "starting"
    live.status("stopping" if stopping else word)
    live.cost(state.cost_usd if state else None)
    if state and state.note:
        live.news(state.note)


def _pass_on(supervisor: subprocess.Popen[bytes], live: LiveLine, *, heeded: int) -> int:
    """Ask the supervisor once more; returns how many asks it has had."""
    if heeded == 0:
        live.say("stopping: saving a checkpoint first (Ctrl-C again to stop at once)")
    elif heeded == 1:
        live.say("stopping at once")
    supervisor.send_signal(signal.SIGTERM if heeded == 0 else FORCE_SIGNAL)
    return heeded + 1
