"""Parquet files: one document a row."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from payload.data.documents import (
    MIB,
    PIECE_BYTES,
    Batch,
    Batcher,
    Cursor,
    Survey,
    read_pieces,
)
from payload.data.sources import SourceRequest
from payload.data.sources.files import ColumnFiles
from payload.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS_AT_ONCE = 1024
"""Rows that are decoded together; few enough for rows of 100 kB."""
_READ_BUFFER_BYTES = 8 * MIB


class ParquetSource(ColumnFiles):
    """Every row is a document."""

    def __init__(self, given: Sequence[Path], request: SourceRequest) -> None:
        super().__init__("parquet", given, glob="*.parquet", request=request)

    def survey(self) -> Survey:
        """Rows and text sizes from the files' own footers. Raises DataError on a damaged one."""
        places = [str(path) for path in self._files]
        return survey_parquet(places, self._column, skip_bad=self._skip_bad)

    def batches(self, cursor: Cursor) -> Iterator[Batch]:
        """Row after row."""
        places = [str(path) for path in self._files]
        yield from read_parquet(places, self._column, cursor, skip_bad=self._skip_bad)


def survey_parquet(places: Sequence[str], column: str, *, skip_bad: bool) -> Survey:
    """Rows and text sizes from the files' footers. Raises DataError."""
    rows = text_bytes = 0
    for place in places:
        try:
            file = open_parquet(place)
        except DamagedFileError as error:
            if not skip_bad:
                raise DataError(
                    f"{error} Copy it again, or leave it out with --skip-bad."
                ) from None
            continue
        with file:
            check_column(file.schema_arrow, column, where=place)
            rows += file.metadata.num_rows
            text_bytes += _column_bytes(file, column)
    return Survey(documents=rows, text_bytes=text_bytes)


def read_parquet(
    places: Sequence[str], column: str, cursor: Cursor, *, skip_bad: bool
) -> Iterator[Batch]:
    """Row after row of the files at `places`: paths, or URLs that fsspec opens."""
    batcher = Batcher(skip_bad=skip_bad)
    number, row = cursor.get("document", 0), cursor.get("row", 0)
    for index in range(cursor.get("file", 0), len(places)):
        place = places[index]
        try:
            for values in _read_column(place, column, skip_rows=row):
                if isinstance(values, _LostRows):
                    complaint = f"{place} rows {row + 1} to {row + len(values)}: {values.reason}"
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
    """A file whose footer cannot be read."""


@dataclass(frozen=True, slots=True)
class _LostRows:
    """What is left of a row group behind a damaged page."""

    count: int
    reason: str

    def __len__(self) -> int:
        return self.count


def open_parquet(place: str) -> pq.ParquetFile:
    """Open and read the footer. Raises DamagedFileError, or OSError where the network fails."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = _open_remote(place) if "://" in place else place
    try:
        # Without pre_buffer a row group is read a page at a time, however large it is.
        return pq.ParquetFile(source, pre_buffer=False, buffer_size=_READ_BUFFER_BYTES)
    except (pa.ArrowException, OSError) as error:
        # pyarrow also reports a bad footer as an OSError, one without a number.
        if isinstance(error, OSError) and ("://" in place or error.errno is not None):
            raise
        raise DamagedFileError(
            f"{place}: not a readable parquet file: {first_line(error)}"
        ) from None


def _open_remote(url: str) -> Any:
    import fsspec

    return fsspec.open(url, "rb").open()


def check_column(schema: pa.Schema, column: str, *, where: str) -> None:
    """Raise DataError unless there is such a column and it holds text."""
    import pyarrow as pa

    if column not in schema.names:
        raise DataError(
            f"{where}: no column {column!r}; columns there: {', '.join(schema.names)}. "
            "Choose one with --text-column."
        )
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (is_text or pa.types.is_string_view(kind)):
        raise DataError(f"{where}: column {column!r} is {kind}, not text.")


def add_column(
    column: pa.Array | pa.ChunkedArray, batcher: Batcher, *, number: int, row: int, where: str
) -> None:
    """Every row of a text column as a document; the first is `where`'s row `row`, from 0."""
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


def _read_column(place: str, column: str, *, skip_rows: int) -> Iterator[pa.Array | _LostRows]:
    """The column behind `skip_rows` rows, in stretches of at most ROWS_AT_ONCE."""
    import pyarrow as pa

    with open_parquet(place) as file:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if skip_rows >= rows:
                skip_rows -= rows
                continue
            reached = 0
            try:
                for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[column]):
                    dropped = min(max(0, skip_rows - reached), batch.num_rows)
                    reached += batch.num_rows
                    if dropped < batch.num_rows:
                        yield batch.column(0).slice(dropped)
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError) and "://" in place:
                    raise
                reason = f"damaged: {first_line(error)}"
                yield _LostRows(rows - max(reached, skip_rows), reason)
            skip_rows = 0


def _column_bytes(file: pq.ParquetFile, column: str) -> int:
    """Uncompressed size; less than the text's own where it is stored as a dictionary."""
    total = 0
    for group in range(file.num_row_groups):
        for index in range(file.metadata.num_columns):
            entry = file.metadata.row_group(group).column(index)
            if entry.path_in_schema == column:
                total += entry.total_uncompressed_size
    return total


def first_line(error: Exception) -> str:
    """A library's message without its second half."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".") + "."
