"""Blocks of a token file, and the order in which training visits them.

The order is a pure function of (seed, epoch, sample index). The order does not depend on the number
of ranks or the micro-batch size, so one integer is enough to resume a run.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from payload.core.errors import DataError
from payload.data.reading.range_hashes import RangeCheck, open_check
from payload.formats.data_folder import (
    IGNORED_TARGET,
    TRAIN_NAME,
    VAL_NAME,
    DataMeta,
    load_meta,
    require_task,
)

Indices = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]

_FEISTEL_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """A keyed permutation of `num_blocks` blocks for every epoch, computed without storing it."""

    num_blocks: int
    seed: int

    def blocks(self, samples: Indices) -> Indices:
        """Return the block that training reads at each of these sample indices.

        Samples are counted from the start of training, over all ranks.
        """
        epochs, positions = np.divmod(samples, self.num_blocks)
        result = np.empty_like(samples)
        # A large step over little data can span a thousand epochs: permute each epoch's samples
        # together.
        bounds = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist(), len(samples)]
        for first, last in pairwise(bounds):
            if first < last:
                epoch = int(epochs[first])
                result[first:last] = self._permute(positions[first:last], epoch=epoch)
        return result

    def _permute(self, positions: Indices, *, epoch: int) -> Indices:
        """Permute positions by a Feistel network over the next power of four.

        A result outside of the blocks is permuted again until it is a block (cycle walking).
        """
        half_bits = max(1, (max(1, self.num_blocks - 1).bit_length() + 1) // 2)
        # Seed and epoch are mixed one after the other, so that seed 0 in epoch 1 differs from
        # seed 1 in epoch 0.
        seeded = _mix(np.full(_FEISTEL_ROUNDS, self.seed, dtype=np.uint64))
        seeded = _mix(seeded ^ np.full(_FEISTEL_ROUNDS, epoch, dtype=np.uint64))
        rounds: _U64 = np.arange(_FEISTEL_ROUNDS, dtype=np.uint64)
        keys = _mix(seeded ^ rounds)
        values = _feistel(positions.astype(np.uint64), keys=keys, half_bits=half_bits)
        outside = values >= self.num_blocks
        while outside.any():
            values[outside] = _feistel(values[outside], keys=keys, half_bits=half_bits)
            outside = values >= self.num_blocks
        return values.astype(np.int64)


def _feistel(values: _U64, *, keys: _U64, half_bits: int) -> _U64:
    """Apply a bijection on numbers of 2 x half_bits bits."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(values: _U64) -> _U64:
    """Return the values with their bits mixed, as by the generator SplitMix64.

    Source: https://prng.di.unimi.it/splitmix64.c.
    """
    with np.errstate(over="ignore"):
        mixed = values + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


class Blocks(Protocol):
    """Blocks of one split, as an evaluation reads them."""

    @property
    def path(self) -> Path:
        """Token file of the split."""

    @property
    def sequence_length(self) -> int:
        """Tokens in a block."""

    def num_full_blocks(self) -> int:
        """Return how many blocks have a target at every position."""

    def num_blocks(self) -> int:
        """Return the number of all blocks."""

    def gather(self, blocks: Indices) -> tuple[torch.Tensor, ...]:
        """Return the tokens, the targets and any further inputs of the model. Raises DataError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBlocks:
    """One token file, cut into blocks of `sequence_length` that do not overlap.

    In shapes, B is the number of blocks and T is `sequence_length`. The targets of a block include
    the first token of the next block, so every token except the first of the file is predicted
    exactly once.
    """

    path: Path
    tokens: np.memmap[tuple[int], np.dtype[np.unsignedinteger]]
    sequence_length: int
    vocab_size: int
    check: RangeCheck | None = None
    """Checks ranges against meta.json before use; None if meta.json has no range hashes."""

    def num_full_blocks(self) -> int:
        """Return how many blocks have `sequence_length` targets."""
        return (len(self.tokens) - 1) // self.sequence_length

    def num_blocks(self) -> int:
        """Return the number of all blocks, including a shorter last block."""
        return -(-(len(self.tokens) - 1) // self.sequence_length)

    def gather(self, blocks: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the targets of these blocks, both (B, T) int64.

        A short last block is padded with token 0 and the target `IGNORED_TARGET`. Raises DataError
        if the file does not match meta.json, or if a token is outside of the vocabulary.
        """
        length = self.sequence_length
        if self.check is not None:
            self.check.require([self._span(block) for block in blocks.tolist()])
        inputs = np.zeros((len(blocks), length), dtype=np.int64)
        targets = np.full((len(blocks), length), IGNORED_TARGET, dtype=np.int64)
        for row, block in enumerate(blocks):
            span = self.tokens[block * length : (block + 1) * length + 1]
            inputs[row, : len(span) - 1] = span[:-1]
            targets[row, : len(span) - 1] = span[1:]
        self._require_in_vocabulary(max(int(inputs.max()), int(targets.max())))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def whole(self, blocks: Indices) -> Indices:
        """Return the tokens of these full blocks, (B, T), without the next block's first token.

        Raises DataError like `gather`.
        """
        if self.check is not None:
            self.check.require([self._span(block) for block in blocks.tolist()])
        length = self.sequence_length
        found = np.stack(
            [self.tokens[block * length : (block + 1) * length] for block in blocks.tolist()]
        ).astype(np.int64)
        self._require_in_vocabulary(int(found.max()))
        return found

    def _require_in_vocabulary(self, largest: int) -> None:
        if largest >= self.vocab_size:
            raise DataError(
                f"{self.path}: token {largest} is outside the vocabulary of {self.vocab_size}. The "
                "file is damaged or from another tokenizer. Prepare the data again."
            )

    def is_checked(self) -> bool:
        """Return True if reads are checked against the hashes in meta.json."""
        return self.check is not None

    def expect(self, blocks: Indices) -> None:
        """Start reading these blocks into the page cache, for a later `gather`.

        The system's readahead does not help, because blocks are visited in random order.
        """
        file = self.tokens.base
        if not isinstance(file, mmap.mmap) or not hasattr(mmap, "MADV_WILLNEED"):
            return
        for block in blocks.tolist():
            start, end = self._span(block)
            if self.check is not None:
                start, end = self.check.extended(start, end)
            # madvise accepts only whole pages.
            start = start // mmap.PAGESIZE * mmap.PAGESIZE
            file.madvise(mmap.MADV_WILLNEED, start, end - start)

    def _span(self, block: int) -> tuple[int, int]:
        """Return the byte range of a block with its targets; the end is exclusive."""
        block_bytes = self.sequence_length * self.tokens.itemsize
        end = (block + 1) * block_bytes + self.tokens.itemsize
        return block * block_bytes, min(end, self.tokens.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenData:
    """A prepared data folder, opened for one sequence length."""

    folder: Path
    meta: DataMeta
    train: TokenBlocks
    val: TokenBlocks

    def has_range_hashes(self) -> bool:
        """Return True if meta.json has a hash for each range of the token files.

        Training compares each range that it reads with the hash.
        """
        return self.train.is_checked() and self.val.is_checked()

    @classmethod
    def open(cls, folder: Path, *, sequence_length: int) -> TokenData:
        """Map train.bin and val.bin into memory.

        Raises DataError if a file does not match meta.json.
        """
        meta = load_meta(folder)
        require_task(folder, meta, task="text")
        train, val = (
            open_tokens(folder / name, meta=meta, sequence_length=sequence_length)
            for name in (TRAIN_NAME, VAL_NAME)
        )
        if train.num_full_blocks() < 1:
            raise DataError(
                f"{train.path}: the file has {len(train.tokens)} tokens, fewer than "
                f"data.sequence_length + 1 = {sequence_length + 1}. Use a shorter "
                "data.sequence_length or prepare more text."
            )
        return cls(folder=folder, meta=meta, train=train, val=val)


def open_tokens(path: Path, *, meta: DataMeta, sequence_length: int) -> TokenBlocks:
    """Map one token file of a folder into memory. Raises DataError for fewer than two tokens."""
    file = meta.files[path.name]
    dtype = np.dtype(meta.dtype).newbyteorder("<")
    if file.bytes < 2 * dtype.itemsize:
        raise DataError(f"{path}: the file has fewer than two tokens. Prepare more text.")
    return TokenBlocks(
        path=path,
        tokens=np.memmap(path, dtype=dtype, mode="r"),
        sequence_length=sequence_length,
        vocab_size=meta.vocab_size,
        check=open_check(path, file, source=meta.source),
    )
