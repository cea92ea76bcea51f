"""The tokens at which a server stops, and the tokens with which a template may end a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import inside_folder
from payload.data.tokenizers.special_tokens import class_tokens, named_tokens, read_tokenizer_config
from payload.formats.hf_folder import CONFIG_FILE, GENERATION_FILE
from payload.formats.tokenizer_identity import TOKENIZER_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTokens:
    """Texts of the tokens that can end a turn."""

    stops: tuple[str, ...] = ()
    """Tokens at which a server stops: eos_token_id of generation_config.json and config.json, and
    eos_token of the tokenizer."""
    special: tuple[str, ...] = ()
    """The special tokens."""
    added: tuple[str, ...] = ()
    """All added tokens, special or not, except white space."""


def known_tokens(folder: Path) -> KnownTokens:
    """Return the tokens of the model or tokenizer in `folder`; none without a tokenizer.json.

    Raises DataError for a damaged tokenizer_config.json.
    """
    config = read_tokenizer_config(folder)
    eos = {**class_tokens(config), **named_tokens(config)}.get("eos_token")
    raw = _read(folder / TOKENIZER_FILE)
    entries = [each for each in raw.get("added_tokens") or () if isinstance(each, Mapping)]
    texts = {each.get("id"): str(each.get("content")) for each in entries}
    stops = [eos] if eos else []
    for name in (GENERATION_FILE, CONFIG_FILE):
        stops += _eos_texts(_read(folder / name), raw)
    return KnownTokens(
        stops=tuple(dict.fromkeys(stops)),
        special=tuple(texts[each["id"]] for each in entries if each.get("special")),
        added=tuple(text for text in texts.values() if text.strip()),
    )


def generation_stops(folder: Path) -> tuple[str, tuple[str, ...]] | None:
    """Return the file that decides where transformers' `generate` stops, and the tokens.

    Returns None for a folder without a model.
    """
    if not (folder / CONFIG_FILE).is_file():
        return None
    raw = _read(folder / TOKENIZER_FILE)
    # transformers reads config.json only without the other file.
    name = GENERATION_FILE if (folder / GENERATION_FILE).is_file() else CONFIG_FILE
    return name, tuple(_eos_texts(_read(folder / name), raw))


def first_of(tokens: tuple[str, ...], text: str, start: int = 0) -> tuple[int, int] | None:
    """Find the first of `tokens` at or after `start`, and return its range of characters.

    If several tokens begin at the same place, returns the range of the longest token.
    """
    if len(tokens) == 1:
        place = text.find(tokens[0], start)
        return None if place < 0 else (place, place + len(tokens[0]))
    found = [(text.find(token, start), -len(token)) for token in tokens]
    place, size = min(((each, size) for each, size in found if each >= 0), default=(-1, 0))
    return None if place < 0 else (place, place - size)


_MARKER = re.compile(r"<[|\uff5c][^<>\s]{1,40}[|\uff5c]>")


def first_marker(text: str) -> str | None:
    """Return the first text in the form of a special token, such as <|user|>."""
    found = _MARKER.search(text)
    return None if found is None else found.group()


def _eos_ids(config: Mapping[str, Any]) -> Iterator[int]:
    text = config.get("text_config")
    for each in (config, text if isinstance(text, Mapping) else {}):
        given = each.get("eos_token_id")
        yield from (n for n in (given if isinstance(given, list) else [given]) if type(n) is int)


def _eos_texts(config: Mapping[str, Any], raw: Mapping[str, Any]) -> list[str]:
    """Return the texts of a model's stop tokens; `raw` is the tokenizer.json."""
    entries = [each for each in raw.get("added_tokens") or () if isinstance(each, Mapping)]
    texts = {each.get("id"): str(each.get("content")) for each in entries}
    found = (texts.get(each) or _in_vocabulary(raw, each) for each in _eos_ids(config))
    return [each for each in found if each]


def _in_vocabulary(raw: Mapping[str, Any], number: int) -> str | None:
    """Return the vocabulary's token with this id. Some models stop at tokens that are not added."""
    vocabulary = (raw.get("model") or {}).get("vocab")
    if isinstance(vocabulary, Mapping):
        return next((text for text, each in vocabulary.items() if each == number), None)
    if isinstance(vocabulary, list) and number < len(vocabulary):
        return str(vocabulary[number][0])
    return None


def _read(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or damaged.

    Other code reports a damaged file.
    """
    try:
        found = json.loads(read_bytes(inside_folder(path)))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
