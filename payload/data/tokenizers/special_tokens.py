"""Reads the special tokens that a tokenizer's files define, as transformers does.

Source: `PreTrainedTokenizerBase._from_pretrained` and its `special_tokens_map` in transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.core.errors import DataError
from payload.core.printable_text import shown
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import inside_folder
from payload.core.validation.json_text import parse_json

CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
EXTRA_TOKEN_KEYS = (
    "additional_special_tokens",
    "extra_special_tokens",
    "model_specific_special_tokens",
)
"""Keys with further tokens. The value is a list, or an object with a name for each token."""
_CLASS_TOKENS: Mapping[str, Mapping[str, str]] = {
    "CodeLlamaTokenizer": {
        **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        **{"prefix_token": "\u2581<PRE>", "middle_token": "\u2581<MID>"},
        **{"suffix_token": "\u2581<SUF>", "eot_token": "\u2581<EOT>", "fill_token": "<FILL_ME>"},
    },
    "CohereTokenizer": {
        **{"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "pad_token": "<PAD>"},
        **{"eos_token": "<|END_OF_TURN_TOKEN|>", "cls_token": "<CLS>", "sep_token": "<SEP>"},
        **{"mask_token": "<MASK_TOKEN>"},
    },
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "GPTNeoXTokenizer": {
        **dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
        "pad_token": "<|padding|>",
    },
    "GemmaTokenizer": {
        **{"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"},
        **{"pad_token": "<pad>", "mask_token": "<mask>"},
    },
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "PreTrainedTokenizer": {},
    "PreTrainedTokenizerFast": {},
    "TokenizersBackend": {},
}
"""Special tokens that the tokenizer classes of transformers have if no file defines these
tokens."""
_FIX = "Repair the folder, or use another folder."


def read_tokenizer_config(folder: Path) -> Mapping[str, Any]:
    """Return `tokenizer_config` of the files in a folder. Raises DataError for a damaged file."""
    files = {}
    for name in (CONFIG_FILE, MAP_FILE):
        try:
            files[name] = read_bytes(inside_folder(folder / name))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise DataError(f"{folder / name}: {error.strerror}. {_FIX}") from None
    return tokenizer_config(files, folder=folder)


def tokenizer_config(files: Mapping[str, bytes], *, folder: Path) -> Mapping[str, Any]:
    """Return tokenizer_config.json, updated by special_tokens_map.json if transformers reads it.

    `files` are the files by name. `folder` is only for messages. Raises DataError for a damaged
    file.
    """
    config, tokens = (
        parse_json(
            files.get(name, b"{}"),
            where=str(folder / name),
            fix=_FIX,
            error=DataError,
            huge_integers=True,
        )
        for name in (CONFIG_FILE, MAP_FILE)
    )
    for name, value in ((CONFIG_FILE, config), (MAP_FILE, tokens)):
        if not isinstance(value, dict):
            raise DataError(f"{folder / name}: expected an object, got {shown(value)}. {_FIX}")
    return {**config, **tokens} if map_overrides_config(config) else config


def map_overrides_config(config: Mapping[str, Any]) -> bool:
    """Return True if special_tokens_map.json overrides tokenizer_config.json."""
    return "added_tokens_decoder" not in config


def named_tokens(config: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the text of each named token that a config defines, with None for a null token."""
    values = {name: value for name, value in config.items() if name.endswith("_token")}
    for name in EXTRA_TOKEN_KEYS:
        more = config.get(name)
        values |= more if isinstance(more, Mapping) else {}
    found: dict[str, str | None] = {}
    for name, value in values.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if text is None or isinstance(text, str):
            found[name] = text
    return found


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each named token that a config defines, without null tokens."""
    return {name: text for name, text in named_tokens(config).items() if text is not None}


def class_tokens(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the default tokens of the config's `tokenizer_class`; empty for an unknown class."""
    return _CLASS_TOKENS.get(_class_name(config), {})


def has_known_class(config: Mapping[str, Any]) -> bool:
    """Return True if the default tokens of the config's `tokenizer_class` are known."""
    return _class_name(config) in _CLASS_TOKENS


def _class_name(config: Mapping[str, Any]) -> str:
    name = str(config.get("tokenizer_class"))
    return name if name in _CLASS_TOKENS else name.removesuffix("Fast")
