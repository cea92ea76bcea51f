"""The disk space that a run's checkpoints need."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from payload.core.errors import ConfigError
from payload.core.files import free_bytes
from payload.formats.checkpoint_listing import (
    CHECKPOINTS_NAME,
    checkpoint_folders,
    partial_checkpoints,
)

_BLOCK_BYTES = 512  # The unit of st_blocks on every file system.


def require_room(run: Path, *, checkpoint_bytes: int, keep: int, uploads: bool) -> None:
    """Raise ConfigError if the disk has no room for the run's checkpoints plus one more checkpoint.

    `run` is the run's folder. The run keeps the newest `keep` checkpoints and the best. `uploads`
    is True if checkpoints are uploaded. Existing checkpoints of a resumed run are counted;
    incomplete checkpoints count as free space, because they are removed first.
    """
    most = most_checkpoints(keep=keep, uploads=uploads)
    to_come = most - min(most - 1, len(checkpoint_folders(run / CHECKPOINTS_NAME)))
    needed = to_come * checkpoint_bytes
    free = free_bytes(run) + _bytes_of(partial_checkpoints(run / CHECKPOINTS_NAME))
    if free < needed:
        uploaded = ", the one in upload" if uploads else ""
        advice = "Free space or lower train.keep_checkpoints" if to_come > 1 else "Free space"
        raise ConfigError(
            f"{run}: {free / 1e9:.1f} GB free, but {to_come} more checkpoint(s) need "
            f"{needed / 1e9:.1f} GB. The disk must hold {most} checkpoints: the newest {keep} "
            f"(train.keep_checkpoints), the best one{uploaded} and the one being written. {advice}."
        )


def most_checkpoints(*, keep: int, uploads: bool) -> int:
    """Return the largest number of checkpoints that a run has on its disk at the same time.

    The uploader keeps the files of one checkpoint open, so removing this checkpoint frees no space.
    """
    return keep + 2 + uploads


def disk_words(
    *, checkpoints: int, checkpoint_bytes: int, state_bytes: int, free_bytes: int | None
) -> str:
    """Return the disk space of a run's checkpoints as text, and the settings that lower it."""
    free = "" if free_bytes is None else f"; {free_bytes / 1e9:,.1f} GB are free"
    if free_bytes is not None and free_bytes < checkpoints * checkpoint_bytes:
        free += ": too little, so the run will refuse to start. Free space or lower "
        free += "train.keep_checkpoints"
    return (
        f"about {checkpoints * checkpoint_bytes / 1e9:,.2f} GB: up to {checkpoints} checkpoints of "
        f"{checkpoint_bytes / 1e9:,.2f} GB (train.keep_checkpoints "
        f"lowers their number), of which {state_bytes / 1e9:,.2f} GB are optimizer state{free}"
    )


def _bytes_of(folders: Iterable[Path]) -> int:
    """Return the disk space used by the files in these folders."""
    blocks = 0
    for path in (path for folder in folders for path in folder.rglob("*")):
        with suppress(OSError):
            blocks += path.lstat().st_blocks
    return blocks * _BLOCK_BYTES
