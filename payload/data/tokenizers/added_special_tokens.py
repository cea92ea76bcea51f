"""Adds special tokens to a tokenizer.json: `prepare --add-special-tokens`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from payload.core.errors import DataError
from payload.core.printable_text import shown
from payload.formats.tokenizer_identity import parse_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FLAG = "--add-special-tokens"


def with_special_tokens(
    content: bytes, texts: Sequence[str], *, path: Path, build: Callable[[bytes], Tokenizer]
) -> tuple[bytes, tuple[str, ...]]:
    """Return a tokenizer.json with new special tokens after its last token, and their texts.

    `build` builds a tokenizer from such a file. Special tokens that the file already has keep their
    ids. Raises DataError if a text is empty or already a plain token, or if the vocabulary has
    unused ids.
    """
    raw, backend = parse_tokenizer(content, where=str(path)), build(content)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    new = tuple(text for text in dict.fromkeys(texts) if text not in special)
    for text in new:
        if not text or text != text.strip():
            raise DataError(
                f"{_FLAG} {shown(text)}: the text is empty or has blanks at an end. Use a text "
                "such as '<|tool|>'."
            )
        if text in vocabulary:
            raise DataError(
                f"{_FLAG} {shown(text)}: this text is already an ordinary token, "
                f"{vocabulary[text]} of {path}. Use another text."
            )
    if not new:
        return content, ()
    first = max(vocabulary.values(), default=-1) + 1
    entries = [
        {
            "id": first + number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, text in enumerate(new)
    ]
    raw["added_tokens"] = [*(raw.get("added_tokens") or ()), *entries]
    extended = json.dumps(raw, ensure_ascii=False).encode()
    made = build(extended)
    # The package numbers new tokens by the size of the vocabulary and ignores their `id`.
    if any(made.token_to_id(text) != first + number for number, text in enumerate(new)):
        raise DataError(
            f"{_FLAG}: the vocabulary of {path} has unused ids below its largest token "
            f"{first - 1:,}, so new tokens would not follow that token. Use another tokenizer."
        )
    return extended, new
