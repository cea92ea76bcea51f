"""CONTRACT: which tokenizer a folder's files are, so that two folders can be compared.

Two tokenizers are the same when they turn texts into the same token numbers. What decides that is
the whole pipeline of tokenizer.json: normalizer, pre-tokenizer, vocabulary with its merges,
post-processor and added tokens. Its canonical form leaves out what changes no token: offsets,
decoders, truncation, padding, and the layout of the file. `payload.data.tokenizers.probe` compares
the tokens of a packaged text as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.core.errors import DataError, TileforgeError
from payload.core.links import inside_folder
from payload.core.printable_text import one_line
from payload.core.regular_files import read_bytes
from payload.core.validation.json_text import parse_json
from payload.formats.data_folder import DataMeta
from payload.formats.prepare_hints import with_tokenizer, write_tokenizer_again
from payload.formats.tokenizer_canonical import canonical_parts

TOKENIZER_FILE = "tokenizer.json"
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
"""GPT-2's vocabulary: the hash that tiktoken pins for r50k_base."""
GPT2_PIPELINE_SHA256 = "398794b6721e9ac57f742c437aa96fd6b835e8e4b6272dd831d2426778e601be"
"""GPT-2's whole pipeline; a test computes it from the packaged files."""
_GPT2_CONTENT_SHA256 = "6535b6b8705ca03b29ab27ba8e87a8f5eacd56236ab65591ac163cbda72974c9"
GPT2_END = "<|endoftext|>"
"""GPT-2's one added token."""
_VOCABULARIES = ("vocab.json", "tokenizer.model")
"""Each is a tokenizer's vocabulary by itself; other files only describe one."""
_FIX = "Repair the folder, or name another one."


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerIdentity:
    """The two hashes by which tokenizers are compared."""

    vocabulary_sha256: str
    """Vocabulary and merges alone: the identity in data folders of older versions."""
    pipeline_sha256: str
    """Everything that changes tokens."""

    def is_gpt2(self) -> bool:
        """Say whether it is GPT-2's tokenizer, which is packaged."""
        return self.pipeline_sha256 == GPT2_PIPELINE_SHA256


def identity_of(tokenizer: Mapping[str, Any]) -> TokenizerIdentity:
    """Return the identity of a parsed tokenizer.json.

    Raises DataError for one that is nested too deeply.
    """
    try:
        return TokenizerIdentity(
            vocabulary_sha256=_vocabulary_sha256(tokenizer),
            pipeline_sha256=_hash(canonical_parts(tokenizer)),
        )
    except RecursionError:
        raise DataError(f"{TOKENIZER_FILE}: it is nested too deeply. {_FIX}") from None


def _vocabulary_sha256(tokenizer: Mapping[str, Any]) -> str:
    """Return the hash of the vocabulary and merges.

    Data folders of every version have it, so it never changes.
    """
    model = tokenizer.get("model")
    model = model if isinstance(model, dict) else {}
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if isinstance(vocabulary, dict):
        # Files differ in which special tokens they repeat here.
        added = tokenizer.get("added_tokens")
        contents = [each.get("content") for each in _list(added) if isinstance(each, dict)]
        special = {each for each in contents if isinstance(each, str)}
        vocabulary = sorted(
            (str(number), token) for token, number in vocabulary.items() if token not in special
        )
    if isinstance(merges, list):
        # Older files write a merge as one string, newer ones as a pair.
        merges = [each.split(" ") if isinstance(each, str) else each for each in merges]
    found = _hash([model.get("type"), vocabulary, merges])
    return GPT2_SHA256 if found == _GPT2_CONTENT_SHA256 else found


def differing_parts(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts of two parsed tokenizer.json that give other tokens, as in `normalizer`."""
    mine, others = canonical_parts(one), canonical_parts(other)
    return tuple(name for name in mine if _hash(mine[name]) != _hash(others[name]))


def folder_identity(
    folder: Path, *, error: type[TileforgeError] = DataError
) -> TokenizerIdentity | None:
    """Return the identity of the tokenizer in `folder`, or None when it has no tokenizer.json.

    Raises `error` for a damaged file.
    """
    found = read_tokenizer(folder, error=error)
    return None if found is None else identity_of(found)


def read_tokenizer(
    folder: Path, *, error: type[TileforgeError] = DataError
) -> dict[str, Any] | None:
    """Return the parsed tokenizer.json of `folder`, or None without one.

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
    """Say whether this is the tokenizer of the data, as far as the folder's hashes tell.

    A folder of an older version has the hash of the vocabulary alone.
    """
    if meta.tokenizer_pipeline_sha256:
        return identity.pipeline_sha256 == meta.tokenizer_pipeline_sha256
    return identity.vocabulary_sha256 == meta.tokenizer_sha256


def vocabulary_file(folder: Path) -> str | None:
    """Return the file with the vocabulary of a folder that has no tokenizer.json, or None."""
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
    """Say whether vocab.json and merges.txt of `folder` are this vocabulary, with these merges.

    `added` has the numbers of the tokens that the hash leaves out; those that the folder has must
    be the same. A SentencePiece vocabulary is not compared. Raises `error` for damaged files.
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
    """Raise `error` when the model in `folder` has a tokenizer other than the data's.

    `init` is what the user calls the model; `settings` name where data and model were given. A
    folder without any vocabulary says nothing; one with a vocabulary and no tokenizer.json must
    have the data's.
    """
    raw = read_tokenizer(folder, error=error)
    if raw is None:
        name = vocabulary_file(folder)
        if name is not None and not _is_vocabulary_of(meta, data, folder, error=error):
            raise error(
                f"{settings[1]} = {init!r} has {name} and no {TOKENIZER_FILE}, and {settings[0]} = "
                f"{str(data)!r} was prepared with the tokenizer {meta.tokenizer}, which is not "
                f"known to be the same. Make the {TOKENIZER_FILE}, then prepare the data with it: "
                f"{write_tokenizer_again(folder)}"
            )
        return
    identity = identity_of(raw)
    if is_tokenizer_of(meta, identity):
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
    """Return the message about a model whose tokenizer is not the data's."""
    name = "gpt2" if identity.is_gpt2() else init
    again = with_tokenizer(data, source=meta.source, tokenizer=name)
    differing = f" (they differ in: {', '.join(parts)})" if parts else ""
    return (
        f"{settings[0]} = {str(data)!r} was prepared with the tokenizer {meta.tokenizer}, but "
        f"{settings[1]} = {init!r} has another one{differing}. Prepare the data with the model's: "
        f"{again}"
    )


def parse_tokenizer(
    content: bytes, *, where: str, error: type[TileforgeError] = DataError
) -> dict[str, Any]:
    """Return the object in a tokenizer.json. Raises `error`."""
    raw = parse_json(content, where=where, fix=_FIX, error=error)
    if not isinstance(raw, dict) or not isinstance(raw.get("model"), dict):
        raise error(f"{where}: has no model, so it is not a tokenizer.json. {_FIX}")
    return raw


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
