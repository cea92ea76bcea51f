"""JSON Lines: one object per line, with the text under one key. Files may be compressed."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from payload.core.errors import DataError
from payload.core.printable_text import shown
from payload.data.sources.compressed import compression_of, convert_errors, open_decompressed
from payload.data.sources.documents import MIB, Batch, Batcher, Cursor, Survey, read_pieces
from payload.data.sources.source_flags import SourceRequest
from payload.data.sources.split import FileSplit
from payload.data.sources.split_columns import split_of_row
from payload.data.sources.text_files import ColumnFiles

LINE_BYTES = 64 * MIB
"""Limit on the size of a line. A line is parsed as a whole, which needs up to four bytes per
character."""
_KEYS_SHOWN = 5


class JsonlSource(ColumnFiles):
    """Documents of JSON Lines files. Every line that is not blank is a document."""

    def __init__(self, given: Sequence[Path], request: SourceRequest) -> None:
        super().__init__("jsonl", given, glob="*.jsonl*", request=request)

    def survey(self) -> Survey:
        """Count the lines. Compressed files are only counted if file names declare a split."""
        size = sum(path.stat().st_size for path in self._files)
        if self.splits.valid:
            first_val = sum(map(_count_lines, self.splits.train))
            documents = first_val + sum(map(_count_lines, self.splits.valid))
            split = FileSplit.of(first_val=first_val, documents=documents)
            text_bytes = None if any(map(compression_of, self._files)) else size
            return Survey(documents=documents, text_bytes=text_bytes, split=split, note=self.note())
        if any(compression_of(path) for path in self._files):
            return Survey(documents=None, text_bytes=None, note=self.note())
        documents = sum(map(_count_lines, self._files))
        return Survey(documents=documents, text_bytes=size, note=self.note())

    def batches(self, cursor: Cursor) -> Iterator[Batch]:
        """Yield the lines as documents."""
        batcher = Batcher(skip_bad=self._skip_bad)
        number, line_number = cursor.get("document", 0), cursor.get("line", 0)
        offset = cursor.get("offset", 0)
        for index in range(cursor.get("file", 0), len(self._files)):
            path = self._files[index]
            batcher.begin_file(index, number=number)
            with open_decompressed(path) as file, convert_errors(path):
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
        """Add one document, or skip it with a message."""
        text = _parse_text(line, self._column, where)
        if text is None:
            batcher.skip(f"{where}: {_describe_fault(line, self._column)}", number=number)
            return
        if len(text) <= LINE_BYTES // 8:
            batcher.add(text, number=number)
            return
        for piece, is_last in read_pieces(io.BytesIO(text)):
            batcher.add(piece, number=number, is_last=is_last)


def _parse_text(line: bytes, column: str, where: str) -> bytes | None:
    """Return the text of one line, or None for a bad line.

    Raises DataError for a line with a key that declares a split. This source is only for files
    without this key in the first line.
    """
    if len(line) > LINE_BYTES:
        return None
    try:
        row = json.loads(line, object_pairs_hook=object_of_pairs)
        text = row[column]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    found = split_of_row(row)
    if found is not None and found[1] != "train":
        raise DataError(
            f"{where}: {found[0]} = {shown(row[found[0]])}, but the first row of the source lacks "
            f"this key. Add the key to the first row, or ignore it with --ignore-key {found[0]}."
        )
    if not isinstance(text, str):
        return None
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        # A lone surrogate from a \\u escape; replaced as tiktoken does.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")


def _describe_fault(line: bytes, column: str) -> str:
    value = parse_line(line, example=f"{{{json.dumps(column)}: ...}}")
    if isinstance(value, str):
        return value
    if column not in value:
        keys = ", ".join(shown(key) for key in list(value)[:_KEYS_SHOWN]) or "none"
        return f"no key {column!r}; its keys: {keys}. Choose one with --text-column."
    return f"{column!r} is {type(value[column]).__name__}, not text."


def parse_line(line: bytes, *, example: str) -> dict[str, Any] | str:
    """Return the object of a line, or an error message; `example` is a valid object."""
    if len(line) > LINE_BYTES:
        return f"longer than {LINE_BYTES // MIB} MiB."
    try:
        # json.loads would make a decoder for each line.
        line = line.rstrip(b"\r\n")
        value = _DECODER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
    except UnicodeDecodeError as error:
        return f"byte {error.start} of the line (0x{line[error.start]:02x}) is not UTF-8."
    except RecursionError:
        return "the JSON is nested too deeply."
    except ValueError as error:
        place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return f"not JSON: {getattr(error, 'msg', error)}{place}."
    if not isinstance(value, dict):
        return f"not an object but {type(value).__name__}; write {example}."
    return value


def object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a repeated key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(name)} is repeated")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=object_of_pairs)


def read_lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield each line, cut after LINE_BYTES + 1 bytes, and the size of the whole line."""
    while line := file.readline(LINE_BYTES + 1):
        read = len(line)
        is_whole = read <= LINE_BYTES or line.endswith(b"\n")
        while not is_whole and (rest := file.readline(MIB)):
            read += len(rest)
            is_whole = rest.endswith(b"\n")
        yield line, read


def _count_lines(path: Path) -> int:
    with open_decompressed(path) as file, convert_errors(path):
        return sum(1 for line, _ in read_lines(file) if not line.isspace())
