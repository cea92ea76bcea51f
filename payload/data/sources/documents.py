"""Batches of documents as UTF-8 bytes, each with the cursor from which a later run resumes.

A document's number is its index in the source, from 0. A skipped document keeps its number, so that
the split does not shift.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar

from payload.core.errors import DataError

if TYPE_CHECKING:
    from payload.data.sources.split import FileSplit

Cursor = dict[str, Any]
"""Position in a source: JSON that only the source itself interprets. {} is the start."""

MIB = 1024 * 1024
BATCH_BYTES = 4 * MIB
PIECE_BYTES = 8 * MIB
"""Size above which a document is read in several pieces, to limit memory."""


class UnreachableSourceError(DataError):
    """The source cannot be reached. The same command can continue later."""


_BATCH_DOCUMENTS = 65536
_BATCH_SKIPS = 4096
_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Batch:
    """Consecutive pieces of text of a source."""

    pieces: list[bytes] = field(default_factory=list)
    """Valid UTF-8: whole documents, or parts of documents. A part has the same tokens as in the
    whole document."""
    numbers: list[int] = field(default_factory=list)
    """For each piece, the number of its document."""
    ends: list[bool] = field(default_factory=list)
    """True for the last piece of a document."""
    skipped: list[tuple[int, int, str]] = field(default_factory=list)
    """For each group of bad documents: the number of the first document, the count, and the
    message."""
    file_starts: list[tuple[int, int]] = field(default_factory=list)
    """For each file that begins in the batch: the number of the file's first document, and the
    file's index."""
    cursor: Cursor = field(default_factory=dict)
    """Cursor of the next batch."""
    text_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Size of a source. None represents a count that is unknown before reading."""

    documents: int | None
    text_bytes: int | None
    """Size of the text in bytes, exact or estimated."""
    bytes_are_exact: bool = False
    note: str | None = None
    """A note for the user about how the documents were found."""
    split: FileSplit | None = None
    """The split that the names of the files, or a column of the rows, declare."""


class Source(Protocol):
    """A source of documents."""

    @property
    def label(self) -> str:
        """Kind and location, for messages and meta.json."""

    @property
    def default_val_fraction(self) -> float | None:
        """Default fraction of the documents for validation; None if the fraction depends on the
        number of documents."""

    @property
    def revision(self) -> str | None:
        """Return the revision that `identity` pinned, if any; call `identity` first."""

    @property
    def inputs_of_files(self) -> Sequence[int]:
        """For each file, the index of its --input; empty for a single input.

        Call `identity` first.
        """

    def identity(self) -> list[Any]:
        """Return JSON that changes when the documents change.

        Raises DataError if the source is missing.
        """

    def survey(self) -> Survey:
        """Return the size of the source without tokenizing.

        Call this after `identity` and before `batches`.
        """

    def batches(self, cursor: Cursor) -> Iterator[Batch]:
        """Yield the documents that follow `cursor`. Raises DataError for a bad document."""


class Batcher:
    """Collects documents into batches, and counts or rejects bad ones."""

    def __init__(self, *, skip_bad: bool) -> None:
        self._skip_bad = skip_bad
        self._batch = Batch()

    @property
    def is_full(self) -> bool:
        """Return True if the batch is large enough, so that the caller should `take` it."""
        batch = self._batch
        return (
            batch.text_bytes >= BATCH_BYTES
            or len(batch.pieces) >= _BATCH_DOCUMENTS
            or len(batch.skipped) >= _BATCH_SKIPS
        )

    def begin_file(self, index: int, *, number: int) -> None:
        """Record that a file begins with the document `number`."""
        self._batch.file_starts.append((number, index))

    def add(self, piece: bytes, *, number: int, is_last: bool = True) -> None:
        """Append one piece."""
        self._batch.pieces.append(piece)
        self._batch.numbers.append(number)
        self._batch.ends.append(is_last)
        self._batch.text_bytes += len(piece)

    def skip(self, complaint: str, *, number: int, documents: int = 1) -> None:
        """Count bad documents. Raises DataError if the user did not allow skipping."""
        if not self._skip_bad:
            raise DataError(f"{complaint} Fix it, or skip such documents with --skip-bad.")
        # The journal and meta.json are UTF-8; a file name need not be valid UTF-8.
        written = complaint.encode("utf-8", "backslashreplace").decode("utf-8")
        self._batch.skipped.append((number, documents, written))

    def take(self, cursor: Cursor) -> Batch:
        """Return the batch and start an empty one."""
        taken, self._batch = self._batch, Batch()
        taken.cursor = cursor
        return taken


def limit(batches: Iterator[Batch], max_documents: int | None) -> Iterator[Batch]:
    """Yield the batches of the first `max_documents` documents, or all batches for None."""
    for batch in batches:
        if max_documents is None or not batch.numbers or batch.numbers[-1] < max_documents:
            yield batch
            continue
        keep = sum(number < max_documents for number in batch.numbers)
        batch.pieces = batch.pieces[:keep]
        batch.numbers, batch.ends = batch.numbers[:keep], batch.ends[:keep]
        batch.skipped = [entry for entry in batch.skipped if entry[0] < max_documents]
        batch.text_bytes = sum(map(len, batch.pieces))
        yield batch
        return


def last_safe_cut(data: bytes) -> int | None:
    """Return the last offset at which `data` can be cut without changing its tokens, or None.

    GPT-2's pattern never joins a non-space character with white space after it, and has no
    lookbehind. So a cut before such white space does not change the tokens.
    """
    end = len(data)
    while end > 0:
        start = max(0, end - 65536)
        for match in reversed(list(_SPACE.finditer(data, start, end))):
            offset = match.start()
            before = data[max(0, offset - 4) : offset].decode("utf-8", errors="ignore")[-1:]
            if before and not before.isspace():
                return offset
        end = start
    return None


_SPACE = re.compile(rb"[ \n\r\t]")


def read_pieces(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Yield the rest of the file in pieces, each with a flag that is True for the last piece.

    The file is read from its current position. A piece ends where a cut does not change the tokens.
    If 8 MiB of text have no white space, the piece ends between two characters. Only then can the
    pieces tokenize differently from the whole document.
    """
    held = b""
    while True:
        read = file.read(PIECE_BYTES + _LONGEST_CHARACTER - len(held))
        held += read
        if len(held) < PIECE_BYTES + _LONGEST_CHARACTER:
            yield held, True
            return
        offset = last_safe_cut(held) or character_start(held, PIECE_BYTES)
        yield held[:offset], False
        held = held[offset:]


_LONGEST_CHARACTER = 4


def character_start(data: bytes, offset: int) -> int:
    """Return the last start of a UTF-8 character at or before `offset`."""
    while offset > 0 and data[offset] & 0xC0 == 0x80:
        offset -= 1
    return offset


def prefetch(items: Iterator[_T]) -> Iterator[_T]:
    """Yield the items; a thread reads the next item while the current one is used."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read") as pool:
        ahead = pool.submit(next, items, None)
        while (item := ahead.result()) is not None:
            ahead = pool.submit(next, items, None)
            yield item
