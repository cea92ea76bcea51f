"""Rows of JSON, CSV, parquet and Arrow files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from payload.core.errors import DataError
from payload.data.rows.rows import Row, Rows
from payload.data.sources.compressed import convert_errors, open_decompressed
from payload.data.sources.file_format import ROW_KINDS, FileFormat, detect_format
from payload.data.sources.json_values import read_objects
from payload.data.sources.jsonl import parse_line, read_lines
from payload.data.sources.source_flags import SourceRequest
from payload.data.sources.text_files import ColumnFiles, missing_shards

GLOBS: dict[str, tuple[str, ...]] = {
    "auto": ("*",),
    "jsonl": ("*.jsonl*", "*.ndjson*", "*.json", "*.json.*"),
    "parquet": ("*.parquet",),
    "csv": ("*.csv", "*.tsv", "*.csv.*", "*.tsv.*"),
}
"""For each kind of source, the patterns of the file names that are read in a folder."""
_EXAMPLE = '{"COLUMN": ...}'
_FIELD_BYTES = 2**26
_DATASETS_FILES = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json")
"""Files that the library `datasets` writes next to the data."""
_NAMES_SHOWN = 5


class FileRows(Rows):
    """Rows of files; the content of each file decides its format."""

    def __init__(self, request: SourceRequest) -> None:
        super().__init__(request)
        self._kind = request.kind
        given = [Path(each) for each in request.inputs]
        self._given = frozenset(given)
        self._files = _Files(request.kind, given, glob=GLOBS[request.kind], request=request)
        self.label = self._files.label
        self._formats: dict[Path, FileFormat] = {}
        self._not_read: list[str] = []

    def identity(self) -> list[Any]:
        """Return the path, size and time of every file that is read, and the renamed columns.

        Raises DataError.
        """
        identity = self._files.identity()
        self._formats = {}
        for path in self._files.paths():
            found = self._detect(path)
            if found is None:
                self._not_read.append(path.name)
            else:
                self._formats[path] = found
        if any(found.kind == "arrow" for found in self._formats.values()):
            # The library datasets writes its state as JSON next to the Arrow files.
            for path in [each for each in self._formats if each not in self._given]:
                if self._formats[path].kind in ("json", "jsonl"):
                    del self._formats[path]
        if not self._formats:
            raise DataError(
                f"{self.label}: plain text has no columns. Use JSON Lines, JSON, CSV, parquet or "
                "Arrow, or --task text."
            )
        valid = self._files.splits.valid
        return [*identity, *self.identity_of_columns(), *([["valid", len(valid)]] if valid else [])]

    def _detect(self, path: Path) -> FileFormat | None:
        """Return the format of a file; None for a file that is in the folder but is not data."""
        if path.name in _DATASETS_FILES and path not in self._given:
            return None
        if self._kind == "csv":
            return detect_format(path, is_table=True)
        found = detect_format(path)
        if self._kind == "jsonl" and found.kind not in ("jsonl", "json"):
            return FileFormat(kind="jsonl", compression=found.compression)
        if self._kind == "parquet":
            return FileFormat(kind="parquet")
        if found.kind in ROW_KINDS:
            return found
        if path in self._given:
            raise DataError(
                f"{path}: plain text has no columns. Use JSON Lines, JSON, CSV, parquet or Arrow, "
                "or --task text."
            )
        return None

    def recognised(self) -> list[str]:
        """Return lines about the formats and splits of the files; call `identity` first."""
        counts: dict[str, list[str]] = {}
        for path, found in self._formats.items():
            counts.setdefault(found.describe(), []).append(path.name)
        lines = [
            f"format: {words}" + (f" ({len(names):,} files)" if len(names) > 1 else "")
            for words, names in counts.items()
        ]
        splits = self._files.splits.note()
        lines += [] if splits is None else [splits]
        if self._not_read:
            names = ", ".join(self._not_read[:_NAMES_SHOWN])
            more = len(self._not_read) - _NAMES_SHOWN
            rest = f" and {more} more" if more > 0 else ""
            lines.append(f"not read, because they have no rows: {names}{rest}")
        return lines

    def _read(self) -> Iterator[Row]:
        valid = self._files.splits.valid
        index_of = dict(zip(self._files.paths(), self._files.inputs_of_files, strict=True))
        for path, found in self._formats.items():
            self._begin_file(index_of[path])
            if path in valid and self.first_val is None:
                self.first_val = self.next_number
            if found.kind in ("parquet", "arrow"):
                yield from self._table(path)
            elif found.kind == "csv":
                yield from self._csv(path, found)
            elif found.kind == "json":
                yield from self._json(path, found)
            else:
                yield from self._jsonl(path)

    def missing_shards(self) -> str | None:
        """Return a note about missing files of the source, if any."""
        return missing_shards(self._files.paths())

    def _jsonl(self, path: Path) -> Iterator[Row]:
        name = str(path)
        with open_decompressed(path) as file, convert_errors(path):
            for number, (line, _) in enumerate(read_lines(file), 1):
                if not line.isspace():
                    yield from self._row(
                        f"{name} line {number}", parse_line(line, example=_EXAMPLE)
                    )

    def _json(self, path: Path, found: FileFormat) -> Iterator[Row]:
        with open_decompressed(path) as file, convert_errors(path):
            for line, value in read_objects(file, path, encoding=found.encoding):
                if not isinstance(value, dict):
                    value = f"not an object but {type(value).__name__}; write {_EXAMPLE}."
                yield from self._row(f"{path} line {line}", value)

    def _table(self, path: Path) -> Iterator[Row]:
        from payload.data.sources.parquet import ParquetReader

        with ParquetReader(None) as reader:
            yield from self._tables(reader.read_rows(str(path)), where=str(path))

    def _csv(self, path: Path, found: FileFormat) -> Iterator[Row]:
        """Yield the rows after the header line, with quoting as in RFC 4180."""
        csv.field_size_limit(_FIELD_BYTES)
        with (
            open_decompressed(path) as binary,
            convert_errors(path),
            io.TextIOWrapper(binary, encoding=found.encoding, newline="") as file,
        ):
            # Excel can declare the delimiter in a first line, `sep=;`.
            skipped = 0
            if file.readline(len("sep=;\r\n")).strip().startswith("sep="):
                skipped = 1
            else:
                file.seek(0)
            lines = iter(partial(_read_line, file, path), "")
            reader = csv.reader(lines, strict=True, delimiter=found.delimiter)
            header: list[str] | None = None
            while True:
                line = reader.line_num + 1 + skipped
                try:
                    fields = next(reader, None)
                except (csv.Error, UnicodeDecodeError) as error:
                    # After broken quotes the remaining rows cannot be separated.
                    raise DataError(
                        f"{path} line {line}: not CSV in {found.encoding_name()}: {error}. Correct "
                        'the quotes: put a field with delimiters or line ends in "...", and write '
                        'a " inside the field as "".'
                    ) from None
                if fields is None:
                    return
                if header is None:
                    header = _header(fields, path)
                elif fields:
                    yield from self._row(f"{path} line {line}", _by_column(fields, header))


class _Files(ColumnFiles):
    """Finds the files of a source of rows, with the rules of the sources of text."""

    def paths(self) -> list[Path]:
        """Return the files that `identity` found."""
        return self._files


def _read_line(file: io.TextIOWrapper, path: Path) -> str:
    """Return the next line; "" at the end. Raises DataError for a line that could fill memory."""
    line = file.readline(_FIELD_BYTES + 1)
    if len(line) > _FIELD_BYTES:
        raise DataError(f"{path}: a line is longer than {_FIELD_BYTES >> 20} MiB. Shorten it.")
    return line


def _header(fields: Sequence[str], path: Path) -> list[str]:
    names = [name.strip() for name in fields]
    if len(set(names)) < len(names) or not all(names):
        raise DataError(
            f"{path} line 1: {', '.join(map(repr, names[:8]))}: column names are missing or "
            "repeated. Begin the file with a line of unique column names."
        )
    return names


def _by_column(fields: Sequence[str], header: Sequence[str]) -> dict[str, str] | str:
    if len(fields) != len(header):
        return f"{len(fields)} fields, but {len(header)} columns ({', '.join(header[:8])})."
    return dict(zip(header, fields, strict=True))
