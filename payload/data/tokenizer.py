"""GPT-2's tokenizer, from the packaged ranks: no download, no cache folder, no network."""

from __future__ import annotations

import binascii
import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from payload.errors import DataError

if TYPE_CHECKING:
    import tiktoken

TOKENIZER_NAME = "gpt2"
END_OF_TEXT = 50256
"""Written after every document."""
END_OF_TEXT_NAME = "<|endoftext|>"
VOCAB_SIZE = 50257
TOKENIZER_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
"""Of the ranks file: the value that tiktoken itself pins for r50k_base."""
REINSTALL = "Install the package again."
RANKS_PATH = Path(__file__).parent / "gpt2" / "r50k_base.tiktoken"

# As in tiktoken_ext.openai_public: GPT-2's own pattern, rewritten there to run faster.
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


@functools.cache
def gpt2_encoding() -> tiktoken.Encoding:
    """tiktoken's GPT-2 encoding. Raises DataError when the packaged ranks are damaged."""
    import tiktoken

    return tiktoken.Encoding(
        TOKENIZER_NAME,
        pat_str=_PATTERN,
        mergeable_ranks=load_ranks(RANKS_PATH),
        special_tokens={END_OF_TEXT_NAME: END_OF_TEXT},
        explicit_n_vocab=VOCAB_SIZE,
    )


def load_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank, from a file that must have `TOKENIZER_SHA256`. Raises DataError.

    tiktoken's own `load_tiktoken_bpe` keeps copies in a shared temporary folder, so it is not used.
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
