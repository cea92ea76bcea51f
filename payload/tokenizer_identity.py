"""CONTRACT: which tokenizer a folder's files are, so that two folders can be compared.

Two tokenizers are the same when they turn texts into the same token numbers. What says so is the
vocabulary with its merges: chat templates, names of special tokens and the layout of the file may
differ between a base model and its fine-tuned sibling.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.data_folder import DataMeta
from payload.errors import DataError, TileforgeError
from payload.remake import with_tokenizer
from payload.untrusted import one_line, parse_json, read_bytes

TOKENIZER_FILE = "tokenizer.json"
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
"""GPT-2's identity: the hash that tiktoken pins for r50k_base."""
_GPT2_CONTENT_SHA256 = "6535b6b8705ca03b29ab27ba8e87a8f5eacd56236ab65591ac163cbda72974c9"
_FIX = "Repair the folder, or name another one."


def identity_of(tokenizer: Mapping[str, Any]) -> str:
    """Return the hash of the vocabulary and merges in a parsed tokenizer.json."""
    model = tokenizer.get("model")
    model = model if isinstance(model, dict) else {}
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if isinstance(vocabulary, dict):
        # Files differ in which special tokens they repeat here.
        added = tokenizer.get("added_tokens")
        special = {each.get("content") for each in added or () if isinstance(each, dict)}
        vocabulary = sorted(
            (str(number), token) for token, number in vocabulary.items() if token not in special
        )
    if isinstance(merges, list):
        # Older files write a merge as one string, newer ones as a pair.
        merges = [each.split(" ") if isinstance(each, str) else each for each in merges]
    content = json.dumps([model.get("type"), vocabulary, merges], ensure_ascii=True)
    found = hashlib.sha256(content.encode()).hexdigest()
    return GPT2_SHA256 if found == _GPT2_CONTENT_SHA256 else found


def folder_identity(folder: Path, *, error: type[TileforgeError] = DataError) -> str | None:
    """Return the identity of the tokenizer in `folder`, or None when it has no tokenizer.json.

    Raises `error` for a damaged file.
    """
    path = folder / TOKENIZER_FILE
    try:
        content = read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise error(f"{path}: {one_line(problem.strerror or problem)} {_FIX}") from None
    return identity_of(parse_tokenizer(content, where=str(path), error=error))


def require_same_tokenizer(
    meta: DataMeta,
    *,
    data: Path,
    folder: Path,
    init: str,
    settings: tuple[str, str] = ("data.dir", "model.init"),
    error: type[TileforgeError] = DataError,
) -> None:
    """Raise `error` when the model in `folder` has a tokenizer other than the data's.

    `init` is what the user calls the model; `settings` name where data and model were given. A
    folder without tokenizer.json says nothing.
    """
    found = folder_identity(folder, error=error)
    if found is None or found == meta.tokenizer_sha256:
        return
    name = "gpt2" if found == GPT2_SHA256 else init
    again = with_tokenizer(data, source=meta.source, tokenizer=name)
    raise error(
        f"{settings[0]} = {str(data)!r} was prepared with the tokenizer {meta.tokenizer}, but "
        f"{settings[1]} = {init!r} has another one. Prepare the data with the model's: {again}"
    )


def parse_tokenizer(
    content: bytes, *, where: str, error: type[TileforgeError] = DataError
) -> dict[str, Any]:
    """Return the object in a tokenizer.json. Raises `error`."""
    raw = parse_json(content, where=where, fix=_FIX, error=error)
    if not isinstance(raw, dict) or not isinstance(raw.get("model"), dict):
        raise error(f"{where}: has no model, so it is not a tokenizer.json. {_FIX}")
    return raw
