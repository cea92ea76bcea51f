"""Blocks of whole conversations. Each token has a mark, which is a bit mask.

The bits are: the loss covers the token, the token is the first of a document, the token is padding.
In shapes, B is the number of blocks and T the number of tokens in a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from payload.core.errors import DataError
from payload.data.reading.blocks import Indices, TokenBlocks, open_tokens
from payload.data.reading.range_hashes import RangeCheck, open_check
from payload.formats.data_folder import (
    IGNORED_TARGET,
    TRAIN_MARKS_NAME,
    TRAIN_NAME,
    VAL_MARKS_NAME,
    VAL_NAME,
    load_meta,
    require_prepared_length,
    require_task,
)

TRAINED, FIRST, PADDING = 1, 2, 4
"""Bits of the mark that each token has. The loss covers the trained tokens, but never the first
token of a document."""

_FILES = {"train": (TRAIN_NAME, TRAIN_MARKS_NAME), "val": (VAL_NAME, VAL_MARKS_NAME)}

Split = Literal["train", "val"]
Marks = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlocks:
    """One split of a folder for the task `chat`."""

    tokens: TokenBlocks
    marks: np.memmap[tuple[int], np.dtype[np.uint8]]
    marks_check: RangeCheck | None

    @property
    def sequence_length(self) -> int:
        """Tokens in a block."""
        return self.tokens.sequence_length

    @property
    def path(self) -> Path:
        """Token file of the split."""
        return self.tokens.path

    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return len(self.marks) // self.sequence_length

    def num_full_blocks(self) -> int:
        """Return the number of blocks. All are full, because a block contains its own targets."""
        return self.num_blocks()

    def gather(self, blocks: Indices) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tokens, targets and document starts of these blocks, each (B, T) int64.

        The document start of a position is the index at which the position's document begins in the
        block. There the positions restart at 0, and attention does not reach earlier tokens. Raises
        DataError.
        """
        marks = self.marks_of(blocks)
        tokens = self.tokens.whole(blocks)
        length = self.sequence_length
        targets = np.full_like(tokens, IGNORED_TARGET)
        is_target = (marks[:, 1:] & TRAINED) != 0
        targets[:, :-1][is_target] = tokens[:, 1:][is_target]
        is_first = (marks & FIRST) != 0
        starts = np.where(is_first, np.arange(length, dtype=np.int64), 0)
        np.maximum.accumulate(starts, axis=1, out=starts)
        return torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(starts)

    def num_targets(self, blocks: Indices) -> int:
        """Return the number of tokens that the loss covers."""
        return int(((self.marks_of(blocks) & TRAINED) != 0).sum())

    def num_tokens(self, blocks: Indices) -> int:
        """Return the number of tokens without padding."""
        return int(((self.marks_of(blocks) & PADDING) == 0).sum())

    def expect(self, blocks: Indices) -> None:
        """Start reading the tokens of these blocks into the page cache.

        The marks are small, and are not read ahead.
        """
        self.tokens.expect(blocks)

    def is_checked(self) -> bool:
        """Return True if reads are checked against the hashes in meta.json."""
        return self.tokens.is_checked() and self.marks_check is not None

    def marks_of(self, blocks: Indices) -> Marks:
        """Return the marks of these blocks, (B, T). Raises DataError for a damaged file."""
        length = self.sequence_length
        if self.marks_check is not None:
            spans = [(block * length, (block + 1) * length) for block in blocks.tolist()]
            self.marks_check.require(spans)
        return self.marks.reshape(-1, length)[blocks]


def open_packed(folder: Path, *, split: Split, sequence_length: int) -> PackedBlocks:
    """Map one split of a folder into memory.

    Raises DataError for a damaged folder, and ConfigError if the folder was prepared for a
    different task or sequence length.
    """
    meta = load_meta(folder)
    require_task(folder, meta, task="chat")
    assert meta.chat is not None, "load_meta requires the record of the task"
    require_prepared_length(folder, meta, sequence_length=sequence_length)
    name, marks_name = _FILES[split]
    path, file = folder / marks_name, meta.files[marks_name]
    if not file.bytes or file.bytes % sequence_length:
        raise DataError(
            f"{path}: {file.bytes:,} marks are not a multiple of the block length "
            f"{sequence_length}. Prepare the data again with --force."
        )
    return PackedBlocks(
        tokens=open_tokens(folder / name, meta=meta, sequence_length=sequence_length),
        marks=np.memmap(path, dtype=np.uint8, mode="r"),
        marks_check=open_check(path, file, source=meta.source),
    )
