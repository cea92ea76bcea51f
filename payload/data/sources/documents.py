"""Batches of documents as UTF-8 bytes, with the cursor to go on from; sources yield them.

A document's number is its place in the source, counted from 0. A document that is left out as bad
keeps its number, so that the split does not shift.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol, TypeVar

from payload.core.errors import DataError

Cursor = dict[str, Any]
"""Where a source goes on: JSON, made and read by the source alone. {} is the start."""

MIB = 1024 * 1024
BATCH_BYTES = 4 * MIB
PIECE_BYTES = 8 * MIB
"""A longer document goes on in pieces: memory does not grow with it."""

_BATCH_DOCUMENTS = 65536
_BATCH_SKIPS = 4096
_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Batch:
    """Some of a source's text, in order."""

    pieces: list[bytes] = field(default_factory=list)
    """Valid UTF-8: whole documents, or parts of one that tokenize as the whole would."""
    numbers: list[int] = field(default_factory=list)
    """The document's number of each piece."""
    ends: list[bool] = field(default_factory=list)
    """True for the last piece of a document."""
    skipped: list[tuple[int, int, str]] = field(default_factory=list)
    """Number of the first bad document, how many they are, and the complaint."""
    cursor: Cursor = field(default_factory=dict)
    """Where the next batch begins."""
    text_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """How much a source holds, as far as that is known before it is read."""

    documents: int | None
    text_bytes: int | None
    """Size of the text itself, exact or close."""
    bytes_are_exact: bool = False
    note: str | None = None
    """A note for the user on how the documents were found."""


class Source(Protocol):
    """A place that documents come from."""

    @property
    def label(self) -> str:
        """Kind and place, for people and meta.json."""

    @property
    def default_val_fraction(self) -> float | None:
        """Share of the documents for validation when none is asked for; None: by their number."""

    @property
    def revision(self) -> str | None:
        """Return the name of the revision that `identity` pins, if any. Known after `identity`."""

    def identity(self) -> list[Any]:
        """JSON that changes when the source's documents do. Raises DataError when it is absent."""

    def survey(self) -> Survey:
        """Count without tokenizing; after `identity` and before `batches`."""

    def batches(self, cursor: Cursor) -> Iterator[Batch]:
        """Everything from `cursor` on. Raises DataError on a bad document."""


class Batcher:
    """Collects documents until they make a batch, and says what happens to bad ones."""

    def __init__(self, *, skip_bad: bool) -> None:
        self._skip_bad = skip_bad
        self._batch = Batch()

    @property
    def is_full(self) -> bool:
        """Return True when it is time to `take`."""
        batch = self._batch
        return (
            batch.text_bytes >= BATCH_BYTES
            or len(batch.pieces) >= _BATCH_DOCUMENTS
            or len(batch.skipped) >= _BATCH_SKIPS
        )

    def add(self, piece: bytes, *, number: int, is_last: bool = True) -> None:
        """Put one piece behind the others."""
        self._batch.pieces.append(piece)
        self._batch.numbers.append(number)
        self._batch.ends.append(is_last)
        self._batch.text_bytes += len(piece)

    def skip(self, complaint: str, *, number: int, documents: int = 1) -> None:
        """Count bad documents, or raise DataError where the user did not allow that."""
        if not self._skip_bad:
            raise DataError(f"{complaint} Fix it, or leave such documents out with --skip-bad.")
        # The journal and meta.json are UTF-8; a file's name need not be.
        written = complaint.encode("utf-8", "backslashreplace").decode("utf-8")
        self._batch.skipped.append((number, documents, written))

    def take(self, cursor: Cursor) -> Batch:
        """The batch so far; the next one starts empty."""
        taken, self._batch = self._batch, Batch()
        taken.cursor = cursor
        return taken


def cut_at(data: bytes) -> int | None:
    """The last place where `data` can be cut without changing its tokens, or None.

    GPT-2's pattern never joins a character that is not white space with white space behind it, and
    never looks back: before such white space the halves tokenize as the whole does.
    """
    end = len(data)
    while end > 0:
        start = max(0, end - 65536)
        for match in reversed(list(_SPACE.finditer(data, start, end))):
            place = match.start()
            before = data[max(0, place - 4) : place].decode("utf-8", errors="ignore")[-1:]
            if before and not before.isspace():
                return place
        end = start
    return None


_SPACE = re.compile(rb"[ \n\r\t]")


def read_pieces(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """A document's text as pieces with `is_last`, from the file's position on.

    8 MiB without white space are cut between two characters: the one case where a piece does not
    tokenize as the whole would, and no text that a language model could learn from.
    """
    held = b""
    while True:
        read = file.read(PIECE_BYTES + _LONGEST_CHARACTER - len(held))
        held += read
        if len(held) < PIECE_BYTES + _LONGEST_CHARACTER:
            yield held, True
            return
        place = cut_at(held) or character_start(held, PIECE_BYTES)
        yield held[:place], False
        held = held[place:]


_LONGEST_CHARACTER = 4


def character_start(data: bytes, place: int) -> int:
    """Return the last start of a UTF-8 character at or before `place`."""
    while place > 0 and data[place] & 0xC0 == 0x80:
        place -= 1
    return place


def prefetch(items: Iterator[_T]) -> Iterator[_T]:
    """The same items, each read in a thread while the one before is used."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read") as pool:
        ahead = pool.submit(next, items, None)
        while (item := ahead.result()) is not None:
            ahead = pool.submit(next, items, None)
            yield item
