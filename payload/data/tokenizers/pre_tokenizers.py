"""llama.cpp's pre-tokenizers of byte-level BPE, in the format of tokenizer.json.

A GGUF file has only the name of its pre-tokenizer. The regular expressions are in llama.cpp.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
IGNORES_MERGES = ("llama-bpe", "tekken")
"""Tokenizers that encode a text in the vocabulary as one token, even if the merges do not produce
this token.

For these tokenizers, llama.cpp puts the BOS token before a text if the file has no `add_bos_token`.
"""
WORD_START = "\u2581"
"""Character that represents a space in the tokens of a SentencePiece vocabulary."""
SPACES: Mapping[str, Any] = {
    "type": "Replace",
    "pattern": {"String": " "},
    "content": WORD_START,
}
"""Normalizer of a SentencePiece vocabulary, which replaces spaces."""
PREPEND_SPACE: Mapping[str, Any] = {"type": "Prepend", "prepend": WORD_START}
"""Puts a space before each text, and before the text after each added token."""

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_REGEXES: Mapping[str, str] = {
    "qwen2": QWEN2,
    "tekken": TEKKEN,
    "llama-bpe": LLAMA3,
    "smaug-bpe": LLAMA3,
    "dbrx": LLAMA3,
}
_DIGITS = ("smollm", "refact", "starcoder")
"""Names of the pre-tokenizers that make each digit a separate piece."""


def pre_tokenizer(name: object) -> Mapping[str, Any] | None:
    """Return the `pre_tokenizer` for tokenizer.json that llama.cpp calls `name`, or None."""
    if name == "gpt-2":
        return _BYTES
    if name in _DIGITS:
        return _sequence({"type": "Digits", "individual_digits": True}, _BYTES)
    if not isinstance(name, str) or name not in _REGEXES:
        return None
    split = {
        "type": "Split",
        "pattern": {"Regex": _REGEXES[name]},
        "behavior": "Isolated",
        "invert": False,
    }
    return _sequence(split, {**_BYTES, "use_regex": False})


def _sequence(*steps: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}
