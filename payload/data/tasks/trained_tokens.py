"""Tokenizes rendered samples, and marks the tokens of their trained spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.data.templates.control_tokens import Span
from payload.data.templates.turns import RenderedSample
from payload.data.tokenizers.hf import HfTokenizer
from payload.data.tokenizers.literal_text import LiteralTextEncoder
from payload.data.writing.tokenizer_check import TokenizerCheck

_Tokens = npt.NDArray[np.uint32]
_Trained = npt.NDArray[np.bool_]
_COUNTS = ("text_bytes", "literal_samples", "unescaped_samples")


@dataclass(slots=True)
class SampleTokenizer:
    """Converts samples to tokens with marks, and checks that the tokens represent the text."""

    tokenizer: HfTokenizer
    check: TokenizerCheck
    text_bytes: int = 0
    literal_samples: int = 0
    """Samples in which a special token of the row was encoded as text."""
    unescaped_samples: int = 0
    """Samples in which a special token of the row is encoded as a special token.

    Either the tokenizer turns the text into the token in any case, or the marks around the token
    changed what the template rendered.
    """
    _literal: LiteralTextEncoder | None = None
    _special: dict[int, str] = field(init=False)
    """Text of each special token."""

    def __post_init__(self) -> None:
        added = self.tokenizer.raw.get("added_tokens") or ()
        self._special = {each["id"]: each["content"] for each in added if each.get("special")}

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
        """Return the tokens of each sample, and which are trained. Raises DataError."""
        texts = [each.text for each in samples]
        encoded = [
            (np.array(each.ids, dtype=np.uint32), each.offsets)
            for each in self.tokenizer.encodings(texts)
        ]
        for index, sample in enumerate(samples):
            if sample.literal:
                encoded[index] = self._with_literals(sample)
            elif sample.has_unmarked:
                self.unescaped_samples += 1
        found = []
        for sample, (tokens, offsets) in zip(samples, encoded, strict=True):
            trained = in_spans(offsets, sample.spans)
            # No earlier token predicts the first token.
            trained[:1] = False
            found.append((tokens, trained))
            if self._special.keys() >= set(tokens.tolist()):
                # Only the template's tokens are there, and not one of the text.
                self.check.require_blank(self._without_special(sample.text))
        content = [text.encode() for text in texts]
        self.check.add_rows(content, [tokens for tokens, _ in encoded])
        self.text_bytes += sum(map(len, content))
        return found

    def _without_special(self, text: str) -> str:
        for token in sorted(self._special.values(), key=len, reverse=True):
            text = text.replace(token, "")
        return text

    def _with_literals(self, sample: RenderedSample) -> tuple[_Tokens, list[Span]]:
        if self._literal is None:
            self._literal = LiteralTextEncoder(self.tokenizer)
        tokens, offsets, is_text = self._literal.encode(sample.text, sample.literal)
        if is_text:
            self.literal_samples += 1
        else:
            self.unescaped_samples += 1
        return tokens, offsets


def in_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> _Trained:
    """Return for each token whether one of its characters is in one of the spans.

    A byte-level tokenizer trims white space from offsets, so a token of only white space has an
    empty range. Such a token starts where the previous token ends.
    """
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    before = np.concatenate(([0], ends[:-1]))
    is_empty = ends <= starts
    starts = np.where(is_empty, before, starts)
    ends = np.where(is_empty, before + 1, ends)
    found = np.zeros(len(starts), dtype=np.bool_)
    for start, end in spans:
        found |= (ends > start) & (starts < end)
    return found
