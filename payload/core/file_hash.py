"""The hash of a file's content, for which a process reads an unchanged file once."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from payload.core.regular_files import open_regular

_SETTLED_S = 2.0
"""A file that was changed this recently may change again within one tick of its file system's
clock, and would look unchanged. The longest tick is FAT's, two seconds."""
_MOST_FILES = 1000


@dataclass(frozen=True, slots=True)
class _Mark:
    """Tells a file, as it is now, from every other one and from itself after a change."""

    device: int
    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: BinaryIO) -> _Mark:
        """Return the mark of an open file."""
        now = os.fstat(file.fileno())
        return cls(now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


_known: dict[_Mark, str] = {}


def sha256_of(path: Path) -> str:
    """Return the hash of a file's content. Raises OSError, also for what is no regular file.

    The content is read again once anything of the file has changed: also its ctime, which the
    system sets at each change and no program can set back.
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
