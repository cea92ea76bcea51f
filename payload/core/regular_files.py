"""Read files of other programs safely: only regular files, of limited size."""

from __future__ import annotations

import errno
import io
import os
import stat
from contextlib import suppress
from pathlib import Path

MAX_FILE_BYTES = 64 * 2**20
"""Default size limit of a file. Every JSON file of Tileforge except metrics.jsonl is smaller."""


def open_regular(path: Path, *, follows: bool = True) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises OSError for a folder, a pipe or a device, because reading these could block. If `follows`
    is False, also raises OSError for a link.
    """
    link = 0 if follows else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | link)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_bytes(path: Path, *, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return a regular file's content.

    Raises OSError. A path that is not a regular file is an error, and so is a file over
    `limit_bytes`. So reading can neither block nor fill the memory.
    """
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"Larger than {limit_bytes:,} bytes", str(path))
    return content


def can_see(path: Path) -> bool:
    """Return True if the path exists and this user has access to it."""
    try:
        return path.exists()
    except OSError:
        return False


def home_path(text: str) -> Path:
    """Return the path with `~` expanded; `~user` of an unknown user is unchanged."""
    with suppress(RuntimeError):
        return Path(text).expanduser()
    return Path(text)
