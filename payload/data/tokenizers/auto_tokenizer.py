"""Compares a tokenizer.json with transformers' AutoTokenizer, which rebuilds some of them.

For some classes, transformers 5 takes only the vocabulary and merges of tokenizer.json, and builds
the normalizer and the pre-tokenizer itself. Source: `LlamaTokenizer.__init__` and
`GPTNeoXTokenizer.__init__`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from payload.core.errors import is_failure
from payload.core.printable_text import shown
from payload.data.tokenizers.base import TextTokenizer
from payload.data.tokenizers.hf import HfTokenizer
from payload.data.tokenizers.special_tokens import CONFIG_FILE, tokenizer_config
from payload.formats.tokenizer_identity import TOKENIZER_FILE

_REBUILT = ("LlamaTokenizer", "GPTNeoXTokenizer")
"""Classes whose tokenizers were found to differ. Only for these is transformers imported, which
takes seconds."""
_PROBES = ("two words", " a  b\n c", "x = [1, 22];\n\n\ty", "e\u0301 \ufb01 \u00bd \u4f60\u597d")
_MOST_SPECIAL = 16


def auto_tokenizer_note(tokenizer: TextTokenizer) -> str | None:
    """Return a note if AutoTokenizer makes other tokens of a short text, otherwise None."""
    if not isinstance(tokenizer, HfTokenizer) or tokenizer.added is not None:
        return None
    config = tokenizer_config(tokenizer.files, folder=Path(tokenizer.name))
    if str(config.get("tokenizer_class")).removesuffix("Fast") not in _REBUILT:
        return None
    try:
        found = _first_difference(tokenizer)
    except BaseException as problem:
        # transformers cannot load this tokenizer, so there are no tokens to compare.
        if not is_failure(problem):
            raise
        return None
    if found is None:
        return None
    text, ours, theirs = found
    return (
        f"transformers' AutoTokenizer rebuilds {tokenizer.name} and makes other tokens: of "
        f"{shown(text)} {theirs}, but {TOKENIZER_FILE} makes {ours}, as this data has. For equal "
        f"tokens, set tokenizer_class in {CONFIG_FILE} to PreTrainedTokenizerFast."
    )


def _first_difference(tokenizer: HfTokenizer) -> tuple[str, list[int], list[int]] | None:
    from transformers import AutoTokenizer

    logging.getLogger("transformers").setLevel(logging.ERROR)
    # A folder with the JSON files alone: the model's folder may hold code or pickled files.
    with TemporaryDirectory() as folder:
        for name, content in tokenizer.files.items():
            (Path(folder) / name).write_bytes(content)
        if tokenizer.model_type:
            config = json.dumps({"model_type": tokenizer.model_type})
            (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        other: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in _texts(tokenizer):
        ours = list(tokenizer.encodings([text])[0].ids)
        theirs = list(other.encode(text, add_special_tokens=False))
        if ours != theirs:
            return text, ours, theirs
    return None


def _texts(tokenizer: HfTokenizer) -> Iterator[str]:
    yield from _PROBES
    added = tokenizer.raw.get("added_tokens") or ()
    for each in [each for each in added if each.get("special")][:_MOST_SPECIAL]:
        yield f"a{each['content']}b {each['content']} c"
