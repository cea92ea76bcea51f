"""CONTRACT: hashes that identify a tokenizer.

The hashes are used to compare the tokenizers of two folders.

Two tokenizers are the same if they produce the same token ids. That depends on the whole pipeline
of tokenizer.json: normalizer, pre-tokenizer, vocabulary with merges, post-processor and added
tokens. The canonical form leaves out the rest: offsets, decoders, truncation, padding, and the
layout of the file. `payload.data.tokenizers.probe` also compares the tokens of a packaged text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.core.errors import DataError, TileforgeError
from payload.core.printable_text import one_line
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import inside_folder
from payload.core.validation.json_text import parse_json
from payload.formats.data_folder import DataMeta
from payload.formats.prepare_hints import with_tokenizer, write_tokenizer_again
from payload.formats.tokenizer_canonical import canonical_parts
from payload.formats.tokenizer_limits import require_bounded

TOKENIZER_FILE = "tokenizer.json"
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
"""Hash of GPT-2's vocabulary, which tiktoken pins for r50k_base."""
GPT2_PIPELINE_SHA256 = "398794b6721e9ac57f742c437aa96fd6b835e8e4b6272dd831d2426778e601be"
"""Hash of GPT-2's whole pipeline; a test computes it from the packaged files."""
_GPT2_CONTENT_SHA256 = "6535b6b8705ca03b29ab27ba8e87a8f5eacd56236ab65591ac163cbda72974c9"
GPT2_END = "<|endoftext|>"
"""GPT-2's only added token."""
_VOCABULARIES = ("vocab.json", "tokenizer.model")
"""Files that contain a whole vocabulary."""
_FIX = "Repair the folder, or use another folder."


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerIdentity:
    """The two hashes by which tokenizers are compared."""

    vocabulary_sha256: str
    """Hash of the vocabulary and merges. Data folders of older releases have only this hash."""
    pipeline_sha256: str
    """Hash of all settings that affect tokens."""

    def is_gpt2(self) -> bool:
        """Return True for GPT-2's tokenizer, which is packaged."""
        return self.pipeline_sha256 == GPT2_PIPELINE_SHA256


def identity_of(tokenizer: Mapping[str, Any]) -> TokenizerIdentity:
    """Return the identity of a parsed tokenizer.json.

    Raises DataError if the JSON is nested too deeply.
    """
    try:
        return TokenizerIdentity(
            vocabulary_sha256=_vocabulary_sha256(tokenizer),
            pipeline_sha256=_hash(canonical_parts(tokenizer)),
        )
    except RecursionError:
        raise DataError(f"{TOKENIZER_FILE}: the JSON is nested too deeply. {_FIX}") from None


def _vocabulary_sha256(tokenizer: Mapping[str, Any]) -> str:
    """Return the hash of the vocabulary and merges.

    Data folders of all releases contain this hash, so it must never change.
    """
    model = tokenizer.get("model")
    model = model if isinstance(model, dict) else {}
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if isinstance(vocabulary, dict):
        # Files repeat different subsets of the special tokens in the vocabulary.
        added = tokenizer.get("added_tokens")
        contents = [each.get("content") for each in _list(added) if isinstance(each, dict)]
        special = {each for each in contents if isinstance(each, str)}
        vocabulary = sorted(
            (str(number), token) for token, number in vocabulary.items() if token not in special
        )
    if isinstance(merges, list):
        # A merge is one string in older files, and a pair in newer files.
        merges = [each.split(" ") if isinstance(each, str) else each for each in merges]
    found = _hash([model.get("type"), vocabulary, merges])
    return GPT2_SHA256 if found == _GPT2_CONTENT_SHA256 else found


def differing_parts(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the parts that differ between two tokenizers, such as `normalizer`."""
    mine, others = canonical_parts(one), canonical_parts(other)
    return tuple(name for name in mine if _hash(mine[name]) != _hash(others[name]))


def folder_identity(
    folder: Path, *, error: type[TileforgeError] = DataError
) -> TokenizerIdentity | None:
    """Return the identity of the tokenizer in `folder`, or None without a tokenizer.json.

    Raises `error` for a damaged file.
    """
    found = read_tokenizer(folder, error=error)
    return None if found is None else identity_of(found)


def read_tokenizer(
    folder: Path, *, error: type[TileforgeError] = DataError
) -> dict[str, Any] | None:
    """Return the parsed tokenizer.json of `folder`, or None if it does not exist.

    Raises `error` for a damaged file.
    """
    path = folder / TOKENIZER_FILE
    try:
        content = read_bytes(inside_folder(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise error(f"{path}: {one_line(problem.strerror or problem)} {_FIX}") from None
    return parse_tokenizer(content, where=str(path), error=error)


def is_tokenizer_of(meta: DataMeta, identity: TokenizerIdentity) -> bool:
    """Return True if the hashes in the data's meta.json identify this tokenizer."""
    if meta.tokenizer_pipeline_sha256:
        return identity.pipeline_sha256 == meta.tokenizer_pipeline_sha256
    return identity.vocabulary_sha256 == meta.tokenizer_sha256


def is_extended_by(meta: DataMeta, identity: TokenizerIdentity) -> bool:
    """Return True if the data's tokenizer is this tokenizer plus special tokens from `prepare`."""
    added = meta.added_tokens
    return added is not None and identity.pipeline_sha256 == added.model_pipeline_sha256


def vocabulary_file(folder: Path) -> str | None:
    """Return the name of the vocabulary file of a folder without tokenizer.json; None without such
    a file."""
    if (folder / TOKENIZER_FILE).is_file():
        return None
    return next((name for name in _VOCABULARIES if (folder / name).is_file()), None)


def _is_vocabulary_of(
    meta: DataMeta, data: Path, folder: Path, *, error: type[TileforgeError]
) -> bool:
    added: dict[Any, Any] = {GPT2_END: meta.end_of_text}
    if TOKENIZER_FILE in meta.tokenizer_files:
        own = read_tokenizer(data) or {}
        added = {
            each.get("content"): each.get("id")
            for each in _list(own.get("added_tokens"))
            if isinstance(each, dict)
        }
    return has_vocabulary(folder, vocabulary_sha256=meta.tokenizer_sha256, added=added, error=error)


def has_vocabulary(
    folder: Path,
    *,
    vocabulary_sha256: str,
    added: Mapping[Any, Any],
    error: type[TileforgeError] = DataError,
) -> bool:
    """Return True if the hash of vocab.json and merges.txt in `folder` is `vocabulary_sha256`.

    `added` has the ids of tokens that the hash does not cover. In the folder, these tokens must
    have the same ids. A SentencePiece vocabulary is not compared. Raises `error` for damaged files.
    """
    found = {}
    for name in ("vocab.json", "merges.txt", "added_tokens.json"):
        try:
            found[name] = read_bytes(inside_folder(folder / name))
        except FileNotFoundError:
            found[name] = b"{}"
        except OSError as problem:
            raise error(
                f"{folder / name}: {one_line(problem.strerror or problem)} {_FIX}"
            ) from None
    vocabulary, more = (
        parse_json(found[name], where=str(folder / name), fix=_FIX, error=error)
        for name in ("vocab.json", "added_tokens.json")
    )
    if not isinstance(vocabulary, dict) or not isinstance(more, dict):
        return False
    if any(added.get(token, number) != number for token, number in vocabulary.items()):
        return False
    if any(added.get(token) != number for token, number in more.items()):
        return False
    lines = found["merges.txt"].decode("utf-8", "replace").split("\n")
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": [line.rstrip("\r") for line in lines if line and not line.startswith("#version")],
    }
    contents = [{"content": token} for token in added]
    return _vocabulary_sha256({"model": model, "added_tokens": contents}) == vocabulary_sha256


def require_same_tokenizer(
    meta: DataMeta,
    *,
    data: Path,
    folder: Path,
    init: str,
    settings: tuple[str, str] = ("data.dir", "model.init"),
    error: type[TileforgeError] = DataError,
) -> None:
    """Raise `error` if the model in `folder` has a different tokenizer than the data.

    `init` is the model as the user named it. `settings` are the names of the settings for the data
    and the model. A folder without a vocabulary is accepted. A folder with a vocabulary but without
    a tokenizer.json must have the vocabulary of the data.
    """
    raw = read_tokenizer(folder, error=error)
    if raw is None:
        name = vocabulary_file(folder)
        if name is not None and not _is_vocabulary_of(meta, data, folder, error=error):
            raise error(
                f"{settings[1]} = {init!r} has {name} but no {TOKENIZER_FILE}, and {settings[0]} "
                f"= {str(data)!r} was prepared with the tokenizer {meta.tokenizer}, which may "
                f"differ. First create the {TOKENIZER_FILE}, then prepare the data again: "
                f"{write_tokenizer_again(folder)}"
            )
        return
    identity = identity_of(raw)
    if is_tokenizer_of(meta, identity) or is_extended_by(meta, identity):
        return
    own = None
    if TOKENIZER_FILE in meta.tokenizer_files:
        own = read_tokenizer(data, error=error)
    parts = () if own is None else differing_parts(own, raw)
    raise error(
        other_tokenizer(
            meta, data=data, identity=identity, init=init, settings=settings, parts=parts
        )
    )


def other_tokenizer(
    meta: DataMeta,
    *,
    data: Path,
    identity: TokenizerIdentity,
    init: str,
    settings: tuple[str, str],
    parts: tuple[str, ...] = (),
) -> str:
    """Return the message about a difference between a model's tokenizer and the data's
    tokenizer."""
    name = "gpt2" if identity.is_gpt2() else init
    again = with_tokenizer(data, source=meta.source, tokenizer=name)
    differing = f" (the two differ in: {', '.join(parts)})" if parts else ""
    return (
        f"{settings[0]} = {str(data)!r} was prepared with the tokenizer {meta.tokenizer}, but "
        f"{settings[1]} = {init!r} has another tokenizer{differing}. Prepare the data with the "
        f"tokenizer of {settings[1]}: {again}"
    )


def parse_tokenizer(
    content: bytes, *, where: str, error: type[TileforgeError] = DataError
) -> dict[str, Any]:
    """Return the object in a tokenizer.json.

    Raises `error` for a damaged file, and for a file on which the package `tokenizers` would end
    the process or fill the memory.
    """
    raw = parse_json(content, where=where, fix=_FIX, error=error)
    if not isinstance(raw, dict) or not isinstance(raw.get("model"), dict):
        raise error(f"{where}: the key 'model' is missing, so this is not a tokenizer.json. {_FIX}")
    require_bounded(raw, where=where, error=error)
    return raw


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
