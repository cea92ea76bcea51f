"""Decodes a prepared sample for `data show`, and marks the text that the model is trained on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from payload.core.errors import ConfigError, DataError, is_failure
from payload.core.printable_text import one_line, printable
from payload.data.reading.packed_blocks import (
    FIRST,
    PADDING,
    TRAINED,
    PackedBlocks,
    Split,
    open_packed,
)
from payload.data.reading.pairs import open_pairs
from payload.data.rows.columns import ANSWERS
from payload.formats.data_folder import IGNORED_TARGET, ChatRecord, DataMeta
from payload.formats.tokenizer_identity import TOKENIZER_FILE

_TRAINED_COLOUR, _PLAIN = "\x1b[32m", "\x1b[0m"
_TRAINED_MARKS = "⟦", "⟧"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One conversation of a split, or one of the two conversations of a preference pair."""

    name: str
    """Heading of the sample, as in `conversation 3 of 120 in train, block 1`."""
    parts: list[tuple[str, bool]]
    """Pieces of the sample's text, each with a flag that is True if the loss covers the piece. The
    flags alternate."""
    num_tokens: int
    num_trained: int

    def render(self, *, colour: bool) -> str:
        """Return the text with the trained pieces in colour, or in brackets without `colour`."""
        opening, closing = (_TRAINED_COLOUR, _PLAIN) if colour else _TRAINED_MARKS
        return "".join(
            f"{opening}{printable(text)}{closing}" if trained else printable(text)
            for text, trained in self.parts
        )


def has_colours(environment: Mapping[str, str]) -> bool:
    """Return True if stdout is a terminal and the environment has no NO_COLOR."""
    return sys.stdout.isatty() and not environment.get("NO_COLOR")


def parts_of(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """Return the pieces of a text, each with a flag.

    The flag is True if the piece is in one of the spans.
    """
    parts, place = [], 0
    for start, end in spans:
        parts += [(text[place:start], False), (text[start:end], True)]
        place = end
    parts.append((text[place:], False))
    return [part for part in parts if part[0]]


def read_samples(folder: Path, meta: DataMeta, *, split: Split, number: int) -> list[Sample]:
    """Return conversation `number` of a split, or both conversations of pair `number`.

    Raises DataError, ConfigError.
    """
    if meta.chat is None and meta.preference is None:
        raise ConfigError(
            f"{folder} was prepared with --task {meta.task}. Use a folder that was prepared with "
            "--task chat or --task preference."
        )
    count = meta.train_documents if split == "train" else meta.val_documents
    if number >= count:
        unit = "conversations" if meta.chat is not None else "pairs"
        raise ConfigError(
            f"--sample {number}: {folder} has {count:,} {unit} in {split}. Use 0 to {count - 1:,}."
        )
    where = f"{number} of {count:,} in {split}"
    if meta.preference is not None:
        length = meta.preference.sequence_length
        return _pair(folder, split=split, number=number, where=where, sequence_length=length)
    assert meta.chat is not None
    return [_conversation(folder, meta.chat, split=split, number=number, where=where)]


def _pair(
    folder: Path, *, split: Split, number: int, where: str, sequence_length: int
) -> list[Sample]:
    pairs = open_pairs(folder, split=split, sequence_length=sequence_length)
    tokens, targets, _ = pairs.gather(np.array([number], dtype=np.int64))
    found = []
    for row, name in enumerate(ANSWERS):
        length = int(pairs.lengths[number, row])
        trained = [False, *(targets[row, : length - 1] != IGNORED_TARGET).tolist()]
        found.append(
            Sample(
                name=f"pair {where}, {name}",
                parts=_decoded(folder, tokens[row, :length].tolist(), trained),
                num_tokens=length,
                num_trained=sum(trained),
            )
        )
    return found


def _conversation(
    folder: Path, chat: ChatRecord, *, split: Split, number: int, where: str
) -> Sample:
    blocks = open_packed(folder, split=split, sequence_length=chat.sequence_length)
    place = _locate(blocks, number, folder)
    row, start, end = place
    block = np.array([row], dtype=np.int64)
    tokens = blocks.gather(block)[0][0, start:end].tolist()
    trained = ((blocks.marks_of(block)[0, start:end] & TRAINED) != 0).tolist()
    return Sample(
        name=f"conversation {where}, block {row}",
        parts=_decoded(folder, tokens, trained),
        num_tokens=len(tokens),
        num_trained=sum(trained),
    )


def _locate(blocks: PackedBlocks, number: int, folder: Path) -> tuple[int, int, int]:
    """Return the block of a conversation, and where in the block it begins and ends (exclusive)."""
    for row in range(blocks.num_blocks()):
        marks = blocks.marks_of(np.array([row], dtype=np.int64))[0]
        firsts = np.flatnonzero((marks & (FIRST | PADDING)) == FIRST)
        if number < len(firsts):
            ends = np.append(firsts[1:], int(((marks & PADDING) == 0).sum()))
            return row, int(firsts[number]), int(ends[number])
        number -= len(firsts)
    raise DataError(
        f"{folder}: its marks hold fewer conversations than meta.json lists. Prepare the data "
        "again."
    )


def _decoded(folder: Path, tokens: list[int], trained: list[bool]) -> list[tuple[str, bool]]:
    """Return the decoded text in pieces: one for each run of trained or of other tokens."""
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except BaseException as error:  # tokenizers raises plain Exception and panics.
        if not is_failure(error):
            raise
        raise DataError(
            f"{path}: cannot be loaded: {one_line(error)} Prepare the data again."
        ) from None
    parts = []
    before, end = "", 0
    for flag, stretch in groupby(trained):
        end += len(list(stretch))
        # Decoded from the beginning: some tokenizers write the first token of a text differently.
        text = tokenizer.decode(tokens[:end], skip_special_tokens=False)
        parts.append((text[len(before) :], flag))
        before = text
    return parts
