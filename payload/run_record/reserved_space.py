"""Writes records even if the disk is full.

Replacing a file needs disk space for the old and the new file. On a full disk, a record overwrites
the old file or a preallocated spare file.
"""

from __future__ import annotations

import contextlib
import errno
import os
from io import FileIO
from pathlib import Path

from payload.core.files import write_whole
from payload.run_record.run_files import RankExit, RankProgress, RunState, Summary, to_json

_ROOM_BYTES = 4096
_BLOCK_BYTES = 512  # The unit of st_blocks, on every file system.


def preallocate_spare_file(path: Path) -> None:
    """Preallocate a hidden spare file for the first record at `path`, if the disk has space."""
    with contextlib.suppress(OSError):
        write_whole(_room(path), " " * _ROOM_BYTES, durable=False)


def remove_spare_file(path: Path) -> None:
    """Remove the spare file of `preallocate_spare_file`, if it still exists."""
    _room(path).unlink(missing_ok=True)


def write_record(
    path: Path, value: Summary | RunState | RankProgress | RankExit, *, durable: bool = True
) -> None:
    """Write a record as `write_json` does; on a full disk, overwrite the old file or a spare file.

    Raises OSError if neither is possible, or if the run folder was removed. A removed run folder is
    not created again.
    """
    text = to_json(value)
    run = path.parent.parent if isinstance(value, RankProgress | RankExit) else path.parent
    if not run.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(run))
    try:
        write_whole(path, text, durable=durable)
    except OSError:
        room = _room(path)
        if _write_over(room, text.encode()):
            room.replace(path)
        elif not _write_over(path, text.encode()):
            raise
    else:
        remove_spare_file(path)


def write_heartbeat(path: Path, value: RankProgress) -> None:
    """Overwrite the last heartbeat with `value`. Raises OSError as `write_record` does.

    A rename over a file would make ext4 allocate the new blocks immediately (auto_da_alloc). This
    would take ten times as long as the rest of this function, and heartbeats come twice a second.
    """
    if not _write_over(path, to_json(value).encode()):
        write_record(path, value, durable=False)


def _room(path: Path) -> Path:
    return path.with_name(f".{path.name}.room")


def _open_here(path: str, flags: int) -> int:
    """Open a file without following a symlink. A symlink might lead out of the run folder."""
    return os.open(path, flags | os.O_NOFOLLOW)


def _write_over(path: Path, content: bytes) -> bool:
    """Overwrite the file in place; return False if it is absent or too small."""
    try:
        file = FileIO(path, "r+", opener=_open_here)
    except OSError:
        return False
    with file:
        found = os.fstat(file.fileno())
        if len(content) > found.st_blocks * _BLOCK_BYTES:
            return False
        # A single write, so that readers see a complete record; JSON may end in spaces.
        file.write(content.ljust(found.st_size))
    return True
