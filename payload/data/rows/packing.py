"""Packs documents into blocks of one length by best-fit decreasing.

Source: Ding et al., Fewer Truncations Improve Language Modeling, 2024 (arXiv:2404.10830).
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_AT_ONCE = 2**16
"""Number of lengths that are converted to Python integers at a time. Integers take four times the
memory."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Indices of the documents in each block. Iteration yields one list of indices per block."""

    documents: Numbers
    """Indices of all documents, block after block."""
    ends: Numbers
    """For each block, how many documents are in this block and all earlier blocks together."""

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for end in self.ends.tolist():
            yield self.documents[start:end].tolist()
            start = end


def one_each(count: int) -> Blocks:
    """Return blocks that contain one document each."""
    return Blocks(np.arange(count, dtype=np.int64), np.arange(1, count + 1, dtype=np.int64))


def best_fit(lengths: Sequence[int] | Numbers, *, capacity: int) -> Blocks:
    """Return which documents go into each block of `capacity` tokens; no document is longer.

    Documents are placed longest first, each into the fullest block that has room for it. The result
    depends only on the lengths. The time is linear in the number of documents: bit n of one integer
    is set if a block has room for exactly n more tokens.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    # The sort is stable: documents of equal length keep their order.
    order = np.argsort(-sizes, kind="stable")
    block_of = array("q")
    by_room: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
    rooms = num_blocks = 0
    for start in range(0, len(order), _AT_ONCE):
        for length in sizes[order[start : start + _AT_ONCE]].tolist():
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                block = by_room[room].pop()
                if not by_room[room]:
                    rooms &= ~(1 << room)
            else:
                room, block = capacity, num_blocks
                num_blocks += 1
            block_of.append(block)
            left = room - length
            if left:
                by_room[left].append(block)
                rooms |= 1 << left
    blocks = np.frombuffer(block_of, dtype=np.int64) if block_of else np.empty(0, np.int64)
    documents = order[np.argsort(blocks, kind="stable")]
    return Blocks(documents, np.cumsum(np.bincount(blocks, minlength=num_blocks)))
