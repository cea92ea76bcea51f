"""`python -m payload.data show`: a prepared conversation as text, what is trained in colour."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from payload.data.packed_blocks import FIRST, PADDING, TRAINED, PackedBlocks, Split, open_packed
from payload.data_folder import DataMeta
from payload.errors import ConfigError, DataError
from payload.tokenizer_identity import TOKENIZER_FILE
from payload.untrusted import one_line, printable

_TRAINED_COLOUR, _PLAIN = "\x1b[32m", "\x1b[0m"
_TRAINED_MARKS = "⟦", "⟧"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One conversation of a split."""

    number: int
    of: int
    block: int
    parts: list[tuple[str, bool]]
    """Text, and whether it is trained, in turns."""
    num_tokens: int
    num_trained: int

    def render(self, *, colour: bool) -> str:
        """Return its text; without colour, what is trained stands in brackets."""
        before, behind = (_TRAINED_COLOUR, _PLAIN) if colour else _TRAINED_MARKS
        return "".join(
            f"{before}{printable(text)}{behind}" if trained else printable(text)
            for text, trained in self.parts
        )


def read_sample(folder: Path, meta: DataMeta, *, split: Split, number: int) -> Sample:
    """Return conversation `number`, from 0, of a split. Raises DataError, ConfigError."""
    if meta.chat is None:
        raise ConfigError(
            f"{folder}: was prepared with --task {meta.task}, and show is for --task chat."
        )
    blocks = open_packed(folder, split=split, sequence_length=meta.chat.sequence_length)
    count = meta.train_documents if split == "train" else meta.val_documents
    if number >= count:
        raise ConfigError(
            f"--sample {number}: {folder} has {count:,} conversations in {split}. Use 0 to "
            f"{count - 1:,}."
        )
    place = _place_of(blocks, number, folder)
    row, start, end = place
    block = np.array([row], dtype=np.int64)
    tokens = blocks.gather(block)[0][0, start:end].tolist()
    trained = ((blocks.marks_of(block)[0, start:end] & TRAINED) != 0).tolist()
    return Sample(
        number=number,
        of=count,
        block=row,
        parts=_decoded(folder, tokens, trained),
        num_tokens=len(tokens),
        num_trained=sum(trained),
    )


def _place_of(blocks: PackedBlocks, number: int, folder: Path) -> tuple[int, int, int]:
    """Return the block, the first token and the end of a conversation."""
    for row in range(blocks.num_blocks()):
        marks = blocks.marks_of(np.array([row], dtype=np.int64))[0]
        firsts = np.flatnonzero((marks & (FIRST | PADDING)) == FIRST)
        if number < len(firsts):
            ends = np.append(firsts[1:], int(((marks & PADDING) == 0).sum()))
            return row, int(firsts[number]), int(ends[number])
        number -= len(firsts)
    raise DataError(f"{folder}: its marks hold fewer conversations than meta.json says.")


def _decoded(folder: Path, tokens: list[int], trained: list[bool]) -> list[tuple[str, bool]]:
    """Return the text of each stretch of tokens that are trained, or are not."""
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises no class of its own.
        raise DataError(f"{path}: cannot be loaded: {one_line(error)}") from None
    parts = []
    before, end = "", 0
    for flag, stretch in groupby(trained):
        end += len(list(stretch))
        # From the beginning: some tokenizers write a token otherwise where a text begins.
        text = tokenizer.decode(tokens[:end], skip_special_tokens=False)
        parts.append((text[len(before) :], flag))
        before = text
    return parts
