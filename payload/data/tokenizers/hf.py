"""Any tokenizer.json, through the package `tokenizers`.

As in transformers, special tokens in a text are recognised, and the tokenizer itself defines which
tokens are put before a document. The files are untrusted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from payload.core.errors import DataError, TileforgeError, is_failure
from payload.core.printable_text import one_line, shown
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import inside_folder
from payload.core.validation.json_text import parse_json
from payload.data.tokenizers.added_special_tokens import with_special_tokens
from payload.data.tokenizers.base import FastTokenizer, TextTokenizer, Tokens
from payload.data.tokenizers.declared_tokens_check import require_declared_tokens
from payload.data.tokenizers.gigatoken_adapter import HfFast
from payload.data.tokenizers.special_tokens import (
    MAP_FILE,
    map_overrides_config,
    named_tokens,
    tokenizer_config,
)
from payload.formats.data_folder import AddedTokens
from payload.formats.hf_folder import CONFIG_FILE, GENERATION_FILE, read_tokenizer_files
from payload.formats.prepare_hints import write_tokenizer_again
from payload.formats.tokenizer_identity import TOKENIZER_FILE, identity_of, parse_tokenizer
from payload.models.fixed_vocabulary import why_fixed_vocabulary

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_CONFIG_FILES = ("tokenizer_config.json", GENERATION_FILE, CONFIG_FILE)
_FIX = "Repair the folder, or use another folder."
_BATCH_BYTES = 2**20
"""Limit on the size of a batch, because a result needs about 150 bytes per token until it is
converted."""
_MAX_TOKEN = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class HfTokenizer(TextTokenizer):
    """A tokenizer.json through the package `tokenizers`."""

    raw: Mapping[str, Any]
    """The parsed tokenizer.json."""
    backend: Tokenizer

    def encode_texts(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the package's tokens of each text, on all cores."""
        found: list[Tokens] = []
        batch: list[str] = []
        size = 0
        for text in texts:
            batch.append(text.decode("utf-8"))
            size += len(text)
            if size >= _BATCH_BYTES:
                found += self._encode(batch)
                batch, size = [], 0
        return found + self._encode(batch)

    def _encode(self, texts: list[str]) -> list[Tokens]:
        with convert_errors(self.name):
            encoded = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=np.uint32) for each in encoded]

    def encodings(self, texts: Sequence[str]) -> list[Encoding]:
        """Return the encodings of texts: their tokens, and the range of characters of each token.

        Raises DataError.
        """
        with convert_errors(self.name):
            return self.backend.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        with convert_errors(self.name):
            return str(self.backend.decode(list(tokens), skip_special_tokens=False))

    def normalized(self, text: str) -> str:
        """Return the text that results from the file's normalizer."""
        normalizer = self.backend.normalizer
        with convert_errors(self.name):
            return text if normalizer is None else str(normalizer.normalize_str(text))

    def fast(self) -> FastTokenizer:
        """Return gigatoken with the same file."""
        from gigatoken import Tokenizer as Gigatoken

        return HfFast(Gigatoken, self.raw)

    def tricky_texts(self) -> Sequence[str]:
        """Return texts with every added token between letters, between spaces, and repeated."""
        contents = [str(each["content"]) for each in self.raw.get("added_tokens") or ()]
        return [f"a{c}b {c} \n{c}\n{c}{c}  {c}" for c in contents]


@contextmanager
def convert_errors(name: object, *, error: type[TileforgeError] = DataError) -> Iterator[None]:
    """Convert failures of the package to `error`: exceptions, and panics of its Rust code."""
    try:
        yield
    except BaseException as problem:
        if not is_failure(problem):
            raise
        raise error(
            f"tokenizer {name}: encoding a text fails: {one_line(problem)} {_FIX}"
        ) from None


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the tokenizer files of a folder by name, without other files of a model.

    Raises DataError if tokenizer.json is missing.
    """
    files = read_tokenizer_files(folder, error=DataError)
    if TOKENIZER_FILE not in files:
        raise DataError(_describe_missing_tokenizer(folder, files))
    return files


def hf_tokenizer(folder: Path, *, name: str, added: Sequence[str] = ()) -> HfTokenizer:
    """Load the tokenizer in `folder`, with the special tokens `added`.

    `name` is recorded in meta.json.

    Raises DataError.
    """
    files = read_folder(folder)
    own = files[TOKENIZER_FILE]
    new: tuple[str, ...] = ()
    if added:
        path = folder / TOKENIZER_FILE
        files[TOKENIZER_FILE], new = with_special_tokens(
            own, added, path=path, build=lambda content: build_backend(content, path)
        )
    raw = parse_tokenizer(files[TOKENIZER_FILE], where=str(folder / TOKENIZER_FILE))
    if dropout := raw["model"].get("dropout"):
        raise DataError(
            f"{folder / TOKENIZER_FILE}: model.dropout = {shown(dropout)} makes tokens random. Set "
            "it to null."
        )
    backend = build_backend(files[TOKENIZER_FILE], folder / TOKENIZER_FILE)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{folder / TOKENIZER_FILE}: its vocabulary has no tokens. {_FIX}")
    if (largest := max(vocabulary.values())) >= _MAX_TOKEN:
        raise DataError(f"{folder / TOKENIZER_FILE}: its largest token id is {largest}. {_FIX}")
    if new:
        _require_rows(folder, new, rows=largest + 1)
    identity = identity_of(raw)
    end, file = _end_of_document(folder, files, backend)
    require_declared_tokens(folder, files, raw, backend)
    with convert_errors(name):
        before, after = tokens_around(backend)
        unknown = _unknown(raw["model"], backend)
    ends = after if after[-1:] == (end,) else (*after, end)
    if outside := [token for token in (*before, *ends) if token > largest]:
        raise DataError(
            f"{folder / TOKENIZER_FILE}: its post_processor puts token {outside[0]} around a text, "
            f"but the largest token is {largest}. {_FIX}"
        )
    return HfTokenizer(
        name=name,
        sha256=identity.vocabulary_sha256,
        pipeline_sha256=identity.pipeline_sha256,
        fingerprint=_fingerprint(files[TOKENIZER_FILE], before, ends),
        vocab_size=largest + 1,
        begin=before,
        after=after,
        end=ends,
        end_note=f"documents end with {backend.id_to_token(end)!r} ({end}), eos_token of {file}",
        files=files,
        added=_added(new, own) if new else None,
        unknown=unknown,
        model_vocab_size=_model_vocab_size(folder, backend),
        reference_name=f"tokenizers {version('tokenizers')}",
        raw=raw,
        backend=backend,
    )


def _added(new: Sequence[str], content: bytes) -> AddedTokens:
    identity = identity_of(parse_tokenizer(content, where=TOKENIZER_FILE))
    return AddedTokens(tokens=list(new), model_pipeline_sha256=identity.pipeline_sha256)


def build_backend(
    content: bytes, path: Path, *, error: type[TileforgeError] = DataError
) -> Tokenizer:
    """Build a tokenizer with the package `tokenizers`. Raises `error` if the package fails."""
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_buffer(content)
        backend.no_truncation()
        backend.no_padding()
        backend.encode("a b", add_special_tokens=True)
    except BaseException as problem:
        if not is_failure(problem):
            raise
        raise error(f"{path}: cannot be loaded: {one_line(problem)} {_FIX}") from None
    return backend


def named_end(
    folder: Path, files: Mapping[str, bytes], backend: Tokenizer
) -> tuple[int, str] | None:
    """Return the token that ends a document and the file that defines this token, or None.

    `files` are the tokenizer's files by name; the model's files are read from `folder`. Raises
    DataError.
    """
    has_map = map_overrides_config(tokenizer_config(files, folder=folder))
    for name in (MAP_FILE, *_CONFIG_FILES) if has_map else _CONFIG_FILES:
        content = _read(folder / name)
        if content is None:
            continue
        where = str(folder / name)
        config = parse_json(content, where=where, fix=_FIX, error=DataError, huge_integers=True)
        found = _named_end(config, backend, where=folder / name)
        if found is not None:
            return found, name
    return None


def _end_of_document(
    folder: Path, files: Mapping[str, bytes], backend: Tokenizer
) -> tuple[int, str]:
    """Return the result of `named_end`. Raises DataError if no file defines the token."""
    found = named_end(folder, files, backend)
    if found is not None:
        return found
    raise DataError(
        f"tokenizer {folder}: no eos_token in {', '.join(_CONFIG_FILES)}; this token must end "
        'every document. Add "eos_token" to tokenizer_config.json.'
    )


def _named_end(config: object, backend: Tokenizer, *, where: Path) -> int | None:
    if not isinstance(config, dict):
        raise DataError(f"{where}: expected an object, got {shown(config)}. {_FIX}")
    token = named_tokens(config).get("eos_token")
    if token is not None:
        number = backend.token_to_id(token)
        if number is None:
            raise DataError(
                f"{where}: eos_token = {shown(token)} is not in {TOKENIZER_FILE}. {_FIX}"
            )
        return number
    given = config.get("eos_token_id")
    first = given[0] if isinstance(given, list) and given else given
    if first is None:
        return None
    if type(first) is not int or first not in range(_MAX_TOKEN) or not backend.id_to_token(first):
        raise DataError(
            f"{where}: eos_token_id = {shown(first)} is not in {TOKENIZER_FILE}. {_FIX}"
        )
    return first


_RARE_TEXT = "\U0010fffd\ue000"
"""Characters that no vocabulary has as single tokens."""


def _unknown(model: Mapping[str, Any], backend: Tokenizer) -> int | None:
    """Return the token for unknown text. Models of the type Unigram store the id of this token."""
    token, number = model.get("unk_token"), model.get("unk_id")
    if isinstance(token, str):
        number = backend.token_to_id(token)
    if type(number) is not int:
        return None
    # With all bytes in the vocabulary no text is unknown, and the token may have a different use.
    return number if number in backend.encode(_RARE_TEXT, add_special_tokens=False).ids else None


def _model_vocab_size(folder: Path, backend: Tokenizer) -> int | None:
    """Return the vocab_size in the folder's config.json plus the number of added tokens.

    Added tokens count because some models have tokens for images above vocab_size. Returns None
    without a config.json. Raises DataError.
    """
    size = _model_config(folder).get("vocab_size")
    added = backend.get_vocab_size() - backend.get_vocab_size(with_added_tokens=False)
    return size + added if type(size) is int and size > 0 else None


def _model_config(folder: Path) -> Mapping[str, Any]:
    """Return the folder's config.json; empty without this file. Raises DataError."""
    path = folder / CONFIG_FILE
    content = _read(path)
    if content is None:
        return {}
    config = parse_json(content, where=str(path), fix=_FIX, error=DataError, huge_integers=True)
    return config if isinstance(config, dict) else {}


def _require_rows(folder: Path, new: Sequence[str], *, rows: int) -> None:
    """Raise DataError if the folder's model has no rows for new tokens and cannot get any.

    `rows` is the number of tokens, including the new ones.
    """
    config = _model_config(folder)
    size, reason = config.get("vocab_size"), why_fixed_vocabulary(config)
    if reason is not None and type(size) is int and rows > size:
        raise DataError(
            f"--add-special-tokens {shown(new[-1])}: the vocabulary of {folder}, {size:,} tokens, "
            f"cannot grow to {rows:,}: {reason}. Leave out --add-special-tokens."
        )


def tokens_around(backend: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that the tokenizer puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    return (), ()


def _fingerprint(content: bytes, before: Sequence[int], after: Sequence[int]) -> str:
    shaping = [hashlib.sha256(content).hexdigest(), list(before), list(after)]
    return hashlib.sha256(json.dumps(shaping).encode()).hexdigest()


def _read(path: Path) -> bytes | None:
    try:
        return read_bytes(inside_folder(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}. {_FIX}") from None


def _describe_missing_tokenizer(folder: Path, files: Mapping[str, bytes]) -> str:
    if not files:
        return f"tokenizer {folder}: no {TOKENIZER_FILE}. Use a folder with this file."
    return (
        f"tokenizer {folder}: {TOKENIZER_FILE} is missing; the folder has only "
        f"{', '.join(files)}. Write {TOKENIZER_FILE} with: {write_tokenizer_again(folder)}"
    )
