"""Sizes of NF4 tensors: 4-bit weights in blocks with a common scale.

Double quantisation stores the scales of the blocks in 8 bits. Source:
https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

BLOCK_SIZE = 64
"""Number of weights with a common scale, as in bitsandbytes' Linear4bit."""
GROUP_SIZE = 256
"""Number of scales with a common second-level scale."""


def num_blocks(elements: int) -> int:
    """Return the number of scales of a tensor."""
    return -(-elements // BLOCK_SIZE)


def num_groups(elements: int) -> int:
    """Return the number of second-level scales of a tensor."""
    return -(-num_blocks(elements) // GROUP_SIZE)


def nf4_bytes(elements: int) -> int:
    """Return the bytes of a quantised tensor: weights, two levels of scales, the scales' mean."""
    return -(-elements // 2) + num_blocks(elements) + 4 * num_groups(elements) + 4
