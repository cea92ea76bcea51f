"""Labelled texts of a data folder, in batches that are padded to the longest text.

A token file holds the texts one after the other. The file of examples holds two integers for each
text: the index after the text's last token, and the index of its label.

In shapes, B is the number of texts and T the length of the longest text of a batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from payload.core.errors import DataError
from payload.data.reading.blocks import Indices, open_tokens
from payload.data.reading.range_hashes import RangeCheck
from payload.formats.data_folder import EXAMPLES_NAMES, DataMeta
from payload.formats.prepare_hints import prepare_again_hint

EXAMPLE_DTYPE = np.dtype("<i8")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledTexts:
    """One split of a folder for classification."""

    path: Path
    tokens: npt.NDArray[np.unsignedinteger]
    starts: Indices
    lengths: Indices
    """Number of tokens that are read from the start of each text: at most `sequence_length`."""
    labels: Indices
    vocab_size: int
    pad_token: int
    num_truncated: int
    check: RangeCheck | None

    def num_texts(self) -> int:
        """Return the number of texts."""
        return len(self.labels)

    def gather(self, chosen: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens (B, T) and the labels (B,) of these texts, both int64.

        Raises DataError if the file does not match meta.json, or if a token is outside of the
        vocabulary.
        """
        starts, lengths = self.starts[chosen], self.lengths[chosen]
        if self.check is not None:
            size = self.tokens.itemsize
            ends = starts + lengths
            self.check.require(
                [(int(a) * size, int(b) * size) for a, b in zip(starts, ends, strict=True)]
            )
        tokens = np.full((len(chosen), int(lengths.max())), self.pad_token, dtype=np.int64)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            tokens[row, :length] = self.tokens[start : start + length]
        largest = int(tokens.max())
        if largest >= self.vocab_size:
            raise DataError(
                f"{self.path}: token {largest} is outside the vocabulary of {self.vocab_size}. "
                "Prepare the data again."
            )
        return torch.from_numpy(tokens), torch.from_numpy(self.labels[chosen])


def open_labelled(path: Path, *, meta: DataMeta, sequence_length: int) -> LabelledTexts:
    """Map the files of one split into memory.

    Raises DataError if a file does not match meta.json.
    """
    assert meta.classify is not None
    blocks = open_tokens(path, meta=meta, sequence_length=sequence_length)
    examples = path.with_name(EXAMPLES_NAMES[path.name])
    content = examples.read_bytes()
    if hashlib.sha256(content).hexdigest() != meta.files[examples.name].sha256:
        raise DataError(
            f"{examples}: its SHA-256 differs from the one in meta.json. "
            f"{prepare_again_hint(path.parent, source=meta.source)}"
        )
    ends, labels = np.frombuffer(content, dtype=EXAMPLE_DTYPE).reshape(-1, 2).T.astype(np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    whole = ends - starts
    is_invalid = (whole < 1).any() or ends[-1] != len(blocks.tokens)
    if is_invalid or labels.min() < 0 or labels.max() >= len(meta.classify.labels):
        raise DataError(
            f"{examples}: its text ends or labels do not match {path.name}. "
            f"{prepare_again_hint(path.parent, source=meta.source)}"
        )
    return LabelledTexts(
        path=path,
        tokens=blocks.tokens,
        starts=starts,
        lengths=np.minimum(whole, sequence_length),
        labels=labels,
        vocab_size=meta.vocab_size,
        pad_token=meta.classify.pad_token,
        num_truncated=int((whole > sequence_length).sum()),
        check=blocks.check,
    )
