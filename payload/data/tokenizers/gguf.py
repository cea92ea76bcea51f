"""Converts the tokenizer in a GGUF file to files in the Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.core.errors import CheckpointError, is_failure
from payload.core.printable_text import one_line, shown
from payload.data.tokenizers.gguf_cache import converted, isolated_link
from payload.data.tokenizers.pre_tokenizers import (
    IGNORES_MERGES,
    PREPEND_SPACE,
    SPACES,
    WORD_START,
    pre_tokenizer,
)
from payload.models.gguf import read_gguf
from payload.models.gguf_header import Value, read_header

_FIX = "Use a folder in the Hugging Face layout."


def gguf_tokenizer_folder(path: Path) -> Path:
    """Return a folder with the tokenizer of a GGUF file. Raises CheckpointError."""
    read_gguf(path)
    return converted(path, kind="tokenizer", build=lambda folder: write_tokenizer(path, folder))


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer and chat template of a GGUF file to `folder`.

    Raises CheckpointError for an unreadable tokenizer, and OSError.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        with isolated_link(path) as link:
            # Not AutoTokenizer, which refuses architectures that transformers cannot read itself.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                link.parent, gguf_file=link.name, local_files_only=True
            )
    except BaseException as error:
        if not is_failure(error):
            raise
        # The reader does not validate the file: a damaged one can raise any exception.
        raise CheckpointError(
            f"{path}: transformers cannot read its tokenizer ({one_line(error).rstrip('.')}). "
            f"{_FIX}"
        ) from None
    tokenizer.save_pretrained(folder)
    _set_pipeline(folder / "tokenizer.json", read_header(path).values, where=str(path))


def _set_pipeline(path: Path, values: Mapping[str, Value], *, where: str) -> None:
    """Set the tokenization steps of llama.cpp. The reader of transformers sets other defaults.

    Raises CheckpointError for an unsupported tokenizer.
    """
    raw = json.loads(path.read_text(encoding="utf-8"))
    kind = values.get("tokenizer.ggml.model")
    if kind == "gpt2":
        _set_byte_level(raw, values, where=where)
    elif kind == "llama":
        _set_sentencepiece(
            raw, adds_space=bool(values.get("tokenizer.ggml.add_space_prefix", True))
        )
    else:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.model = {shown(kind)}: only gpt2 and llama are supported. "
            f"{_FIX}"
        )
    path.write_text(json.dumps(raw, ensure_ascii=False), encoding="utf-8")


def _set_byte_level(raw: dict[str, Any], values: Mapping[str, Value], *, where: str) -> None:
    name = values.get("tokenizer.ggml.pre")
    step = pre_tokenizer(name)
    if step is None:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.pre = {shown(name)}: this pre-tokenizer is not supported. "
            f"{_FIX}"
        )
    raw["pre_tokenizer"] = step
    raw["model"]["ignore_merges"] = name in IGNORES_MERGES
    number = values.get("tokenizer.ggml.bos_token_id")
    if (
        name in IGNORES_MERGES
        and "tokenizer.ggml.add_bos_token" not in values
        and number is not None
    ):
        raw["post_processor"] = _bos_before_text(raw, number, where=where)


def _bos_before_text(raw: Mapping[str, Any], number: Value, *, where: str) -> dict[str, Any]:
    """Return a post-processor that puts the BOS token before each text."""
    tokens = {each["id"]: each["content"] for each in raw["added_tokens"]}
    tokens |= {row: token for token, row in raw["model"]["vocab"].items() if row == number}
    if number not in tokens:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.bos_token_id = {shown(number)} is not in its vocabulary. "
            f"{_FIX}"
        )
    name = tokens[number]
    bos = {"SpecialToken": {"id": name, "type_id": 0}}
    first, second = ({"Sequence": {"id": each, "type_id": 0}} for each in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }


def _set_sentencepiece(raw: dict[str, Any], *, adds_space: bool) -> None:
    steps = [PREPEND_SPACE, SPACES] if adds_space else [SPACES]
    raw["normalizer"] = {"type": "Sequence", "normalizers": steps}
    raw["pre_tokenizer"] = None
    # Decoding strips the added space. If no space is added, nothing is stripped.
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": WORD_START}, "content": " "}
    ]
    back += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if adds_space:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    raw["decoder"] = {"type": "Sequence", "decoders": back}
