"""CONTRACT: the canonical form of a tokenizer.json, with only the settings that affect tokens.

Two files with the same form produce the same tokens. Missing keys have the defaults of the package
`tokenizers`. A step of an unknown kind is kept unchanged, so any difference in the step changes the
form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ONLY_OFFSETS = frozenset({"trim_offsets"})
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ByteLevel": {"use_regex": True, "add_prefix_space": False},
    "BPE": {
        "dropout": 0,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    },
    "Unigram": {"byte_fallback": False},
    "WordPiece": {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    "Metaspace": {"prepend_scheme": "always", "split": True, "replacement": "\u2581"},
    "Split": {"invert": False},
    "Digits": {"individual_digits": False},
    "Punctuation": {"behavior": "Isolated"},
}
_FLAGS = ("single_word", "lstrip", "rstrip")
_TEXT = "A"
"""Placeholder for the text in a post-processor's template."""


def canonical_parts(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the canonical form of each part of a parsed tokenizer.json.

    The keys are the names of the parts.
    """
    normalizer = flat_steps(tokenizer.get("normalizer"), inner="normalizers")
    pre_tokenizer = flat_steps(tokenizer.get("pre_tokenizer"), inner="pretokenizers")
    added = _added_tokens(tokenizer.get("added_tokens"), is_normalized=bool(normalizer))
    return {
        "normalizer": normalizer,
        "pre-tokenizer": pre_tokenizer,
        **_model(tokenizer.get("model"), added, pre_tokenizer),
        "post-processor": _around(tokenizer.get("post_processor")),
        "added tokens": added,
    }


def flat_steps(step: object, *, inner: str) -> list[Any]:
    """Return the steps of a normalizer, pre-tokenizer or decoder as a flat list.

    `inner` is the key of the steps in a Sequence.
    """
    waiting: list[object] = [step]
    found: list[Any] = []
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict) and each.get("type") == "Sequence":
            steps = each.get(inner)
            waiting += reversed(steps if isinstance(steps, list) else [])
        elif isinstance(each, dict):
            found.append(_step(each))
        elif each is not None:
            found.append(each)
    return found


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    kind = step.get("type")
    given = {key: step[key] for key in step if key not in _ONLY_OFFSETS}
    if kind == "Metaspace":
        # Older files use a different key for the prefix of a text.
        given.pop("str_rep", None)
        before = given.pop("add_prefix_space", None)
        if before is not None and given.get("prepend_scheme") is None:
            given["prepend_scheme"] = "always" if before else "never"
    return _without_defaults(given, kind)


def _without_defaults(given: Mapping[str, Any], kind: object) -> dict[str, Any]:
    """Return the entries with a value that is neither null nor the package's default."""
    defaults = _DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}
    return {
        key: given[key]
        for key in sorted(given)
        if given[key] is not None and not (key in defaults and given[key] == defaults[key])
    }


def _model(model: object, added: list[list[Any]], pre_tokenizer: list[Any]) -> dict[str, Any]:
    given = dict(model) if isinstance(model, dict) else {}
    vocabulary, merges = given.pop("vocab", None), given.pop("merges", None)
    kind = given.pop("type", None) or _kind(vocabulary, merges)
    if isinstance(vocabulary, dict):
        if kind == "BPE" and _is_byte_level(pre_tokenizer) and not _lacks_bytes(vocabulary):
            # Every byte has a token, so no text is unknown.
            given.pop("unk_token", None)
            given.pop("fuse_unk", None)
        # Files repeat different subsets of the added tokens in the vocabulary.
        numbers = {each[1]: each[0] for each in added if isinstance(each[1], str)}
        vocabulary = sorted(
            (str(number), token)
            for token, number in vocabulary.items()
            if token not in numbers or numbers[token] != number
        )
    if isinstance(merges, list):
        # A merge is one string in older files, and a pair in newer files.
        merges = [each.split(" ") if isinstance(each, str) else each for each in merges]
    return {
        "model": {"type": kind, **_without_defaults(given, kind)},
        "vocabulary": vocabulary,
        "merges": merges or [],
    }


def _kind(vocabulary: object, merges: object) -> str | None:
    """Return the model's kind for an older file that does not record the kind."""
    if isinstance(merges, list):
        return "BPE"
    return "Unigram" if isinstance(vocabulary, list) else None


def _is_byte_level(pre_tokenizer: list[Any]) -> bool:
    return any(isinstance(each, dict) and each.get("type") == "ByteLevel" for each in pre_tokenizer)


def _lacks_bytes(vocabulary: Mapping[str, Any]) -> bool:
    """Return True if a byte-level vocabulary lacks a character of the byte alphabet."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols = {*printed, *range(0x100, 0x100 + 256 - len(printed))}
    return any(chr(symbol) not in vocabulary for symbol in symbols)


def _added_tokens(added: object, *, is_normalized: bool) -> list[list[Any]]:
    """Return the id, the content and the flags of each added token.

    The flag `special` is left out, as it only affects decoding.
    """
    tokens = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    # Without a normalizer, all tokens are searched in the same text. The flag `normalized` then
    # affects only the order of the search, and only if tokens with and without the flag exist.
    kinds = {bool(each.get("normalized")) for each in tokens}
    matters = is_normalized or len(kinds) > 1
    found = [
        [
            each.get("id"),
            each.get("content"),
            *(bool(each.get(flag)) for flag in _FLAGS),
            matters and bool(each.get("normalized")),
        ]
        for each in tokens
    ]
    return sorted(found, key=repr)


def _around(processor: object) -> list[Any]:
    """Return the template of each step that adds tokens around a text."""
    found = []
    for step in flat_steps(processor, inner="processors"):
        around = _template(step)
        if around not in ([_TEXT], None):
            found.append(around)
    return found


def _template(step: Any) -> Any:
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "ByteLevel":
        return None
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [_number(step.get("cls")), _TEXT, _number(step.get("sep"))]
    single, special = (step.get("single"), step.get("special_tokens")) if kind else (None, None)
    if kind != "TemplateProcessing" or not isinstance(single, list):
        return step
    found: list[Any] = []
    for piece in single:
        named = piece.get("SpecialToken") if isinstance(piece, dict) else None
        text = piece.get("Sequence") if isinstance(piece, dict) else None
        if isinstance(text, dict) and text.get("id") == "A":
            found.append(_TEXT)
            continue
        name = named.get("id") if isinstance(named, dict) else None
        entry = special.get(name) if isinstance(special, dict) and isinstance(name, str) else None
        numbers = entry.get("ids") if isinstance(entry, dict) else None
        if not isinstance(numbers, list):
            return step
        found += numbers
    return found


def _number(pair: object) -> object:
    """Return the id of a token from the pair (content, id)."""
    return pair[1] if isinstance(pair, list) and len(pair) == 2 else pair
