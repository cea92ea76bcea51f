"""Compares a model's tokenizer with the tokenizer of a data folder.

The hashes are compared first (payload.formats.tokenizer_identity), then the tokens of a packaged
text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from payload.core.errors import DataError, TileforgeError
from payload.core.regular_files import read_bytes
from payload.data.tokenizers.declared_tokens_check import require_declared_tokens
from payload.data.tokenizers.gpt2 import gpt2_encoding
from payload.data.tokenizers.hf import build_backend, convert_errors
from payload.data.tokenizers.probe import Encode, same_tokens
from payload.formats.data_folder import DataMeta
from payload.formats.prepare_hints import prepare_again_hint
from payload.formats.tokenizer_identity import (
    GPT2_SHA256,
    TOKENIZER_FILE,
    differing_parts,
    folder_identity,
    is_tokenizer_of,
    other_tokenizer,
    parse_tokenizer,
    require_same_tokenizer,
)


def verified_file(meta: DataMeta, data: Path, name: str) -> bytes:
    """Return one tokenizer file of the data folder, after checking the file's hash.

    Raises DataError.
    """
    again = prepare_again_hint(data, source=meta.source)
    try:
        content = read_bytes(data / name)
    except OSError as error:
        raise DataError(f"{data / name}: {error.strerror}. {again}") from None
    if hashlib.sha256(content).hexdigest() != meta.tokenizer_files[name].sha256:
        raise DataError(f"{data / name}: its SHA-256 differs from the one in meta.json. {again}")
    return content


def is_same_tokenizer(
    meta: DataMeta, *, data: Path, folder: Path, error: type[TileforgeError] = DataError
) -> bool:
    """Return True if the model in `folder` has a tokenizer.json with the same tokens as the data.

    Raises `error` for a damaged file of the model, and DataError for a damaged file of the data.
    """
    identity = folder_identity(folder, error=error)
    return (
        identity is not None
        and is_tokenizer_of(meta, identity)
        and _produce_same_tokens(meta, data, folder, error=error)
    )


def makes_declared_tokens(
    files: Mapping[str, bytes], *, folder: Path, error: type[TileforgeError] = DataError
) -> bool:
    """Return True if tokenizer.json produces every token that the files of `folder` declare.

    Raises `error` for a tokenizer.json that cannot be loaded.
    """
    path, content = folder / TOKENIZER_FILE, files[TOKENIZER_FILE]
    raw = parse_tokenizer(content, where=str(path), error=error)
    backend = build_backend(content, path, error=error)
    try:
        require_declared_tokens(folder, files, raw, backend)
    except DataError:
        return False
    return True


def require_same_tokens(
    meta: DataMeta,
    *,
    data: Path,
    folder: Path,
    init: str,
    settings: tuple[str, str] = ("data.dir", "model.init"),
    error: type[TileforgeError] = DataError,
) -> None:
    """Raise `error` if the tokenizer of the model in `folder` differs from the tokenizer of the
    data.

    For the arguments, see `require_same_tokenizer`.
    """
    require_same_tokenizer(
        meta, data=data, folder=folder, init=init, settings=settings, error=error
    )
    identity = folder_identity(folder, error=error)
    if identity is None or _produce_same_tokens(meta, data, folder, error=error):
        return
    parts: tuple[str, ...] = ()
    if TOKENIZER_FILE in meta.tokenizer_files:
        own, model = verified_file(meta, data, TOKENIZER_FILE), read_bytes(folder / TOKENIZER_FILE)
        parts = differing_parts(*(parse_tokenizer(each, where=init) for each in (own, model)))
    message = other_tokenizer(
        meta, data=data, identity=identity, init=init, settings=settings, parts=parts
    )
    raise error(message)


def _produce_same_tokens(
    meta: DataMeta, data: Path, folder: Path, *, error: type[TileforgeError]
) -> bool:
    """Return True if both tokenizers produce the same tokens of the packaged text.

    The tokens that `prepare` added to the tokenizer of the data are not compared: the model's own
    tokenizer lacks them. Also returns True if the tokenizer of the data is unavailable: not in the
    folder, and not GPT-2's.
    """
    path = folder / TOKENIZER_FILE
    model = read_bytes(path)
    if TOKENIZER_FILE in meta.tokenizer_files:
        own = verified_file(meta, data, TOKENIZER_FILE)
        if own == model:
            return True
        mine = backend_encode(own, data / TOKENIZER_FILE)
    elif meta.tokenizer_sha256 == GPT2_SHA256:
        mine = gpt2_encode()
    else:
        return True
    added = meta.added_tokens.tokens if meta.added_tokens is not None else []
    return same_tokens(mine, backend_encode(model, path, error=error), apart_from=added)


def backend_encode(
    content: bytes, path: Path, *, error: type[TileforgeError] = DataError
) -> Encode:
    """Return a function that encodes texts with a tokenizer.json, including special tokens."""
    backend = build_backend(content, path, error=error)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        with convert_errors(path, error=error):
            return [each.ids for each in backend.encode_batch_fast(list(texts))]

    return encode


def gpt2_encode() -> Encode:
    """Return a function that encodes texts with the packaged GPT-2 tokenizer."""
    encoding = gpt2_encoding()
    return lambda texts: [encoding.encode_ordinary(text) for text in texts]
