"""A tokenizer.json as a GGUF file has it: tokens, their kinds, merges or scores, special tokens.

llama.cpp has the pre-tokenizers' regular expressions in its code and finds them by name, so a
tokenizer is written only when its own expression is one of those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from payload.data.pre_tokenizers import LLAMA3, QWEN2, TEKKEN
from payload.errors import CheckpointError
from payload.hf_folder import own_file
from payload.tokenizer_pipeline import canonical_parts
from payload.untrusted import build, checked, is_failure, parse_json, read_bytes, shown

_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_FIX = "Use --format hf."
_WORD_START = "\u2581"
_LONG_INTEGER = re.compile(rb'(?<="model_max_length": )[0-9]{20,}')
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPECIAL_NAMES = ("bos", "eos", "unk", "pad")


class TokenKind(IntEnum):
    """llama.cpp's kinds of tokens."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokenizer's part of a GGUF file."""

    model: str
    """`gpt2` for byte-level BPE, `llama` for SentencePiece's."""
    pre: str
    """llama.cpp's name of the pre-tokenizer."""
    tokens: Sequence[str]
    kinds: Sequence[TokenKind]
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    """Scores of a `llama` vocabulary: the higher, the earlier two pieces are merged to this one."""
    special: Mapping[str, int] = field(default_factory=dict)
    """bos, eos, unk, pad."""
    adds_bos: bool = False
    adds_space: bool = False
    template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """tokenizer.json's `model`."""

    type: str
    vocab: Mapping[str, int]
    merges: tuple[Any, ...]
    byte_fallback: bool = False
    ignore_merges: bool = False
    unk_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _AddedToken:
    """A token that is found in the text before anything else."""

    id: int = checked(low=0, high=2**24)
    content: str
    special: bool = False


def read_vocabulary(folder: Path, *, rows: int, eos: int | None) -> Vocabulary:
    """Return the tokenizer of `folder` for a model with `rows` in its embedding.

    `eos` is the token that ends a text by config.json; the tokenizer's own comes first. Raises
    CheckpointError for a tokenizer that is missing, damaged or unknown to llama.cpp.
    """
    path = own_file(folder, _TOKENIZER)
    raw = _read_json(path)
    model, added = _parsed(raw, path)
    texts, kinds = _tokens(model, added, rows=rows, path=path)
    config = _read_json(own_file(folder, _TOKENIZER_CONFIG), missing={})
    ids = {text: number for number, text in enumerate(texts)}
    special = _special_tokens(config, ids)
    if eos is not None:
        special.setdefault("eos", eos)
    template = _chat_template(folder, config)
    adds_bos = _adds_bos(folder, special.get("bos"))
    _require_known_normalizer(raw, model, path)
    if model.byte_fallback:
        return Vocabulary(
            model="llama",
            pre="default",
            tokens=texts,
            kinds=kinds,
            scores=_scores(model, texts),
            special=special,
            adds_bos=adds_bos,
            adds_space=_adds_space(raw),
            template=template,
        )
    return Vocabulary(
        model="gpt2",
        pre=_pre_tokenizer(raw, model, path),
        tokens=texts,
        kinds=kinds,
        merges=[_merge_text(pair) for pair in model.merges],
        special=special,
        adds_bos=adds_bos,
        template=template,
    )


def _parsed(raw: Any, path: Path) -> tuple[_Model, Sequence[_AddedToken]]:
    where = str(path)
    if not isinstance(raw, Mapping) or not isinstance(raw.get("model"), Mapping):
        raise CheckpointError(f"{where}: is no tokenizer. {_FIX}")
    kind = raw["model"].get("type")
    if kind != "BPE":
        raise CheckpointError(f"{where}: a tokenizer of type {shown(kind)}, not BPE. {_FIX}")
    model = build(_Model, raw["model"], where=where, fix=_FIX, error=CheckpointError)
    added = raw.get("added_tokens") or []
    if not isinstance(added, list):
        raise CheckpointError(f"{where}: added_tokens = {shown(added)} is no list. {_FIX}")
    return model, [
        build(_AddedToken, each, where=f"{where}: added_tokens", fix=_FIX, error=CheckpointError)
        for each in added
    ]


def _tokens(
    model: _Model, added: Sequence[_AddedToken], *, rows: int, path: Path
) -> tuple[list[str], list[TokenKind]]:
    """Return every row's text and kind; rows that no token uses are `[PAD<row>]`."""
    texts = [f"[PAD{row}]" for row in range(rows)]
    kinds = [TokenKind.UNUSED] * rows
    largest = max([*model.vocab.values(), *(token.id for token in added)], default=0)
    if largest >= rows or min(model.vocab.values(), default=0) < 0:
        raise CheckpointError(
            f"{path}: has token {largest}, the model's embedding has {rows} rows: it is another "
            "model's tokenizer. Put the model's own beside its weights."
        )
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
        # llama.cpp looks for these in the text as it is, before spaces become U+2581.
        is_text = model.byte_fallback and not token.special
        texts[token.id] = token.content.replace(_WORD_START, " ") if is_text else token.content
    return texts, kinds


def _scores(model: _Model, texts: Sequence[str]) -> list[float]:
    """Return minus the number of the first merge that makes each token.

    llama.cpp merges the pair with the highest score first, tokenizer.json that of the first merge.
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model.merges):
        ranks.setdefault("".join(_halves(pair)), rank)
    last = len(model.merges)
    return [-float(ranks.get(text, last)) for text in texts]


def _halves(pair: Any) -> tuple[str, str]:
    """Return a merge's two tokens: tokenizer.json has a list, or in older files one string."""
    halves = pair.split(" ") if isinstance(pair, str) else pair
    if not (isinstance(halves, list | tuple) and len(halves) == 2):
        raise CheckpointError(f"{_TOKENIZER}: {shown(pair)} is no merge of two tokens. {_FIX}")
    first, second = halves
    if not (isinstance(first, str) and isinstance(second, str)):
        raise CheckpointError(f"{_TOKENIZER}: {shown(pair)} is no merge of two tokens. {_FIX}")
    return first, second


def _merge_text(pair: Any) -> str:
    return " ".join(_halves(pair))


def _pre_tokenizer(raw: Mapping[str, Any], model: _Model, path: Path) -> str:
    """Return llama.cpp's name for how text is cut into words before the merges."""
    step = raw.get("pre_tokenizer") or {}
    parts = step.get("pretokenizers", [step]) if isinstance(step, Mapping) else []
    match [part for part in parts if isinstance(part, Mapping)]:
        case [*_, {"type": "ByteLevel", "add_prefix_space": True}]:
            pass
        case [{"type": "ByteLevel", **rest}] if rest.get("use_regex", True):
            return "gpt-2"
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", **rest},
        ] if rest.get("use_regex", True):
            return "smollm"
        case [{"type": "Split", "pattern": {"Regex": str(regex)}}, {"type": "ByteLevel"}]:
            names = {QWEN2: "qwen2", TEKKEN: "tekken"}
            names[LLAMA3] = "llama-bpe" if model.ignore_merges else "smaug-bpe"
            if regex in names:
                return names[regex]
    raise CheckpointError(
        f"{path}: llama.cpp has no pre-tokenizer like this one's, {shown(step)}. {_FIX}"
    )


def _require_known_normalizer(raw: Mapping[str, Any], model: _Model, path: Path) -> None:
    """Raise CheckpointError for a change of the text before it is cut that llama.cpp lacks.

    It reads NFC's texts as they are, and has SentencePiece's way with spaces in its own code.
    """
    known: list[Mapping[str, Any]] = [{"type": "NFC"}]
    if model.byte_fallback:
        known = [
            {"type": "Prepend", "prepend": _WORD_START},
            {"type": "Replace", "pattern": {"String": " "}, "content": _WORD_START},
        ]
    for step in canonical_parts(raw)["normalizer"]:
        if step not in known:
            raise CheckpointError(
                f"{path}: llama.cpp has no normalizer like this one's, {shown(step)}. {_FIX}"
            )


def _special_tokens(config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, int]:
    special = {}
    for name in _SPECIAL_NAMES:
        token = config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str) and text in ids:
            special[name] = ids[text]
    return special


def _adds_bos(folder: Path, bos: int | None) -> bool:
    """Say whether the tokenizer puts its first token before a text."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
    except BaseException as error:  # The library raises nothing narrower.
        if not is_failure(error):
            raise
        raise CheckpointError(
            f"{folder / _TOKENIZER}: cannot be read ({shown(str(error))}). {_FIX}"
        ) from None
    return bos is not None and tokenizer.encode("a").ids[:1] == [bos]


def _adds_space(raw: Mapping[str, Any]) -> bool:
    """Say whether a space is put before a text: by the normalizer, or by Metaspace."""
    normalizer, step = raw.get("normalizer") or {}, raw.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if any(each.get("type") == "Prepend" for each in steps):
        return True
    return step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    try:
        return read_bytes(own_file(folder, _TEMPLATE)).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        template = config.get("chat_template")
        return template if isinstance(template, str) else None


def _read_json(path: Path, *, missing: Mapping[str, Any] | None = None) -> Any:
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise CheckpointError(
            f"{path}: no such file. A GGUF file needs the tokenizer: copy the model's "
            f"{_TOKENIZER} beside its weights, or use --format hf."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. {_FIX}") from None
    # transformers writes a model_max_length of 31 digits where a tokenizer has no limit.
    content = _LONG_INTEGER.sub(b"0", content)
    return parse_json(content, where=str(path), fix=_FIX, error=CheckpointError)
