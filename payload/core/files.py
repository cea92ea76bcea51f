"""Write files atomically, move unexpected files aside, share folders, query disk space."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from pathlib import Path

from payload.core.symlink_safety import no_follow


def move_aside(path: Path) -> Path:
    """Rename a damaged file to `<name>.damaged-<number>`; return the new path."""
    taken = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    aside = next(each for each in taken if not os.path.lexists(each))
    path.rename(aside)
    return aside


def is_not_regular(path: Path) -> bool:
    """Return True if the path exists and is not a regular file: a folder, a pipe, a broken link."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return path.is_symlink()


def require_file(path: Path) -> Path | None:
    """Move a folder, pipe or broken link at `path` aside.

    Return the new path, or None if nothing moved.
    """
    return move_aside(path) if is_not_regular(path) else None


def discard(path: Path) -> None:
    """Remove a file; move a folder, pipe or broken link aside instead. Raises OSError."""
    if require_file(path) is None:
        path.unlink(missing_ok=True)


def write_whole(
    path: Path, content: str | bytes, *, durable: bool = True, is_private: bool = False
) -> None:
    """Write a file atomically: to a temporary file, which is then renamed.

    If `durable`, the file also survives a power cut. If `is_private`, only this user can read it.
    Raises OSError.
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
    """Flush a folder's entries to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_shared(folder: Path) -> None:
    """Give a private folder from `tempfile.mkdtemp` the mode that `mkdir` gives a new folder.

    Raises OSError.
    """
    # A new folder shows the umask. Querying the umask would change it for all threads.
    probe = folder / ".mode"
    probe.mkdir()
    folder.chmod(stat.S_IMODE(probe.stat().st_mode))
    probe.rmdir()


def free_bytes(folder: Path) -> int:
    """Return the free space of the file system of `folder`, which need not exist yet."""
    path = folder.absolute()
    existing = next(each for each in (path, *path.parents) if each.is_dir())
    return shutil.disk_usage(existing).free


def size_of(folder: Path) -> int:
    """Return the size of all files in a folder and the folders below, in bytes."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
