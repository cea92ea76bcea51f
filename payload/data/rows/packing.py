"""Packs documents into blocks of one length by best-fit decreasing.

Source: Ding et al., Fewer Truncations Improve Language Modeling, 2024 (arXiv:2404.10830).
"""

from __future__ import annotations

from collections.abc import Sequence


def best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return the numbers of the documents in each block; `capacity` must fit the longest.

    Documents are placed longest first, each into the fullest block that has room for it. The result
    depends only on the lengths. The time is linear in the number of documents: bit n of one integer
    is set if a block has room for exactly n more tokens.
    """
    blocks: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    # The sort is stable: documents of equal length keep their order.
    for document in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[document]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            block = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
            blocks[block].append(document)
        else:
            room, block = capacity, len(blocks)
            blocks.append([document])
        left = room - length
        if left:
            by_room[left].append(block)
            rooms |= 1 << left
    return blocks
