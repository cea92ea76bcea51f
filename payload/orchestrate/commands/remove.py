"""`remove`: moves old runs to the trash, restores them, and empties the trash."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from payload.core.errors import ExitCode, TileforgeError, UsageError
from payload.core.files import size_of
from payload.core.suggested_commands import command
from payload.orchestrate.commands.run_choice import is_alive_at_site, readable_mirror
from payload.orchestrate.commands.run_commands_options import RemoveOptions
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.mirror import Mirrored, mirror_file
from payload.orchestrate.runs.removal import (
    finish_removals,
    is_own_run,
    needs,
    refuse_to_remove,
    remove_run,
)
from payload.orchestrate.runs.run_index import all_runs, find_run, is_copy
from payload.orchestrate.runs.trash import (
    TrashedRun,
    delete_trashed,
    is_expired,
    move_to_trash,
    restore_run,
    tidy_trash,
    trashed_runs,
)
from payload.orchestrate.terminal.console import confirm, text_console
from payload.run_record.run_files import LATEST, RunPaths, point_latest_at
from payload.run_record.run_repair import known_state, known_summary
from payload.run_record.suggested_run_commands import run_command, runs_dir_option


@dataclass(frozen=True, slots=True, kw_only=True)
class _Removal:
    """A run that can be removed."""

    paths: RunPaths
    text: str
    """The run's id, status and size."""
    size_bytes: int


def remove(options: RemoveOptions, access: LocalAccess) -> int:
    """Remove the named runs, or all except the newest; never remove a run in progress."""
    runs_dir, talk = options.runs_dir, text_console(stderr=True)
    out = text_console(stderr=False)
    _require_one_choice(options)
    if options.restore is not None:
        paths = restore_run(runs_dir, options.restore)
        _repair_latest(runs_dir)
        out.print(f"restored {paths.run_id}")
        return ExitCode.OK
    found, refused = _removals(options, access, talk)
    empties = options.now and not options.runs and options.keep is None
    trashed = trashed_runs(runs_dir) if empties else []
    failed = None
    if options.dry_run:
        texts = [each.text for each in found] + [_trashed_text(each) for each in trashed]
        out.print("".join(f"would remove {text}\n" for text in texts), end="")
    elif _is_confirmed(options, found, trashed, talk):
        removed, refused_now, failed = _carry_out(options, access, found, talk)
        refused = refused_now or refused
        if not empties:
            trashed = [each for each in trashed_runs(runs_dir) if is_expired(each)]
        failed = _delete(runs_dir, trashed, talk) or failed
        if removed and not options.now:
            _print_ways_back(removed[-1], talk)
        _repair_latest(runs_dir)
    # If --keep skips a run, the command does not fail, because the user did not name the run.
    error = failed or (refused if options.runs else None)
    return ExitCode.OK if error is None else error.exit_code


def _require_one_choice(options: RemoveOptions) -> None:
    """Raise UsageError if the options do not select exactly one action."""
    ways = [bool(options.runs), options.keep is not None, options.restore is not None]
    if sum(ways) > 1 or not (any(ways) or options.now):
        raise UsageError(
            "choose runs to remove, keep the newest N finished runs with --keep N, or restore "
            "a run with --restore RUN."
        )
    if options.keep is not None and options.keep < 0:
        raise UsageError(f"--keep {options.keep}: must be 0 or more.")


def _removals(
    options: RemoveOptions, access: LocalAccess, talk: Console
) -> tuple[list[_Removal], TileforgeError | None]:
    """Return the runs that can be removed, and the last error for a run that cannot be removed."""
    found: list[_Removal] = []
    refused: TileforgeError | None = None
    for paths in _selected(options.runs_dir, options.runs, keep=options.keep):
        try:
            _refuse(options, access, paths, without=[each.paths for each in found])
        except TileforgeError as error:
            refused = error
            talk.print(f"kept: {error}")
            continue
        size_bytes = size_of(paths.root)
        text = f"{paths.run_id} ({_status(paths)}, {size_bytes / 1e9:,.2f} GB)"
        found.append(_Removal(paths=paths, text=text, size_bytes=size_bytes))
    return found, refused


def _refuse(
    options: RemoveOptions, access: LocalAccess, paths: RunPaths, *, without: Collection[RunPaths]
) -> None:
    """Raise UsageError if the run must not be removed.

    The runs in `without` count as already removed.
    """
    if is_alive_at_site(paths, access.environment()):
        raise UsageError(f"run {paths.run_id} has an active job. Stop it first.")
    mirrored = readable_mirror(paths)
    refuse_to_remove(
        paths,
        [each for each in all_runs(options.runs_dir) if each not in without],
        is_alive=mirrored is not None and mirrored.alive,
        may_lose=_may_lose(paths, mirrored),
        is_forced=options.force,
    )


def _is_confirmed(
    options: RemoveOptions,
    found: Sequence[_Removal],
    trashed: Sequence[TrashedRun],
    talk: Console,
) -> bool:
    """List what would be removed, and prompt. Raises UsageError without a terminal."""
    if options.yes or not (found or trashed):
        return True
    for each in found:
        talk.print(f"  {each.text}")
    sizes = [each.size_bytes for each in found]
    for old in trashed:
        sizes.append(size_of(old.folder))
        talk.print(f"  {_trashed_text(old)}")
    runs = f"{len(sizes)} run{'s' * (len(sizes) > 1)} ({sum(sizes) / 1e9:,.2f} GB)"
    verb = f"Delete {runs} permanently?" if options.now else f"Move {runs} to the trash?"
    return confirm(verb, assume_yes=False)


def _trashed_text(trashed: TrashedRun) -> str:
    """Return the run's id and size."""
    size_bytes = size_of(trashed.folder)
    return f"{trashed.record.run_id} (in the trash, {size_bytes / 1e9:,.2f} GB)"


def _carry_out(
    options: RemoveOptions, access: LocalAccess, found: Sequence[_Removal], talk: Console
) -> tuple[list[RunPaths], TileforgeError | None, TileforgeError | None]:
    """Remove the runs; return the removed runs, the last refusal, and the last failure."""
    removed: list[RunPaths] = []
    refused: TileforgeError | None = None
    failed: TileforgeError | None = None
    out = text_console(stderr=False)
    for each in found:
        try:
            # During the prompt, this run or one that needs it can have been started.
            _refuse(options, access, each.paths, without=())
            (remove_run if options.now else move_to_trash)(each.paths)
        except UsageError as error:
            refused = error
            talk.print(f"kept: {error}")
        except TileforgeError as error:
            failed = error
            talk.print(f"kept: {error}")
        else:
            removed.append(each.paths)
            out.print(f"{'deleted' if options.now else 'moved to the trash:'} {each.text}")
    finish_removals(options.runs_dir)
    return removed, refused, failed


def _delete(runs_dir: Path, trashed: Sequence[TrashedRun], talk: Console) -> TileforgeError | None:
    """Delete these runs in the trash, and return the last failure."""
    failed: TileforgeError | None = None
    out = text_console(stderr=False)
    for each in trashed:
        try:
            if delete_trashed(runs_dir, each):
                out.print(f"deleted {each.record.run_id} from the trash")
        except TileforgeError as error:
            failed = error
            talk.print(f"kept: {error}")
    tidy_trash(runs_dir)
    return failed


def _print_ways_back(last: RunPaths, talk: Console) -> None:
    """Print the commands that restore the last removed run, and that empty the trash."""
    empty = command("orchestrate", "remove", "--now", *runs_dir_option(last.root.parent))
    talk.print(f"To get a run back: {run_command('remove --restore', last)}")
    talk.print(f"The disk space is freed by the first `remove` after a day, or now: {empty}")


def _status(paths: RunPaths) -> str:
    """Return the run's status in its records; `unfinished` if the records have no status."""
    record = known_state(paths) or known_summary(paths)
    return record.status if record else "unfinished"


def _selected(runs_dir: Path, names: Sequence[str], *, keep: int | None) -> list[RunPaths]:
    """Return the selected runs without duplicates. Raises UsageError.

    Only finished runs count for `keep`. An adapter's run comes before its base run, because the
    base can be removed only after the adapter.
    """
    if keep is not None:
        found = [paths for paths in all_runs(runs_dir) if is_own_run(paths)]
        kept = [paths for paths in found if _status(paths) == "finished"][:keep]
        found = [paths for paths in found if paths not in kept]
    else:
        named = {paths.root: paths for paths in (find_run(runs_dir, name) for name in names)}
        found = list(named.values())
    return sorted(found, key=lambda paths: any(needs(other, paths) for other in found))


def _may_lose(paths: RunPaths, mirrored: Mirrored | None) -> bool:
    """Return True if the run is on a cluster and its results were not collected."""
    was_collected = mirrored is not None and mirrored.collected is not None
    return not was_collected and (mirror_file(paths).exists() or is_copy(paths))


def _repair_latest(runs_dir: Path) -> None:
    """If the link `latest` is dangling, point it at the newest run with a checkpoint."""
    link = runs_dir / LATEST
    if not link.is_symlink() or link.exists():
        return
    link.unlink()
    trained = [paths for paths in all_runs(runs_dir) if paths.newest_checkpoint() is not None]
    if trained:
        point_latest_at(trained[0])
