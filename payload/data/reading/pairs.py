"""Preference pairs of a data folder, in batches that are padded to the longest conversation.

A token file holds the two conversations of each pair, the chosen one first. The file of pairs holds
the end of each conversation, as a token index. The file of marks has a flag for each token. The
flag is set if the token belongs to an answer.

In shapes, P is the number of pairs and T the length of the longest conversation of a batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from payload.core.errors import DataError
from payload.data.reading.blocks import Indices, open_tokens
from payload.data.reading.packed_blocks import TRAINED
from payload.data.reading.range_hashes import RangeCheck, open_check
from payload.formats.data_folder import (
    IGNORED_TARGET,
    PAIRS_NAMES,
    TRAIN_MARKS_NAME,
    TRAIN_NAME,
    VAL_MARKS_NAME,
    VAL_NAME,
    load_meta,
    require_prepared_length,
    require_task,
)
from payload.formats.prepare_hints import prepare_again_hint

_FILES = {"train": (TRAIN_NAME, TRAIN_MARKS_NAME), "val": (VAL_NAME, VAL_MARKS_NAME)}
_PAIR_DTYPE = np.dtype("<i8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """One split of a folder for the task `preference`."""

    path: Path
    tokens: npt.NDArray[np.unsignedinteger]
    marks: npt.NDArray[np.uint8]
    starts: Indices
    """Shape (pairs, 2): where the chosen and the rejected conversation begin, as token indices."""
    lengths: Indices
    """Shape (pairs, 2): lengths of the chosen and the rejected conversation, in tokens."""
    vocab_size: int
    pad_token: int
    check: RangeCheck | None
    marks_check: RangeCheck | None

    def num_pairs(self) -> int:
        """Return the number of pairs."""
        return len(self.starts)

    def num_tokens(self, chosen: Indices) -> int:
        """Return the number of tokens in both conversations of these pairs, without padding."""
        return int(self.lengths[chosen].sum())

    def longest(self, chosen: Indices) -> Indices:
        """Return the length of the longer conversation of each pair."""
        return np.asarray(self.lengths[chosen].max(axis=1), dtype=np.int64)

    def is_checked(self) -> bool:
        """Return True if reads are checked against the hashes in meta.json."""
        return self.check is not None and self.marks_check is not None

    def gather(self, chosen: Indices) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tokens, targets and document starts of these pairs, each (2P, T) int64.

        The chosen conversations come first, then the rejected conversations in the same order. Only
        the tokens of the answers are targets. `CausalLM.hidden` explains document starts. Each
        padding token counts as a separate document. Raises DataError if a file does not match
        meta.json.
        """
        starts, lengths = self.starts[chosen].T.flatten(), self.lengths[chosen].T.flatten()
        self._require_intact(starts, starts + lengths)
        size = (len(starts), int(lengths.max()))
        tokens = np.full(size, self.pad_token, dtype=np.int64)
        targets = np.full(size, IGNORED_TARGET, dtype=np.int64)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            own = self.tokens[start : start + length]
            tokens[row, :length] = own
            is_target = (self.marks[start + 1 : start + length] & TRAINED) != 0
            targets[row, : length - 1][is_target] = own[1:][is_target]
        if int(tokens.max()) >= self.vocab_size:
            raise DataError(
                f"{self.path}: token {int(tokens.max())} is outside the vocabulary of "
                f"{self.vocab_size}. Prepare the data again."
            )
        positions = np.arange(size[1], dtype=np.int64)
        documents = np.where(positions < lengths[:, None], 0, positions)
        return torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(documents)

    def _require_intact(self, starts: Indices, ends: Indices) -> None:
        for check, size in ((self.check, self.tokens.itemsize), (self.marks_check, 1)):
            if check is not None:
                spans = zip((starts * size).tolist(), (ends * size).tolist(), strict=True)
                check.require(list(spans))


def open_pairs(folder: Path, *, split: Literal["train", "val"], sequence_length: int) -> Pairs:
    """Map one split of a folder into memory.

    Raises DataError for a damaged folder, and ConfigError if the folder was prepared for a
    different task or sequence length.
    """
    meta = load_meta(folder)
    require_task(folder, meta, task="preference")
    assert meta.preference is not None, "load_meta requires the record of the task"
    require_prepared_length(folder, meta, sequence_length=sequence_length)
    name, marks_name = _FILES[split]
    blocks = open_tokens(folder / name, meta=meta, sequence_length=sequence_length)
    pairs_file = folder / PAIRS_NAMES[name]
    remedy = prepare_again_hint(folder, source=meta.source)
    content = pairs_file.read_bytes()
    if hashlib.sha256(content).hexdigest() != meta.files[pairs_file.name].sha256:
        raise DataError(f"{pairs_file}: its SHA-256 differs from the one in meta.json. {remedy}")
    ends = np.frombuffer(content, dtype=_PAIR_DTYPE).astype(np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    lengths = ends - starts
    if (lengths < 2).any() or (lengths > sequence_length).any() or ends[-1] != len(blocks.tokens):
        raise DataError(f"{pairs_file}: its offsets do not match {name}. {remedy}")
    return Pairs(
        path=folder / name,
        tokens=blocks.tokens,
        marks=np.memmap(folder / marks_name, dtype=np.uint8, mode="r"),
        starts=starts.reshape(-1, 2),
        lengths=lengths.reshape(-1, 2),
        vocab_size=meta.vocab_size,
        pad_token=meta.preference.pad_token,
        check=blocks.check,
        marks_check=open_check(folder / marks_name, meta.files[marks_name], source=meta.source),
    )
