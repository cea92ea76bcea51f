"""`remove`: moves old runs to the trash, restores them, and empties the trash."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from payload.core.errors import ExitCode, TileforgeError, UsageError
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
    KEPT_S,
    empty_trash,
    move_to_trash,
    restore_run,
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
    if options.dry_run:
        out.print("".join(f"would remove {each.text}\n" for each in found), end="")
    elif _is_confirmed(options, found, talk):
        refused = _carry_out(options, found, talk) or refused
    # If --keep skips a run, the command does not fail, because the user did not name the run.
    return refused.exit_code if refused is not None and options.runs else ExitCode.OK


def _require_one_choice(options: RemoveOptions) -> None:
    """Raise UsageError unless the options name what to do, in one way."""
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
    """Return the runs that can be removed, and the last reason why another one cannot."""
    found: list[_Removal] = []
    refused: TileforgeError | None = None
    for paths in _selected(options.runs_dir, options.runs, keep=options.keep):
        gone = {each.paths.root for each in found}
        try:
            if is_alive_at_site(paths, access.environment()):
                raise UsageError(f"run {paths.run_id} has an active job. Stop it first.")
            mirrored = readable_mirror(paths)
            refuse_to_remove(
                paths,
                [each for each in all_runs(options.runs_dir) if each.root not in gone],
                is_alive=mirrored is not None and mirrored.alive,
                may_lose=_may_lose(paths, mirrored),
                is_forced=options.force,
            )
        except TileforgeError as error:
            refused = error
            talk.print(f"kept: {error}")
            continue
        size_bytes = _size_bytes(paths.root)
        text = f"{paths.run_id} ({_status(paths)}, {size_bytes / 1e9:,.2f} GB)"
        found.append(_Removal(paths=paths, text=text, size_bytes=size_bytes))
    return found, refused


def _is_confirmed(options: RemoveOptions, found: Sequence[_Removal], talk: Console) -> bool:
    """List what would be removed, and prompt. Raises UsageError without a terminal."""
    old = trashed_runs(options.runs_dir) if options.now else []
    deleted = [] if options.runs or options.keep is not None else old
    if options.yes or not (found or deleted):
        return True
    for each in found:
        talk.print(f"  {each.text}")
    sizes = [each.size_bytes for each in found]
    for trashed in deleted:
        sizes.append(_size_bytes(trashed.folder))
        talk.print(f"  {trashed.record.run_id} (in the trash, {sizes[-1] / 1e9:,.2f} GB)")
    runs = f"{len(sizes)} run{'s' * (len(sizes) > 1)} ({sum(sizes) / 1e9:,.2f} GB)"
    verb = f"Delete {runs} permanently?" if options.now else f"Move {runs} to the trash?"
    return confirm(verb, assume_yes=False)


def _carry_out(
    options: RemoveOptions, found: Sequence[_Removal], talk: Console
) -> TileforgeError | None:
    """Remove the runs, and return the last error."""
    runs_dir, refused = options.runs_dir, None
    out = text_console(stderr=False)
    for each in found:
        try:
            (remove_run if options.now else move_to_trash)(each.paths)
        except TileforgeError as error:
            refused = error
            talk.print(f"kept: {error}")
            continue
        out.print(f"{'deleted' if options.now else 'moved to the trash:'} {each.text}")
    finish_removals(runs_dir)
    empties = options.now and not options.runs and options.keep is None
    before_unix = float("inf") if empties else time.time() - KEPT_S
    for trashed in empty_trash(runs_dir, removed_before_unix=before_unix):
        out.print(f"deleted {trashed.record.run_id} from the trash")
    if found and not options.now:
        restore = run_command("remove --restore", found[-1].paths)
        empty = command("orchestrate", "remove", "--now", *runs_dir_option(runs_dir))
        talk.print(f"To get a run back: {restore}")
        talk.print(f"The disk space is freed by the first `remove` after a day, or now: {empty}")
    _repair_latest(runs_dir)
    return refused


def _status(paths: RunPaths) -> str:
    """Return the run's status in its records; `unfinished` if the records have no status."""
    record = known_state(paths) or known_summary(paths)
    return record.status if record else "unfinished"


def _selected(runs_dir: Path, names: Sequence[str], *, keep: int | None) -> list[RunPaths]:
    """Return the selected runs without duplicates. Raises UsageError.

    Only finished runs count for `keep`. A run that adapters are based on comes after the runs of
    these adapters, because it can be removed only after them.
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


def _size_bytes(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())
