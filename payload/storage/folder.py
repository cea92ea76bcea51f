"""A store in a folder, such as a mounted file system: the same rules as a bucket's."""

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
"""Begins the names of files that are being written, and of the lock."""
_PARTIAL = ".partial"
_LOCK = ".lock"
_MOST_FOLDERS = 8
_FOLDER = os.O_RDONLY | os.O_DIRECTORY


class FolderStore:
    """Files below a folder. A generation is the file's time of change in nanoseconds.

    Others may write there, too: below the folder that a person named, nothing is read or written
    through a symlink, and only regular files are opened.
    """

    def __init__(self, address: StoreAddress) -> None:
        """Nothing is looked at yet."""
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
        """List the groups of the address that this one lies in."""
        return FolderStore(self.address.parent()).groups()

    def put(
        self, name: str, content: BinaryIO, *, size: int, generation: int | None = None
    ) -> StoredObject:
        """Write beside, flush to disk, then rename."""
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
                    raise StoreError(f"writing {path}: {written} bytes came of {size}")
                with self._alone():
                    before = _generation(last, descriptor)
                    _require_generation(before, generation, path)
                    os.replace(partial, last, src_dir_fd=descriptor, dst_dir_fd=descriptor)
                    if _generation(last, descriptor) <= before:
                        # A coarse clock must not give two contents one generation.
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
            # What is read counts: the file may grow meanwhile.
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
        """Remove a file, and the folders that are empty without it."""
        folder, _, last = self._checked(name).rpartition("/")
        path = self._root / name
        with self._plainly(f"removing {path}"):
            try:
                with self._folder(folder) as descriptor:
                    if _generation(last, descriptor) == ABSENT:
                        return
                    with self._alone():
                        there = _generation(last, descriptor)
                        if there != ABSENT:
                            _require_generation(there, generation, path)
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
        """Remove the files of writes that never ended."""
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
            raise StoreError(f"{self.address}: {name!r} is no object's name")
        return name

    @contextmanager
    def _folder(self, name: str, *, make: bool = False) -> Iterator[int]:
        """Open a folder below the address without following a symlink; `make` it where missing.

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
                # A pipe must not hold us up.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                opened = os.open(last, flags, dir_fd=descriptor)
            except OSError as error:
                raise _refused(error, path) from None
            with os.fdopen(opened, "rb") as file:
                if not stat.S_ISREG(os.fstat(opened).st_mode):
                    raise StoreRefusedError(f"{path} is no regular file. Move it away.")
                yield file

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the store's lock: a file system has no writes that depend on a generation."""
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
        """Turn what the file system refuses into our errors."""
        try:
            yield
        except FileNotFoundError as error:
            raise MissingObjectError(f"{what}: {error.filename} is not there") from None
        except OSError as error:
            words = f"{what}: {error.strerror} ({error.filename or self._root})"
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
                raise StoreRefusedError(
                    f"{words}. Name a folder in storage.results that this user can write."
                ) from None
            raise StoreError(words) from None


def _too_large(path: Path, most_bytes: int) -> TooLargeError:
    return TooLargeError(f"{path}: it has more than {most_bytes:,} bytes")


def _refused(error: OSError, path: Path) -> OSError | StoreRefusedError:
    """Return what to raise for a part of a store that could not be opened."""
    if path.is_symlink():
        return StoreRefusedError(
            f"{path} is a symlink: a store is neither read nor written through one. Move it away."
        )
    return OSError(error.errno, error.strerror, str(path))


def _files(descriptor: int, *, within: PurePosixPath) -> Iterator[StoredObject]:
    """Yield the regular files below an open folder, but hidden ones.

    A folder that cannot be read is no run's, such as a file system's lost+found; nor is one that
    lies deeper than a run's.
    """
    if len(within.parts) > _MOST_FOLDERS:
        return
    with os.scandir(descriptor) as entries:
        for each in entries:
            if each.name.startswith(_HIDDEN):
                continue
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
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


def _require_generation(there: int, generation: int | None, path: Path) -> None:
    if generation is not None and there != generation:
        raise ConflictError(f"writing {path}: somebody else wrote it meanwhile")


def _lock(descriptor: int, *, root: Path) -> None:
    """Raises StoreError where another process keeps the lock: one that hangs would hang all."""
    ends_s = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > ends_s:
                raise StoreError(f"{root}: another process keeps its lock") from None
        time.sleep(_LOOK_S)
