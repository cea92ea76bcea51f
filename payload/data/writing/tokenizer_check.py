"""Checks while text is tokenized that the tokenizer's tokens stand for the text.

A tokenizer with an empty vocabulary, or with one for other text, gives tokens from which nothing
can be learned, and training on them fails late or never.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError
from payload.core.printable_text import shown
from payload.data.tokenizers.base import TextTokenizer, Tokens

MOST_BYTES_PER_TOKEN = 20.0
LEAST_BYTES_PER_TOKEN = 0.5
MOST_UNKNOWN = 0.01
"""Largest share of a corpus's tokens that may be the unknown token."""
MOST_LOST = 0.01
"""Largest share of a sample's characters that decoding may lose."""
_LEAST_ROWS_USED = 0.5
"""Smallest share of a model's vocabulary that its tokenizer has; models pad theirs."""
_FIRST_LOOK_BYTES = 256 * 1024
"""Text after which the rates are looked at, besides at the end."""
_SAMPLE_BYTES = 256 * 1024
"""Text that is decoded again: 0.1 s."""
_SAMPLE_TEXT_BYTES = 16 * 1024
_FIX = (
    "Name the model's own tokenizer with --tokenizer, or continue with this one by "
    "--allow-odd-tokenizer."
)
# Spaces come and go with the words' marks, which decoders turn back in many ways.
_WORD_START = "\u2581"


class TokenizerCheck:
    """Counts of one prepare's text and tokens, and what is odd about them."""

    def __init__(
        self, tokenizer: TextTokenizer, *, allow_odd: bool, say: Callable[[str], None]
    ) -> None:
        """Raises DataError for a vocabulary that does not fit the model beside it."""
        self._tokenizer = tokenizer
        self._allow_odd = allow_odd
        self._say = say
        self._noted: set[str] = set()
        self._bytes = self._tokens = self._unknown = 0
        self._looked = False
        self._sampled_bytes = self._characters = self._lost = 0
        self._example = ""
        self._check_vocabulary()

    def add(self, texts: Sequence[bytes], tokens: Tokens, offsets: npt.NDArray[np.int64]) -> None:
        """Check and count texts; text i has tokens[offsets[i]:offsets[i + 1]], none around it.

        Raises DataError.
        """
        lengths = np.diff(offsets)
        for place in np.flatnonzero(lengths == 0).tolist():
            text = texts[place].decode("utf-8", "replace")
            # The tokenizer's own rules may leave nothing of a text, as of control characters.
            if text.strip() and self._tokenizer.normalized(text).strip():
                self._report(
                    "no tokens",
                    f"{len(texts[place]):,} bytes of text became no token: {shown(text)}.",
                )
        self._bytes += sum(map(len, texts))
        self._tokens += int(lengths.sum())
        if self._tokenizer.unknown is not None:
            self._unknown += int((tokens == self._tokenizer.unknown).sum())
        self._decode_some(texts, tokens, offsets)
        if not self._looked and self._bytes >= _FIRST_LOOK_BYTES:
            self._looked = True
            self.finish()

    def add_rows(self, texts: Sequence[bytes], rows: Sequence[Tokens]) -> None:
        """Check and count texts by the tokens of each. Raises DataError."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        self.add(texts, np.concatenate(rows) if rows else np.empty(0, np.uint32), offsets)

    def finish(self) -> None:
        """Check the rates of all text so far. Raises DataError."""
        if self._bytes:
            self._check_rates()
        if self._characters and self._lost > MOST_LOST * self._characters:
            self._report(
                "lost",
                f"decoding the tokens loses {self._lost / self._characters:.1%} of a sample's "
                f"characters, more than {MOST_LOST:.0%}, which its normalizer does not explain: "
                f"of {shown(self._example)}.",
            )

    def check_rate(self, *, text_bytes: int, tokens: int) -> None:
        """Check the bytes a token of a whole corpus. Raises DataError."""
        rate = text_bytes / tokens if tokens else float("inf")
        if text_bytes and not LEAST_BYTES_PER_TOKEN <= rate <= MOST_BYTES_PER_TOKEN:
            measured = f"{rate:.3g} bytes a token" if tokens else "no token"
            self._report(
                "rate",
                f"{text_bytes:,} bytes of text became {tokens:,} tokens, {measured}: expected "
                f"{LEAST_BYTES_PER_TOKEN:g} to {MOST_BYTES_PER_TOKEN:g}.",
            )

    def _check_rates(self) -> None:
        self.check_rate(text_bytes=self._bytes, tokens=self._tokens)
        if self._unknown > MOST_UNKNOWN * self._tokens:
            self._report(
                "unknown",
                f"{self._unknown / self._tokens:.1%} of the tokens are the unknown token "
                f"{self._tokenizer.unknown}, more than {MOST_UNKNOWN:.0%}: its vocabulary lacks "
                "this text's characters or words.",
            )

    def _check_vocabulary(self) -> None:
        rows, size = self._tokenizer.model_vocab_size, self._tokenizer.vocab_size
        if rows is not None and not rows * _LEAST_ROWS_USED <= size <= rows:
            self._report(
                "vocabulary",
                f"it has tokens up to {size - 1:,}, and the config.json beside it has vocab_size "
                f"= {rows:,}: it is not that model's.",
            )

    def _decode_some(
        self, texts: Sequence[bytes], tokens: Tokens, offsets: npt.NDArray[np.int64]
    ) -> None:
        for place, text in enumerate(texts):
            if self._sampled_bytes >= _SAMPLE_BYTES:
                return
            own = tokens[offsets[place] : offsets[place + 1]]
            if len(text) > _SAMPLE_TEXT_BYTES:
                # A token may reach over the cut: the beginning has tokens of its own.
                text = text[:_SAMPLE_TEXT_BYTES].decode("utf-8", "ignore").encode()
                (own,) = self._tokenizer.encode_texts([text])
            if text:
                self._sampled_bytes += len(text)
                self._compare(text.decode("utf-8", "replace"), self._tokenizer.decode(own.tolist()))

    def _compare(self, text: str, decoded: str) -> None:
        wanted = _characters(self._tokenizer.normalized(text))
        lost = (wanted - _characters(decoded)).total()
        self._characters += wanted.total()
        self._lost += lost
        if lost and not self._example:
            self._example = text

    def _report(self, kind: str, problem: str) -> None:
        """Raise DataError, or note the problem once where the user allowed it."""
        message = f"tokenizer {self._tokenizer.name}: {problem}"
        if not self._allow_odd:
            raise DataError(f"{message} {_FIX}")
        if kind not in self._noted:
            self._noted.add(kind)
            self._say(f"note: {message} Continuing by --allow-odd-tokenizer.")


def _characters(text: str) -> Counter[str]:
    return Counter("".join(text.replace(_WORD_START, " ").split()))
