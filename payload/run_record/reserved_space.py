"""Records that are written though the disk is full.

Replacing a file takes room for both of them. Where there is none, a record goes over the old one,
or into room that was kept for it: what a file has, its file system does not take back.
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
_BLOCK_BYTES = 512  # st_blocks', whatever the file system's are.


def keep_room(path: Path) -> None:
    """Room for the first record at `path`, a hidden file beside it; none if there is none now."""
    with contextlib.suppress(OSError):
        write_whole(_room(path), " " * _ROOM_BYTES, durable=False)


def give_room_back(path: Path) -> None:
    """Remove the room that `keep_room` kept and nobody needed."""
    _room(path).unlink(missing_ok=True)


def write_record(
    path: Path, value: Summary | RunState | RankProgress | RankExit, *, durable: bool = True
) -> None:
    """`write_json`, but on a full disk over the record that is there, or into the room for one.

    Raises OSError where there is neither, and where the run's folder has been removed: a part of
    it must not come back.
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
        give_room_back(path)


def write_heartbeat(path: Path, value: RankProgress) -> None:
    """Write a heartbeat over the one before; raises OSError as `write_record` does.

    A rename over a file makes ext4 allocate the new one's blocks at once (auto_da_alloc), which
    takes ten times as long as all else here, and heartbeats come twice a second.
    """
    if not _write_over(path, to_json(value).encode()):
        write_record(path, value, durable=False)


def _room(path: Path) -> Path:
    return path.with_name(f".{path.name}.room")


def _open_here(path: str, flags: int) -> int:
    """Open a file, but none that a link leads to: it may be outside of the run folder."""
    return os.open(path, flags | os.O_NOFOLLOW)


def _write_over(path: Path, content: bytes) -> bool:
    """Write over the file where it is; return whether it is there and has room enough."""
    try:
        file = FileIO(path, "r+", opener=_open_here)
    except OSError:
        return False
    with file:
        there = os.fstat(file.fileno())
        if len(content) > there.st_blocks * _BLOCK_BYTES:
            return False
        # In one piece, so that no reader sees half of it; JSON may end in spaces.
        file.write(content.ljust(there.st_size))
    return True
