"""Finds the characters of each token from the tokens' bytes, without running the tokenizer.

With byte-level BPE, the tokens are exactly the bytes of the text. So the lengths of the tokens
determine which characters each token covers. The package `tokenizers` returns the same ranges, but
takes more time for the ranges than for the tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.data.tokenizers.gigatoken_adapter import byte_symbols

Numbers = npt.NDArray[np.int64]

_NOT_BYTES = -(2**31)
"""Width of a token that does not come from the text. No sum with this width is a text's length."""
_SPACE = "\u0120"
"""Symbol that represents a space in a byte-level vocabulary."""


class TokenRanges:
    """For each token, how many bytes it has, and how many spaces at its ends do not count.

    Some tokenizers leave out such spaces from a token's range of characters.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """`raw` is a tokenizer.json that `has_token_ranges`."""
        texts = {number: text for text, number in raw["model"]["vocab"].items()}
        size = max((*texts, *(each["id"] for each in raw.get("added_tokens") or ()))) + 1
        self._widths = np.full(size, _NOT_BYTES, dtype=np.int64)
        self._leading = np.zeros(size, dtype=np.int64)
        self._trailing = np.zeros(size, dtype=np.int64)
        symbols = frozenset(byte_symbols())
        for number, text in texts.items():
            if symbols.issuperset(text):
                self._widths[number] = len(text)
        for each in raw.get("added_tokens") or ():
            texts[each["id"]] = each["content"]
            self._widths[each["id"]] = len(each["content"].encode("utf-8", "replace"))
        self._is_normalized = raw.get("normalizer") is not None
        if any(each.get("trim_offsets") for each in _steps(raw, "post_processor", "processors")):
            for number, text in texts.items():
                if _is_space(text[:1]) or _is_space(text[-1:]):
                    self._leading[number] = _num_spaces(text)
                    self._trailing[number] = _num_spaces(text[::-1])

    def inexact(
        self, tokens: npt.NDArray[np.uint32], offsets: Numbers, texts: Sequence[bytes]
    ) -> list[int]:
        """Return the indices of texts for which the tokens are not exactly the bytes of the text.

        Text i has tokens[offsets[i]:offsets[i + 1]].
        """
        ends = np.concatenate(([0], np.cumsum(self._widths[tokens])))
        sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        found = np.flatnonzero(np.diff(ends[offsets]) != sizes).tolist()
        if self._is_normalized:
            found += [i for i, each in enumerate(texts) if not _is_normal(each)]
        return sorted(set(found))

    def find(
        self, tokens: npt.NDArray[np.uint32], offsets: Numbers, texts: Sequence[bytes]
    ) -> tuple[Numbers, Numbers]:
        """Return where each token begins and ends (exclusive), as character indices in its text.

        Texts for which `inexact` returns an index must be left out.
        """
        ends = np.cumsum(self._widths[tokens])
        starts = ends - self._widths[tokens]
        sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        content = b"".join(texts)
        if not content.isascii():
            # A token with a part of a character has the range of the whole character.
            is_first = (np.frombuffer(content, dtype=np.uint8) & 0xC0) != 0x80
            numbers = np.concatenate(([0], np.cumsum(is_first)))
            starts, ends = numbers[starts + (ends > starts)] - (ends > starts), numbers[ends]
            sizes = np.diff(numbers[np.concatenate(([0], np.cumsum(sizes)))])
        before = np.repeat(np.cumsum(sizes) - sizes, np.diff(offsets))
        starts, ends = starts - before, ends - before
        starts = np.minimum(starts + self._leading[tokens], ends)
        trailing = self._trailing[tokens]
        return starts, np.where(ends >= trailing, np.maximum(ends - trailing, starts), ends)


def has_token_ranges(raw: Mapping[str, Any]) -> bool:
    """Return True if the tokens of a tokenizer.json are the bytes of a text."""
    model, normalizer = raw["model"], raw.get("normalizer")
    steps = list(_steps(raw, "pre_tokenizer", "pretokenizers"))
    added = raw.get("added_tokens") or ()
    return (
        model.get("type", "BPE") == "BPE"
        and isinstance(model.get("vocab"), dict)
        and not model.get("byte_fallback")
        and any(each.get("type") == "ByteLevel" for each in steps)
        and not any(each.get("add_prefix_space") for each in steps)
        and not any(each.get("lstrip") or each.get("rstrip") for each in added)
        and (normalizer is None or normalizer.get("type") == "NFC")
    )


def _steps(raw: Mapping[str, Any], key: str, inner: str) -> Iterator[Mapping[str, Any]]:
    outer = raw.get(key) or {}
    yield from outer.get(inner) or (outer,)


def _is_normal(text: bytes) -> bool:
    return text.isascii() or unicodedata.is_normalized("NFC", text.decode("utf-8"))


def _is_space(character: str) -> bool:
    return character == _SPACE or character.isspace()


def _num_spaces(text: str) -> int:
    return next((n for n, each in enumerate(text) if not _is_space(each)), len(text))
