"""JSON Lines: one object a line, its text in one key. `.gz` files are read as they are."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from payload.core.errors import DataError
from payload.core.printable_text import shown
from payload.data.sources.documents import MIB, Batch, Batcher, Cursor, Survey, read_pieces
from payload.data.sources.request import SourceRequest
from payload.data.sources.text_files import ColumnFiles, missing_shards

LINE_BYTES = 64 * MIB
"""A longer line is bad: JSON has to be parsed whole, at up to four bytes a character."""
_KEYS_SHOWN = 5


class JsonlSource(ColumnFiles):
    """Every line that is not blank is a document."""

    def __init__(self, given: Sequence[Path], request: SourceRequest) -> None:
        super().__init__("jsonl", given, glob="*.jsonl*", request=request)

    def survey(self) -> Survey:
        """Count the lines; a compressed file is not opened for that."""
        size = sum(path.stat().st_size for path in self._files)
        if any(_is_compressed(path) for path in self._files):
            return Survey(documents=None, text_bytes=None, note=missing_shards(self._files))
        note = missing_shards(self._files)
        return Survey(documents=sum(map(_count_lines, self._files)), text_bytes=size, note=note)

    def batches(self, cursor: Cursor) -> Iterator[Batch]:
        """Line after line."""
        batcher = Batcher(skip_bad=self._skip_bad)
        number, line_number = cursor.get("document", 0), cursor.get("line", 0)
        offset = cursor.get("offset", 0)
        for index in range(cursor.get("file", 0), len(self._files)):
            path = self._files[index]
            with open_jsonl(path) as file, damaged_named(path):
                file.seek(offset)
                for line, read in read_lines(file):
                    line_number += 1
                    offset += read
                    if line.isspace():
                        continue
                    self._add(line, batcher, number=number, where=f"{path} line {line_number}")
                    number += 1
                    if batcher.is_full:
                        yield batcher.take(
                            {"file": index, "offset": offset, "line": line_number}
                            | {"document": number}
                        )
            line_number, offset = 0, 0
        yield batcher.take({"file": len(self._files), "document": number})

    def _add(self, line: bytes, batcher: Batcher, *, number: int, where: str) -> None:
        """One document, or its complaint."""
        text = _text_of(line, self._column)
        if text is None:
            batcher.skip(f"{where}: {_complaint_about(line, self._column)}", number=number)
            return
        if len(text) <= LINE_BYTES // 8:
            batcher.add(text, number=number)
            return
        for piece, is_last in read_pieces(io.BytesIO(text)):
            batcher.add(piece, number=number, is_last=is_last)


def _text_of(line: bytes, column: str) -> bytes | None:
    """The document of one line, or None when there is none."""
    if len(line) > LINE_BYTES:
        return None
    try:
        text = json.loads(line, object_pairs_hook=_object)[column]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(text, str):
        return None
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        # A lone surrogate from a \\u escape; replaced as tiktoken does it.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")


def _complaint_about(line: bytes, column: str) -> str:
    value = parse_line(line, example=f"{{{json.dumps(column)}: ...}}")
    if isinstance(value, str):
        return value
    if column not in value:
        keys = ", ".join(shown(key) for key in list(value)[:_KEYS_SHOWN]) or "none"
        return f"no key {column!r}; keys there: {keys}. Choose one with --text-column."
    return f"{column!r} is {type(value[column]).__name__}, not text."


def parse_line(line: bytes, *, example: str) -> dict[str, Any] | str:
    """Return a line's object, or the complaint about it; `example` is an object as it should be."""
    if len(line) > LINE_BYTES:
        return f"longer than {LINE_BYTES // MIB} MiB."
    try:
        value = json.loads(line.rstrip(b"\r\n"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        return f"byte {error.start} of the line (0x{line[error.start]:02x}) is not UTF-8."
    except RecursionError:
        return "JSON nested too deep."
    except ValueError as error:
        place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return f"not JSON: {getattr(error, 'msg', error)}{place}."
    if not isinstance(value, dict):
        return f"not an object but {type(value).__name__}; write {example}."
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a key that stands there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(name)} stands there twice")
    return found


def read_lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Lines and their bytes in the file; of one above LINE_BYTES only that much and a byte more."""
    while line := file.readline(LINE_BYTES + 1):
        read = len(line)
        is_whole = read <= LINE_BYTES or line.endswith(b"\n")
        while not is_whole and (rest := file.readline(MIB)):
            read += len(rest)
            is_whole = rest.endswith(b"\n")
        yield line, read


@contextmanager
def damaged_named(path: Path) -> Iterator[None]:
    """Turn what reading a damaged .gz raises into a DataError."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file: {error}. Copy it again.") from None


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line, _ in read_lines(file) if not line.isspace())


def _is_compressed(path: Path) -> bool:
    return path.suffix == ".gz"


def open_jsonl(path: Path) -> BinaryIO:
    """Open for reading, decompressed."""
    return cast(BinaryIO, gzip.open(path, "rb")) if _is_compressed(path) else path.open("rb")
