"""Encodes texts with gigatoken, or with the reference encoder if the two disagree."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from payload.core.errors import is_failure
from payload.core.printable_text import one_line
from payload.data.sources.documents import MIB, last_safe_cut
from payload.data.tokenizers.base import FastTokenizer, NotFastError, TextTokenizer, Tokens
from payload.machines.machine import discover

Offsets = npt.NDArray[np.int64]

TRICKY_TEXTS = (
    "",
    " ",
    "\n",
    " \n\n  x",
    "hello  world ",
    "<|endoftext|>",
    "x<|endoftext|>y",
    "it's I'LL we'Ve 'tis ''''",
    "\tdef f():\r\n\r\n\treturn 0x1F  # ok\r\n",
    "\ufeffmark \u00a0\u3000 spaces \u2028\u2029\x85",
    "e\u0301 \u0301 \u0e01\u0e33 \u05e9\u05c1",
    "\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea\U00010000",
    "\x00\x01\x1f\x7f",
    "1234567890 \u00bd \u00b2 \u0663 \u2167",
    "\u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8\u3002",
    " " * 1000,
    "\n" * 1000 + "x",
    "a" * 3000,
    "ab1!" * 500,
)
"""Texts on which tokenizers have disagreed. The encoders are compared on these texts before every
run."""

# gigatoken caches every word: 320 MB of distinct words needed 2.8 GB. Creating a new tokenizer
# takes 0.06 s and frees that memory.
_GROWTH_BYTES = 384 * MIB
_MIN_RENEWAL_BYTES = 32 * MIB
_RENEWAL_BYTES_WITHOUT_MEMORY_INFO = 128 * MIB

_FIRST_SAMPLE_BYTES = 128 * 1024
_SAMPLE_SHARE = 1 / 512
_SAMPLE_TEXTS = 256
_SAMPLE_PREFIX_BYTES = 16 * 1024


class EncoderMismatchError(Exception):
    """Raised if the fast encoder and the reference encoder return different tokens."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of several texts: text i has tokens[offsets[i]:offsets[i + 1]]."""

    tokens: Tokens
    offsets: Offsets


class Encoder(Protocol):
    """Encodes UTF-8 texts, without the tokens before and after a document."""

    @property
    def name(self) -> str:
        """Name and version of the package, for meta.json."""

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """Return the tokens of every text."""

    def check_sample(self, texts: Sequence[bytes], encoded: Encoded) -> None:
        """Compare a sample of the tokens from `encode` with the reference encoder's tokens.

        The caller must not use the tokens before this check. One thread can run the check while
        another encodes the next texts. Raises EncoderMismatchError.
        """


class ReferenceEncoder:
    """The tokenizer's package: tiktoken or tokenizers."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.name = tokenizer.reference_name
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """Return the tokens of every text, on all cores."""
        return _join(self._tokenizer.encode_texts(texts))

    def check_sample(self, texts: Sequence[bytes], encoded: Encoded) -> None:
        """Do nothing, because this is the reference encoder."""


class GigatokenEncoder:
    """gigatoken with bounded memory. The reference encoder encodes texts that may differ."""

    def __init__(self, tokenizer: TextTokenizer, fast: FastTokenizer, *, seed: int) -> None:
        self.name = f"gigatoken {version('gigatoken')}"
        self._reference = tokenizer
        self._fast = fast
        self._tokenizer = fast.make()
        self._random = random.Random(seed)
        self._first_sample_bytes = _FIRST_SAMPLE_BYTES
        # With two cores, one is left for reading and writing: 31 MB take 0.2 s instead of 0.3 s.
        self._is_parallel = discover().num_cores() > 2
        self._memory_at_start = resident_bytes()
        self._bytes_since_renewal = 0

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """Return the tokens of every text. Raises EncoderMismatchError if gigatoken fails."""
        exact = self._fast.uncertain(texts, self._agree)
        encoded = self._encode_fast([b"" if i in exact else t for i, t in enumerate(texts)])
        return self._splice(texts, encoded, exact) if exact else encoded

    def check(self, texts: Sequence[bytes]) -> None:
        """Compare the tokens of every text with the reference. Raises EncoderMismatchError."""
        fast, exact = self.encode(texts), _join(self._reference.encode_texts(texts))
        if not np.array_equal(fast.offsets, exact.offsets):
            raise EncoderMismatchError("different number of tokens")
        if not np.array_equal(fast.tokens, exact.tokens):
            raise EncoderMismatchError("different tokens")

    def check_sample(self, texts: Sequence[bytes], encoded: Encoded) -> None:
        """Compare random texts with the reference encoder.

        The sample has 1/512 of the bytes; it is larger for the first batch.
        """
        budget = max(sum(map(len, texts)) * _SAMPLE_SHARE, self._first_sample_bytes)
        self._first_sample_bytes = 0
        for i in self._random.sample(range(len(texts)), min(len(texts), _SAMPLE_TEXTS)):
            if budget <= 0:
                return
            sample = texts[i]
            if len(sample) > _SAMPLE_PREFIX_BYTES:
                sample = sample[: last_safe_cut(sample[:_SAMPLE_PREFIX_BYTES]) or 0]
            budget -= len(sample)
            start, end = encoded.offsets[i], encoded.offsets[i + 1]
            exact = self._reference.encode_one(sample)
            if len(sample) < len(texts[i]):
                end = start + len(exact)
            if not np.array_equal(encoded.tokens[start:end], exact):
                raise EncoderMismatchError(f"different tokens for {sample[:40]!r}")

    def _agree(self, texts: Sequence[bytes]) -> list[bool]:
        fast = self._encode_fast(texts)
        rows = np.split(fast.tokens, fast.offsets[1:-1])
        return [
            np.array_equal(row, exact)
            for row, exact in zip(rows, self._reference.encode_texts(texts), strict=True)
        ]

    def _encode_fast(self, texts: Sequence[bytes]) -> Encoded:
        try:
            layout = self._tokenizer.encode_batch(list(texts), parallel=self._is_parallel).layout
            offsets = np.asarray(layout.offsets.data, dtype=np.int64)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise EncoderMismatchError(f"it failed: {one_line(error).rstrip('.')}") from error
        if len(offsets) != len(texts) + 1:
            raise EncoderMismatchError(f"{len(offsets) - 1} results for {len(texts)} texts")
        encoded = Encoded(np.asarray(layout.content.data), offsets)
        self._renew_when_large(sum(map(len, texts)))
        return encoded

    def _splice(self, texts: Sequence[bytes], encoded: Encoded, exact: set[int]) -> Encoded:
        parts = np.split(encoded.tokens, encoded.offsets[1:-1])
        for i in exact:
            parts[i] = self._reference.encode_one(texts[i])
        return _join(parts)

    def _renew_when_large(self, text_bytes: int) -> None:
        self._bytes_since_renewal += text_bytes
        if self._memory_at_start is None:
            due = self._bytes_since_renewal >= _RENEWAL_BYTES_WITHOUT_MEMORY_INFO
        else:
            grown = (resident_bytes() or 0) - self._memory_at_start
            due = grown >= _GROWTH_BYTES and self._bytes_since_renewal >= _MIN_RENEWAL_BYTES
        if due:
            del self._tokenizer
            self._tokenizer = self._fast.make()
            self._bytes_since_renewal = 0


def choose_encoder(tokenizer: TextTokenizer, *, seed: int, log: Callable[[str], None]) -> Encoder:
    """Return gigatoken if it is installed and passes a comparison, otherwise the reference encoder.

    The comparison covers `TRICKY_TEXTS`. `log` receives a line with the choice and its reason.
    """
    reference = ReferenceEncoder(tokenizer)
    package = tokenizer.reference_package
    try:
        encoder = GigatokenEncoder(tokenizer, tokenizer.fast(), seed=seed)
        encoder.check([text.encode() for text in (*TRICKY_TEXTS, *tokenizer.tricky_texts())])
    except ImportError as error:
        log(f"tokenizer: {package}; the faster gigatoken cannot be used: {error}")
    except NotFastError as error:
        log(
            f"tokenizer: {package}; the faster gigatoken cannot be used for this tokenizer: {error}"
        )
    except (EncoderMismatchError, AttributeError, TypeError, ValueError, OSError) as error:
        log(f"tokenizer: {package}; gigatoken failed a comparison with {package}: {error}")
    else:
        log(f"tokenizer: {encoder.name}, checked against {package} on samples")
        return encoder
    return reference


def resident_bytes() -> int | None:
    """Return the memory of this process, or None if the system does not report it (not Linux)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _join(parts: Sequence[Tokens]) -> Encoded:
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)
    return Encoded(tokens.astype(np.uint32, copy=False), offsets)
