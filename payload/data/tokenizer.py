"""GPT-2's tokenizer under its former name."""

from payload.data.tokenizers.gpt2 import (
    END_OF_TEXT,
    END_OF_TEXT_NAME,
    REINSTALL,
    TOKENIZER_NAME,
    TOKENIZER_SHA256,
    VOCAB_SIZE,
    gpt2_encoding,
    load_ranks,
)

__all__ = [
    "END_OF_TEXT",
    "END_OF_TEXT_NAME",
    "REINSTALL",
    "TOKENIZER_NAME",
    "TOKENIZER_SHA256",
    "VOCAB_SIZE",
    "gpt2_encoding",
    "load_ranks",
]
