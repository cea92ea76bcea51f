"""Tokenized samples: a file that grows while rows are read, and blocks packed from its samples.

Memory holds 40 bytes for each sample, and the tokens of a limited number of samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.core.symlink_safety import no_follow
from payload.data.reading.packed_blocks import FIRST, PADDING, TRAINED
from payload.data.rows.packing import Blocks
from payload.data.selection.content_keys import Keys, Numbers, key_of, keys_of
from payload.data.tasks.whole_folder_writer import Chunks
from payload.data.writing.resumable_token_files import (
    INDEX_NAME,
    SAMPLES_NAME,
    ResumableTokenFiles,
    partial_path,
)
from payload.formats.data_folder import TokenDtype

_INDEX = np.dtype(
    [("row", "<i8"), ("group", "<i8"), ("length", "<i4"), ("trained", "<i4"), ("key", "<u8", (2,))]
)
_CHUNK_TOKENS = 2**17
"""Number of tokens that are packed at a time. Each token needs about 30 bytes."""
_VALUE = np.dtype("<u4")
"""A token id (below 2**24), and a bit that is set if the token is trained."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The tokens of some samples, one after the other."""

    rows: npt.NDArray[np.int64]
    """For each sample, the index of its row."""
    groups: npt.NDArray[np.int64]
    """For each sample, the number of its group, or of its row if there are no groups. The number
    decides whether the sample is for validation."""
    lengths: npt.NDArray[np.int64]
    """For each sample, its number of tokens."""
    tokens: npt.NDArray[np.uint32]
    trained: npt.NDArray[np.bool_]
    """True for each token that is trained; the first token of a sample never is."""

    def __len__(self) -> int:
        return len(self.lengths)

    def num_trained(self) -> npt.NDArray[np.int64]:
        """Return the number of trained tokens of each sample."""
        sums = np.concatenate(([0], np.cumsum(self.trained)))
        ends = np.cumsum(self.lengths)
        found: npt.NDArray[np.int64] = sums[ends] - sums[ends - self.lengths]
        return found

    def only(self, chosen: npt.NDArray[np.bool_]) -> Documents:
        """Return the chosen samples."""
        if chosen.all():
            return self
        of_token = np.repeat(chosen, self.lengths)
        return Documents(
            self.rows[chosen],
            self.groups[chosen],
            self.lengths[chosen],
            self.tokens[of_token],
            self.trained[of_token],
        )


def split_sample(
    tokens: npt.NDArray[np.uint32], trained: npt.NDArray[np.bool_], *, length: int
) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
    """Return a sample in pieces of at most `length` tokens."""
    pieces = []
    # A piece begins with the last token of the piece before, which predicts the next token.
    for start in range(0, len(tokens) - 1, length - 1):
        marks = trained[start : start + length].copy()
        marks[0] = False
        pieces.append((tokens[start : start + length], marks))
    return pieces


class SampleFiles:
    """The samples of a run, in the order of the rows."""

    def __init__(self, store: ResumableTokenFiles | None) -> None:
        """A dry run has no `store`, and keeps only the lengths of the samples.

        A `store` that was resumed has the samples of an earlier run.
        """
        self._store = store
        self._parts: list[npt.NDArray[Any]] = []
        if store is not None and store.has_shards:
            self._parts.append(np.fromfile(partial_path(store.folder, INDEX_NAME), dtype=_INDEX))

    def add(self, documents: Documents) -> None:
        """Append samples."""
        if not len(documents):
            return
        index = np.empty(len(documents), dtype=_INDEX)
        index["group"], index["length"] = documents.groups, documents.lengths
        index["row"], index["trained"] = documents.rows, documents.num_trained()
        values = documents.tokens.astype(_VALUE) << 1
        values |= documents.trained
        index["key"] = _keys(values, documents.lengths)
        self._parts.append(index)
        if self._store is not None:
            self._store.append(SAMPLES_NAME, values)
            self._store.append(INDEX_NAME, index)

    def index(self) -> npt.NDArray[Any]:
        """Return `row`, `group`, `length`, `trained` and `key` of every sample.

        `trained` is the number of trained tokens. Samples with equal keys have the same tokens and
        the same trained tokens.
        """
        self._parts = [np.concatenate([np.empty(0, dtype=_INDEX), *self._parts])]
        return self._parts[0]

    def temporary_bytes(self) -> int:
        """Return the size of the files that the run removes when it is complete."""
        index = self.index()
        return int(index["length"].sum(dtype=np.int64)) * _VALUE.itemsize + index.nbytes

    def packed(
        self,
        numbers: npt.NDArray[np.int64],
        pack: Callable[[npt.NDArray[np.int64]], Blocks],
        *,
        length: int,
        dtype: TokenDtype,
        padding: int,
    ) -> tuple[Chunks, Chunks]:
        """Pack samples into blocks of `length` tokens; return the tokens and the marks.

        `numbers` are the indices of the samples; an index can occur several times.

        `pack` assigns samples of given lengths to blocks. The token `padding` fills each block up.
        """
        blocks = pack(self.index()["length"][numbers].astype(np.int64))
        blocks = Blocks(numbers[blocks.documents], blocks.ends)
        folder = self._store.folder if self._store is not None else None

        def tokens(
            places: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], values: Any, size: int
        ) -> npt.NDArray[Any]:
            found = np.full(size, padding, dtype=dtype)
            found[places] = values >> 1
            return found

        def marks(
            places: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], values: Any, size: int
        ) -> npt.NDArray[Any]:
            # Each padding token is a separate document, so attention does no work for it.
            found = np.full(size, PADDING | FIRST, dtype=np.uint8)
            found[places] = (values & 1).astype(np.uint8) * np.uint8(TRAINED)
            found[starts] |= FIRST
            return found

        size = len(blocks) * length
        made = partial(self._chunks, folder, blocks, length=length)
        return (
            Chunks(size * np.dtype(dtype).itemsize, partial(made, fill=tokens)),
            Chunks(size, partial(made, fill=marks)),
        )

    def _chunks(
        self, folder: Path | None, blocks: Blocks, *, length: int, fill: Callable[..., Any]
    ) -> Iterator[npt.NDArray[Any]]:
        """Yield parts of a file. `fill` makes each part from several blocks."""
        assert folder is not None, "a dry run has no files"
        lengths = self.index()["length"].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        at_once = max(1, _CHUNK_TOKENS // length)
        with ExitStack() as stack:
            path = partial_path(folder, SAMPLES_NAME)
            file = stack.enter_context(open(path, "rb", opener=no_follow))
            first = 0
            for block in range(0, len(blocks), at_once):
                ends = blocks.ends[block : block + at_once]
                documents = blocks.documents[first : ends[-1]]
                counts = np.diff(ends, prepend=first)
                first = int(ends[-1])
                # Not a memory map: its pages would count as memory of this process.
                content = b"".join(
                    os.pread(file.fileno(), size * _VALUE.itemsize, start * _VALUE.itemsize)
                    for size, start in zip(
                        lengths[documents].tolist(), starts[documents].tolist(), strict=True
                    )
                )
                values = np.frombuffer(content, dtype=_VALUE)
                sizes = lengths[documents]
                before = np.cumsum(sizes) - sizes
                of_block = np.repeat(before[np.cumsum(counts) - counts], counts)
                block_starts = np.repeat(np.arange(len(ends)) * length, counts)
                begins = block_starts + before - of_block
                places = np.repeat(begins - before, sizes) + np.arange(len(values))
                yield fill(places, begins, values, len(ends) * length)


def _keys(values: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> Keys:
    """Return a key for each sample: a hash of the sample's values."""
    content = values.data.cast("B")
    ends = np.cumsum(lengths) * _VALUE.itemsize
    starts = [0, *ends[:-1].tolist()]
    return keys_of(
        key_of(content[start:end]) for start, end in zip(starts, ends.tolist(), strict=True)
    )


def row_keys(index: npt.NDArray[Any]) -> tuple[Numbers, Keys]:
    """Return for each row the index of its first sample, and a key of all its samples."""
    rows = index["row"]
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    keys = index["key"][first].copy()
    counts = np.diff(first, append=len(rows))
    for place in np.flatnonzero(counts > 1).tolist():
        start = first[place]
        samples = index["key"][start : start + counts[place]]
        keys[place] = keys_of([key_of(np.ascontiguousarray(samples).data.cast("B"))])[0]
    return first, keys
