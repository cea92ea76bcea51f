"""Opens compressed files for reading.

The compression is detected by the first bytes of a file instead of the file's name.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

from payload.core.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from _typeshed import WriteableBuffer

Compression = Literal["gzip", "bzip2", "xz", "zstd"]
_MAGIC: tuple[tuple[bytes, Compression], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)


def compression_of(path: Path) -> Compression | None:
    """Return the compression of a file, or None."""
    with path.open("rb") as file:
        start = file.read(10)
    if start.startswith(b"BZh") and start[4:] != b"1AY&SY":
        return None  # a text
    return next((name for magic, name in _MAGIC if start.startswith(magic)), None)


def open_decompressed(path: Path) -> BinaryIO:
    """Open a file for reading. Reading returns the decompressed bytes."""
    compression = compression_of(path)
    if compression == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if compression == "bzip2":
        return cast(BinaryIO, bz2.open(path, "rb"))
    if compression == "xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    if compression == "zstd":
        return cast(BinaryIO, io.BufferedReader(_ZstdFile(path)))
    return path.open("rb")


@contextmanager
def convert_errors(path: Path) -> Iterator[None]:
    """Convert the errors of a damaged compressed file to a DataError."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{path}: damaged {_name(path)} file: {error}. Copy the file again."
        ) from None
    except OSError as error:
        # bz2 and zstd raise OSError without a number.
        if error.errno is not None or compression_of(path) not in ("bzip2", "zstd"):
            raise
        raise DataError(
            f"{path}: damaged {_name(path)} file: {error}. Copy the file again."
        ) from None


def _name(path: Path) -> str:
    return compression_of(path) or "compressed"


class _ZstdFile(io.RawIOBase):
    """The decompressed bytes of a zstd file. Reading can skip bytes, but not move backwards."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._file: pa.CompressedInputStream = pa.CompressedInputStream(str(path), "zstd")
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET and offset >= self._offset
        while self._offset < offset:
            left = min(2**20, offset - self._offset)
            if not self._read(left):
                break
        return self._offset

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        content = self._read(len(view))
        view[: len(content)] = content
        return len(content)

    def _read(self, size: int) -> bytes:
        content: bytes = self._file.read(size)
        self._offset += len(content)
        return content

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
