"""Watching a run on a cluster from here: through broken connections, and without holding it."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from rich.console import Console

from payload.errors import (
    INTERRUPTED,
    AnswerError,
    ExitCode,
    PreflightError,
    SshUnreachableError,
    TileforgeError,
)
from payload.hints import run_command
from payload.inventory import Node
from payload.orchestrate.follow import (
    Asks,
    Tail,
    final_error,
    read_progress,
    show_progress,
    show_state,
    show_steps,
)
from payload.orchestrate.live import LiveLine
from payload.orchestrate.remote_end import bring_home, say_remote_end
from payload.orchestrate.remote_run import Look, RemoteRun
from payload.results import StopWish, Summary, last_record, point_latest_at
from payload.run_config import load_run_config
from payload.run_lock import FORCE_SIGNAL

_POLL_S = 1.0
_TICK_S = 0.1
_SECOND_ASK_S = 3.0
_RECONNECT_S = 300.0
_RETRY_S = 5.0


def follow_to_the_end(run: RemoteRun, *, arguments: argparse.Namespace, talk: Console) -> int:
    """Show the run until it has ended, bring its results home, and return its exit code.

    Ctrl-C detaches: the run goes on. A second one soon after stops it with a checkpoint, a third
    one at once.
    """
    train = load_run_config(run.paths.config).train
    log = Tail(run.paths.rank_log(0), from_end=True)
    metrics = Tail(run.paths.metrics, from_end=True)
    heeded, is_latest = 0, False
    nodes = len(run.inventory.nodes)
    stale = read_progress(run.paths)
    with Asks() as asks, LiveLine(talk, train=train, nodes=nodes) as live:
        alive = True
        while alive:
            look = patiently(run, say=live.say, interrupted=partial(asks.exceed, heeded))
            alive = look.alive
            for problem in look.damaged:
                live.news(f"warning: {problem}")
            for line in log.lines():
                live.log(line)
            show_steps(metrics, live)
            show_progress(run.paths, live, stale=stale)
            if live.has_stepped and not is_latest:
                is_latest = True
                with suppress(OSError):  # the link is a convenience
                    point_latest_at(run.paths)
            show_state(run.paths, live, stopping=heeded > 0)
            _pause(asks, heeded=heeded, seconds=_POLL_S if alive else 0.0)
            if asks.count > heeded and alive:
                if heeded == 0 and not _asks_again(asks, live):
                    live.say(f"detached; {how_to_attach(run)}")
                    return INTERRUPTED
                heeded = _pass_on(run, live, heeded=heeded)
        if log.rest():
            live.log(log.rest())
        live.say_kept(unless=final_error(run.paths))
    status = _bring_home(run, arguments=arguments, talk=talk)
    summary = last_record(Summary, run.paths.summary)
    unfinished = summary is None or summary.status != "finished"
    # Whoever stopped it: what a script would do with a finished run must not be done.
    return INTERRUPTED if status == ExitCode.OK and unfinished else status


def how_to_attach(run: RemoteRun) -> str:
    """For messages."""
    return (
        f"run {run.paths.run_id} goes on. Follow it with: {run_command('attach', run.paths)}; end "
        f"it with: {run_command('stop', run.paths)}"
    )


def patiently(
    run: RemoteRun,
    *others: Node,
    say: Callable[[str], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> Look:
    """Bring the copy up to date from the head and `others`, connecting anew until the deadline.

    Raises SshUnreachableError at the deadline, or when the operator does not want to wait for it.
    """
    ends = None
    while True:
        try:
            return run.look(*others, enough=interrupted)
        except AnswerError:
            raise  # asked again, it would say the same
        except (SshUnreachableError, PreflightError) as error:
            run.close()
            if ends is None:
                ends = time.monotonic() + _RECONNECT_S
                say(f"connection lost, trying for {_RECONNECT_S:g} s: {error}")
            words = f"{error} As far as is known, {how_to_attach(run)}."
            retry = time.monotonic() + _RETRY_S
            while time.monotonic() < retry and not interrupted():
                time.sleep(_TICK_S)
            if time.monotonic() > ends or interrupted():
                raise SshUnreachableError(words) from None


def _pause(asks: Asks, *, heeded: int, seconds: float) -> None:
    """Wait, but not when the operator asks something."""
    ends = time.monotonic() + seconds
    while asks.count == heeded and time.monotonic() < ends:
        time.sleep(_TICK_S)


def _asks_again(asks: Asks, live: LiveLine) -> bool:
    live.say(f"detaching; Ctrl-C again within {_SECOND_ASK_S:g} s stops the run with a checkpoint")
    _pause(asks, heeded=1, seconds=_SECOND_ASK_S)
    return asks.count > 1


def _pass_on(run: RemoteRun, live: LiveLine, *, heeded: int) -> int:
    """Ask the supervisor to stop; returns how many of the operator's asks that answers.

    Raises SshUnreachableError when the head cannot be told.
    """
    if heeded == 0:
        live.say("stopping: saving a checkpoint first (Ctrl-C again to stop at once)")
        _deliver(run, signal.SIGTERM)
        return 2
    live.say("stopping at once")
    _deliver(run, FORCE_SIGNAL)
    return heeded + 1


def _deliver(run: RemoteRun, number: signal.Signals) -> None:
    """Signal the supervisor, which may be repeated; once more where a connection has broken."""
    try:
        run.signal([number], wish=StopWish())
    except TileforgeError:
        run.close()
        try:
            run.signal([number], wish=StopWish())
        except TileforgeError as error:
            raise SshUnreachableError(
                f"the stop was not delivered: {error} As far as is known, {how_to_attach(run)}."
            ) from None


def _bring_home(run: RemoteRun, *, arguments: argparse.Namespace, talk: Console) -> int:
    """The newest checkpoint, every node's logs, the run's key away, and the words at the end."""
    try:
        if bring_home(run, talk=talk).alive:
            talk.print(f"it has ended and was started again; {how_to_attach(run)}")
            return ExitCode.OK
    except TileforgeError as error:
        # A head that is gone must not hide how the run ended.
        talk.print(f"warning: {error}")
    return say_remote_end(run, arguments=arguments, talk=talk)
