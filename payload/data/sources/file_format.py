"""Detects the format of a file from its content: rows, plain text, or an unsupported format."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from payload.core.errors import DataError
from payload.data.sources.compressed import (
    Compression,
    compression_of,
    convert_errors,
    open_decompressed,
)
from payload.data.sources.documents import MIB
from payload.data.sources.json_values import WRAPPED

FileKind = Literal["jsonl", "json", "csv", "parquet", "arrow", "text"]
ROW_KINDS: tuple[FileKind, ...] = ("jsonl", "json", "csv", "parquet", "arrow")
_SAMPLE_BYTES = MIB
_CSV_SUFFIXES = (".csv", ".tsv")
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
_RECORDS = 200
"""Number of records that are compared to find the delimiter."""
_FEWEST_RECORDS = 3
"""Minimum number of records, including the header, from which a file without a table's suffix can
count as a table."""
_SEPARATOR_LINE = re.compile(r"sep=(.)\r?\n")
"""Matches the first line of a file in which Excel declares the delimiter."""
_ROW_OBJECT = re.compile(r'\s*\{\s*("|\}\s*$)')
_ARRAY = re.compile(r"\s*\[\s*(\{|\]\s*$)")
_TABLES: dict[FileKind, tuple[bytes, ...]] = {
    "parquet": (b"PAR1",),
    "arrow": (b"ARROW1", b"\xff\xff\xff\xff"),
}
"""First bytes of the binary table formats. Arrow has two formats, one for files and one for
streams."""
_BINARY: tuple[tuple[int, bytes, str, str], ...] = (
    (
        0,
        b"PK\x03\x04",
        "a zip file, such as .xlsx or .docx",
        "Save a table as CSV, or unpack the file",
    ),
    (0, b"%PDF", "a PDF", "Convert the file to text"),
    (0, b"\xd0\xcf\x11\xe0", "a file of an older Office program", "Save a table as CSV"),
    (0, b"SQLite format 3", "an SQLite database", "Export the table as CSV"),
    (0, b"\x89HDF", "an HDF5 file", "Convert the file to parquet"),
    (0, b"FEA1", "a file of Feather version 1", "Convert the file to parquet"),
    (0, b"Obj\x01", "an Avro file", "Convert the file to parquet"),
    (0, b"\x93NUMPY", "a NumPy file", "Convert the file to parquet"),
    (0, b"7z\xbc\xaf", "a 7z archive", "Unpack the file"),
    (257, b"ustar", "a tar archive", "Unpack the file"),
    (0, b"\x89PNG", "an image", "Only text can be trained: leave out this file"),
    (0, b"\xff\xd8\xff", "an image", "Only text can be trained: leave out this file"),
)
"""Formats that are not supported. An entry has the offset of the identifying bytes, the bytes, the
format's name and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """The format of a file."""

    kind: FileKind
    compression: Compression | None = None
    encoding: str = "utf-8"
    """Python's name of the encoding of a text file."""
    delimiter: str = ","
    """Delimiter of a table."""

    def encoding_name(self) -> str:
        """Return the usual name of the encoding."""
        return _ENCODING_NAMES[self.encoding]

    def describe(self) -> str:
        """Return a description of the format, for messages."""
        words = {
            "jsonl": "JSON Lines",
            "json": "JSON",
            "csv": f"CSV, delimiter {DELIMITERS.get(self.delimiter, repr(self.delimiter))}",
            "parquet": "parquet",
            "arrow": "Arrow",
            "text": "plain text",
        }[self.kind]
        if self.kind not in ("parquet", "arrow"):
            words += f", {self.encoding_name()}"
        return words if self.compression is None else f"{words}, compressed with {self.compression}"


_ENCODING_NAMES = {
    "utf-8": "UTF-8",
    "utf-8-sig": "UTF-8 with BOM",
    "utf-16": "UTF-16",
    "cp1252": "Windows-1252 (Latin-1)",
    "latin-1": "Latin-1",
}


def detect_format(path: Path, *, is_table: bool = False) -> FileFormat:
    """Return the format of a file. With `is_table`, any text is read as a table.

    Raises DataError for an unsupported binary format.
    """
    compression = compression_of(path)
    with convert_errors(path), open_decompressed(path) as file:
        start = file.read(_SAMPLE_BYTES)
    for kind, magics in _TABLES.items():
        if start.startswith(magics):
            if compression is not None:
                raise DataError(f"{path}: {kind} compressed with {compression}. Decompress it.")
            return FileFormat(kind=kind)
    for offset, magic, name, fix in _BINARY:
        if start.startswith(magic, offset):
            raise DataError(
                f"{path}: {name}, which is not supported. {fix}. Supported: JSON, JSON Lines, CSV, "
                "parquet, Arrow and plain text."
            )
    encoding = _encoding(path, start)
    if b"\0" in start and encoding != "utf-16":
        raise DataError(
            f"{path}: a binary file of an unknown format. Supported: JSON, JSON Lines, CSV, "
            "parquet, Arrow and plain text."
        )
    text = codecs.getincrementaldecoder(encoding)("replace").decode(start)
    kind, delimiter = _kind(path, text, is_table=is_table)
    if kind == "jsonl" and encoding == "utf-16":
        kind = "json"  # in UTF-16, bytes cannot be split into lines
    if kind in ("csv", "text"):
        encoding = _encoding_of_all(path, encoding)
    return FileFormat(kind=kind, compression=compression, encoding=encoding, delimiter=delimiter)


def _encoding(path: Path, start: bytes) -> str:
    if start.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return "utf-8"


def _encoding_of_all(path: Path, encoding: str) -> str:
    """Return the first encoding that fits the whole file: `encoding`, Windows-1252 or Latin-1."""
    for tried in (encoding, "cp1252"):
        decoder = codecs.getincrementaldecoder(tried)()
        try:
            with convert_errors(path), open_decompressed(path) as file:
                while chunk := file.read(MIB):
                    decoder.decode(chunk)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            continue
        return tried
    return "latin-1"


def _kind(path: Path, text: str, *, is_table: bool) -> tuple[FileKind, str]:
    """Return the kind of a text file and its delimiter."""
    suffixes = [each.lower() for each in path.suffixes]
    has_table_suffix = any(each in _CSV_SUFFIXES for each in suffixes)
    if not is_table:
        if _ARRAY.match(text) or WRAPPED.match(text):
            return "json", ","
        if _ROW_OBJECT.match(text):
            first, newline, _ = text.lstrip().partition("\n")
            is_whole = _is_object(first) or (not newline and len(text) >= _SAMPLE_BYTES // 4)
            spans_lines = not is_whole and _spans_lines(text)
            return ("json" if spans_lines else "jsonl"), ","
        if any(each in (".jsonl", ".ndjson", ".jsonlines") for each in suffixes):
            return "jsonl", ","
        if ".json" in suffixes:
            return "json", ","
    declared = _SEPARATOR_LINE.match(text)
    if declared:
        return "csv", declared[1]
    delimiter = _delimiter(text, is_sure=is_table or has_table_suffix)
    if delimiter is None:
        return "text", ","
    return "csv", delimiter


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _spans_lines(text: str) -> bool:
    """Return True if the text begins with a JSON value that spans several lines.

    The text can end before the value is complete.
    """
    decoder = json.JSONDecoder()
    place = len(text) - len(text.lstrip())
    try:
        _, end = decoder.raw_decode(text, place)
    except RecursionError:
        return False
    except json.JSONDecodeError as error:
        # The value may continue after the end of the sample, or have a fault in a later line.
        return error.pos >= len(text) - 1 or "\n" in text[place : error.pos]
    return "\n" in text[place:end]


def _delimiter(text: str, *, is_sure: bool) -> str | None:
    """Return the delimiter of a table, or None if the text does not look like one.

    Chooses the delimiter with which most records have as many fields as the header. Without the
    suffix of a table, the header must consist of short names, and every record must have as many
    fields.
    """
    best: tuple[float, int, str] = (0.0, 0, "")
    for delimiter in DELIMITERS:
        records = _records(text, delimiter)
        if not records:
            continue
        header, sizes = records[0], Counter(map(len, records))
        if len(header) < 2 or len(set(header)) < len(header) or not all(map(str.strip, header)):
            continue
        share = sizes[len(header)] / len(records)
        if not is_sure and (share < 1 or len(records) < _FEWEST_RECORDS or not _is_named(header)):
            continue
        best = max(best, (share, len(header), delimiter))
    return best[2] or ("," if is_sure else None)


def _is_named(header: Sequence[str]) -> bool:
    """Return True if the fields are as short as column names. Parts of a sentence are longer."""
    return all(len(name) <= 40 and len(name.split()) <= 3 for name in header)


def _records(text: str, delimiter: str) -> list[list[str]]:
    """Return the first records of a text, without a last record that may be incomplete."""
    found: list[list[str]] = []
    try:
        for record in csv.reader(text.splitlines(keepends=True), delimiter=delimiter):
            if record:
                found.append(record)
            if len(found) >= _RECORDS:
                return found
    except csv.Error:
        pass
    # The sample may end within a record.
    return found[:-1] if len(text) >= _SAMPLE_BYTES // 4 else found
