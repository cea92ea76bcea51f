"""Interface of a tokenizer: its properties, a reference encoder and a fast encoder.

The fast encoder uses the package gigatoken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.formats.data_folder import AddedTokens

Tokens = npt.NDArray[np.uint32]
Agree = Callable[[Sequence[bytes]], Sequence[bool]]
"""Returns for each text whether the fast encoder and the reference encoder produce the same
tokens."""


class NotFastError(Exception):
    """Raised if gigatoken cannot be used for a tokenizer. The error's text gives the reason."""


class FastTokenizer(ABC):
    """The package gigatoken, set up for one tokenizer."""

    @abstractmethod
    def make(self) -> Any:
        """Return a new gigatoken tokenizer with an empty cache."""

    @abstractmethod
    def uncertain(self, texts: Sequence[bytes], agree: Agree) -> set[int]:
        """Return the indices of the texts that the reference encoder must encode.

        `agree` compares the two encoders on given texts.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTokenizer(ABC):
    """A tokenizer, with the properties and encoders that `prepare` needs."""

    name: str
    """Name for messages and meta.json: `gpt2`, a hub name with its commit, or a folder."""
    sha256: str
    """Hash of the vocabulary and merges (payload.formats.tokenizer_identity)."""
    pipeline_sha256: str
    """Hash of all settings that change tokens."""
    fingerprint: str
    """Hash of all settings that change train.bin."""
    vocab_size: int
    """Largest token id plus one."""
    begin: tuple[int, ...] = ()
    """Tokens that are put before a document."""
    after: tuple[int, ...] = ()
    """Tokens that the tokenizer appends to a text."""
    end: tuple[int, ...]
    """Tokens that are put after a document. The last of these tokens is the end-of-document
    token."""
    end_note: str | None = None
    """Sentence that names the end-of-document token, and the file that defines this token."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Tokenizer files in the Hugging Face layout, copied into the data folder."""
    added: AddedTokens | None = None
    """Special tokens that `prepare` added to the tokenizer of the model."""
    unknown: int | None = None
    """Token for text outside of the vocabulary."""
    model_vocab_size: int | None = None
    """Number of rows of the embedding, from the config.json next to the tokenizer."""
    reference_name: str
    """Package and version of the reference encoder, as in `tiktoken 0.14.0`."""

    @property
    def reference_package(self) -> str:
        """Package of the reference encoder."""
        return self.reference_name.partition(" ")[0]

    @abstractmethod
    def encode_texts(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the reference encoder's tokens of each text, without begin and end tokens.

        Uses all cores.
        """

    def encode_one(self, text: bytes) -> Tokens:
        """Return the reference encoder's tokens of one text."""
        return self.encode_texts([text])[0]

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""

    def normalized(self, text: str) -> str:
        """Return the text that results from the tokenizer's normalization."""
        return text

    @abstractmethod
    def fast(self) -> FastTokenizer:
        """Return the fast encoder.

        Raises NotFastError if gigatoken cannot be used for this tokenizer, and ImportError if the
        package gigatoken is not installed.
        """

    @abstractmethod
    def tricky_texts(self) -> Sequence[str]:
        """Return texts on which the encoders are compared, in addition to TRICKY_TEXTS."""
