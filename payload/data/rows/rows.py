"""Rows of several columns, for tasks that need more than the text of a document."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from payload.core.errors import DataError, UsageError
from payload.core.printable_text import shown
from payload.data.sources.jsonl import convert_gzip_errors, open_jsonl, parse_line, read_lines
from payload.data.sources.source_flags import SourceRequest, check_flags
from payload.data.sources.text_files import ColumnFiles, missing_shards

_GLOBS = {"jsonl": "*.jsonl*", "parquet": "*.parquet", "csv": "*.csv"}
_FIELD_BYTES = 2**26
_BATCH_CHARS = 2**22
_COLUMNS_SHOWN = 8
_SKIP = "Correct it, or skip such rows with --skip-bad."

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row; `number` is its index in the source, from 0."""

    number: int
    where: str
    """File and line, for messages."""
    values: Mapping[str, Any]


class Rows(ABC):
    """The rows of one source. A bad row raises DataError, or is only counted with `skip_bad`."""

    label: str
    """Kind and location, for messages and meta.json."""
    revision: str | None = None

    def __init__(self, request: SourceRequest) -> None:
        self._skip_bad = request.skip_bad
        self.skipped: list[str] = []
        """One message for each skipped row."""
        self.num_rows = 0
        """Rows read so far, including bad rows."""
        self._unread: Counter[str] = Counter()

    @abstractmethod
    def identity(self) -> list[Any]:
        """Return JSON that changes when the rows change.

        Raises DataError if the source is missing.
        """

    @abstractmethod
    def read(self) -> Iterator[Row]:
        """Yield every row; call `identity` first. Raises DataError for a bad row."""

    def skip(self, where: str, complaint: str) -> None:
        """Skip a bad row. Raises DataError unless the user allowed skipping."""
        message = f"{where}: {complaint}"
        if not self._skip_bad:
            raise DataError(f"{message} {_SKIP}")
        self.skipped.append(message.encode("utf-8", "backslashreplace").decode("utf-8"))

    def note_unread(self, columns: Iterable[str]) -> None:
        """Count columns of a row that the task does not read."""
        self._unread.update(columns)

    def notes(self) -> list[str]:
        """Return notes for the user about the rows that were read."""
        shards = self.missing_shards()
        found = [] if shards is None else [f"note: {shards}"]
        if not self._unread:
            return found
        names = [
            f"{shown(name)} ({count:,} rows)"
            for name, count in self._unread.most_common(_COLUMNS_SHOWN)
        ]
        more = len(self._unread) - len(names)
        rest = f" and {more} more columns" if more else ""
        return [*found, f"note: ignored columns: {', '.join(names)}{rest}"]

    def missing_shards(self) -> str | None:
        """Return a note about missing files of the source, if any."""
        return None

    def require_some(self) -> None:
        """Raise DataError if the source had no rows."""
        if not self.num_rows:
            raise DataError(f"{self.label}: no rows. Add some, or use another source.")

    def _row(self, where: str, values: Mapping[str, Any] | str) -> Iterator[Row]:
        """Count a row and yield it; `values` is an error message for a bad row."""
        number = self.num_rows
        self.num_rows += 1
        if isinstance(values, str):
            self.skip(where, values)
        else:
            yield Row(number=number, where=where, values=values)

    def _tables(self, tables: Iterator[Any], *, where: str) -> Iterator[Row]:
        from payload.data.sources.parquet import LostRows

        for table in tables:
            first = self.num_rows
            if isinstance(table, LostRows):
                self.skip(f"{where} rows {first + 1} to {first + len(table)}", table.reason)
                self.num_rows += len(table)
                continue
            for values in table:
                yield from self._row(f"{where} row {self.num_rows + 1}", values)


def in_batches(
    items: Iterable[_T | None], *, count: int, chars: Callable[[_T], int]
) -> Iterator[list[_T]]:
    """Yield the items in lists of at most `count`, without None, to be tokenized together.

    `chars` returns the length of an item. The total length of a list is limited, because tokenizing
    needs about 150 bytes per token.
    """
    batch: list[_T] = []
    size = 0
    for item in items:
        if item is None:
            continue
        batch.append(item)
        size += chars(item)
        if len(batch) >= count or size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def open_rows(request: SourceRequest) -> Rows:
    """Return the rows of a source without opening it.

    Raises UsageError for flags that the source does not support.
    """
    check_flags(request)
    if request.kind == "hf":
        return _HubRows(request)
    if request.kind not in _GLOBS:
        raise UsageError(
            f"--source {request.kind} has no columns. For this task use one of "
            f"{', '.join([*_GLOBS, 'hf'])}."
        )
    return _FileRows(request)


class _FileRows(Rows):
    """Rows of jsonl, parquet or csv files."""

    def __init__(self, request: SourceRequest) -> None:
        super().__init__(request)
        given = [Path(each) for each in request.inputs]
        kind = request.kind
        self._files = _Files(kind, given, glob=_GLOBS[kind], request=request)
        self.label = self._files.label
        self._read = {"jsonl": self._jsonl, "parquet": self._parquet, "csv": self._csv}[kind]

    def identity(self) -> list[Any]:
        return self._files.identity()

    def read(self) -> Iterator[Row]:
        for path in self._files.paths():
            yield from self._read(path)

    def missing_shards(self) -> str | None:
        return missing_shards(self._files.paths())

    def _jsonl(self, path: Path) -> Iterator[Row]:
        with open_jsonl(path) as file, convert_gzip_errors(path):
            for number, (line, _) in enumerate(read_lines(file), 1):
                if not line.isspace():
                    example = '{"COLUMN": ...}'
                    yield from self._row(f"{path} line {number}", parse_line(line, example=example))

    def _parquet(self, path: Path) -> Iterator[Row]:
        from payload.data.sources.parquet import ParquetReader

        with ParquetReader(None) as reader:
            yield from self._tables(reader.read_rows(str(path)), where=str(path))

    def _csv(self, path: Path) -> Iterator[Row]:
        """Yield the rows after the header line, with quoting as in RFC 4180."""
        csv.field_size_limit(_FIELD_BYTES)
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header: list[str] | None = None
            while True:
                line = reader.line_num + 1
                try:
                    fields = next(reader, None)
                except (csv.Error, UnicodeDecodeError) as error:
                    # After broken quotes the remaining rows cannot be separated.
                    raise DataError(
                        f"{path} line {line}: not CSV in UTF-8: {error}. Correct its quotes: put a "
                        'field with commas or line ends in "...", and write " inside it as "".'
                    ) from None
                if fields is None:
                    return
                if header is None:
                    header = _header(fields, path)
                elif fields:
                    yield from self._row(f"{path} line {line}", _by_column(fields, header))


class _Files(ColumnFiles):
    """Finds files in the same way as the text sources."""

    def paths(self) -> list[Path]:
        """Return the files that `identity` found."""
        return self._files


class _HubRows(Rows):
    """Rows of a dataset of the Hugging Face hub, or of a local folder in its formats."""

    def __init__(self, request: SourceRequest) -> None:
        from payload.data.sources.hub import HubSource

        super().__init__(request)
        self._hub = HubSource(request)
        self.label = self._hub.label

    def identity(self) -> list[Any]:
        found = self._hub.identity()
        self.revision = self._hub.revision
        return found

    def read(self) -> Iterator[Row]:
        yield from self._tables(self._hub.rows(), where=self.label)

    def missing_shards(self) -> str | None:
        return self._hub.note()


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
