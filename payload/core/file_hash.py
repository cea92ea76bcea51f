"""SHA-256 of files, cached in the process until a file changes."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from payload.core.regular_files import open_regular

_SETTLED_S = 2.0
"""Minimum age in seconds of a file's last change for its hash to be cached. A second change within
one tick of the file system's clock would go unnoticed. The longest tick is two seconds, on FAT."""
_MOST_FILES = 1000


@dataclass(frozen=True, slots=True)
class _Mark:
    """Identity and state of a file, different for each file and after each change."""

    device: int
    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: BinaryIO) -> _Mark:
        """Return the identity and state of an open file."""
        now = os.fstat(file.fileno())
        return cls(now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


_known: dict[_Mark, str] = {}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file's content in hexadecimal.

    The file is read again after any change. Each change sets the ctime, and no program can set the
    ctime back. Raises OSError, for example if the path is not a regular file.
    """
    with open_regular(path) as file:
        began_ns, mark = time.time_ns(), _Mark.of(file)
        known = _known.get(mark)
        if known is not None:
            return known
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        is_settled = began_ns - mark.ctime_ns > _SETTLED_S * 1e9
        if is_settled and _Mark.of(file) == mark:
            if len(_known) >= _MOST_FILES:
                _known.clear()
            _known[mark] = digest
        return digest
