"""Reads parquet files through a worker process. Every row is a document."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from payload.core.errors import DataError
from payload.core.printable_text import one_line, shown
from payload.data.sources.documents import (
    MIB,
    PIECE_BYTES,
    Batch,
    Batcher,
    Cursor,
    Survey,
    read_pieces,
)
from payload.data.sources.source_flags import SourceRequest
from payload.data.sources.split import FileSplit
from payload.data.sources.text_files import ColumnFiles
from payload.data.sources.worker_exit import describe_exit, end_worker

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 1024
"""Number of rows that are decoded together. The number is small enough for rows of 100 kB."""
_NAMES_SHOWN = 5
_READ_BUFFER_BYTES = 8 * MIB
_WORKER = Path(__file__).with_name("parquet_worker.py")
_FRAME = struct.Struct(">cQ")
_UNREACHABLE = frozenset(
    {"ConnectionError", "TimeoutError", "ConnectError", "ConnectTimeout", "LocalEntryNotFoundError"}
)


class ParquetSource(ColumnFiles):
    """Documents of parquet files; every row is a document."""

    def __init__(self, given: Sequence[Path], request: SourceRequest) -> None:
        super().__init__("parquet", given, glob="*.parquet", request=request)

    def survey(self) -> Survey:
        """Return the number of rows and the size of the text, from the footers of the files.

        Raises DataError for a damaged file.
        """
        train, valid = (
            survey_parquet(list(map(str, files)), self._column, skip_bad=self._skip_bad)
            for files in (self.splits.train, self.splits.valid)
        )
        assert train.documents is not None and valid.documents is not None
        documents, split = train.documents + valid.documents, None
        if self.splits.valid:
            split = FileSplit.of(first_val=train.documents, documents=documents)
        text_bytes = (train.text_bytes or 0) + (valid.text_bytes or 0)
        return Survey(documents=documents, text_bytes=text_bytes, split=split, note=self.note())

    def batches(self, cursor: Cursor) -> Iterator[Batch]:
        """Yield the rows as documents."""
        places = [str(path) for path in self._files]
        yield from read_parquet(places, self._column, cursor, skip_bad=self._skip_bad)


def survey_parquet(places: Sequence[str], column: str, *, skip_bad: bool) -> Survey:
    """Return the number of rows and the text size from the files' footers. Raises DataError."""
    rows = text_bytes = 0
    with ParquetReader(column) as reader:
        for place in places:
            try:
                more_rows, more_bytes = reader.survey(place)
            except DamagedFileError as error:
                if not skip_bad:
                    raise DataError(
                        f"{error} Copy the file again, or skip it with --skip-bad."
                    ) from None
                continue
            rows, text_bytes = rows + more_rows, text_bytes + more_bytes
    return Survey(documents=rows, text_bytes=text_bytes)


def read_parquet(
    places: Sequence[str], column: str, cursor: Cursor, *, skip_bad: bool
) -> Iterator[Batch]:
    """Yield the rows of the files at `places`: paths, or URLs that fsspec opens."""
    batcher = Batcher(skip_bad=skip_bad)
    number, row = cursor.get("document", 0), cursor.get("row", 0)
    with ParquetReader(column) as reader:
        for index in range(cursor.get("file", 0), len(places)):
            place = places[index]
            batcher.begin_file(index, number=number)
            try:
                for values in reader.read(place, skip_rows=row):
                    if isinstance(values, LostRows):
                        complaint = f"{place} rows {row + 1} to {row + len(values)}: "
                        complaint += values.reason
                        batcher.skip(complaint, number=number, documents=len(values))
                    else:
                        add_column(values, batcher, number=number, row=row, where=place)
                    row, number = row + len(values), number + len(values)
                    if batcher.is_full:
                        yield batcher.take({"file": index, "row": row, "document": number})
            except DamagedFileError as error:
                batcher.skip(str(error), number=number)
            row = 0
    yield batcher.take({"file": len(places), "document": number})


class DamagedFileError(DataError):
    """A file that cannot be read as parquet."""


@dataclass(frozen=True, slots=True)
class LostRows:
    """Rows that cannot be read, because an earlier page of their row group is damaged."""

    count: int
    reason: str

    def __len__(self) -> int:
        return self.count


class ParquetReader:
    """Reads one text column or all columns of parquet files, in a worker process.

    A damaged file can crash the worker, but not this process.

    Every method raises DamagedFileError for such a file, DataError if the column is missing, and
    OSError if the disk or the network fails.
    """

    def __init__(self, column: str | None) -> None:
        """Read `column`; None reads all columns, for `read_rows`."""
        self._column = column
        self._worker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_worker()

    def survey(self, place: str) -> tuple[int, int]:
        """Return the number of rows of the file, and the size of the column in bytes."""
        end: dict[str, Any] = {}
        for response in self._request("survey", place, skip_rows=0):
            if isinstance(response, dict):
                end = response
        return int(end["rows"]), int(end["bytes"])

    def read(self, place: str, *, skip_rows: int) -> Iterator[pa.Array | LostRows]:
        """Yield the column after `skip_rows` rows, in arrays of at most BATCH_ROWS."""
        for response in self._request("read", place, skip_rows=skip_rows):
            if isinstance(response, dict):
                if response.get("lost"):
                    yield LostRows(response["lost"], one_line(response["reason"]))
            elif response.num_rows:
                yield response.column(0)

    def read_rows(self, place: str) -> Iterator[list[dict[str, Any]] | LostRows]:
        """Yield the rows of the file with all columns, in lists of at most BATCH_ROWS."""
        for response in self._request("read", place, skip_rows=0):
            if isinstance(response, dict):
                if response.get("lost"):
                    yield LostRows(response["lost"], one_line(response["reason"]))
            elif response.num_rows:
                yield response.to_pylist()

    def _request(
        self, operation: str, place: str, *, skip_rows: int
    ) -> Iterator[dict[str, Any] | pa.RecordBatch]:
        """Yield the frames of a response, after checking the schema of the first table."""
        import pyarrow as pa

        request = {
            "do": operation,
            "place": place,
            "column": self._column,
            "skip_rows": skip_rows,
            "rows": BATCH_ROWS,
            "buffer_bytes": _READ_BUFFER_BYTES,
        }
        is_whole = False
        try:
            self._send(request)
            is_first = True
            while not is_whole:
                kind, content = self._frame(place)
                if kind == b"J":
                    response = json.loads(content)
                    is_whole = "end" in response
                    _raise_failure(response, place)
                    yield response
                    continue
                batch = pa.ipc.open_stream(content).read_next_batch()
                if is_first:
                    if self._column is not None:
                        check_column(batch.schema, self._column, where=place)
                    is_first = False
                yield batch
        finally:
            if not is_whole:
                # Otherwise the next request would read the rest of this response.
                self._end_worker()

    def _send(self, request: Mapping[str, Any]) -> None:
        if self._worker is None:
            self._worker = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._worker.stdin is not None
        try:
            self._worker.stdin.write(json.dumps(request).encode() + b"\n")
            self._worker.stdin.flush()
        except BrokenPipeError:
            pass  # Reading the response reports that the worker has ended.

    def _frame(self, place: str) -> tuple[bytes, bytes]:
        assert self._worker is not None and self._worker.stdout is not None
        out = self._worker.stdout
        header = out.read(_FRAME.size)
        if len(header) == _FRAME.size:
            kind, size = _FRAME.unpack(header)
            content = out.read(size)
            if len(content) == size:
                return kind, content
        status = self._worker.wait()
        raise DamagedFileError(
            f"{place}: not a readable parquet or Arrow file: the process that read it ended with "
            f"{describe_exit(status)}. Write the file again."
        )

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            end_worker(worker)


def _raise_failure(response: Mapping[str, Any], place: str) -> None:
    """Raise the error with which a response ended, if there is one."""
    failed = response.get("failed")
    if failed is None:
        return
    reason = one_line(response["reason"])
    if failed == "damaged":
        raise DamagedFileError(
            f"{place}: not a readable parquet or Arrow file: {reason.rstrip('.')}. Write the file "
            "again."
        )
    if _UNREACHABLE & set(response["types"]):
        raise ConnectionError(reason)
    if response["errno"] is not None and "://" not in place:
        raise OSError(response["errno"], os.strerror(response["errno"]), place)
    raise OSError(reason)


def check_column(schema: pa.Schema, column: str, *, where: str) -> None:
    """Raise DataError if the schema lacks this column, or if the column does not hold text."""
    import pyarrow as pa

    if column not in schema.names:
        names = ", ".join(shown(name) for name in schema.names[:_NAMES_SHOWN]) or "none"
        raise DataError(
            f"{where}: no column {column!r}; its columns: {names}. Choose one with --text-column."
        )
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (is_text or pa.types.is_string_view(kind)):
        raise DataError(f"{where}: column {column!r} is {_kind_name(kind)}, not text.")


def _kind_name(kind: pa.DataType) -> str:
    """Return the name of a type on one line. A struct's name contains names from the data."""
    return one_line(kind).rstrip(".")


def add_column(
    column: pa.Array | pa.ChunkedArray, batcher: Batcher, *, number: int, row: int, where: str
) -> None:
    """Add every row of a text column as a document. `row` is the index of the first row."""
    import pyarrow as pa

    try:
        column.validate(full=True)
        is_valid = True
    except pa.ArrowInvalid:
        is_valid = False
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    for index, text in enumerate(column.cast(pa.large_binary()).to_pylist()):
        place, numbered = f"{where} row {row + index + 1}", number + index
        if text is None:
            batcher.skip(f"{place}: no text (null).", number=numbered)
        elif not (is_valid or _is_utf8(text)):
            batcher.skip(f"{place}: not UTF-8.", number=numbered)
        elif len(text) <= PIECE_BYTES:
            batcher.add(text, number=numbered)
        else:
            for piece, is_last in read_pieces(io.BytesIO(text)):
                batcher.add(piece, number=numbered, is_last=is_last)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
