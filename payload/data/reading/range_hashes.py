"""Hashes of a token file's ranges. Training checks each range before it first uses the range."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from payload.core.errors import DataError
from payload.core.file_hash import sha256_of
from payload.formats.data_folder import HASH_DIGITS, RANGE_BYTES, DataFile
from payload.formats.prepare_hints import prepare_again_hint


class RangeHasher:
    """Hashes each range of a file while the file grows."""

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._last = hashlib.sha256()
        self._last_bytes = 0

    def update(self, content: memoryview | bytes) -> None:
        """Add the next bytes of the file."""
        start = 0
        while start < len(content):
            part = content[start : start + RANGE_BYTES - self._last_bytes]
            self._last.update(part)
            self._last_bytes += len(part)
            start += len(part)
            if self._last_bytes == RANGE_BYTES:
                self._whole.append(_hash_digits(self._last))
                self._last, self._last_bytes = hashlib.sha256(), 0

    def hashes(self) -> tuple[str, ...]:
        """Return the hash of each range so far, including a shorter last range."""
        return (*self._whole, *([_hash_digits(self._last)] if self._last_bytes else []))


class RangeCheck:
    """Compares each range of one token file with meta.json before the range is first used.

    After the file has been modified, all its ranges are compared again.
    """

    def __init__(
        self, path: Path, *, size_bytes: int, hashes: tuple[str, ...], source: str
    ) -> None:
        """Open the file. Errors name `source`. Raises DataError if the file cannot be opened."""
        self.path = path
        self._size_bytes = size_bytes
        self._hashes = hashes
        self._source = source
        self._is_checked = bytearray(len(hashes))
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}.") from None
        self._changed_ns = self._stat().st_mtime_ns

    def require(self, spans: list[tuple[int, int]]) -> None:
        """Check the ranges that contain these byte spans.

        A span is (start, end). Raises DataError.
        """
        found = self._stat()
        if found.st_mtime_ns != self._changed_ns:
            self._changed_ns = found.st_mtime_ns
            self._is_checked = bytearray(len(self._hashes))
        # Reading mapped memory beyond the end of a truncated file would end the process with
        # SIGBUS.
        if found.st_size != self._size_bytes:
            raise self._damage_error(
                f"{found.st_size:,} bytes; meta.json records {self._size_bytes:,}"
            )
        for start, end in spans:
            for number in self._unchecked(start, end):
                self._check(number)

    def extended(self, start: int, end: int) -> tuple[int, int]:
        """Return (start, end) in bytes, extended to the borders of all ranges that are not checked
        yet.

        An unchecked range must be read whole, because its hash covers the whole range.
        """
        numbers = self._unchecked(start, end)
        if not numbers:
            return start, end
        first, last = numbers[0] * RANGE_BYTES, (numbers[-1] + 1) * RANGE_BYTES
        return min(start, first), max(end, min(last, self._size_bytes))

    def _unchecked(self, start: int, end: int) -> list[int]:
        first, last = start // RANGE_BYTES, (end - 1) // RANGE_BYTES
        return [number for number in range(first, last + 1) if not self._is_checked[number]]

    def _check(self, number: int) -> None:
        start = number * RANGE_BYTES
        size = min(RANGE_BYTES, self._size_bytes - start)
        try:
            content = os.pread(self._file.fileno(), size, start)
        except OSError as error:
            raise self._damage_error(
                f"cannot be read at byte {start:,} ({error.strerror})"
            ) from None
        if _hash_digits(hashlib.sha256(content)) != self._hashes[number]:
            raise self._damage_error(
                f"the hash of bytes {start:,} to {start + size - 1:,} differs from the one in "
                "meta.json"
            )
        self._is_checked[number] = 1

    def _stat(self) -> os.stat_result:
        return os.fstat(self._file.fileno())

    def _damage_error(self, problem: str) -> DataError:
        remedy = prepare_again_hint(self.path.parent, source=self._source)
        return DataError(f"{self.path}: {problem}. The file is damaged. {remedy}")


def open_check(path: Path, file: DataFile, *, source: str) -> RangeCheck | None:
    """Return the check of a file's ranges, or None if the whole file was checked instead.

    The whole file is checked if meta.json has no hashes of the file's ranges. Raises DataError.
    """
    if file.range_sha256:
        return RangeCheck(path, size_bytes=file.bytes, hashes=file.range_sha256, source=source)
    require_content(path, file, source=source)
    return None


def require_content(path: Path, file: DataFile, *, source: str) -> None:
    """Raise DataError if the SHA-256 of the file differs from the SHA-256 in meta.json."""
    try:
        found = sha256_of(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}.") from None
    if found != file.sha256:
        raise DataError(
            f"{path}: its SHA-256 differs from the one in meta.json. "
            f"{prepare_again_hint(path.parent, source=source)}"
        )


def damaged_ranges(found: tuple[str, ...], expected: tuple[str, ...]) -> str:
    """Return text about the ranges that differ: ` (within bytes 0 to 262,143: 1 of 7 ranges)`."""
    numbers = [i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b]
    if not numbers:
        return ""
    first, last = numbers[0] * RANGE_BYTES, (numbers[-1] + 1) * RANGE_BYTES - 1
    return f" (within bytes {first:,} to {last:,}: {len(numbers)} of {len(expected)} ranges)"


def _hash_digits(digest: Any) -> str:
    return str(digest.hexdigest()[:HASH_DIGITS])
