"""GPT-2's tokenizer, from a packaged file with the rank of each token."""

from __future__ import annotations

import binascii
import functools
import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from payload.core.errors import DataError
from payload.data.tokenizers.base import Agree, FastTokenizer, TextTokenizer, Tokens
from payload.formats.tokenizer_identity import GPT2_END, GPT2_PIPELINE_SHA256, GPT2_SHA256
from payload.machines.machine import discover

if TYPE_CHECKING:
    import tiktoken

TOKENIZER_NAME = "gpt2"
END_OF_TEXT = 50256
"""Id of the end-of-text token, written after every document."""
END_OF_TEXT_NAME = GPT2_END
VOCAB_SIZE = 50257
TOKENIZER_SHA256 = GPT2_SHA256
"""SHA-256 of the file of ranks. tiktoken checks its r50k_base for the same value."""
REINSTALL = "Install the package again."
RANKS_PATH = Path(__file__).parents[1] / "gpt2" / "r50k_base.tiktoken"

# As in tiktoken_ext.openai_public: a faster equivalent of GPT-2's pattern.
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


@functools.cache
def gpt2_encoding() -> tiktoken.Encoding:
    """Return tiktoken's GPT-2 encoding. Raises DataError if the packaged ranks are damaged."""
    import tiktoken

    return tiktoken.Encoding(
        TOKENIZER_NAME,
        pat_str=_PATTERN,
        mergeable_ranks=load_ranks(RANKS_PATH),
        special_tokens={END_OF_TEXT_NAME: END_OF_TEXT},
        explicit_n_vocab=VOCAB_SIZE,
    )


def load_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token from the file of ranks.

    Raises DataError if the file's hash is not `TOKENIZER_SHA256`.

    tiktoken's `load_tiktoken_bpe` is not used, because it keeps copies in a shared temporary
    folder.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {path}: {error.strerror}. {REINSTALL}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != TOKENIZER_SHA256:
        raise DataError(f"tokenizer {path}: sha256 is {found}, not {TOKENIZER_SHA256}. {REINSTALL}")
    ranks = {}
    for line in content.splitlines():
        token, rank = line.split()
        ranks[binascii.a2b_base64(token)] = int(rank)
    return ranks


# Letters and digits that Unicode 17 added, as UTF-8 (in blocks of 64 above U+FFFF). gigatoken 0.10
# supports them, tiktoken 0.14 does not, so the two split words with these characters differently.
# They agree on all other code points (tests/data/test_encode.py). Documents with such a character
# go to tiktoken. One pattern per first byte is 4 times as fast as one pattern for all.
_UNICODE_17 = (
    re.compile(rb"\xe0(?:\xa2\x8f|\xb1\x9c|\xb3\x9c)"),
    re.compile(rb"\xea\x9f[\x8e\x8f\x92\x94\xb1]"),
    re.compile(
        rb"\xf0(?:\x90[\xa5\xbb]|\x91[\xb6\xb7]|\x96[\xba\xbb\xbf]|\x98[\x9f\xb4\xb6\xb7]|"
        rb"\x9e\x9b|\xab\x9c|\xac\xba|\xb2[\x8e-\xbf]|\xb3[\x80-\x91])"
    ),
)


def may_differ(text: bytes) -> bool:
    """Return True if the text has a character that gigatoken and tiktoken may treat differently."""
    return not text.isascii() and any(pattern.search(text) for pattern in _UNICODE_17)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2Tokenizer(TextTokenizer):
    """GPT-2's tokenizer, through tiktoken. Special tokens in a text are encoded as plain text."""

    def encode_texts(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return tiktoken's tokens of each text, on all cores."""
        with ThreadPoolExecutor(discover().num_cores()) as pool:
            return list(pool.map(self.encode_one, texts))

    def encode_one(self, text: bytes) -> Tokens:
        """Return tiktoken's tokens of one text."""
        return gpt2_encoding().encode_to_numpy(text.decode("utf-8"), disallowed_special=())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return gpt2_encoding().decode(list(tokens), errors="replace")

    def fast(self) -> FastTokenizer:
        """Return gigatoken with the packaged ranks."""
        from gigatoken import Tokenizer

        return Gpt2Fast(Tokenizer)

    def tricky_texts(self) -> Sequence[str]:
        """Return no texts, because TRICKY_TEXTS already contains GPT-2's special token."""
        return ()


class Gpt2Fast(FastTokenizer):
    """gigatoken with the packaged ranks."""

    def __init__(self, tokenizer_class: Any) -> None:
        self._class = tokenizer_class

    def make(self) -> Any:
        """Return a new tokenizer."""
        return self._class.from_tiktoken(RANKS_PATH, pretokenizer="gpt2", special_tokens={})

    def uncertain(self, texts: Sequence[bytes], agree: Agree) -> set[int]:
        """Return the indices of texts with a character that the encoders may treat differently."""
        return {index for index, text in enumerate(texts) if may_differ(text)}


def gpt2_tokenizer() -> Gpt2Tokenizer:
    """Return GPT-2's tokenizer. Raises DataError if the packaged ranks are damaged."""
    gpt2_encoding()
    return Gpt2Tokenizer(
        name=TOKENIZER_NAME,
        sha256=TOKENIZER_SHA256,
        pipeline_sha256=GPT2_PIPELINE_SHA256,
        fingerprint=TOKENIZER_SHA256,
        vocab_size=VOCAB_SIZE,
        end=(END_OF_TEXT,),
        reference_name=f"tiktoken {version('tiktoken')}",
    )
