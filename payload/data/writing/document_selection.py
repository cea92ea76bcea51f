"""Mixes documents of the task `text` by weight, and removes duplicates.

The source is read several times. The first reading hashes the documents. Then each round reads the
source again: the first round yields all documents, and each further round yields the documents that
need one more copy. So the copies of a document are not adjacent.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from payload.data.selection.content_keys import KEY_BYTES, Mask, Numbers, equal_groups, keys_of
from payload.data.selection.near_duplicates import Sketcher, Sketches, near_groups
from payload.data.selection.select_rows import Mixing, RowSelection, select_rows, split_by_units
from payload.data.sources.documents import Batch, Cursor, Source, Survey, limit
from payload.data.sources.split import Split
from payload.formats.data_folder import SplitRecord


@dataclass(frozen=True, slots=True)
class DocumentSelection:
    """Numbers of copies of the documents in the training file and in the validation file."""

    rows: RowSelection
    copies: Numbers
    """The number of copies of each document. The index is the document's number."""
    is_val: Mask
    """Mask of the validation documents. The index is the document's number."""

    @property
    def record(self) -> SplitRecord:
        """Record of the split for meta.json."""
        return self.rows.split.record

    def val_mask(self, numbers: Numbers) -> Mask:
        """Return the mask of the validation documents among `numbers`."""
        return self.is_val[numbers]

    def survey(self, found: Survey) -> Survey:
        """Return the size of the output: the number of documents, and their estimated text size."""
        total, size = int(self.copies.sum()), found.text_bytes
        share = total / max(1, len(self.rows.copies))
        return replace(
            found, documents=total, text_bytes=None if size is None else int(size * share)
        )

    def batches(
        self, source: Source, cursor: Cursor, *, max_documents: int | None
    ) -> Iterator[Batch]:
        """Yield the documents of each round from `cursor` on."""
        first, at = cursor.get("round", 0), cursor.get("at", {})
        for turn in range(first, max(1, int(self.copies.max(initial=0)))):
            for batch in limit(source.batches(at), max_documents):
                yield self._only(batch, turn)
            at = {}

    def _only(self, batch: Batch, turn: int) -> Batch:
        chosen = np.flatnonzero(self.copies[np.array(batch.numbers, dtype=np.int64)] > turn)
        pieces = [batch.pieces[index] for index in chosen]
        return Batch(
            pieces=pieces,
            numbers=[batch.numbers[index] for index in chosen],
            ends=[batch.ends[index] for index in chosen],
            skipped=[] if turn else batch.skipped,
            cursor={"round": turn, "at": batch.cursor},
            text_bytes=sum(map(len, pieces)),
        )


def select_documents(
    source: Source,
    survey: Survey,
    mixing: Mixing,
    *,
    choose_split: Callable[[Survey], Split],
    max_documents: int | None,
) -> DocumentSelection | None:
    """Return how many copies of each document are written.

    Returns None if neither weights nor --dedup are set. Raises DataError.
    """
    if mixing.dedup in (None, "none") and not mixing.weights:
        return None
    scan = _Scan(near=mixing.dedup == "near")
    for batch in limit(source.batches({}), max_documents):
        scan.add(batch)
    numbers, starts, files = map(np.array, (scan.numbers, scan.starts, scan.files))
    inputs = np.zeros(len(numbers), dtype=np.int64)
    # A single file that is divided into documents has no starts of files.
    if source.inputs_of_files and len(starts):
        begun = np.searchsorted(starts, numbers, side="right") - 1
        inputs = np.array(source.inputs_of_files)[files[begun]]
    split_rows = split_by_units(choose_split, survey, numbers)
    selected = select_rows(scan.groups(), inputs, split_rows, mixing)
    size = int(numbers.max(initial=-1)) + 1
    copies, is_val = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.bool_)
    copies[numbers], is_val[numbers] = selected.copies, selected.is_val
    return DocumentSelection(selected, copies, is_val)


class _Scan:
    """Hashes of all documents, at 24 bytes per document, and 512 more for near duplicates."""

    def __init__(self, *, near: bool) -> None:
        self.numbers = array("q")
        self.starts, self.files = array("q"), array("q")
        """For each file, the number of its first document, and the file's index."""
        self._keys = bytearray()
        self._sketcher = Sketcher() if near else None
        self._sketches: list[Sketches] = []
        self._hash = hashlib.blake2b(digest_size=KEY_BYTES)
        self._pieces: list[bytes] = []

    def add(self, batch: Batch) -> None:
        """Hash the documents of a batch."""
        self.starts.extend(number for number, _ in batch.file_starts)
        self.files.extend(index for _, index in batch.file_starts)
        for piece, number, is_last in zip(batch.pieces, batch.numbers, batch.ends, strict=True):
            self._hash.update(piece)
            if self._sketcher is not None:
                self._pieces.append(piece)
            if not is_last:
                continue
            self.numbers.append(number)
            self._keys += self._hash.digest()
            self._hash = hashlib.blake2b(digest_size=KEY_BYTES)
            if self._sketcher is not None:
                texts = (each.decode() for each in self._pieces)
                self._sketches.append(self._sketcher.sketch(texts))
                self._pieces = []

    def groups(self) -> Numbers:
        """Return a group number for each document. Duplicates have the same number."""
        groups = equal_groups(keys_of([bytes(self._keys)]))
        if self._sketcher is None or not self._sketches:
            return groups
        return near_groups(groups, np.stack(self._sketches))
