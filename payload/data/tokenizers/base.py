"""The interface of a tokenizer: numbers for meta.json, a reference encoder and a fast one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]
Agree = Callable[[Sequence[bytes]], Sequence[bool]]
"""Say for each text whether the fast encoder and the reference give the same tokens."""


class NotFastError(Exception):
    """gigatoken cannot be used for this tokenizer; the text says why."""


class FastTokenizer(ABC):
    """gigatoken set up for one tokenizer."""

    @abstractmethod
    def make(self) -> Any:
        """Return a new gigatoken tokenizer, without the words that an older one remembers."""

    @abstractmethod
    def uncertain(self, texts: Sequence[bytes], agree: Agree) -> set[int]:
        """Return the places of texts that only the reference may encode.

        `agree` compares the two encoders on other texts.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTokenizer(ABC):
    """One tokenizer as `prepare` uses it."""

    name: str
    """For people and meta.json: `gpt2`, a hub name with its commit, or a folder."""
    sha256: str
    """Hash of the vocabulary with its merges (payload.formats.tokenizer_identity)."""
    pipeline_sha256: str
    """Hash of everything that changes the tokens."""
    fingerprint: str
    """Hash over everything of it that shapes train.bin."""
    vocab_size: int
    """One more than the largest token."""
    begin: tuple[int, ...] = ()
    """Tokens that it puts before a document."""
    after: tuple[int, ...] = ()
    """Tokens that it puts behind a text itself, as `begin` before it."""
    end: tuple[int, ...]
    """Tokens after a document; the last one is the end-of-document token."""
    end_note: str | None = None
    """Sentence that names the end-of-document token and the file that names it."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Its files in the Hugging Face layout, which the data folder carries."""
    unknown: int | None = None
    """Token that stands for text which it does not know."""
    model_vocab_size: int | None = None
    """Rows of the embedding by the config.json beside it."""
    reference_name: str
    """Package and version of the reference encoder, as in `tiktoken 0.14.0`."""

    @property
    def reference_package(self) -> str:
        """The reference encoder's package."""
        return self.reference_name.partition(" ")[0]

    @abstractmethod
    def encode_texts(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the reference's tokens of each text, on all cores; no begin or end tokens."""

    def encode_one(self, text: bytes) -> Tokens:
        """Return the reference's tokens of one text."""
        return self.encode_texts([text])[0]

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""

    def normalized(self, text: str) -> str:
        """Return a text as the tokenizer changes it before it is cut into words."""
        return text

    @abstractmethod
    def fast(self) -> FastTokenizer:
        """Return the fast encoder. Raises NotFastError, and ImportError without gigatoken."""

    @abstractmethod
    def nasty(self) -> Sequence[str]:
        """Return texts of its own, besides those for all, on which to compare the encoders."""
