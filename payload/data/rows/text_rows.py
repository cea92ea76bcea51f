"""Reads the documents of the task `text` from the rows of any file that has columns."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from payload.core.printable_text import shown
from payload.data.rows.open_rows import open_rows
from payload.data.rows.rows import Row, Rows
from payload.data.sources.documents import (
    PIECE_BYTES,
    Batch,
    Batcher,
    Cursor,
    Survey,
    read_pieces,
)
from payload.data.sources.source_flags import SourceRequest

_KEYS_SHOWN = 5


class TextRows:
    """Documents of CSV, JSON and Arrow files: the text column of every row.

    A resumed run reads the rows before the cursor again, but does not tokenize them.
    """

    default_val_fraction: float | None = None
    revision: str | None = None
    inputs_of_files: Sequence[int] = ()

    def __init__(self, request: SourceRequest) -> None:
        self._request = request
        self._column = request.column()
        self.label = open_rows(request).label
        self.inputs_of_files = range(len(request.inputs))

    def identity(self) -> list[Any]:
        """Return JSON that changes when the rows change. Raises DataError."""
        rows = open_rows(self._request)
        found = rows.identity()
        self.revision = rows.revision
        return found

    def _opened(self) -> Rows:
        rows = open_rows(self._request)
        rows.identity()
        return rows

    def survey(self) -> Survey:
        """Read all rows to count them and the bytes of their text."""
        rows = self._opened()
        size = sum(len(_text(row, self._column)) for row in rows.read())
        found = rows.survey()
        notes = [*rows.recognised(), *rows.notes()]
        note = "; ".join(each.removeprefix("note: ") for each in notes)
        return Survey(
            documents=found.documents, text_bytes=size, split=found.split, note=note or None
        )

    def batches(self, cursor: Cursor) -> Iterator[Batch]:
        """Yield the rows as documents."""
        batcher = Batcher(skip_bad=self._request.skip_bad)
        rows = self._opened()
        done, known = cursor.get("document", 0), 0
        begun = 0
        for row in rows.read():
            for number, index in rows.file_starts[begun:]:
                batcher.begin_file(index, number=number)
            begun = len(rows.file_starts)
            skipped, known = rows.skipped[known:], len(rows.skipped)
            if row.number < done:
                continue
            for place, complaint in enumerate(skipped):
                batcher.skip(complaint, number=row.number - len(skipped) + place)
            text = _text(row, self._column)
            if not text and not isinstance(row.values.get(self._column), str):
                batcher.skip(f"{row.where}: {_fault(row, self._column)}", number=row.number)
            for piece, is_last in _pieces(text):
                batcher.add(piece, number=row.number, is_last=is_last)
            if batcher.is_full:
                yield batcher.take({"document": row.number + 1})
        for place, complaint in enumerate(rows.skipped[known:]):
            batcher.skip(complaint, number=rows.next_number - len(rows.skipped) + known + place)
        yield batcher.take({"document": rows.next_number})


def _text(row: Row, column: str) -> bytes:
    """Return the text of a row; empty if the row has no text."""
    value = row.values.get(column)
    return value.encode("utf-8", "replace") if isinstance(value, str) else b""


def _pieces(text: bytes) -> Iterator[tuple[bytes, bool]]:
    if len(text) <= PIECE_BYTES:
        return iter([(text, True)] if text else [])
    return read_pieces(io.BytesIO(text))


def _fault(row: Row, column: str) -> str:
    if column not in row.values:
        keys = ", ".join(shown(key) for key in list(row.values)[:_KEYS_SHOWN]) or "none"
        return f"no column {column!r}; its columns: {keys}. Choose one with --text-column."
    return f"{column!r} is {type(row.values[column]).__name__}, not text."
