"""Compares the tokens that a tokenizer's files declare with the tokens of tokenizer.json.

Data is tokenized with tokenizer.json alone. transformers also adds tokens from the other files. So
a token that only the other files declare is one token in transformers, but several tokens in the
data.

Source: `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__` in transformers
5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from payload.core.errors import DataError, is_failure
from payload.core.printable_text import shown
from payload.core.validation.json_text import parse_json
from payload.data.tokenizers.special_tokens import (
    CONFIG_FILE,
    EXTRA_TOKEN_KEYS,
    MAP_FILE,
    map_overrides_config,
    named_tokens,
    tokenizer_config,
)
from payload.formats.prepare_hints import write_tokenizer_again
from payload.formats.tokenizer_identity import TOKENIZER_FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ADDED_FILE = "added_tokens.json"
_FLAGS = ("lstrip", "rstrip", "single_word")


@dataclass(frozen=True, slots=True)
class _Declared:
    """A token that one of the tokenizer's files declares."""

    content: str
    number: int | None
    """Id of the token; None if the file has no id for the token."""
    where: str
    """The file that declares the token, and the token's key in this file."""
    flags: Mapping[str, Any] | None = None
    """Flags that control where in a text the token is recognised; None if the file has no flags."""


def require_declared_tokens(
    folder: Path, files: Mapping[str, bytes], raw: Mapping[str, Any], backend: Tokenizer
) -> None:
    """Raise DataError if a declared token is missing in tokenizer.json, or is different there.

    Also raises DataError for split_special_tokens, which is not supported.

    `files` are the files of the folder, `raw` is the parsed tokenizer.json, and `backend` is the
    tokenizer built from it.
    """
    if tokenizer_config(files, folder=folder).get("split_special_tokens"):
        raise DataError(
            f"tokenizer {folder}: split_special_tokens of {CONFIG_FILE} is not supported. Remove "
            "the key."
        )
    known = {token.content: (n, token) for n, token in backend.get_added_tokens_decoder().items()}
    for each in _declared(folder, files, raw):
        number, token = known.get(each.content, (None, None))
        expected = "as a token" if each.number is None else f"as token {each.number}"
        if number is None:
            ids = _encode_as_text(each.content, backend)
            found = f"lacks this added token and encodes the text as {ids}"
        elif each.number not in (None, number):
            found = f"lists it as token {number}"
        elif flag := _first_different_flag(each.flags, token):
            value = getattr(token, flag)
            expected, found = f"with {flag} = {not value}", f"has {flag} = {value}"
        else:
            continue
        raise DataError(
            f"tokenizer {folder}: {each.where} declares {shown(each.content)} {expected}, but "
            f"{TOKENIZER_FILE} {found}. Correct one of the files, or write all of them again: "
            f"{write_tokenizer_again(folder)}"
        )


def _encode_as_text(text: str, backend: Tokenizer) -> str:
    try:
        return shown(backend.encode(text, add_special_tokens=False).ids)
    except BaseException as problem:
        if not is_failure(problem):
            raise
        return "no tokens"


def _first_different_flag(flags: Mapping[str, Any] | None, token: Any) -> str | None:
    """Return the first flag with a declared value that differs from the value in tokenizer.json."""
    return next(
        (each for each in _FLAGS if flags and bool(flags.get(each)) != getattr(token, each)), None
    )


def _declared(
    folder: Path, files: Mapping[str, bytes], raw: Mapping[str, Any]
) -> Iterator[_Declared]:
    """Yield the declared tokens that transformers reads."""
    for entry in raw.get("added_tokens") or ():
        # The package numbers new tokens in order and ignores their `id`.
        yield from _parse_entry(entry, entry.get("id"), "its list added_tokens")
    config = tokenizer_config(files, folder=folder)
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        for number, entry in decoder.items():
            if isinstance(entry, Mapping) and str(number).isdecimal():
                where = f"added_tokens_decoder of {CONFIG_FILE}"
                yield from _parse_entry(entry, int(number), where, flags=entry)
    for name, text in named_tokens(config).items():
        yield from _parse_entry(text, None, f"{name} of {_source(config, name, files)}")
    for name in EXTRA_TOKEN_KEYS:
        given = config.get(name)
        for entry in given if isinstance(given, list) else ():
            yield from _parse_entry(entry, None, f"{name} of {_source(config, name, files)}")
    if map_overrides_config(config):
        added = parse_json(files.get(ADDED_FILE, b"{}"), where=ADDED_FILE, error=DataError)
        for text, number in added.items() if isinstance(added, Mapping) else ():
            yield from _parse_entry(text, number, ADDED_FILE)


def _source(config: Mapping[str, Any], name: str, files: Mapping[str, bytes]) -> str:
    """Return the file that defines the value of `name`."""
    is_in_map = map_overrides_config(config) and f'"{name}"'.encode() in files.get(MAP_FILE, b"")
    return MAP_FILE if is_in_map else CONFIG_FILE


def _parse_entry(
    entry: object, number: object, where: str, *, flags: Mapping[str, Any] | None = None
) -> Iterator[_Declared]:
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    if isinstance(text, str) and text:
        yield _Declared(text, number if type(number) is int else None, where, flags)
