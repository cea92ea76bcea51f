"""A store in a folder, such as a mounted file system: the same rules as a bucket's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from payload.results import fsync_folder
from payload.storage.objects import (
    ABSENT,
    SMALL_BYTES,
    ConflictError,
    MissingObjectError,
    StoredObject,
    StoreError,
    StoreRefusedError,
)
from payload.store_address import StoreAddress

_PART_BYTES = 2**20
_LOCK_S = 30.0
_LOOK_S = 0.02
_HIDDEN = "."
"""Begins the names of files that are being written, and of the lock."""
_PARTIAL = ".partial"


class FolderStore:
    """Files below a folder. A generation is the file's time of change in nanoseconds."""

    def __init__(self, address: StoreAddress) -> None:
        """Nothing is looked at yet."""
        self.address = address
        self._root = Path(address.path)

    def entries(self, prefix: str = "") -> list[StoredObject]:
        """List the files whose names begin with `prefix`."""
        with self._plainly("listing"):
            folder = self._root / prefix.rpartition("/")[0]
            found = []
            for path in sorted(folder.rglob("*")):
                name = path.relative_to(self._root).as_posix()
                hidden = any(part.startswith(_HIDDEN) for part in Path(name).parts)
                if hidden or not name.startswith(prefix):
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    if path.is_file():
                        found.append(self._stored(path))
            return found

    def groups(self) -> list[str]:
        """List the folders of the first level."""
        with self._plainly("listing"):
            if not self._root.is_dir():
                return []
            folders = (path for path in self._root.iterdir() if path.is_dir())
            return sorted(path.name for path in folders if not path.name.startswith(_HIDDEN))

    def siblings(self) -> list[str]:
        """List the groups of the address that this one lies in."""
        return FolderStore(self.address.parent()).groups()

    def put(
        self, name: str, content: BinaryIO, *, size: int, generation: int | None = None
    ) -> StoredObject:
        """Write beside, flush to disk, then rename."""
        path = self._path(name)
        partial = path.with_name(f"{_HIDDEN}{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
        content.seek(0)
        try:
            with self._plainly(f"writing {path}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with partial.open("xb") as file:
                    shutil.copyfileobj(content, file, _PART_BYTES)
                    file.flush()
                    os.fsync(file.fileno())
                    written = file.tell()
                if written != size:
                    raise StoreError(f"writing {path}: {written} bytes came of {size}")
                with self._alone():
                    self._require_generation(path, generation)
                    before = self._generation(path)
                    partial.replace(path)
                    if self._generation(path) <= before:
                        # A coarse clock must not give two contents one generation.
                        os.utime(path, ns=(before + 1, before + 1))
                fsync_folder(path.parent)
                return self._stored(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def read(self, name: str) -> tuple[bytes, int]:
        """Return a small file's content and generation."""
        path = self._path(name)
        with self._plainly(f"reading {path}"), path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size > SMALL_BYTES:
                raise StoreError(f"{path}: {stat.st_size} bytes are too many")
            return file.read(), stat.st_mtime_ns

    def fetch(self, name: str, into: BinaryIO, *, progressed: Callable[[], None]) -> None:
        """Copy a whole file, part by part."""
        path = self._path(name)
        with self._plainly(f"reading {path}"), path.open("rb") as file:
            while part := file.read(_PART_BYTES):
                into.write(part)
                progressed()

    def remove(self, name: str, *, generation: int | None = None) -> None:
        """Remove a file, and the folders that are empty without it."""
        path = self._path(name)
        with self._plainly(f"removing {path}"):
            if not path.exists():
                return
            with self._alone():
                if generation is not None and path.exists():
                    self._require_generation(path, generation)
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for folder in path.parents:
                if folder == self._root:
                    break
                folder.rmdir()

    def tidy(self) -> None:
        """Remove the files of writes that never ended."""
        with self._plainly("removing"):
            for path in self._root.rglob(f"{_HIDDEN}*{_PARTIAL}"):
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if any(part.startswith(_HIDDEN) for part in Path(name).parts) or Path(name).is_absolute():
            raise StoreError(f"{self.address}: {name!r} is no object's name")
        return self._root / name

    def _stored(self, path: Path) -> StoredObject:
        stat = path.stat()
        return StoredObject(
            name=path.relative_to(self._root).as_posix(),
            bytes=stat.st_size,
            generation=stat.st_mtime_ns,
            changed_unix=stat.st_mtime,
        )

    def _generation(self, path: Path) -> int:
        try:
            return path.stat().st_mtime_ns
        except FileNotFoundError:
            return ABSENT

    def _require_generation(self, path: Path, generation: int | None) -> None:
        if generation is not None and self._generation(path) != generation:
            raise ConflictError(f"writing {path}: somebody else wrote it meanwhile")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the store's lock: a file system has no writes that depend on a generation."""
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / f"{_HIDDEN}lock").open("w") as lock:
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
