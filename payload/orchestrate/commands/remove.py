"""`remove`: deletes old runs from the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from payload.core.errors import ExitCode, TileforgeError, UsageError
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
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import LATEST, RunPaths, point_latest_at


def remove(options: RemoveOptions, access: LocalAccess) -> int:
    """Remove the named runs, or all except the newest; never remove a run in progress."""
    runs_dir = options.runs_dir
    talk, out = text_console(stderr=True), text_console(stderr=False)
    if bool(options.runs) == (options.keep is not None):
        raise UsageError("choose the runs to remove, or keep the newest N with --keep N.")
    if options.keep is not None and options.keep < 0:
        raise UsageError(f"--keep {options.keep}: must be 0 or more.")
    refused: TileforgeError | None = None
    gone: set[Path] = set()
    for paths in _selected(runs_dir, options.runs, keep=options.keep):
        size = _size_bytes(paths.root) / 1e9
        try:
            if is_alive_at_site(paths, access.environment()):
                raise UsageError(f"run {paths.run_id} has an active job. Stop it first.")
            mirrored = readable_mirror(paths)
            refuse_to_remove(
                paths,
                [each for each in all_runs(runs_dir) if each.root not in gone],
                is_alive=mirrored is not None and mirrored.alive,
                may_lose=_may_lose(paths, mirrored),
                is_forced=options.force,
            )
            if not options.dry_run:
                remove_run(paths)
        except TileforgeError as error:
            refused = error
            talk.print(f"kept: {error}")
            continue
        gone.add(paths.root)
        verb = "would remove" if options.dry_run else "removed"
        out.print(f"{verb} {paths.run_id} ({size:,.2f} GB)")
    if not options.dry_run:
        finish_removals(runs_dir)
        _repair_latest(runs_dir)
    # If --keep skips a run, the command does not fail, because the user did not name the run.
    return refused.exit_code if refused is not None and options.runs else ExitCode.OK


def _selected(runs_dir: Path, names: Sequence[str], *, keep: int | None) -> list[RunPaths]:
    """Return the selected runs without duplicates. Raises UsageError.

    Folders of other programs are not counted by `keep`. A run that adapters are based on comes
    after the runs of these adapters, because it can be removed only after them.
    """
    if keep is not None:
        found = [paths for paths in all_runs(runs_dir) if is_own_run(paths)][keep:]
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
