"""Tokenizes rendered samples, and marks the tokens that the model is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.data.tasks.sample_encoder import EncodedTexts, SampleEncoder, reference_texts
from payload.data.templates.control_tokens import Span
from payload.data.templates.turns import RenderedSample
from payload.data.tokenizers.hf import HfTokenizer
from payload.data.tokenizers.literal_text import LiteralTextEncoder
from payload.data.writing.tokenizer_check import TokenizerCheck

_Tokens = npt.NDArray[np.uint32]
_Trained = npt.NDArray[np.bool_]
_COUNTS = ("text_bytes", "literal_samples", "unescaped_samples")
_GAP = 2


@dataclass(frozen=True, slots=True)
class TokenizedSamples:
    """Tokens of several samples: sample i has tokens[offsets[i]:offsets[i + 1]]."""

    tokens: _Tokens
    trained: _Trained
    """True for each token that is trained; the first token of a sample never is."""
    offsets: npt.NDArray[np.int64]


@dataclass(slots=True)
class SampleTokenizer:
    """Converts samples to marked tokens, and checks that the tokens represent the text."""

    tokenizer: HfTokenizer
    check: TokenizerCheck
    text_bytes: int = 0
    literal_samples: int = 0
    """Number of samples in which a special token from the row was encoded as text."""
    unescaped_samples: int = 0
    """Number of samples in which a special token from the row is encoded as a special token.

    Either the tokenizer always encodes such a text as the special token, or marks around the text
    would change what the template renders.
    """
    encoder: SampleEncoder = field(init=False)
    _literal: LiteralTextEncoder | None = None
    _special: tuple[str, ...] = field(init=False)
    """Texts of the special tokens, the longest first."""
    _is_special: npt.NDArray[np.bool_] = field(init=False)
    """For each token, True if it is a special token."""

    def __post_init__(self) -> None:
        self.encoder = SampleEncoder(self.tokenizer)
        added = self.tokenizer.raw.get("added_tokens") or ()
        size = self.tokenizer.vocab_size
        special = [each for each in added if each.get("special") and each["id"] < size]
        texts = [str(each["content"]) for each in special]
        self._special = tuple(sorted(texts, key=len, reverse=True))
        self._is_special = np.zeros(size, dtype=np.bool_)
        self._is_special[[each["id"] for each in special]] = True

    def state(self) -> dict[str, Any]:
        """Return JSON for `restore`: the counts so far."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {**counts, "check": self.check.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the counts of an interrupted run."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.check.restore(state["check"])

    def tokens(self, samples: Sequence[RenderedSample]) -> list[tuple[_Tokens, _Trained]]:
        """Return each sample's tokens, and a mask of the tokens that the loss counts.

        Raises DataError.
        """
        found = self.tokenize(samples)
        ends = found.offsets[1:-1]
        return list(zip(np.split(found.tokens, ends), np.split(found.trained, ends), strict=True))[
            : len(samples)
        ]

    def tokenize(self, samples: Sequence[RenderedSample]) -> TokenizedSamples:
        """Return the tokens of all samples in one array, and a mask of those that the loss counts.

        Raises DataError, EncoderMismatchError.
        """
        texts = [each.text for each in samples]
        encoded = self.encoder.encode(texts)
        literal = {}
        for index, sample in enumerate(samples):
            if sample.literal:
                literal[index] = self._with_literals(sample)
            elif sample.has_unmarked:
                self.unescaped_samples += 1
        if literal:
            encoded = encoded.replaced(literal)
        trained = _in_spans(encoded, texts, [each.spans for each in samples])
        offsets = encoded.offsets
        sizes = np.diff(offsets)
        # No earlier token predicts the first token.
        trained[offsets[:-1][sizes > 0]] = False
        num_plain = np.concatenate(([0], np.cumsum(~self._is_special[encoded.tokens])))[offsets]
        for index in np.flatnonzero(np.diff(num_plain) == 0).tolist():
            # The sample has only special tokens, and no token of its text.
            self.check.require_blank(self._without_special(texts[index]))
        content = [text.encode() for text in texts]
        self.check.add(content, encoded.tokens, offsets)
        self.text_bytes += sum(map(len, content))
        return TokenizedSamples(encoded.tokens, trained, offsets)

    def _without_special(self, text: str) -> str:
        for token in self._special:
            text = text.replace(token, "")
        return text

    def _with_literals(self, sample: RenderedSample) -> EncodedTexts:
        if self._literal is None:
            self._literal = LiteralTextEncoder(self.tokenizer)
        tokens, offsets, is_text = self._literal.encode(sample.text, sample.literal)
        if is_text:
            self.literal_samples += 1
        else:
            self.unescaped_samples += 1
        return reference_texts([tokens.tolist()], [offsets])


def in_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> _Trained:
    """Return for each token of a text whether one of its characters is in a span.

    `offsets` has each token's range of characters. The spans must be in order.
    """
    encoded = reference_texts([[0] * len(offsets)], [offsets])
    return _in_spans(encoded, ["x" * max((end for _, end in offsets), default=0)], [spans])


def _in_spans(
    encoded: EncodedTexts, texts: Sequence[str], spans: Sequence[Sequence[Span]]
) -> _Trained:
    """Return for each token whether one of its characters is in a span of its text.

    A byte-level tokenizer trims white space from the ranges. So a token of only white space has an
    empty range. Such a token counts as starting where the previous token ends.
    """
    sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    # Positions count through all texts. The gaps keep a token within its own text.
    bases = np.cumsum(sizes + _GAP) - sizes
    of_token = np.repeat(bases, np.diff(encoded.offsets))
    starts, ends = encoded.starts + of_token, encoded.ends + of_token
    before = np.concatenate(([0], ends[:-1]))[: len(ends)]
    has_tokens = np.diff(encoded.offsets) > 0
    before[encoded.offsets[:-1][has_tokens]] = bases[has_tokens]
    is_empty = ends <= starts
    starts = np.where(is_empty, before, starts)
    ends = np.where(is_empty, before + 1, ends)
    all_spans = np.array(
        [
            (base + start, base + end)
            for base, each in zip(bases.tolist(), spans, strict=True)
            for start, end in each
        ],
        dtype=np.int64,
    ).reshape(-1, 2)
    if not len(all_spans):
        return np.zeros(len(starts), dtype=np.bool_)
    # Spans are in order, so only the first one that ends after the start can overlap.
    number = np.searchsorted(all_spans[:, 1], starts, side="right")
    first = all_spans[np.minimum(number, len(all_spans) - 1), 0]
    found: _Trained = (number < len(all_spans)) & (first < ends)
    return found
