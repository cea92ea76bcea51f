"""The tokenizer's files of a checkpoint, so that it loads in transformers as it is.

A model that has a tokenizer of its own keeps it. Other models get the files that the data folder
carries; for data with GPT-2's tokenizer, which is packaged, the files are made here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.core.errors import CheckpointError, DataError
from payload.data.templates.chat_template import TEMPLATE_FILE, templates_of
from payload.data.tokenizer_match import (
    carried_file,
    is_same_tokenizer,
    makes_declared_tokens,
)
from payload.data.tokenizers.gigatoken_adapter import PRINTED_BYTES, byte_symbols
from payload.data.tokenizers.gpt2 import (
    END_OF_TEXT,
    END_OF_TEXT_NAME,
    REINSTALL,
    TOKENIZER_SHA256,
    VOCAB_SIZE,
)
from payload.data.tokenizers.special_tokens import special_tokens, tokenizer_config
from payload.formats.data_folder import DataMeta
from payload.formats.hf_folder import read_tokenizer_files
from payload.formats.prepare_hints import how_to_make_again

MERGES_PATH = Path(__file__).parent / "gpt2" / "merges.txt"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
"""Hash of OpenAI's vocab.bpe: the value that tiktoken pins for it."""


def tokenizer_files(
    meta: DataMeta, *, data: Path, source: Path | None, context: int
) -> Mapping[str, bytes]:
    """Return the tokenizer's files by name, for a checkpoint.

    They are those in `source`, the folder of the model that training starts from; else those that
    the data folder `data` carries; else GPT-2's, which are made here. A source without a
    tokenizer.json, with another one than the data's, or with other special tokens than the task
    needs, does not count. `context` is the longest one of the model in tokens. There are none for
    a vocabulary that is not known here.
    Raises CheckpointError and DataError for files that cannot be read.
    """
    if source is not None and is_same_tokenizer(
        meta, data=data, folder=source, error=CheckpointError
    ):
        files, template = read_tokenizer_files(source, error=CheckpointError), _template(meta, data)
        own = special_tokens(tokenizer_config(files, folder=source))
        is_whole = makes_declared_tokens(files, folder=source, error=CheckpointError)
        if is_whole and _names_trained_tokens(own, meta, data):
            return {**files, **template}
        # transformers would make other tokens, or end texts, pad or write turns with others.
    if meta.tokenizer_files:
        return {**_carried(meta, data), **_template(meta, data)}
    if meta.tokenizer_sha256 == TOKENIZER_SHA256 and meta.vocab_size == VOCAB_SIZE:
        return gpt2_files(context=context)
    return {}


def _names_trained_tokens(own: Mapping[str, str], meta: DataMeta, data: Path) -> bool:
    """Say whether a model's special tokens are those that the data was made with.

    A template may write any of them. The task needs no others than those that end a text and fill
    it up. GPT-2 has one alone, and a data folder of an older version may not say which they were.
    """
    if not meta.tokenizer_files:
        return True
    trained = special_tokens(tokenizer_config(_carried(meta, data), folder=data))
    if meta.chat or meta.preference:
        return own == trained
    names = ("eos_token", "pad_token") if meta.classify else ("eos_token",)
    return all(own.get(name) == trained.get(name) for name in names)


def _template(meta: DataMeta, data: Path) -> Mapping[str, bytes]:
    """Return the chat template that conversations were rendered with: what the model learns.

    Folders of older versions have no file of it where it stood in tokenizer_config.json. Raises
    DataError for a folder that lacks it.
    """
    record = meta.chat or meta.preference
    if record is None:
        return {}
    found = [
        text
        for text in templates_of(_carried(meta, data))
        if hashlib.sha256(text.encode()).hexdigest() == record.template_sha256
    ]
    if not found:
        again = how_to_make_again(data, source=meta.source)
        raise DataError(
            f"{data}: no file has the chat template of its conversations (sha256 "
            f"{record.template_sha256[:12]}). {again}"
        )
    return {TEMPLATE_FILE: found[0].encode()}


def _carried(meta: DataMeta, data: Path) -> Mapping[str, bytes]:
    """Return the data folder's tokenizer files, compared with meta.json."""
    return {name: carried_file(meta, data, name) for name in meta.tokenizer_files}


def gpt2_files(*, context: int) -> Mapping[str, bytes]:
    """Return GPT-2's tokenizer.json and tokenizer_config.json, as transformers has them.

    Raises DataError when the packaged merges are damaged.
    """
    vocabulary, merges = _gpt2_vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": END_OF_TEXT,
                "content": END_OF_TEXT_NAME,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "trim_offsets": True},
        "post_processor": {**byte_level, "trim_offsets": False},
        "decoder": {**byte_level, "trim_offsets": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": END_OF_TEXT_NAME,
        "eos_token": END_OF_TEXT_NAME,
        "unk_token": END_OF_TEXT_NAME,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(config)}


def _gpt2_vocabulary() -> tuple[dict[str, int], list[str]]:
    """Return the tokens with their numbers, and the merges, in GPT-2's alphabet for bytes.

    A token's number is its place: 256 bytes, then what each merge makes, then the end of text.
    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    try:
        content = MERGES_PATH.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {MERGES_PATH}: {error.strerror}. {REINSTALL}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != MERGES_SHA256:
        raise DataError(
            f"tokenizer {MERGES_PATH}: sha256 is {found}, not {MERGES_SHA256}. {REINSTALL}"
        )
    # The first line is a version; no merge contains white space but the one that divides it.
    merges = content.decode("utf-8").split("\n")[1:-1]
    symbols = byte_symbols()
    tokens = [symbols[byte] for byte in PRINTED_BYTES]
    tokens += [symbols[byte] for byte in range(256) if byte not in PRINTED_BYTES]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens.append(END_OF_TEXT_NAME)
    return {token: number for number, token in enumerate(tokens)}, merges


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
