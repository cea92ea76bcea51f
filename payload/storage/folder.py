"""A store in a folder, such as a mounted file system, with the semantics of a bucket."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from payload.config.store_address import StoreAddress
from payload.storage.objects import (
    ABSENT,
    SMALL_BYTES,
    ConflictError,
    MissingObjectError,
    StoredObject,
    StoreError,
    StoreRefusedError,
    TooLargeError,
)

_PART_BYTES = 2**20
_LOCK_S = 30.0
_LOOK_S = 0.02
_HIDDEN = "."
"""First character of the names of partial files and of the lock file."""
_PARTIAL = ".partial"
_LOCK = ".lock"
_MOST_FOLDERS = 8
_FOLDER = os.O_RDONLY | os.O_DIRECTORY


class FolderStore:
    """Files below a folder. A file's generation is its modification time in nanoseconds.

    Other users may have write access to the folder. So below the configured folder, symlinks are
    not followed, and only regular files are opened.
    """

    def __init__(self, address: StoreAddress) -> None:
        """Store the address; the folder is not accessed yet."""
        self.address = address
        self._root = Path(address.path)
        parts = PurePosixPath(address.path).parts
        self._below = parts[len(parts) - address.num_below :]
        self._named = Path(*parts[: len(parts) - address.num_below])

    def entries(self, prefix: str = "") -> list[StoredObject]:
        """List the files whose names begin with `prefix`."""
        folder = prefix.rpartition("/")[0]
        with self._plainly("listing"):
            try:
                with self._folder(folder) as descriptor:
                    found = list(_files(descriptor, within=PurePosixPath(folder)))
            except FileNotFoundError:
                return []
        return sorted(
            (each for each in found if each.name.startswith(prefix)), key=lambda each: each.name
        )

    def groups(self) -> list[str]:
        """List the folders of the first level."""
        with self._plainly("listing"):
            try:
                with self._folder("") as descriptor, os.scandir(descriptor) as entries:
                    folders = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
            except FileNotFoundError:
                return []
        return sorted(name for name in folders if not name.startswith(_HIDDEN))

    def siblings(self) -> list[str]:
        """List the first-level folders of the parent address."""
        return FolderStore(self.address.parent()).groups()

    def put(
        self, name: str, content: BinaryIO, *, size: int, generation: int | None = None
    ) -> StoredObject:
        """Write a temporary file, flush it to disk, then rename it."""
        folder, _, last = self._checked(name).rpartition("/")
        path, partial = self._root / name, f"{_HIDDEN}{last}.{secrets.token_hex(4)}{_PARTIAL}"
        content.seek(0)
        with self._plainly(f"writing {path}"), self._folder(folder, make=True) as descriptor:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                opened = os.open(partial, flags, 0o666, dir_fd=descriptor)
                with os.fdopen(opened, "wb") as file:
                    shutil.copyfileobj(content, file, _PART_BYTES)
                    file.flush()
                    os.fsync(file.fileno())
                    written = file.tell()
                if written != size:
                    raise StoreError(f"writing {path}: received {written} of {size} bytes")
                with self._alone():
                    before = _generation(last, descriptor)
                    _require_generation(before, generation, path)
                    os.replace(partial, last, src_dir_fd=descriptor, dst_dir_fd=descriptor)
                    if _generation(last, descriptor) <= before:
                        # With a coarse clock, the old and the new content could have the same
                        # generation.
                        times = (before + 1, before + 1)
                        os.utime(last, ns=times, dir_fd=descriptor, follow_symlinks=False)
                os.fsync(descriptor)
                return _stored(name, os.stat(last, dir_fd=descriptor, follow_symlinks=False))
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(partial, dir_fd=descriptor)

    def read(self, name: str) -> tuple[bytes, int]:
        """Return a small file's content and generation."""
        with self._opened(name) as file:
            # The limit applies to the bytes that are read, because the file may grow.
            content = file.read(SMALL_BYTES + 1)
            if len(content) > SMALL_BYTES:
                raise _too_large(self._root / name, SMALL_BYTES)
            return content, os.fstat(file.fileno()).st_mtime_ns

    def fetch(
        self, name: str, into: BinaryIO, *, most_bytes: int, progressed: Callable[[], None]
    ) -> None:
        """Copy a whole file, part by part."""
        left = most_bytes
        with self._opened(name) as file:
            while part := file.read(min(_PART_BYTES, left + 1)):
                left -= len(part)
                if left < 0:
                    raise _too_large(self._root / name, most_bytes)
                into.write(part)
                progressed()

    def remove(self, name: str, *, generation: int | None = None) -> None:
        """Remove a file, and the folders that become empty."""
        folder, _, last = self._checked(name).rpartition("/")
        path = self._root / name
        with self._plainly(f"removing {path}"):
            try:
                with self._folder(folder) as descriptor:
                    if _generation(last, descriptor) == ABSENT:
                        return
                    with self._alone():
                        found = _generation(last, descriptor)
                        if found != ABSENT:
                            _require_generation(found, generation, path)
                            os.unlink(last, dir_fd=descriptor)
            except FileNotFoundError:
                return
        with contextlib.suppress(OSError):
            while folder:
                above, _, last = folder.rpartition("/")
                with self._folder(above) as descriptor:
                    os.rmdir(last, dir_fd=descriptor)
                folder = above

    def tidy(self) -> None:
        """Remove the partial files of interrupted writes."""
        gone = contextlib.suppress(FileNotFoundError)
        with self._plainly("removing"), gone, self._folder("") as descriptor:
            for _, _, names, within in os.fwalk(".", dir_fd=descriptor):
                for name in names:
                    if name.startswith(_HIDDEN) and name.endswith(_PARTIAL):
                        with gone:
                            os.unlink(name, dir_fd=within)

    def _checked(self, name: str) -> str:
        parts = PurePosixPath(name).parts
        plain = bool(parts) and "/".join(parts) == name and "\0" not in name
        if not plain or any(part.startswith(_HIDDEN) for part in parts):
            raise StoreError(f"{self.address}: {name!r} is not a valid object name")
        return name

    @contextmanager
    def _folder(self, name: str, *, make: bool = False) -> Iterator[int]:
        """Open a folder below the address without following symlinks; `make` creates it.

        Raises OSError, and StoreRefusedError for a symlink.
        """
        if make:
            self._named.mkdir(parents=True, exist_ok=True)
        path, descriptor = self._named, os.open(self._named, _FOLDER)
        try:
            for part in (*self._below, *PurePosixPath(name).parts):
                path /= part
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=descriptor)
                try:
                    inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
                except OSError as error:
                    raise _refused(error, path) from None
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        """Open a regular file for reading."""
        folder, _, last = self._checked(name).rpartition("/")
        path = self._root / name
        with self._plainly(f"reading {path}"), self._folder(folder) as descriptor:
            try:
                # O_NONBLOCK: opening a pipe must not block.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                opened = os.open(last, flags, dir_fd=descriptor)
            except OSError as error:
                raise _refused(error, path) from None
            with os.fdopen(opened, "rb") as file:
                if not stat.S_ISREG(os.fstat(opened).st_mode):
                    raise StoreRefusedError(f"{path} is not a regular file. Move this path away.")
                yield file

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock on the store's lock file during the block.

        A bucket itself refuses a write if another process has changed the object. A file system
        does not, so writers need the lock.
        """
        with self._folder("", make=True) as descriptor:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                opened = os.open(_LOCK, flags, 0o666, dir_fd=descriptor)
            except OSError as error:
                raise _refused(error, self._root / _LOCK) from None
        with os.fdopen(opened, "wb") as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                _lock(lock.fileno(), root=self._root)
            yield

    @contextmanager
    def _plainly(self, what: str) -> Iterator[None]:
        """Convert the file system's errors to one-line errors of Tileforge."""
        try:
            yield
        except FileNotFoundError as error:
            raise MissingObjectError(f"{what}: {error.filename} does not exist") from None
        except OSError as error:
            problem = f"{what}: {error.strerror} ({error.filename or self._root})"
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
                raise StoreRefusedError(
                    f"{problem}. Set storage.results to a folder that this user can write to."
                ) from None
            raise StoreError(problem) from None


def _too_large(path: Path, most_bytes: int) -> TooLargeError:
    return TooLargeError(f"{path}: the file has more than {most_bytes:,} bytes")


def _refused(error: OSError, path: Path) -> OSError | StoreRefusedError:
    """Return the error for a path of the store that could not be opened."""
    if path.is_symlink():
        return StoreRefusedError(
            f"{path} is a symlink, and a store does not follow symlinks. Move the symlink away."
        )
    return OSError(error.errno, error.strerror, str(path))


def _files(descriptor: int, *, within: PurePosixPath) -> Iterator[StoredObject]:
    """Yield the regular files below an open folder, except hidden files.

    Folders that cannot be read, such as lost+found, and folders deeper than the folders of a run
    are skipped.
    """
    if len(within.parts) > _MOST_FOLDERS:
        return
    with os.scandir(descriptor) as entries:
        for each in entries:
            if each.name.startswith(_HIDDEN):
                continue
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                if each.is_dir(follow_symlinks=False):
                    try:
                        inner = os.open(each.name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
                    except OSError:
                        continue
                    try:
                        yield from _files(inner, within=within / each.name)
                    finally:
                        os.close(inner)
                elif each.is_file(follow_symlinks=False):
                    yield _stored(str(within / each.name), each.stat(follow_symlinks=False))


def _stored(name: str, found: os.stat_result) -> StoredObject:
    return StoredObject(
        name=name,
        bytes=found.st_size,
        generation=found.st_mtime_ns,
        changed_unix=found.st_mtime,
    )


def _generation(name: str, descriptor: int) -> int:
    """Return the generation of a file in an open folder."""
    try:
        return os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:
        return ABSENT


def _require_generation(found: int, generation: int | None, path: Path) -> None:
    if generation is not None and found != generation:
        raise ConflictError(f"writing {path}: another process has written this file")


def _lock(descriptor: int, *, root: Path) -> None:
    """Take the lock. Raises StoreError if another process holds it for too long."""
    ends_s = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > ends_s:
                raise StoreError(f"{root}: another process holds its lock") from None
        time.sleep(_LOOK_S)
