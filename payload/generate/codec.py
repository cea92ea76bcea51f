"""The tokenizer with which text is generated: encoding, decoding, and stop tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.core.errors import CheckpointError, is_failure
from payload.core.printable_text import one_line
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import inside_folder
from payload.core.validation.json_text import parse_json
from payload.data.tokenizers.gpt2 import END_OF_TEXT, TOKENIZER_NAME, VOCAB_SIZE, gpt2_encoding
from payload.data.tokenizers.hf import convert_errors
from payload.formats.hf_folder import CONFIG_FILE, GENERATION_FILE, read_config
from payload.formats.prepare_hints import write_tokenizer_again
from payload.formats.tokenizer_identity import (
    GPT2_END,
    GPT2_SHA256,
    TOKENIZER_FILE,
    folder_identity,
    has_vocabulary,
    vocabulary_file,
)
from payload.models.registry import named_family
from payload.train.models.hf_weights import config_folder, tokenizer_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """Encodes text to tokens, and decodes tokens."""

    name: str
    encode: Callable[[str], list[int]]
    """Returns the tokens of a prompt, with the begin-of-text token, as transformers does."""
    encode_marked: Callable[[str], list[int]]
    """Returns the tokens of a text that contains special tokens, such as a rendered chat template.
    """
    decode: Callable[[Sequence[int]], str]
    """Takes tokens, and returns their text without special tokens."""
    decode_marked: Callable[[Sequence[int]], str]
    """Takes tokens, and returns their text with special tokens."""
    special_texts: tuple[str, ...]
    """Texts of the special tokens."""
    vocab_size: int
    stop_tokens: frozenset[int]
    """Tokens that end a text."""
    begin_of_text: int
    """Token used for an empty prompt."""


def find_codec(folder: Path) -> Codec:
    """Return the tokenizer of a checkpoint.

    For a GPT-2 without tokenizer files, return the packaged tokenizer.

    If an adapter has no tokenizer files, the files of the base model are used. Raises
    CheckpointError and DataError for a missing or damaged tokenizer.
    """
    model, tokenizer = config_folder(folder), tokenizer_folder(folder)
    config = read_config(model)
    own = folder_identity(tokenizer, error=CheckpointError)
    family = named_family(config.get("model_type"))
    # A GPT-2 model that was trained with a different tokenizer has that tokenizer in its folder.
    if family and family.tokenizer == TOKENIZER_NAME and (own is None or own.is_gpt2()):
        _require_gpt2(tokenizer)
        return _gpt2_codec()
    return _tokenizer_codec(tokenizer, stops=_stop_tokens(model, config))


def _require_gpt2(folder: Path) -> None:
    """Raise CheckpointError for a vocabulary that is not GPT-2's and has no tokenizer.json."""
    name, added = vocabulary_file(folder), {GPT2_END: END_OF_TEXT}
    if name is not None and not has_vocabulary(
        folder, vocabulary_sha256=GPT2_SHA256, added=added, error=CheckpointError
    ):
        raise CheckpointError(
            f"{folder}: {TOKENIZER_FILE} is missing, and {name} is not GPT-2's. Write "
            f"{TOKENIZER_FILE} with: {write_tokenizer_again(folder)}"
        )


def _gpt2_codec() -> Codec:
    """Return GPT-2's tokenizer, through tiktoken. Text is never encoded as a special token."""
    encoding = gpt2_encoding()
    return Codec(
        name="GPT-2's",
        encode=encoding.encode_ordinary,
        encode_marked=lambda text: encoding.encode(text, allowed_special="all"),
        decode=lambda tokens: encoding.decode(list(tokens), errors="replace"),
        decode_marked=lambda tokens: encoding.decode(list(tokens), errors="replace"),
        special_texts=tuple(encoding.special_tokens_set),
        vocab_size=VOCAB_SIZE,
        stop_tokens=frozenset({END_OF_TEXT}),
        begin_of_text=END_OF_TEXT,
    )


def _tokenizer_codec(folder: Path, *, stops: frozenset[int]) -> Codec:
    """Return the tokenizer in tokenizer.json, through the package `tokenizers`."""
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    try:
        backend = Tokenizer.from_buffer(read_bytes(inside_folder(path)))
        backend.no_truncation()
        backend.no_padding()
        before = backend.encode("", add_special_tokens=True).ids
    except BaseException as error:  # tokenizers raises plain Exception and panics.
        if not is_failure(error):
            raise
        raise CheckpointError(
            f"{path}: cannot be loaded: {one_line(error)} Copy the model's tokenizer next to its "
            "weights."
        ) from None

    def encode(text: str, *, marked: bool) -> list[int]:
        with convert_errors(path, error=CheckpointError):
            return list(backend.encode(text, add_special_tokens=not marked).ids)

    def decode(tokens: Sequence[int], *, marked: bool) -> str:
        with convert_errors(path, error=CheckpointError):
            return str(backend.decode(list(tokens), skip_special_tokens=not marked))

    return Codec(
        name=str(path),
        encode=lambda text: encode(text, marked=False),
        encode_marked=lambda text: encode(text, marked=True),
        decode=lambda tokens: decode(tokens, marked=False),
        decode_marked=lambda tokens: decode(tokens, marked=True),
        special_texts=tuple(
            token.content
            for token in backend.get_added_tokens_decoder().values()
            if token.special and token.content
        ),
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        stop_tokens=stops,
        begin_of_text=before[0] if before else min(stops, default=0),
    )


def _stop_tokens(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Return the eos_token_id of generation_config.json and config.json, which can be a list."""
    found: set[int] = set()
    text = config.get("text_config")  # of a multimodal model
    nested = text if isinstance(text, Mapping) else {}
    for raw in (config, nested, read_generation_config(folder)):
        given = raw.get("eos_token_id")
        for token in given if isinstance(given, list) else [given]:
            if type(token) is int and token >= 0:
                found.add(token)
    return frozenset(found)


def read_generation_config(folder: Path) -> Mapping[str, Any]:
    """Return a model's generation_config.json; empty without the file. Raises CheckpointError."""
    path = folder / GENERATION_FILE
    fix = f"Repair the file (compare with {CONFIG_FILE}), or remove it."
    try:
        raw = parse_json(
            read_bytes(inside_folder(path)), where=str(path), fix=fix, error=CheckpointError
        )
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. {fix}") from None
    return raw if isinstance(raw, Mapping) else {}
