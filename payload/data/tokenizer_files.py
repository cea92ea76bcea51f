"""The tokenizer files of a checkpoint. transformers needs these files to load the checkpoint.

If the initial model has a tokenizer, the tokenizer's files are kept. Otherwise, the files of the
data folder are used. For data with GPT-2's tokenizer, which is packaged, the files are generated
here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.core.errors import CheckpointError, DataError
from payload.data.templates.chat_template import templates_of
from payload.data.templates.template_files import TEMPLATE_FILE
from payload.data.tokenizer_match import (
    is_same_tokenizer,
    makes_declared_tokens,
    verified_file,
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
from payload.formats.prepare_hints import prepare_again_hint

MERGES_PATH = Path(__file__).parent / "gpt2" / "merges.txt"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
"""Hash of OpenAI's vocab.bpe. tiktoken checks for the same value."""


def tokenizer_files(
    meta: DataMeta, *, data: Path, source: Path | None, context: int
) -> Mapping[str, bytes]:
    """Return the tokenizer files of a checkpoint by name, or no files for an unknown vocabulary.

    `source` is the folder of the initial model. Its files are used if its tokenizer.json makes the
    same tokens as the data and has the special tokens that the task needs. Otherwise, the files
    come from the data folder `data`, or are generated for GPT-2. `context` is the maximum
    context of the model in tokens.

    Raises CheckpointError and DataError for files that cannot be read.
    """
    if source is not None and is_same_tokenizer(
        meta, data=data, folder=source, error=CheckpointError
    ):
        files, template = read_tokenizer_files(source, error=CheckpointError), _template(meta, data)
        own = special_tokens(tokenizer_config(files, folder=source))
        is_whole = makes_declared_tokens(files, folder=source, error=CheckpointError)
        if is_whole and _has_trained_special_tokens(own, meta, data):
            return {**files, **template}
        # Otherwise transformers would use different tokens, or different special tokens for ends,
        # padding or turns.
    if meta.tokenizer_files:
        return {**_data_files(meta, data), **_template(meta, data)}
    if meta.tokenizer_sha256 == TOKENIZER_SHA256 and meta.vocab_size == VOCAB_SIZE:
        return gpt2_files(context=context)
    return {}


def _has_trained_special_tokens(own: Mapping[str, str], meta: DataMeta, data: Path) -> bool:
    """Return True if the model has the special tokens with which the data was prepared.

    For data with a chat template, all special tokens are compared, because a template can use any
    of them. The other tasks need only the tokens for ends and padding. GPT-2 has only one special
    token; data folders of older versions may not record it.
    """
    if not meta.tokenizer_files:
        return True
    trained = special_tokens(tokenizer_config(_data_files(meta, data), folder=data))
    if meta.chat or meta.preference:
        return own == trained
    names = ("eos_token", "pad_token") if meta.classify else ("eos_token",)
    return all(own.get(name) == trained.get(name) for name in names)


def _template(meta: DataMeta, data: Path) -> Mapping[str, bytes]:
    """Return the chat template with which the conversations were rendered.

    In folders of older versions, the template is in tokenizer_config.json. Raises DataError if the
    folder has no template.
    """
    record = meta.chat or meta.preference
    if record is None:
        return {}
    found = [
        text
        for text in templates_of(_data_files(meta, data))
        if hashlib.sha256(text.encode()).hexdigest() == record.template_sha256
    ]
    if not found:
        again = prepare_again_hint(data, source=meta.source)
        raise DataError(
            f"{data}: the chat template of its conversations is missing (sha256 "
            f"{record.template_sha256[:12]}). {again}"
        )
    return {TEMPLATE_FILE: found[0].encode()}


def _data_files(meta: DataMeta, data: Path) -> Mapping[str, bytes]:
    """Return the tokenizer files of the data folder, after checking their hashes."""
    return {name: verified_file(meta, data, name) for name in meta.tokenizer_files}


def gpt2_files(*, context: int) -> Mapping[str, bytes]:
    """Return GPT-2's tokenizer.json and tokenizer_config.json, as transformers writes them.

    Raises DataError if the packaged merges are damaged.
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
    """Return the vocabulary and the merges of GPT-2, in its byte alphabet.

    The vocabulary has an id for each token: first 256 bytes, then the result of each merge, then
    the end of text. Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py.
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
    # The first line is a version; the only white space in a merge is its separator.
    merges = content.decode("utf-8").split("\n")[1:-1]
    symbols = byte_symbols()
    tokens = [symbols[byte] for byte in PRINTED_BYTES]
    tokens += [symbols[byte] for byte in range(256) if byte not in PRINTED_BYTES]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens.append(END_OF_TEXT_NAME)
    return {token: number for number, token in enumerate(tokens)}, merges


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
