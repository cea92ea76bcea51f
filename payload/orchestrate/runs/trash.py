"""The trash folder of a runs folder: removed runs, which can be restored for a day."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from payload.core.errors import ConfigError, UsageError
from payload.orchestrate.runs.removal import HeldRun, drop_holder, finish, held, held_run
from payload.run_record.run_files import RunPaths

TRASH_NAME = ".trash"
_KEPT_S = 86_400.0
"""Time that a run stays in the trash. The first `remove` after this time deletes the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrashedRun:
    """A run in the trash."""

    holder: Path
    """The folder inside the trash for this run; it has only the run and its record."""
    record: HeldRun

    @property
    def folder(self) -> Path:
        """The run's folder, inside `holder`."""
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
    return [each for each in _holders(runs_dir) if _is_folder(each.folder)]


def _holders(runs_dir: Path) -> list[TrashedRun]:
    """Return the folders in the trash that have a record.

    After an interruption, such a folder may have no run.
    """
    trash, found = runs_dir / TRASH_NAME, []
    if trash.is_symlink() or not trash.is_dir():
        return []
    for holder in trash.iterdir():
        with suppress(OSError, ConfigError):
            if not holder.is_symlink():
                found.append(TrashedRun(holder=holder, record=held_run(holder)))
    return sorted(found, key=lambda each: each.record.removed_unix, reverse=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def is_expired(trashed: TrashedRun) -> bool:
    """Return True if the run has been in the trash for longer than runs are kept."""
    return trashed.record.removed_unix < time.time() - _KEPT_S


def delete_trashed(runs_dir: Path, trashed: TrashedRun) -> bool:
    """Delete the run; return False if another command has restored or deleted it.

    Raises ConfigError.
    """
    return finish(trashed.holder, runs_dir=runs_dir)


def tidy_trash(runs_dir: Path) -> None:
    """Delete what interrupted commands left in the trash, and the trash folder if it is empty."""
    for each in _holders(runs_dir):
        if is_expired(each) and not each.folder.exists():
            drop_holder(each.holder)
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
