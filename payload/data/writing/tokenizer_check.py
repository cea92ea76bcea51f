"""Checks that tokens represent the text, while the text is tokenized.

A tokenizer with an empty vocabulary, or a tokenizer for a different kind of text, produces tokens
that do not represent the text. Training on these tokens fails late, or ends without an error and
with a useless model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError
from payload.core.printable_text import shown
from payload.data.tokenizers.base import TextTokenizer, Tokens

MAX_BYTES_PER_TOKEN = 20.0
MIN_BYTES_PER_TOKEN = 0.5
MAX_UNKNOWN = 0.01
"""Highest fraction of unknown tokens in a corpus."""
MAX_LOST = 0.01
"""Highest fraction of a sample's characters that may be lost by decoding."""
_MIN_ROWS_USED = 0.5
"""Minimum fraction of a model's vocabulary that its tokenizer must use. The fraction is below 1
because models pad the vocabulary."""
_FIRST_CHECK_BYTES = 256 * 1024
"""Size of the text after which the rates are checked for the first time. The rates are checked
again at the end."""
_SAMPLE_BYTES = 256 * 1024
"""Size of the text that is decoded for comparison. Decoding this text takes 0.1 s."""
_SAMPLE_TEXT_BYTES = 16 * 1024
_FIX = (
    "Use the model's tokenizer with --tokenizer, or keep this tokenizer with --allow-odd-tokenizer."
)
# Decoders treat word boundaries and spaces in many ways, so spaces are not compared.
_WORD_START = "\u2581"
_COUNTS = (
    *("bytes", "tokens", "unknown", "rates_checked"),
    *("sampled_bytes", "characters", "lost", "example"),
)


class TokenizerCheck:
    """Counts the text and tokens of one prepare run, and reports unusual rates."""

    def __init__(
        self, tokenizer: TextTokenizer, *, allow_odd: bool, log: Callable[[str], None]
    ) -> None:
        """Raises DataError for a vocabulary that does not fit the model next to it."""
        self._tokenizer = tokenizer
        self._allow_odd = allow_odd
        self._log = log
        self._noted: set[str] = set()
        self._bytes = self._tokens = self._unknown = 0
        self._rates_checked = False
        self._sampled_bytes = self._characters = self._lost = 0
        self._example = ""
        self._check_vocabulary()

    def state(self) -> dict[str, Any]:
        """Return JSON for `restore`: the counts so far."""
        return {name: getattr(self, f"_{name}") for name in _COUNTS}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the counts of an interrupted run."""
        for name in _COUNTS:
            setattr(self, f"_{name}", state[name])

    def add(self, texts: Sequence[bytes], tokens: Tokens, offsets: npt.NDArray[np.int64]) -> None:
        """Check and count texts. Text i has tokens[offsets[i]:offsets[i + 1]].

        `tokens` does not include the tokens that are added around a text. Raises DataError.
        """
        lengths = np.diff(offsets)
        for index in np.flatnonzero(lengths == 0).tolist():
            self.require_blank(texts[index].decode("utf-8", "replace"))
        self._bytes += sum(map(len, texts))
        self._tokens += int(lengths.sum())
        if self._tokenizer.unknown is not None:
            self._unknown += int((tokens == self._tokenizer.unknown).sum())
        self._check_decoding(texts, tokens, offsets)
        if not self._rates_checked and self._bytes >= _FIRST_CHECK_BYTES:
            self._rates_checked = True
            self.finish()

    def require_blank(self, text: str) -> None:
        """Check that a text that became no token is blank. Raises DataError."""
        # A tokenizer's normalization can remove all of a text, for example control characters.
        if text.strip() and self._tokenizer.normalized(text).strip():
            self._report(
                "no tokens", f"{len(text.encode()):,} bytes of text became no token: {shown(text)}."
            )

    def add_rows(self, texts: Sequence[bytes], rows: Sequence[Tokens]) -> None:
        """Check and count texts. `rows` has the tokens of each text. Raises DataError."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        self.add(texts, np.concatenate(rows) if rows else np.empty(0, np.uint32), offsets)

    def finish(self) -> None:
        """Check the rates of all text so far. Raises DataError."""
        if self._bytes:
            self._check_rates()
        if self._characters and self._lost > MAX_LOST * self._characters:
            self._report(
                "lost",
                f"decoding the tokens loses {self._lost / self._characters:.1%} of the characters "
                f"of a sample, beyond normalization; the limit is {MAX_LOST:.0%}. For example: "
                f"{shown(self._example)}.",
            )

    def check_rate(self, *, text_bytes: int, tokens: int) -> None:
        """Check the number of bytes per token in a whole corpus. Raises DataError."""
        rate = text_bytes / tokens if tokens else float("inf")
        if text_bytes and not MIN_BYTES_PER_TOKEN <= rate <= MAX_BYTES_PER_TOKEN:
            measured = f"{rate:.3g} bytes a token" if tokens else "no tokens"
            self._report(
                "rate",
                f"{text_bytes:,} bytes of text became {tokens:,} tokens, {measured}: expected "
                f"{MIN_BYTES_PER_TOKEN:g} to {MAX_BYTES_PER_TOKEN:g}.",
            )

    def _check_rates(self) -> None:
        self.check_rate(text_bytes=self._bytes, tokens=self._tokens)
        if self._unknown > MAX_UNKNOWN * self._tokens:
            self._report(
                "unknown",
                f"{self._unknown / self._tokens:.1%} of the tokens are the unknown token "
                f"{self._tokenizer.unknown}; the limit is {MAX_UNKNOWN:.0%}. The vocabulary lacks "
                "characters of this text.",
            )

    def _check_vocabulary(self) -> None:
        rows, size = self._tokenizer.model_vocab_size, self._tokenizer.vocab_size
        size -= len(self._tokenizer.added.tokens) if self._tokenizer.added else 0
        if rows is not None and not rows * _MIN_ROWS_USED <= size <= rows:
            self._report(
                "vocabulary",
                f"the tokenizer has tokens up to {size - 1:,}, but config.json in the same folder "
                f"has vocab_size = {rows:,}. This is the tokenizer of another model.",
            )

    def _check_decoding(
        self, texts: Sequence[bytes], tokens: Tokens, offsets: npt.NDArray[np.int64]
    ) -> None:
        for index, text in enumerate(texts):
            if self._sampled_bytes >= _SAMPLE_BYTES:
                return
            text_tokens = tokens[offsets[index] : offsets[index + 1]]
            if len(text) > _SAMPLE_TEXT_BYTES:
                # A token can span the cut, so the start is tokenized separately.
                text = text[:_SAMPLE_TEXT_BYTES].decode("utf-8", "ignore").encode()
                (text_tokens,) = self._tokenizer.encode_texts([text])
            if text:
                self._sampled_bytes += len(text)
                self._compare(
                    text.decode("utf-8", "replace"), self._tokenizer.decode(text_tokens.tolist())
                )

    def _compare(self, text: str, decoded: str) -> None:
        expected = _characters(self._tokenizer.normalized(text))
        lost = (expected - _characters(decoded)).total()
        self._characters += expected.total()
        self._lost += lost
        if lost and not self._example:
            self._example = text

    def _report(self, kind: str, problem: str) -> None:
        """Raise DataError. If the user allowed problems, log each kind of problem once instead."""
        message = f"tokenizer {self._tokenizer.name}: {problem}"
        if not self._allow_odd:
            raise DataError(f"{message} {_FIX}")
        if kind not in self._noted:
            self._noted.add(kind)
            self._log(f"note: {message} Continuing because of --allow-odd-tokenizer.")


def _characters(text: str) -> Counter[str]:
    return Counter("".join(text.replace(_WORD_START, " ").split()))
