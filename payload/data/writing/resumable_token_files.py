"""Files that are being written, and the journal file from which an interrupted run resumes.

The output is written to *.partial files. After every shard, the files are flushed to disk. Then a
line is appended to the journal. This line has the lengths and counts of the files, and the cursor
of the source. A resumed run truncates the files to the last complete line of the journal and
continues, so the result is the same as without interruption. Finally the files are renamed, and
meta.json is written last. Conversations are packed after all are tokenized. Until then, the samples
are in separate files, which are removed at the end.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError
from payload.core.files import fsync_folder
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import no_follow
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.data.reading.range_hashes import RangeHasher
from payload.data.sources.documents import MIB, Cursor
from payload.formats.data_folder import META_NAME, TRAIN_NAME, VAL_NAME, DataFile, task_files

JOURNAL_NAME = ".prepare.jsonl"
LOCK_NAME = ".prepare.lock"
SAMPLES_NAME = "samples.bin"
INDEX_NAME = "samples.index.bin"
GROUPS_NAME = "samples.groups.jsonl"
SKETCHES_NAME = "samples.sketches.bin"
SAMPLE_NAMES = (SAMPLES_NAME, INDEX_NAME, GROUPS_NAME, SKETCHES_NAME)
"""Files of the samples, which the run removes when it is complete."""
_NAMES = (*sorted(task_files()), *SAMPLE_NAMES)
"""Files that a run may write as .partial files."""


@dataclass(slots=True, kw_only=True)
class Totals:
    """Counts of the output so far."""

    train_tokens: int = 0
    val_tokens: int = 0
    train_documents: int = 0
    val_documents: int = 0
    skipped_documents: int = 0
    skipped_examples: list[str] = field(default_factory=list)
    text_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens in both files."""
        return self.train_tokens + self.val_tokens

    @property
    def documents(self) -> int:
        """Number of documents in both files."""
        return self.train_documents + self.val_documents


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """One line of the journal, with the counts of the output after a shard."""

    cursor: dict[str, Any]
    totals: Totals
    files: dict[str, DataFile]
    is_complete: bool
    in_document: bool = False
    """True if the next text continues a document."""


class WriteFailedError(DataError):
    """The output cannot be written, for example because the disk is full."""


class ResumableTokenFiles:
    """The growing output of one run in `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        encoder: str,
        names: Sequence[str] = (TRAIN_NAME, VAL_NAME),
    ) -> None:
        self.folder = folder
        self.totals = Totals()
        self.cursor: Cursor = {}
        self.is_complete = False
        self.in_document = False
        """True if the next text continues a document."""
        self.has_shards = False
        """True if a later run can resume from the disk."""
        self.encoder = encoder
        """Encoder of the run. If a run fell back to `tiktoken`, it also resumes with `tiktoken`."""
        self._fingerprint = fingerprint
        self._names = names
        self._files: dict[str, GrowingFile] = {}
        self._journal: BinaryIO | None = None
        self._uncommitted_bytes = 0

    def start(self) -> None:
        """Start from scratch, and remove the output of an earlier unfinished run."""
        self.close()
        self.totals, self.cursor = Totals(), {}
        self.is_complete = self.has_shards = self.in_document = False
        with writing_to(self.folder):
            self._journal = _open(self.folder / JOURNAL_NAME, "wb")
            self._write_line({"fingerprint": self._fingerprint, "encoder": self.encoder})
            for name in self._names:
                self._files[name] = GrowingFile(self.folder, name, keep_bytes=0)

    def resume(self) -> bool:
        """Resume from the last finished shard. Return False without a shard. Raises DataError."""
        lines = _read_journal(self.folder / JOURNAL_NAME)
        last = _shard(lines[-1]) if len(lines) > 1 else None
        if last is None or lines[0].get("fingerprint") != self._fingerprint:
            return False
        self.encoder = str(lines[0].get("encoder"))
        self.totals, self.cursor = last.totals, dict(last.cursor)
        self.is_complete, self.has_shards = last.is_complete, True
        self.in_document = last.in_document
        if not self.is_complete:
            for name, entry in last.files.items():
                file = self._files[name] = GrowingFile(self.folder, name, keep_bytes=entry.bytes)
                if file.describe(with_ranges=False) != entry:
                    raise DataError(
                        f"{partial_path(self.folder, name)}: its SHA-256 differs from the one in "
                        f"{JOURNAL_NAME}. Start again with --force."
                    )
        self._journal = _cut_journal(self.folder / JOURNAL_NAME, lines)
        return True

    def append(self, name: str, values: npt.NDArray[np.generic]) -> None:
        """Append values to one of the files."""
        with writing_to(self.folder):
            self._files[name].append(values)
        self._uncommitted_bytes += values.nbytes

    def is_due(self, *, shard_bytes: int) -> bool:
        """Return True if there is enough new output to finish a shard."""
        return self._uncommitted_bytes >= shard_bytes

    def commit(self, cursor: Cursor, *, is_complete: bool = False) -> None:
        """Flush the output to disk, then record it in the journal."""
        with writing_to(self.folder):
            for file in self._files.values():
                file.sync()
            self._write_line(
                {
                    "cursor": cursor,
                    "totals": asdict(self.totals),
                    # The hashes of ranges are needed only in the last line, and can be computed
                    # from the files.
                    "files": {
                        name: asdict(file.describe(with_ranges=is_complete))
                        for name, file in self._files.items()
                    },
                    "is_complete": is_complete,
                    "in_document": self.in_document,
                }
            )
        self.cursor, self._uncommitted_bytes = cursor, 0
        self.is_complete, self.has_shards = is_complete, True

    def publish(self) -> dict[str, DataFile]:
        """Rename the files to their final names, after `commit(is_complete=True)`.

        If the run is killed during this call, a resumed run calls this again. Files that were
        already renamed stay.
        """
        last = _shard(_read_journal(self.folder / JOURNAL_NAME)[-1])
        assert last is not None, "commit() wrote it"
        with writing_to(self.folder):
            (self.folder / META_NAME).unlink(missing_ok=True)
            for name in last.files:
                partial = partial_path(self.folder, name)
                if partial.exists():
                    partial.replace(self.folder / name)
            fsync_folder(self.folder)
        return last.files

    def discard(self) -> None:
        """Remove the journal and the unfinished files."""
        self.close()
        remove_unfinished(self.folder)
        self.has_shards = False

    def close(self) -> None:
        """Close all files without removing them."""
        for file in self._files.values():
            file.close()
        self._files = {}
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _write_line(self, value: dict[str, Any]) -> None:
        assert self._journal is not None, "start() or resume() comes first"
        self._journal.write(json.dumps(value).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())


class GrowingFile:
    """One .partial file, and the hash of its content."""

    def __init__(self, folder: Path, name: str, *, keep_bytes: int) -> None:
        path = partial_path(folder, name)
        if keep_bytes and not path.exists():
            raise DataError(
                f"{path}: missing, but {JOURNAL_NAME} lists it. Start again with --force."
            )
        self._hash, self._ranges = hashlib.sha256(), RangeHasher()
        self.size = keep_bytes
        self._file = _open(path, "r+b" if keep_bytes else "wb")
        if keep_bytes:
            self._cut(path, keep_bytes)

    def _cut(self, path: Path, keep_bytes: int) -> None:
        # Checked first, because `truncate` fills a shorter file with zeros.
        if (size := path.stat().st_size) < keep_bytes:
            raise DataError(
                f"{path}: the file has {size:,} bytes, but {JOURNAL_NAME} lists {keep_bytes:,}. "
                "Start again with --force."
            )
        self._file.truncate(keep_bytes)
        while chunk := self._file.read(8 * MIB):
            self._update(chunk)

    def append(self, values: npt.NDArray[np.generic]) -> None:
        """Append values."""
        content = np.ascontiguousarray(values).view(np.uint8).data
        self._file.write(content)
        self._update(content)
        self.size += values.nbytes

    def _update(self, content: memoryview | bytes) -> None:
        self._hash.update(content)
        self._ranges.update(content)

    def sync(self) -> None:
        """Flush the content to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def describe(self, *, with_ranges: bool) -> DataFile:
        """Return the size and hashes of the content."""
        ranges = self._ranges.hashes() if with_ranges else ()
        return DataFile(bytes=self.size, sha256=self._hash.hexdigest(), range_sha256=ranges)

    def close(self) -> None:
        """Close the file."""
        # After a failed write, closing fails as well; commit() has flushed what the journal
        # records.
        with suppress(OSError):
            self._file.close()


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Convert a failed write, for example because the disk is full, to an error with a fix."""
    try:
        yield
    except OSError as error:
        free_mib = shutil.disk_usage(folder).free / MIB
        raise WriteFailedError(
            f"{folder}: {error.strerror or error} while writing, {free_mib:,.1f} MiB free. Fix "
            "the cause and run the same command again, without --force. It resumes from the last "
            "finished shard."
        ) from None


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of `folder`, so that no other `prepare` writes to it.

    If another `prepare` holds the lock, waits if `wait` is True, and otherwise raises DataError.
    Also raises DataError if a file that `prepare` would open is not a regular file.
    """
    path = folder / LOCK_NAME
    partials = (partial_path(folder, name) for name in _NAMES)
    for each in (path, folder / JOURNAL_NAME, *partials):
        _require_own(each)
    while True:
        file = _open(path, "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise DataError(
                f"{folder}: another prepare is writing to this folder. Wait with --wait, or choose "
                "another --out."
            ) from None
        # The previous holder may have removed the file between our open and our lock.
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            break
        file.close()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def unfinished_fingerprint(folder: Path) -> str | None:
    """Return the fingerprint of the unfinished run in `folder`; None before its first shard."""
    lines = _read_journal(folder / JOURNAL_NAME)
    return lines[0].get("fingerprint") if len(lines) > 1 else None


def remove_unfinished(folder: Path) -> None:
    """Remove the journal and the .partial files."""
    for name in _NAMES:
        partial_path(folder, name).unlink(missing_ok=True)
    (folder / JOURNAL_NAME).unlink(missing_ok=True)


def _require_own(path: Path) -> None:
    """Raise DataError if a file exists and is not a regular file.

    Writing through a link would change the target of the link.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise DataError(
                f"{path}: not a regular file, or a link, so prepare does not write to it. Remove "
                "this path, or choose another --out."
            )


def _open(path: Path, mode: Literal["wb", "r+b"]) -> BinaryIO:
    return open(path, mode, opener=no_follow)


def partial_path(folder: Path, name: str) -> Path:
    """Return the path of a file that is still being written."""
    return folder / f"{name}.partial"


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal up to the first truncated or damaged line."""
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return []
    lines: list[dict[str, Any]] = []
    for line in content.splitlines(keepends=True):
        try:
            value = parse_json(line, where=str(path), error=DataError)
        except DataError:
            break
        is_whole = line.endswith(b"\n") and isinstance(value, dict)
        if not is_whole or (lines and _shard(value) is None):
            break
        lines.append(value)
    return lines


def _shard(line: dict[str, Any]) -> _Shard | None:
    """Return the shard that a line of the journal describes, or None for a damaged line."""
    try:
        shard = build(_Shard, line, where=JOURNAL_NAME, error=DataError)
    except DataError:
        return None
    return shard if set(shard.files) <= set(_NAMES) else None


def _cut_journal(path: Path, lines: list[dict[str, Any]]) -> BinaryIO:
    """Truncate the journal after `lines`, and open it for appending."""
    whole = b"".join(path.read_bytes().splitlines(keepends=True)[: len(lines)])
    file = _open(path, "r+b")
    file.truncate(len(whole))
    file.seek(len(whole))
    return file
