"""CONTRACT: removes the folder of a run that is not active and that no other run needs.

This module queries no cluster: callers pass the last known state of a run on a cluster.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from payload.core.errors import ConfigError, UsageError
from payload.core.regular_files import home_path, read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import RUN_ID
from payload.core.validation.records import build
from payload.formats.checkpoint_listing import newest_valid
from payload.orchestrate.runs.mirror import mirror_file
from payload.run_record.run_files import RankProgress, RunPaths, RunState, read_json
from payload.run_record.run_lock import RunLock, is_supervised, start_lock
from payload.run_record.run_repair import has_own_record, known_config

_HOLDER_PREFIX = ".removing-"
_HOLDER_RECORD = "removal.json"
"""Name of the file that marks a temporary folder that this program created for a run."""
# Ranks of a killed supervisor may still be saving. Their heartbeats are at most this far apart.
_ALIVE_S = 60.0


def is_own_run(paths: RunPaths) -> bool:
    """Return True if only this program can have created the folder.

    `hosts`, `inventory.json` or `state.json` alone prove nothing: other programs use these names.
    """
    has_config = paths.config.is_file()
    marks = (paths.lock, mirror_file(paths))
    return has_own_record(paths) or (has_config and any(mark.is_file() for mark in marks))


def refuse_to_remove(
    paths: RunPaths,
    all_of_them: Sequence[RunPaths],
    *,
    is_alive: bool,
    may_lose: bool,
    is_forced: bool,
) -> None:
    """Raise UsageError for a run that is active, needed by another run, or not fully collected.

    A folder that is not a run is also an error. `is_alive` is the last known state of a run on a
    cluster. `may_lose` is True if the cluster may have uncollected results. With `is_forced`,
    uncollected results and adapters of other runs do not prevent the removal.
    """
    if paths.root.is_symlink():
        raise UsageError(f"run {paths.run_id} is a link. Remove the link itself: rm {paths.root}")
    if not is_own_run(paths) and newest_valid(paths.checkpoints) is None:
        raise UsageError(
            f"{paths.root} is not a run, or its records are gone. To delete this folder anyway: "
            f"rm -r {paths.root}"
        )
    if is_alive or is_supervised(paths):
        raise UsageError(f"run {paths.run_id} is running. Stop it first.")
    if _may_be_saving(paths):
        raise UsageError(
            f"run {paths.run_id}: its ranks may still be saving a checkpoint. Try again in a "
            "minute."
        )
    for other in all_of_them:
        if is_supervised(other) and _starts_from(other, paths):
            raise UsageError(
                f"run {paths.run_id}: run {other.run_id}, which started from the weights of "
                f"{paths.run_id}, is running. Stop run {other.run_id} first."
            )
        if other != paths and not is_forced and needs(other, paths):
            raise UsageError(
                f"run {paths.run_id}: the adapter of run {other.run_id} was trained on the weights "
                f"of this run and has no copy of these weights. Remove {other.run_id} first, or "
                "use --force."
            )
    if may_lose and not is_forced:
        raise UsageError(
            f"run {paths.run_id} was not collected: its newest checkpoint may exist only on the "
            "cluster. Collect the run, or remove the copy with --force."
        )


def _may_be_saving(paths: RunPaths) -> bool:
    try:
        state = read_json(RunState, paths.state)
        beat = read_json(RankProgress, paths.rank_progress(0))
    except ConfigError:
        return False
    if state is None:
        return time.time() - paths.root.stat().st_mtime < _ALIVE_S
    ended = state.exit_class is not None
    return not ended and beat is not None and time.time() - beat.time_unix < _ALIVE_S


def needs(other: RunPaths, paths: RunPaths) -> bool:
    """Return whether run `other` trains an adapter on weights in the folder at `paths`."""
    return known_config(other).adapter.is_on() and _starts_from(other, paths)


def _starts_from(other: RunPaths, paths: RunPaths) -> bool:
    init = known_config(other).model.init
    return home_path(init).resolve().is_relative_to(paths.root.resolve())


def remove_run(paths: RunPaths) -> None:
    """Rename the run's folder, then delete it; a later command completes an interrupted removal."""
    runs_dir = paths.root.parent
    with held(paths, folder=runs_dir, prefix=_HOLDER_PREFIX) as holder:
        finish(holder, runs_dir=runs_dir)


@contextmanager
def held(paths: RunPaths, *, folder: Path, prefix: str) -> Iterator[Path]:
    """Move the run's folder into a new holder folder, and lock the run during the context.

    Raises ConfigError if a folder cannot be written.
    """
    try:
        # Locked, so that no other command resumes it.
        with start_lock(paths), RunLock(paths):
            holder = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
            record = {"format_version": 1, "run_id": paths.run_id, "removed_unix": time.time()}
            try:
                (holder / _HOLDER_RECORD).write_text(json.dumps(record), encoding="utf-8")
                paths.root.rename(holder / paths.run_id)
            except OSError:
                drop_holder(holder)
                raise
            yield holder
    except OSError as error:
        raise ConfigError(
            f"{paths.root}: cannot be removed ({error.strerror}). Remove the folder yourself: rm "
            f"-r {paths.root}"
        ) from None


def finish_removals(runs_dir: Path) -> None:
    """Complete interrupted removals."""
    for holder in runs_dir.glob(f"{_HOLDER_PREFIX}*"):
        with suppress(ConfigError):
            finish(holder, runs_dir=runs_dir)


def finish(holder: Path, *, runs_dir: Path) -> bool:
    """Delete a holder folder that this program created, and the run in it.

    Returns False if the run is not there, because another command has restored or deleted it.
    Raises ConfigError if the run cannot be deleted, and for a record of another program.
    """
    if holder.is_symlink():
        return False
    folder = holder
    try:
        folder = holder / held_run(holder).run_id
        # Renamed, so that no other command restores the run, or moves a run into this holder.
        holder = holder.rename(runs_dir / f"{_HOLDER_PREFIX}{secrets.token_hex(8)}")
        folder = holder / folder.name
        was_there = folder.exists()
        shutil.rmtree(folder, onerror=_unless_gone)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be removed ({error.strerror or error}). Remove the folder yourself: "
            f"rm -r {folder}"
        ) from None
    drop_holder(holder)
    return was_there


def drop_holder(holder: Path) -> None:
    """Remove the temporary folder that held a run, after the run was moved out or deleted."""
    (holder / _HOLDER_RECORD).unlink(missing_ok=True)
    with suppress(OSError):
        holder.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRun:
    """removal.json: the run in a holder folder."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run id")
    removed_unix: float = checked(math.inf, low=0.0)
    """Time of the removal; infinite if the record has no time, so that the run is never old enough
    to be deleted."""


def held_run(holder: Path) -> HeldRun:
    """Read the record of a holder folder.

    Raises OSError, and ConfigError for a record of another program.
    """
    record = holder / _HOLDER_RECORD
    raw = parse_json(read_bytes(record), where=str(record))
    return build(HeldRun, raw, where=str(record))


def _unless_gone(
    _function: object, _path: object, found: tuple[object, BaseException, object]
) -> None:
    """Ignore a file that another command has removed."""
    if not isinstance(found[1], FileNotFoundError):
        raise found[1]
