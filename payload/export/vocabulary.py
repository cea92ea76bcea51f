"""Converts a tokenizer.json to the vocabulary of a GGUF file.

A GGUF file has only the name of a pre-tokenizer. The regular expression of the pre-tokenizer is in
llama.cpp's code. So a tokenizer can only be written if llama.cpp has the tokenizer's regular
expression.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from payload.core.errors import CheckpointError, DataError
from payload.core.printable_text import one_line, shown
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.data.templates.template_files import TEMPLATE_FILE
from payload.data.tokenizers.hf import build_backend, named_end, tokens_around
from payload.data.tokenizers.pre_tokenizers import (
    IGNORES_MERGES,
    LLAMA3,
    PREPEND_SPACE,
    QWEN2,
    SPACES,
    TEKKEN,
    WORD_START,
)
from payload.data.tokenizers.special_tokens import named_tokens, tokenizer_config
from payload.formats.hf_folder import own_file, read_tokenizer_files
from payload.formats.tokenizer_canonical import canonical_parts

_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_FIX = "Use --format hf."
_OWN = "Put the tokenizer of this model next to its weights."
_NO_SPACES_LEFT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
"""Gemma's pre-tokenizer. It has no effect, because the normalizer has already replaced the
spaces."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPECIAL_NAMES = ("bos", "eos", "unk", "pad")


class TokenKind(IntEnum):
    """llama.cpp's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The vocabulary of a GGUF file."""

    model: str
    """`gpt2` for byte-level BPE, `llama` for SentencePiece."""
    pre: str
    """llama.cpp's name of the pre-tokenizer."""
    tokens: Sequence[str]
    kinds: Sequence[TokenKind]
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    """Scores of the tokens in a `llama` vocabulary. The merge with the highest score is applied
    first."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Token ids of bos, eos, unk and pad."""
    adds_bos: bool = False
    adds_eos: bool = False
    adds_space: bool = False
    template: str | Sequence[Mapping[str, str]] | None = None
    """The chat template, or a list of named templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """The `model` of tokenizer.json."""

    type: str
    vocab: Mapping[str, int]
    merges: tuple[Any, ...]
    byte_fallback: bool = False
    ignore_merges: bool = False
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    unk_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _AddedToken:
    """A token that is matched in the text before all other tokens."""

    id: int = checked(low=0, high=2**24)
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Template:
    """One of several named chat templates."""

    name: str = checked(pattern=re.compile(r"[A-Za-z0-9_-]{1,64}"), wanted="a plain name")
    template: str


def read_vocabulary(folder: Path, *, rows: int, eos: int | None) -> Vocabulary:
    """Return the tokenizer of `folder` for a model with `rows` rows in its embedding.

    `eos` is the eos token in the model's config.json, used if the tokenizer defines no eos token.
    Raises CheckpointError for a tokenizer that is missing, damaged or not supported by llama.cpp.
    """
    path = own_file(folder, _TOKENIZER)
    raw = _read_json(path)
    model, added = _parsed(raw, path)
    texts, kinds = _tokens(model, added, rows=rows, path=path)
    try:
        special, around, config = _special_tokens(folder, texts, eos=eos)
    except DataError as error:
        raise CheckpointError(str(error)) from None
    template = _chat_template(folder, config)
    adds_bos, adds_eos = _adds_special_tokens(special, around, texts=texts, path=path)
    parts = canonical_parts(raw)
    if model.byte_fallback:
        return Vocabulary(
            model="llama",
            pre="default",
            tokens=texts,
            kinds=kinds,
            scores=_scores(model, texts),
            special=special,
            adds_bos=adds_bos,
            adds_eos=adds_eos,
            adds_space=_adds_space(parts, path),
            template=template,
        )
    return Vocabulary(
        model="gpt2",
        pre=_pre_tokenizer(parts, model, path),
        tokens=texts,
        kinds=kinds,
        merges=[_merge_text(pair) for pair in model.merges],
        special=special,
        adds_bos=adds_bos,
        adds_eos=adds_eos,
        template=template,
    )


def _parsed(raw: Any, path: Path) -> tuple[_Model, Sequence[_AddedToken]]:
    where = str(path)
    if not isinstance(raw, Mapping) or not isinstance(raw.get("model"), Mapping):
        raise CheckpointError(f"{where}: not a tokenizer. {_FIX}")
    kind = raw["model"].get("type")
    if kind != "BPE":
        raise CheckpointError(f"{where}: the tokenizer has type {shown(kind)}, not BPE. {_FIX}")
    model = build(_Model, raw["model"], where=where, fix=_FIX, error=CheckpointError)
    added = raw.get("added_tokens") or []
    if not isinstance(added, list):
        raise CheckpointError(f"{where}: added_tokens = {shown(added)} is not a list. {_FIX}")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if getattr(model, key):
            raise CheckpointError(
                f"{where}: model.{key} = {shown(getattr(model, key))}: not supported by llama.cpp. "
                f"{_FIX}"
            )
    tokens = [
        build(_AddedToken, each, where=f"{where}: added_tokens", fix=_FIX, error=CheckpointError)
        for each in added
    ]
    for token in tokens:
        for flag in ("single_word", "lstrip", "rstrip"):
            if getattr(token, flag):
                raise CheckpointError(
                    f"{where}: the added token {shown(token.content)} has {flag} = true, which a "
                    f"GGUF file cannot express. {_FIX}"
                )
    return model, tokens


def _tokens(
    model: _Model, added: Sequence[_AddedToken], *, rows: int, path: Path
) -> tuple[list[str], list[TokenKind]]:
    """Return the text and type of the token in every row. Unused rows are called `[PAD<row>]`."""
    texts = [f"[PAD{row}]" for row in range(rows)]
    kinds = [TokenKind.UNUSED] * rows
    largest = max([*model.vocab.values(), *(token.id for token in added)], default=0)
    if largest >= rows:
        raise CheckpointError(
            f"{path}: the largest token id is {largest}, but the model's embedding has {rows} "
            f"rows. {_OWN}"
        )
    if (smallest := min(model.vocab.values(), default=0)) < 0:
        raise CheckpointError(f"{path}: the token id {smallest} is negative. {_OWN}")
    for text, row in model.vocab.items():
        texts[row] = text
        kinds[row] = TokenKind.NORMAL
        if model.byte_fallback and _BYTE.fullmatch(text):
            kinds[row] = TokenKind.BYTE
        elif model.byte_fallback and text == model.unk_token:
            kinds[row] = TokenKind.UNKNOWN
    for token in added:
        if kinds[token.id] is not TokenKind.UNKNOWN:
            kinds[token.id] = TokenKind.CONTROL if token.special else TokenKind.USER_DEFINED
        # llama.cpp matches these tokens in the original text, before spaces become U+2581.
        is_text = model.byte_fallback and not token.special
        texts[token.id] = token.content.replace(WORD_START, " ") if is_text else token.content
    return texts, kinds


def _scores(model: _Model, texts: Sequence[str]) -> list[float]:
    """Return the score of each token: the negative index of the first merge that produces the
    token.

    llama.cpp applies the merge with the highest score first; a tokenizer.json applies merges in the
    order of its list.
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model.merges):
        ranks.setdefault("".join(_split_merge(pair)), rank)
    last = len(model.merges)
    return [-float(ranks.get(text, last)) for text in texts]


def _split_merge(pair: Any) -> tuple[str, str]:
    """Return the two tokens of a merge. Older files store the two as one string."""
    halves = pair.split(" ") if isinstance(pair, str) else pair
    if not (isinstance(halves, list | tuple) and len(halves) == 2):
        raise CheckpointError(f"{_TOKENIZER}: {shown(pair)} is not a merge of two tokens. {_FIX}")
    first, second = halves
    if not (isinstance(first, str) and isinstance(second, str)):
        raise CheckpointError(f"{_TOKENIZER}: {shown(pair)} is not a merge of two tokens. {_FIX}")
    return first, second


def _merge_text(pair: Any) -> str:
    return " ".join(_split_merge(pair))


def _pre_tokenizer(parts: Mapping[str, Any], model: _Model, path: Path) -> str:
    """Return llama.cpp's name of the pre-tokenizer of a byte-level vocabulary.

    llama.cpp does not normalize to NFC. Raises CheckpointError for steps that llama.cpp lacks.
    """
    if parts["normalizer"] not in ([], [{"type": "NFC"}]):
        _refuse_step("normalizer", parts["normalizer"], path)
    name = None
    match parts["pre-tokenizer"]:
        case [{"type": "ByteLevel", **rest}] if not rest:
            name = "gpt-2"
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", **rest},
        ] if not rest:
            name = "smollm"
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", **rest},
            {"type": "ByteLevel", "use_regex": False, **more},
        ] if not rest and not more:
            names = {QWEN2: "qwen2", TEKKEN: "tekken"}
            names[LLAMA3] = "llama-bpe" if model.ignore_merges else "smaug-bpe"
            name = names.get(regex)
    if name is None:
        _refuse_step("pre-tokenizer", parts["pre-tokenizer"], path)
    if model.ignore_merges != (name in IGNORES_MERGES):
        raise CheckpointError(
            f"{path}: model.ignore_merges = {model.ignore_merges}, but llama.cpp computes tokens "
            f"of the pre-tokenizer {name} with {not model.ignore_merges}. {_FIX}"
        )
    return name


def _adds_space(parts: Mapping[str, Any], path: Path) -> bool:
    """Return True if the steps of a SentencePiece vocabulary put a space before a text.

    llama.cpp itself can only replace spaces and add a space at the start. Raises CheckpointError
    for other steps.
    """
    normalizer, words = parts["normalizer"], parts["pre-tokenizer"]
    if normalizer and words in ([], [_NO_SPACES_LEFT]):
        if normalizer in ([PREPEND_SPACE, SPACES], [SPACES]):
            return bool(normalizer[0] == PREPEND_SPACE)
        _refuse_step("normalizer", normalizer, path)
    match words:
        case [{"type": "Metaspace", "split": False, **rest}] if not normalizer:
            scheme = rest.pop("prepend_scheme", "always")
            if not rest:
                return bool(scheme != "never")
    _refuse_step("pre-tokenizer", words, path)


def _refuse_step(what: str, steps: object, path: Path) -> NoReturn:
    raise CheckpointError(f"{path}: llama.cpp does not support its {what} {shown(steps)}. {_FIX}")


_Around = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens that a tokenizer puts before and after a text."""


def _special_tokens(
    folder: Path, texts: Sequence[str], *, eos: int | None
) -> tuple[dict[str, int], _Around, Mapping[str, Any]]:
    """Return three values: special tokens, the tokens added around a text, and the parsed config.

    The special tokens are bos, eos, unk and pad, determined as in `prepare`.
    Raises DataError.
    """
    files = read_tokenizer_files(folder, error=DataError)
    config = tokenizer_config(files, folder=folder)
    backend = build_backend(files[_TOKENIZER], folder / _TOKENIZER)
    named, ids = named_tokens(config), {text: number for number, text in enumerate(texts)}
    special = {
        name: ids[text]
        for name in _SPECIAL_NAMES
        if (text := named.get(f"{name}_token")) is not None and text in ids
    }
    end = named_end(folder, files, backend)
    if end is not None:
        special["eos"] = end[0]
    elif eos is not None:
        special["eos"] = eos
    return special, tokens_around(backend), config


def _adds_special_tokens(
    special: Mapping[str, int], around: _Around, *, texts: Sequence[str], path: Path
) -> tuple[bool, bool]:
    """Return whether bos precedes a text, and whether eos follows it.

    Raises CheckpointError for any other tokens around a text, because a GGUF file cannot express
    these.
    """
    places = (("bos", "before"), ("eos", "after"))
    for (name, place), found in zip(places, around, strict=True):
        if found and found != (special.get(name),):
            tokens = ", ".join(shown(texts[token]) for token in found)
            raise CheckpointError(
                f"{path}: the tokenizer adds {tokens} {place} each text, but llama.cpp can add "
                f"only the {name}_token. {_FIX}"
            )
    before, after = around
    return bool(before), bool(after)


def _chat_template(
    folder: Path, config: Mapping[str, Any]
) -> str | Sequence[Mapping[str, str]] | None:
    """Return the chat template, or the named templates if tokenizer_config.json has several.

    Raises CheckpointError.
    """
    path = own_file(folder, TEMPLATE_FILE)
    try:
        return read_bytes(path).decode("utf-8")
    except FileNotFoundError:
        template = config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({one_line(error).rstrip('.')}). {_FIX}"
        ) from None
    if isinstance(template, list):
        where = f"{folder / _TOKENIZER_CONFIG}: chat_template"
        found = [
            build(_Template, each, where=where, fix=_FIX, error=CheckpointError)
            for each in template
        ]
        return [{"name": each.name, "template": each.template} for each in found]
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> Any:
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: does not exist. A GGUF file needs the tokenizer: copy the model's "
            f"{_TOKENIZER} next to its weights, or use --format hf."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. {_FIX}") from None
    return parse_json(content, where=str(path), fix=_FIX, error=CheckpointError)
