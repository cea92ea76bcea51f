"""The trash folder of a runs folder: removed runs, which can be restored for a day."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from payload.core.errors import ConfigError, UsageError
from payload.orchestrate.runs.removal import HeldRun, drop_holder, finish, held, held_run
from payload.run_record.run_files import RunPaths

TRASH_NAME = ".trash"
KEPT_S = 86_400.0
"""A run is deleted by the first `remove` after this time in the trash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrashedRun:
    """A run in the trash."""

    holder: Path
    """The run's own folder in the trash."""
    record: HeldRun

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.holder / self.record.run_id


def move_to_trash(paths: RunPaths) -> None:
    """Move the run's folder to the trash. Raises ConfigError."""
    trash = paths.root.parent / TRASH_NAME
    if trash.is_symlink():
        raise ConfigError(f"{trash} is a link. Remove the link, or delete the runs with --now.")
    try:
        trash.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{trash}: cannot be written ({error.strerror}).") from None
    with held(paths, folder=trash, prefix=f"{paths.run_id}-"):
        pass


def trashed_runs(runs_dir: Path) -> list[TrashedRun]:
    """Return the runs in the trash, the last removed first; other folders are left out."""
    trash, found = runs_dir / TRASH_NAME, []
    if trash.is_symlink() or not trash.is_dir():
        return []
    for holder in trash.iterdir():
        with suppress(OSError, ConfigError):
            if not holder.is_symlink():
                found.append(TrashedRun(holder=holder, record=held_run(holder)))
    return sorted(found, key=lambda each: each.record.removed_unix, reverse=True)


def empty_trash(runs_dir: Path, *, removed_before_unix: float) -> Iterator[TrashedRun]:
    """Delete the runs that were removed before this time, and yield each deleted run."""
    for each in trashed_runs(runs_dir):
        if each.record.removed_unix < removed_before_unix:
            with suppress(OSError, ConfigError):
                finish(each.holder)
                yield each
    with suppress(OSError):
        (runs_dir / TRASH_NAME).rmdir()


def restore_run(runs_dir: Path, run_id: str) -> RunPaths:
    """Move the run back from the trash. Raises UsageError and ConfigError."""
    found = trashed_runs(runs_dir)
    each = next((each for each in found if each.record.run_id == run_id), None)
    if each is None:
        known = ", ".join(dict.fromkeys(each.record.run_id for each in found)) or "no run"
        raise UsageError(f"run {run_id} is not in {runs_dir / TRASH_NAME}, which has {known}.")
    paths = RunPaths(runs_dir / run_id)
    if paths.root.exists():
        raise UsageError(f"run {run_id} exists in {runs_dir}. Rename or remove that run first.")
    try:
        each.folder.rename(paths.root)
    except OSError as error:
        raise ConfigError(f"{paths.root}: cannot be restored ({error.strerror}).") from None
    drop_holder(each.holder)
    return paths
