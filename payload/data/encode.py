"""Text to tokens: gigatoken where it proves equal to tiktoken, else tiktoken."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from payload.data.documents import MIB, cut_at
from payload.data.tokenizer import RANKS_PATH, gpt2_encoding

Tokens = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]

NASTY = (
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
"""Texts that tokenizers have been known to differ on; checked before every run."""

# Letters and digits that Unicode 17 added, as UTF-8 (in blocks of 64 above U+FFFF). gigatoken 0.10
# knows them, tiktoken 0.14 does not yet, so the two cut words differently there; over all other
# code points they agree, which tests/data/test_encode.py checks one by one. Documents with such a
# character go to tiktoken. One pattern a first byte: 4 times the speed of one for all.
_UNSETTLED = (
    re.compile(rb"\xe0(?:\xa2\x8f|\xb1\x9c|\xb3\x9c)"),
    re.compile(rb"\xea\x9f[\x8e\x8f\x92\x94\xb1]"),
    re.compile(
        rb"\xf0(?:\x90[\xa5\xbb]|\x91[\xb6\xb7]|\x96[\xba\xbb\xbf]|\x98[\x9f\xb4\xb6\xb7]|"
        rb"\x9e\x9b|\xab\x9c|\xac\xba|\xb2[\x8e-\xbf]|\xb3[\x80-\x91])"
    ),
)

# gigatoken remembers every word it saw: 320 MB of words that never repeat took 2.8 GB. A new
# tokenizer costs 0.06 s and gives that memory back.
_GROWTH_BYTES = 384 * MIB
_RENEW_AT_MOST_EVERY_BYTES = 32 * MIB
_RENEW_BLINDLY_EVERY_BYTES = 128 * MIB

_FIRST_SAMPLE_BYTES = 128 * 1024
_SAMPLE_SHARE = 1 / 512
_SAMPLE_TEXTS = 256
_SAMPLE_PREFIX_BYTES = 16 * 1024


class EncoderMismatchError(Exception):
    """The fast encoder gave other tokens than tiktoken; what it wrote so far is not to be used."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of several texts: text i has tokens[offsets[i]:offsets[i + 1]]."""

    tokens: Tokens
    offsets: Offsets


class Encoder(Protocol):
    """Turns UTF-8 texts into GPT-2 tokens, special tokens never recognised in them."""

    @property
    def name(self) -> str:
        """Package and version, for meta.json."""

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """The tokens of every text."""

    def check_sample(self, texts: Sequence[bytes], encoded: Encoded) -> None:
        """Compare some of what `encode` gave with tiktoken, before it is used.

        Raises EncoderMismatchError. One thread may check while another encodes the next texts.
        """


class TiktokenEncoder:
    """The reference."""

    def __init__(self) -> None:
        self.name = f"tiktoken {version('tiktoken')}"
        self._encoding = gpt2_encoding()
        self._threads = os.cpu_count() or 1

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """The tokens of every text, on all cores."""
        with ThreadPoolExecutor(self._threads) as pool:
            parts = list(pool.map(self.encode_one, texts))
        return _join(parts)

    def check_sample(self, texts: Sequence[bytes], encoded: Encoded) -> None:
        """Nothing to compare: this is tiktoken."""

    def encode_one(self, text: bytes) -> Tokens:
        """The tokens of one text."""
        return self._encoding.encode_to_numpy(text.decode("utf-8"), disallowed_special=())


class GigatokenEncoder:
    """gigatoken with bounded memory and tiktoken for what it sees differently."""

    def __init__(self, tokenizer_class: Any, *, seed: int) -> None:
        self.name = f"gigatoken {version('gigatoken')}"
        self._make: Callable[[], Any] = lambda: tokenizer_class.from_tiktoken(
            RANKS_PATH, pretokenizer="gpt2", special_tokens={}
        )
        self._tokenizer = self._make()
        self._reference = TiktokenEncoder()
        self._random = random.Random(seed)
        self._first_sample_bytes = _FIRST_SAMPLE_BYTES
        # With two cores, reading and writing fill the second: 0.2 s for 31 MB, against 0.3 s.
        self._is_parallel = (os.cpu_count() or 1) > 2
        self._memory_at_start = resident_bytes()
        self._bytes_since_renewal = 0

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """The tokens of every text. Raises EncoderMismatchError when gigatoken fails."""
        unsettled = {i for i, text in enumerate(texts) if is_unsettled(text)}
        encoded = self._encode_fast([b"" if i in unsettled else t for i, t in enumerate(texts)])
        return self._splice(texts, encoded, unsettled) if unsettled else encoded

    def check(self, texts: Sequence[bytes]) -> None:
        """Compare every text's tokens. Raises EncoderMismatchError."""
        fast, exact = self._encode_fast(texts), self._reference.encode(texts)
        if not np.array_equal(fast.offsets, exact.offsets):
            raise EncoderMismatchError("another number of tokens")
        if not np.array_equal(fast.tokens, exact.tokens):
            raise EncoderMismatchError("other tokens")

    def check_sample(self, texts: Sequence[bytes], encoded: Encoded) -> None:
        """Compare the beginnings of random texts with tiktoken: 1/512 of all, more at the start."""
        budget = max(sum(map(len, texts)) * _SAMPLE_SHARE, self._first_sample_bytes)
        self._first_sample_bytes = 0
        for i in self._random.sample(range(len(texts)), min(len(texts), _SAMPLE_TEXTS)):
            if budget <= 0:
                return
            sample = texts[i]
            if len(sample) > _SAMPLE_PREFIX_BYTES:
                sample = sample[: cut_at(sample[:_SAMPLE_PREFIX_BYTES]) or 0]
            budget -= len(sample)
            start, end = encoded.offsets[i], encoded.offsets[i + 1]
            exact = self._reference.encode_one(sample)
            if len(sample) < len(texts[i]):
                end = start + len(exact)
            if not np.array_equal(encoded.tokens[start:end], exact):
                raise EncoderMismatchError(f"other tokens for {sample[:40]!r}")

    def _encode_fast(self, texts: Sequence[bytes]) -> Encoded:
        try:
            layout = self._tokenizer.encode_batch(list(texts), parallel=self._is_parallel).layout
            offsets = np.asarray(layout.offsets.data, dtype=np.int64)
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise EncoderMismatchError(f"it failed: {error}") from error
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
            due = self._bytes_since_renewal >= _RENEW_BLINDLY_EVERY_BYTES
        else:
            grown = (resident_bytes() or 0) - self._memory_at_start
            due = grown >= _GROWTH_BYTES and self._bytes_since_renewal >= _RENEW_AT_MOST_EVERY_BYTES
        if due:
            del self._tokenizer
            self._tokenizer = self._make()
            self._bytes_since_renewal = 0


def choose_encoder(*, seed: int, say: Callable[[str], None]) -> Encoder:
    """gigatoken when it is installed and right about `NASTY`, else tiktoken; `say` tells why."""
    try:
        from gigatoken import Tokenizer

        encoder = GigatokenEncoder(Tokenizer, seed=seed)
        encoder.check([text.encode() for text in NASTY])
    except ImportError as error:
        say(f"tokenizer: tiktoken; the faster gigatoken cannot be used: {error}")
    except (EncoderMismatchError, AttributeError, TypeError, ValueError, OSError) as error:
        say(f"tokenizer: tiktoken; gigatoken differs from it in a check: {error}")
    else:
        say(f"tokenizer: {encoder.name}, checked against tiktoken on samples")
        return encoder
    return TiktokenEncoder()


def is_unsettled(text: bytes) -> bool:
    """Whether gigatoken and tiktoken may differ on a character in it."""
    return not text.isascii() and any(pattern.search(text) for pattern in _UNSETTLED)


def resident_bytes() -> int | None:
    """This process's memory now, or None where the system does not say (not Linux)."""
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
