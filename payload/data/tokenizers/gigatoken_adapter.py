"""Adapts a tokenizer.json to gigatoken, and detects texts that gigatoken may encode differently.

gigatoken 0.10 reads byte-level BPE with the split patterns of GPT-2, cl100k, o200k, Llama 3, Qwen 2
and 3.5, OLMo 3, DeepSeek 3, Nemotron and Kimi, and SentencePiece BPE with byte fallback (Llama 2,
Gemma, Mistral). Two kinds of file need a change that keeps the tokens:

- A vocabulary that lacks some of the 256 bytes. The missing bytes get ids after the vocabulary;
  the reference encodes texts with such a byte.
- Digits split before GPT-2's pattern (SmolLM, StarCoder). Each digit becomes an added token,
  which splits a text at the same positions.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.core.errors import is_failure
from payload.core.printable_text import one_line, shown
from payload.data.tokenizers.base import Agree, FastTokenizer, NotFastError

PRINTED_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that represent themselves in a byte-level vocabulary. GPT-2's vocabulary begins with
them."""
_CODE_POINTS = 0x110000
_DIGITS = "0123456789"
_PROBES = ("a{}b", " {}", "  {}", "1{}2", "{}{}", "!{}!", "\n{}\n", "{}  a")
"""Texts into which a character is put. They test whether tokenizers join the character to its
neighbours."""
_CHARACTER_BATCH = 4096


class HfFast(FastTokenizer):
    """gigatoken for one tokenizer.json.

    gigatoken and `tokenizers` use different versions of Unicode. So both encode each non-ASCII
    character when it first occurs, between neighbours of every kind. If the results differ, the
    reference encoder encodes all texts with this character.
    """

    def __init__(self, tokenizer_class: Any, raw: Mapping[str, Any]) -> None:
        """Raises NotFastError if gigatoken cannot read the file."""
        self._class = tokenizer_class
        self._content, self._missing_bytes = _adapt(raw)
        self._is_compared: npt.NDArray[np.bool_] = np.zeros(_CODE_POINTS, dtype=np.bool_)
        self._differs: npt.NDArray[np.bool_] = np.zeros(_CODE_POINTS, dtype=np.bool_)

    def make(self) -> Any:
        """Return a new tokenizer."""
        try:
            return self._class.from_json(self._content)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise NotFastError(one_line(error).rstrip(".")) from None

    def uncertain(self, texts: Sequence[bytes], agree: Agree) -> set[int]:
        """Return the indices of texts that gigatoken may encode differently."""
        found = set()
        if self._missing_bytes:
            for index, text in enumerate(texts):
                if len(text.translate(None, self._missing_bytes)) != len(text):
                    found.add(index)
        for index, text in enumerate(texts):
            if not text.isascii() and self._has_different(_code_points(text), agree):
                found.add(index)
        return found

    def _has_different(self, characters: npt.NDArray[np.uint32], agree: Agree) -> bool:
        uncompared = characters[~self._is_compared[characters]]
        if len(uncompared):
            self._compare_characters(np.unique(uncompared), agree)
        return bool(self._differs[characters].any())

    def _compare_characters(self, characters: npt.NDArray[np.uint32], agree: Agree) -> None:
        self._is_compared[characters] = True
        for start in range(0, len(characters), _CHARACTER_BATCH):
            batch = characters[start : start + _CHARACTER_BATCH]
            # TRICKY_TEXTS covers the ASCII characters in every run.
            batch = batch[batch >= 0x80]
            probes = [probe.format(c, c).encode() for c in map(chr, batch) for probe in _PROBES]
            if probes:
                equal = np.array(agree(probes), dtype=np.bool_).reshape(-1, len(_PROBES))
                self._differs[batch] = ~equal.all(axis=1)


def _code_points(text: bytes) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.decode("utf-8").encode("utf-32-le"), dtype="<u4")


def _adapt(raw: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return a tokenizer.json that gigatoken can read, and the bytes that the vocabulary lacks."""
    model = raw["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise NotFastError(f"its model is not BPE (model.type = {shown(model.get('type'))})")
    changed = {**raw, "truncation": None, "padding": None, "post_processor": None}
    missing = b""
    if not model.get("byte_fallback"):
        changed["model"] = {**model, "vocab": dict(model["vocab"])}
        missing = _add_missing_bytes(changed)
        _replace_digits(changed)
    return json.dumps(changed), missing


def _add_missing_bytes(raw: dict[str, Any]) -> bytes:
    vocabulary = raw["model"]["vocab"]
    added = [int(each["id"]) for each in raw.get("added_tokens") or ()]
    next_id = max([*vocabulary.values(), *added]) + 1
    missing = []
    for byte, symbol in enumerate(byte_symbols()):
        if symbol not in vocabulary:
            missing.append(byte)
            vocabulary[symbol] = next_id
            next_id += 1
    return bytes(missing)


def _replace_digits(raw: dict[str, Any]) -> None:
    """Replace the step that splits off single digits by added tokens for the digits."""
    outer = raw.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers") or []
    if [step.get("type") for step in steps] != ["Digits", "ByteLevel"]:
        return
    digits, words = steps
    vocabulary = raw["model"]["vocab"]
    is_plain = words.get("use_regex", True) and not words.get("add_prefix_space")
    if not digits.get("individual_digits") or not is_plain:
        return
    if raw.get("normalizer") is not None or any(digit not in vocabulary for digit in _DIGITS):
        return
    raw["pre_tokenizer"] = copy.deepcopy(words)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    raw["added_tokens"] = [
        *(raw.get("added_tokens") or ()),
        *({"id": vocabulary[d], "content": d, **flags, "special": True} for d in _DIGITS),
    ]


def byte_symbols() -> list[str]:
    """Return the character that represents each byte in a byte-level vocabulary.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    symbols, others = [], 0
    for byte in range(256):
        if byte in PRINTED_BYTES:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(0x100 + others))
            others += 1
    return symbols
