"""Encodes rendered texts to tokens, with the range of characters of each token.

The package gigatoken encodes a text if the tokens are exactly the bytes of the text. For other
texts and tokenizers, the package `tokenizers` is used. Its tokens and ranges are the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from payload.data.tokenizers.hf import HfTokenizer
from payload.data.tokenizers.token_ranges import Numbers, TokenRanges, has_token_ranges
from payload.data.writing.encoder_choice import (
    TRICKY_TEXTS,
    Encoder,
    ReferenceEncoder,
    choose_encoder,
)

_PROBES = (" a  b ", "\n a\n", "\u00e9\u20ac\U0001f469\u200d\U0001f4bb \u65e5 \ue000\U0010fffd")


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """Tokens of several texts: text i has tokens[offsets[i]:offsets[i + 1]]."""

    tokens: npt.NDArray[np.uint32]
    starts: Numbers
    """The index of each token's first character within its text."""
    ends: Numbers
    """The index after each token's last character within its text."""
    offsets: Numbers

    def parts(self) -> list[EncodedTexts]:
        """Return each text's tokens separately."""
        found = []
        for first, last in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True):
            cut = slice(first, last)
            ends = np.array([0, last - first], dtype=np.int64)
            found.append(EncodedTexts(self.tokens[cut], self.starts[cut], self.ends[cut], ends))
        return found

    def replaced(self, others: Mapping[int, EncodedTexts]) -> EncodedTexts:
        """Return a copy in which `others` replaces texts. The keys are indices of the texts."""
        return joined([others.get(index, each) for index, each in enumerate(self.parts())])


def joined(parts: Sequence[EncodedTexts]) -> EncodedTexts:
    """Return the encodings of all texts. Each of `parts` has one text."""
    if not parts:
        return reference_texts([], [])
    sizes = [len(each.tokens) for each in parts]
    return EncodedTexts(
        np.concatenate([each.tokens for each in parts]),
        np.concatenate([each.starts for each in parts]),
        np.concatenate([each.ends for each in parts]),
        np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))),
    )


def reference_texts(
    ids: Sequence[Sequence[int]], ranges: Sequence[Sequence[tuple[int, int]]]
) -> EncodedTexts:
    """Return the encodings from the package `tokenizers` as arrays."""
    sizes = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    both = np.array(list(chain.from_iterable(ranges)), dtype=np.int64).reshape(-1, 2)
    return EncodedTexts(
        np.array(list(chain.from_iterable(ids)), dtype=np.uint32),
        both[:, 0],
        both[:, 1],
        np.concatenate(([0], np.cumsum(sizes))),
    )


class SampleEncoder:
    """The encoder of one prepare run. Raises EncoderMismatchError if gigatoken's tokens differ."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        """Encode with the package `tokenizers` until `choose_fast` is called."""
        self._tokenizer = tokenizer
        self._encoder: Encoder = ReferenceEncoder(tokenizer)
        self._ranges: TokenRanges | None = None

    @property
    def name(self) -> str:
        """Name and version of the encoding package, for meta.json."""
        return self._encoder.name

    def choose_fast(self, *, seed: int, log: Callable[[str], None]) -> None:
        """Encode with gigatoken from now on, if it encodes difficult texts as the reference does.

        `log` receives a line with the choice and its reason.
        """
        tokenizer = self._tokenizer
        if not has_token_ranges(tokenizer.raw):
            return
        encoder = choose_encoder(tokenizer, seed=seed, log=log)
        if isinstance(encoder, ReferenceEncoder):
            return
        self._encoder, self._ranges = encoder, TokenRanges(tokenizer.raw)
        texts = [*TRICKY_TEXTS, *tokenizer.tricky_texts(), *_PROBES]
        found, exact = self.encode(texts), self._reference(texts)
        if not (
            np.array_equal(found.tokens, exact.tokens)
            and np.array_equal(found.starts, exact.starts)
            and np.array_equal(found.ends, exact.ends)
        ):
            self.use_reference()

    def use_reference(self) -> None:
        """Encode with the package `tokenizers` from now on."""
        self._encoder, self._ranges = ReferenceEncoder(self._tokenizer), None

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the tokens of texts. Raises DataError, EncoderMismatchError."""
        ranges = self._ranges
        if ranges is None:
            return self._reference(texts)
        content = [each.encode() for each in texts]
        encoded = self._encoder.encode(content)
        self._encoder.check_sample(content, encoded)
        tokens, offsets = encoded.tokens, encoded.offsets
        inexact = set(ranges.inexact(tokens, offsets, content))
        if not inexact:
            return EncodedTexts(tokens, *ranges.find(tokens, offsets, content), offsets)
        others = sorted(inexact)
        found = dict(
            zip(others, self._reference([texts[index] for index in others]).parts(), strict=True)
        )
        for index in range(len(texts)):
            if index not in inexact:
                part = tokens[offsets[index] : offsets[index + 1]]
                own = np.array([0, len(part)], dtype=np.int64)
                places = ranges.find(part, own, [content[index]])
                found[index] = EncodedTexts(part, *places, own)
        return joined([found[index] for index in range(len(texts))])

    def _reference(self, texts: Sequence[str]) -> EncodedTexts:
        found = self._tokenizer.encodings(texts)
        return reference_texts([each.ids for each in found], [each.offsets for each in found])
