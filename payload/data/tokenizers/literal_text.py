"""Encodes a text so that special tokens at given places are encoded as plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError
from payload.data.tokenizers.hf import HfTokenizer, convert_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The first of the private use planes, which no vocabulary and no normalizer knows.
_FIRST_NAME = 0xF0000
_FILL = "\U000ffffd"


class LiteralTextEncoder:
    """A tokenizer with new names for the special tokens.

    Special tokens that the template wrote are renamed, in the text and in the tokenizer. Special
    tokens that came from a row keep their names. The tokenizer does not know these names as special
    tokens any more, and encodes them together with the text around them. A new name has as many
    characters as the old name, so that ranges stay the same.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        """Raises DataError if the renamed tokenizer cannot be loaded."""
        self._tokenizer = tokenizer
        entries: list[dict[str, Any]] = [dict(each) for each in tokenizer.raw["added_tokens"]]
        self._names: dict[str, str] = {}
        for number, each in enumerate(entries):
            content = str(each["content"])
            if each.get("special") and content:
                self._names[content] = chr(_FIRST_NAME + number) + _FILL * (len(content) - 1)
                each["content"] = self._names[content]
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        renamed = {**tokenizer.raw, "added_tokens": entries, "post_processor": None}
        post = tokenizer.raw.get("post_processor")
        if isinstance(post, dict) and post.get("type") == "ByteLevel":
            renamed["post_processor"] = post  # only trims offsets
        self._backend = _load(renamed, tokenizer.name)
        # A renamed token that was in the model's vocabulary gets a new number.
        self._ids: dict[int | None, int] = {
            self._backend.token_to_id(each["content"]): int(each["id"]) for each in entries
        }
        self._special = {each["id"] for each in entries if each.get("special")} - set(self._ids)

    def encode(
        self, text: str, literal: Sequence[tuple[int, int]]
    ) -> tuple[npt.NDArray[np.uint32], list[tuple[int, int]], bool]:
        """Return tokens, their ranges of characters, and whether the encoding succeeded.

        `literal` are the ranges of characters to encode as plain text. The last value is False if
        the tokenizer still encodes one of these ranges as a special token. It is also False if the
        text has a character that is reserved for the new names; special tokens are then not
        renamed.
        """
        tokenizer = self._tokenizer
        if any(ord(each) >= _FIRST_NAME for each in text):
            (found,) = tokenizer.encodings([text])
            return np.array(found.ids, dtype=np.uint32), found.offsets, False
        kept: list[str] = []
        place = 0
        for start, end in [*literal, (len(text), len(text))]:
            part = text[place:start]
            kept += [self._pattern.sub(lambda hit: self._names[hit.group()], part), text[start:end]]
            place = end
        with convert_errors(tokenizer.name):
            found = self._backend.encode("".join(kept), add_special_tokens=False)
        ids = [self._ids.get(token, token) for token in found.ids]
        is_text = self._special.isdisjoint(found.ids)
        return np.array(ids, dtype=np.uint32), found.offsets, is_text


def _load(raw: dict[str, Any], name: str) -> Tokenizer:
    from tokenizers import Tokenizer

    with convert_errors(name, error=DataError):
        backend = Tokenizer.from_str(json.dumps(raw))
        backend.no_truncation()
        backend.no_padding()
    return backend
