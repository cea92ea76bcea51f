"""Commands that look at runs and stop them."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from rich.console import Console

from payload.errors import ConfigError, ExitCode, RankLostError, UsageError
from payload.hints import run_command
from payload.launch.ranks import load_ranks
from payload.orchestrate.console import text_console
from payload.orchestrate.follow import Tail, follow_log
from payload.orchestrate.local import LocalAccess
from payload.orchestrate.mirror import read_mirrored
from payload.orchestrate.report import list_lines, ranks_lines, status_lines
from payload.orchestrate.runs import all_runs, find_run, view_run
from payload.orchestrate.stop_wait import StopWait
from payload.results import RunPaths, StopWish, write_json
from payload.run_lock import FORCE_SIGNAL, is_supervised
from payload.run_repair import known_state

_LOOK_S = 0.1
# A supervisor that is told to end at once kills for at most ten seconds.
_FORCE_S = 15.0


def status(arguments: argparse.Namespace, access: LocalAccess) -> int:
    """Show one run and its ranks."""
    paths = find_run(arguments.runs_dir, arguments.run)
    with _watched(paths, access) as look:
        look()
    view = view_run(paths, now_unix=time.time())
    out = text_console(stderr=False)
    if arguments.json:
        out.print(json.dumps(asdict(view), indent=2))
        return ExitCode.OK
    lines = [*status_lines(view, width=out.width), "", *ranks_lines(view, width=out.width)]
    out.print("\n".join(lines))
    return ExitCode.OK


def list_runs(arguments: argparse.Namespace, access: LocalAccess) -> int:
    """Show all runs, the newest first."""
    views = []
    for paths in all_runs(arguments.runs_dir):
        try:
            views.append(view_run(paths, now_unix=time.time()))
        except ConfigError as error:
            text_console(stderr=True).print(f"note: run {paths.run_id} left out: {error}")
    out = text_console(stderr=False)
    if arguments.json:
        out.print(json.dumps([asdict(view) for view in views], indent=2))
    elif views:
        out.print("\n".join(list_lines(views, width=out.width)))
    else:
        text_console(stderr=True).print(f"no run in {arguments.runs_dir}")
    return ExitCode.OK


def logs(arguments: argparse.Namespace, access: LocalAccess) -> int:
    """Print a rank's log or the launcher's."""
    paths = find_run(arguments.runs_dir, arguments.run)
    rank = 0 if arguments.launcher else arguments.rank
    node = _node_of(paths, rank)
    path = paths.launcher_log if arguments.launcher else paths.rank_log(rank)
    out = text_console(stderr=False)
    with _watched(paths, access, node=node) as alive:
        if not alive() and not path.exists():
            raise UsageError(f"{path} does not exist: the run ended before it wrote one.")
        follow_log(
            Tail(path),
            show=out.print,
            alive=lambda: bool(arguments.follow) and not out.is_closed and alive(),
        )
    return ExitCode.OK


def _node_of(paths: RunPaths, rank: int) -> str | None:
    """Return the name of a rank's node; None where the rank file cannot be read."""
    try:
        ranks = load_ranks(paths.ranks)
    except ConfigError:
        return None
    if not 0 <= rank < len(ranks):
        raise UsageError(f"--rank {rank}: run {paths.run_id} has ranks 0 to {len(ranks) - 1}.")
    return ranks[rank].node


def stop(arguments: argparse.Namespace, access: LocalAccess) -> int:
    """Stop a run with a checkpoint, or at once."""
    paths = find_run(arguments.runs_dir, arguments.run)
    mirrored = read_mirrored(paths)
    if mirrored is not None:
        from payload.orchestrate import remote_commands

        return remote_commands.stop(paths, mirrored, arguments=arguments, env=access.environment())
    talk = text_console(stderr=True)
    number = FORCE_SIGNAL if arguments.force else signal.SIGTERM
    wish = StopWish(grace_s=arguments.grace)
    if not access.signal_supervisor(paths, [number], wish=wish):
        view = view_run(paths, now_unix=time.time())
        talk.print(f"run {paths.run_id} is not running: {view.status} after step {view.step}")
        return ExitCode.OK
    talk.print(
        f"run {paths.run_id}: " + ("stopping at once" if arguments.force else "saving and stopping")
    )
    if arguments.force:
        _end_by_force(paths, access, talk)
    wait = StopWait(paths, wish)
    while is_supervised(paths):
        if wait.is_over():
            raise RankLostError(
                f"run {paths.run_id} has not ended within {wait.waited_s():.0f} s. End it at once, "
                f"without a checkpoint: {run_command('stop', paths, '--force')}"
            )
        time.sleep(_LOOK_S)
    view = view_run(paths, now_unix=time.time())
    talk.print(f"{view.status} after step {view.step}" + (f": {view.error}" if view.error else ""))
    return ExitCode.OK


def _end_by_force(paths: RunPaths, access: LocalAccess, talk: Console) -> None:
    """Kill the run's processes where its supervisor does not do so: it may be frozen itself."""
    ends = time.monotonic() + _FORCE_S
    while is_supervised(paths) and time.monotonic() < ends:
        time.sleep(_LOOK_S)
    if not is_supervised(paths):
        return
    talk.print("its supervisor does not answer: killing it and the run's processes")
    access.end_at_once(paths)
    if is_supervised(paths):
        raise RankLostError(
            f"run {paths.run_id} cannot be ended: its supervisor is no process that this user can "
            "see here. Stop it where and as whom it was started."
        )
    before = known_state(paths)
    if before is not None:
        error = "killed by force, its supervisor did not answer; the last checkpoint is as it was"
        ended = replace(before, status="stopped", exit_class=ExitCode.OK.label, error=error)
        write_json(paths.state, ended)


@contextmanager
def _watched(
    paths: RunPaths, access: LocalAccess, *, node: str | None = None
) -> Iterator[Callable[[], bool]]:
    """What says whether the run is alive; of one on a cluster, it brings the copy up to date.

    `node` is the one besides the head whose part is wanted; None is every one.
    """
    if read_mirrored(paths) is None:
        yield lambda: is_supervised(paths)
        return
    # paramiko takes half a second to import, which a local run does not need.
    from payload.orchestrate.remote_commands import watched

    with watched(paths, env=access.environment(), node=node) as look:
        yield look
