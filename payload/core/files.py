"""Files that are written whole or not at all, what stands in the way of one, and free space."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from pathlib import Path

from payload.core.links import no_follow


def set_aside(path: Path) -> Path:
    """Rename what is damaged, so that it is neither lost nor in the way; return its new name."""
    taken = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    aside = next(each for each in taken if not os.path.lexists(each))
    path.rename(aside)
    return aside


def is_odd_file(path: Path) -> bool:
    """Tell whether something else has a file's name: a folder, a pipe, a dead link."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return path.is_symlink()


def require_file(path: Path) -> Path | None:
    """Set aside a folder, pipe or dead link with a file's name; return its new name, or None."""
    return set_aside(path) if is_odd_file(path) else None


def discard(path: Path) -> None:
    """Remove a file that is not needed any more; what is no file is set aside. Raises OSError."""
    if require_file(path) is None:
        path.unlink(missing_ok=True)


def write_whole(
    path: Path, content: str | bytes, *, durable: bool = True, is_private: bool = False
) -> None:
    """Write `content` beside, then rename: whole or absent; if `durable`, after a power cut too.

    If `is_private`, this user alone may read it. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb", opener=no_follow) as file:
            if is_private:
                os.fchmod(file.fileno(), 0o600)
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk: a rename in it survives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Return the free space on the disk that `folder` is on, or will be."""
    whole = folder.absolute()
    there = next(each for each in (whole, *whole.parents) if each.is_dir())
    return shutil.disk_usage(there).free
