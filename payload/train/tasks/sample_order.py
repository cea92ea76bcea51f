"""Orders a step's samples before they are divided among micro-batches and ranks."""

from __future__ import annotations

import numpy as np

from payload.data.reading.blocks import Indices


def similar_lengths(chosen: Indices, lengths: Indices) -> Indices:
    """Return the samples sorted by their `lengths`, so that a micro-batch has similar lengths."""
    return chosen[np.argsort(lengths, kind="stable")]


def equal_tokens(chosen: Indices, lengths: Indices, *, micro_batch_size: int) -> Indices:
    """Return the samples in an order in which micro-batches have about the same number of tokens.

    The samples are sorted by `lengths` and assigned to the micro-batches in turn. Every second
    round visits the micro-batches in reverse.
    """
    count = len(chosen) // micro_batch_size
    dealt = similar_lengths(chosen, lengths).reshape(micro_batch_size, count)
    dealt[1::2] = dealt[1::2, ::-1].copy()
    return dealt.T.flatten()
