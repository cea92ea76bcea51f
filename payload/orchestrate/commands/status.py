"""Commands that look at runs, stop them, and remove old ones from the disk."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from payload.checkpoint_files import newest_sound
from payload.errors import ConfigError, ExitCode, RankLostError, TileforgeError, UsageError
from payload.hints import run_command
from payload.launch.ranks import load_ranks
from payload.orchestrate.run.console import text_console
from payload.orchestrate.run.follow import StopWait, Tail, follow_log, say_run_end
from payload.orchestrate.run.mirror import Mirrored, read_mirrored
from payload.orchestrate.run.report import list_lines, ranks_lines, status_lines
from payload.orchestrate.run.store import all_runs, find_run, is_copy, view_run
from payload.orchestrate.sites.choose import SiteRun, run_at_site
from payload.orchestrate.sites.local import LocalAccess
from payload.results import (
    LATEST,
    RankProgress,
    RunPaths,
    RunState,
    StopWish,
    point_latest_at,
    read_json,
    write_json,
)
from payload.run_config import load_run_config
from payload.run_lock import FORCE_SIGNAL, RunLock, is_supervised, starting
from payload.run_repair import has_own_record, known_state

_LOOK_S = 0.1
# A supervisor that is told to end at once kills for at most ten seconds.
_FORCE_S = 15.0


def status(arguments: argparse.Namespace, access: LocalAccess) -> int:
    """Show one run and its ranks."""
    paths = find_run(arguments.runs_dir, arguments.run)
    elsewhere = run_at_site(paths, access.environment())
    with _watched(paths, access) as look:
        alive = look()
    view = view_run(paths, now_unix=time.time(), alive=None if elsewhere is None else alive)
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
            alive = _alive_at_site(paths, access)
            views.append(view_run(paths, now_unix=time.time(), alive=alive))
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


def _alive_at_site(paths: RunPaths, access: LocalAccess) -> bool | None:
    """Return whether a site has the run; None where none does, or the site does not answer."""
    try:
        elsewhere = run_at_site(paths, access.environment())
        return None if elsewhere is None else _alive(elsewhere, set())
    except TileforgeError:
        return None


def _alive(run: SiteRun, said: set[str]) -> bool:
    """Return whether a site has the run; say once where it could not be asked."""
    seen = run.look()
    for sentence in seen.news:
        if sentence.startswith("warning: ") and sentence not in said:
            said.add(sentence)
            text_console(stderr=True).print(f"{sentence} (run {run.paths.run_id})")
    return seen.alive


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
    if arguments.inventory is not None:
        from payload.orchestrate.commands.attach import stop_on_cluster

        return stop_on_cluster(arguments, access.environment())
    paths = find_run(arguments.runs_dir, arguments.run)
    mirrored = read_mirrored(paths)
    if mirrored is not None:
        from payload.orchestrate.commands import attach

        return attach.stop(paths, mirrored, arguments=arguments, env=access.environment())
    talk = text_console(stderr=True)
    elsewhere = run_at_site(paths, access.environment())
    if elsewhere is not None:
        return _stop_at_site(elsewhere, arguments, talk=talk)
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


def _stop_at_site(run: SiteRun, arguments: argparse.Namespace, *, talk: Console) -> int:
    """Let a run save and stop, or end at once; one that does not end is given up."""
    wish = StopWish(grace_s=arguments.grace)
    run_id = run.paths.run_id
    if not run.signal(FORCE_SIGNAL if arguments.force else signal.SIGTERM, wish):
        talk.print(f"run {run_id} is not running: {run.where} has ended")
        return ExitCode.OK
    talk.print(
        f"run {run_id}: " + ("stopping at once" if arguments.force else "saving and stopping")
    )
    wait = StopWait(run.paths, wish)
    while run.look().alive:
        if wait.is_over():
            waited = f"run {run_id} has not ended within {wait.waited_s():.0f} s"
            raise RankLostError(f"{waited}: {run.abandon()}.")
        time.sleep(run.every_s)
    run.bring_home()
    arguments.json = False
    say_run_end(run, arguments=arguments, talk=talk)
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
    elsewhere = run_at_site(paths, access.environment())
    if elsewhere is not None:
        yield partial(_alive, elsewhere, set())
        return
    if read_mirrored(paths) is None:
        yield lambda: is_supervised(paths)
        return
    # paramiko takes half a second to import, which a local run does not need.
    from payload.orchestrate.commands.attach import watched

    with watched(paths, env=access.environment(), node=node) as look:
        yield look


_REMOVED_PREFIX = ".removed-"
# Ranks whose supervisor died may still be saving; they show a sign of life more often than this.
_ALIVE_S = 60.0


def remove(arguments: argparse.Namespace, access: LocalAccess) -> int:
    """Remove the named runs, or all but the newest; never one that is running."""
    runs_dir: Path = arguments.runs_dir
    talk, out = text_console(stderr=True), text_console(stderr=False)
    if bool(arguments.runs) == (arguments.keep is not None):
        raise UsageError("name the runs to remove, or say how many to keep with --keep N.")
    if arguments.keep is not None and arguments.keep < 0:
        raise UsageError(f"--keep {arguments.keep}: must be 0 or more.")
    refused: TileforgeError | None = None
    for paths in _chosen(runs_dir, arguments.runs, keep=arguments.keep):
        size = _size_bytes(paths.root) / 1e9
        try:
            if _alive_at_site(paths, access):
                raise UsageError(f"run {paths.run_id} has a job that has not ended. Stop it first.")
            _refuse_to_remove(paths, all_runs(runs_dir), force=arguments.force)
            if not arguments.dry_run:
                _remove(paths)
        except TileforgeError as error:
            refused = error
            talk.print(f"kept: {error}")
            continue
        verb = "would remove" if arguments.dry_run else "removed"
        out.print(f"{verb} {paths.run_id} ({size:,.2f} GB)")
    if not arguments.dry_run:
        for left in runs_dir.glob(f"{_REMOVED_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        _mend_latest(runs_dir)
    # What --keep passes over is no failure: it was not asked for by name.
    return refused.exit_code if refused is not None and arguments.runs else ExitCode.OK


def _chosen(runs_dir: Path, names: Sequence[str], *, keep: int | None) -> list[RunPaths]:
    """Return the runs that the command line means, each once. Raises UsageError.

    What only looks like a run does not count among those that are kept.
    """
    if keep is not None:
        return [paths for paths in all_runs(runs_dir) if _is_a_run(paths)][keep:]
    found = {paths.root: paths for paths in (find_run(runs_dir, name) for name in names)}
    return list(found.values())


def _is_a_run(paths: RunPaths) -> bool:
    """Tell whether nobody but this program can have made the folder.

    `hosts`, `inventory.json` or `state.json` may be another program's, and then so is all the rest.
    """
    has_config = paths.config.is_file()
    marks = (paths.lock, paths.root / "mirror.json")
    return has_own_record(paths) or (has_config and any(mark.is_file() for mark in marks))


def _refuse_to_remove(paths: RunPaths, all_of_them: Sequence[RunPaths], *, force: bool) -> None:
    """Raise UsageError for a run that is going on, is needed by another, or is nowhere else.

    So too for a folder that is no run.
    """
    if paths.root.is_symlink():
        raise UsageError(f"run {paths.run_id} is a link. Remove the link itself: rm {paths.root}")
    if not _is_a_run(paths) and newest_sound(paths.checkpoints) is None:
        raise UsageError(
            f"{paths.root} is no run, or nothing in it says so any more. If you mean it, remove it "
            f"yourself: rm -r {paths.root}"
        )
    mirrored = _mirrored(paths)
    if is_supervised(paths) or (mirrored is not None and mirrored.alive):
        raise UsageError(f"run {paths.run_id} is running. Stop it first.")
    if _may_be_saving(paths):
        raise UsageError(f"run {paths.run_id}: its ranks may still be saving. Wait a minute.")
    for other in all_of_them:
        if is_supervised(other) and _starts_from(other, paths):
            raise UsageError(f"run {paths.run_id}: run {other.run_id} starts from it and goes on.")
    was_collected = mirrored is not None and mirrored.collected is not None
    has_mirror = (paths.root / "mirror.json").exists()
    if (has_mirror or is_copy(paths)) and not was_collected and not force:
        raise UsageError(
            f"run {paths.run_id} was not collected: its newest checkpoint may be on the cluster "
            "only. Collect it, or remove the copy with --force."
        )


def _mirrored(paths: RunPaths) -> Mirrored | None:
    try:
        return read_mirrored(paths)
    except ConfigError:
        return None  # what cannot be read does not say that the run was collected


def _may_be_saving(paths: RunPaths) -> bool:
    try:
        state = read_json(RunState, paths.state)
        sign = read_json(RankProgress, paths.rank_progress(0))
    except ConfigError:
        return False
    if state is None:
        return time.time() - paths.root.stat().st_mtime < _ALIVE_S
    ended = state.exit_class is not None
    return not ended and sign is not None and time.time() - sign.time_unix < _ALIVE_S


def _starts_from(other: RunPaths, paths: RunPaths) -> bool:
    try:
        init = load_run_config(other.config).model.init
    except ConfigError:
        return False
    return Path(init).resolve().is_relative_to(paths.root.resolve())


def _remove(paths: RunPaths) -> None:
    """Take the run out of sight at once, then remove it; an interrupted removal goes on later."""
    hidden = paths.root.with_name(f"{_REMOVED_PREFIX}{paths.run_id}")
    try:
        # Held so that nobody resumes it meanwhile.
        with starting(paths), RunLock(paths):
            shutil.rmtree(hidden, ignore_errors=True)
            paths.root.rename(hidden)
            shutil.rmtree(hidden)
    except OSError as error:
        raise ConfigError(f"{paths.root}: cannot be removed ({error.strerror}).") from None


def _mend_latest(runs_dir: Path) -> None:
    """Let `latest` lead to the newest run that has a checkpoint, where its own is gone."""
    link = runs_dir / LATEST
    if not link.is_symlink() or link.exists():
        return
    link.unlink()
    trained = [paths for paths in all_runs(runs_dir) if paths.newest_checkpoint() is not None]
    if trained:
        point_latest_at(trained[0])


def _size_bytes(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())
