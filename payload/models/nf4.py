"""NF4's sizes: weights of 4 bits in blocks that share a scale. Pure arithmetic.

Double quantisation keeps the blocks' scales in 8 bits. Source: https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

BLOCK_SIZE = 64
"""Weights that share a scale, as in bitsandbytes' Linear4bit."""
GROUP_SIZE = 256
"""Scales that share a scale of their own."""


def num_blocks(elements: int) -> int:
    """Return the number of scales of a tensor."""
    return -(-elements // BLOCK_SIZE)


def num_groups(elements: int) -> int:
    """Return the number of the scales' own scales."""
    return -(-num_blocks(elements) // GROUP_SIZE)


def nf4_bytes(elements: int) -> int:
    """Return what a quantised tensor takes: weights, scales, the scales' scales and their mean."""
    return -(-elements // 2) + num_blocks(elements) + 4 * num_groups(elements) + 4
