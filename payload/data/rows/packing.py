"""Documents into blocks of one length: best-fit decreasing, as Best-fit Packing has it.

Source: Ding et al., Fewer Truncations Improve Language Modeling, 2024 (arXiv:2404.10830).
"""

from __future__ import annotations

from collections.abc import Sequence


def best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return the documents of each block, by number; none is longer than `capacity`.

    The longest document comes first, and each goes into the fullest block that has room for it.
    The result follows from the lengths alone. It takes time proportional to their number: bit n of
    one integer says whether a block has room for exactly n more tokens.
    """
    blocks: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    # The sort is stable: documents of one length keep their order.
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
