"""Converts the tokenizer in a GGUF file to files in the Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path

from payload.core.errors import CheckpointError, is_failure
from payload.core.printable_text import one_line, shown
from payload.data.tokenizers.gguf_cache import converted, isolated_link
from payload.data.tokenizers.pre_tokenizers import IGNORES_MERGES, pre_tokenizer
from payload.models.gguf import read_gguf
from payload.models.gguf_header import read_header

_FIX = "Use a folder in the Hugging Face layout."


def gguf_tokenizer_folder(path: Path) -> Path:
    """Return a folder with the tokenizer of a GGUF file. Raises CheckpointError."""
    read_gguf(path)
    return converted(path, kind="tokenizer", build=lambda folder: write_tokenizer(path, folder))


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer and chat template of a GGUF file to `folder`.

    Raises CheckpointError for an unreadable tokenizer, and OSError.
    """
    from transformers import AutoTokenizer

    try:
        with isolated_link(path) as link:
            tokenizer = AutoTokenizer.from_pretrained(
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
    values = read_header(path).values
    if values.get("tokenizer.ggml.model") == "gpt2":
        _set_pre_tokenizer(
            folder / "tokenizer.json", values.get("tokenizer.ggml.pre"), where=str(path)
        )


def _set_pre_tokenizer(path: Path, name: object, *, where: str) -> None:
    """Set the pre-tokenizer that the GGUF file names; transformers' reader always sets GPT-2's."""
    step = pre_tokenizer(name)
    if step is None:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.pre = {shown(name)}: this pre-tokenizer is not supported. "
            f"{_FIX}"
        )
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["pre_tokenizer"] = step
    raw["model"]["ignore_merges"] = name in IGNORES_MERGES
    path.write_text(json.dumps(raw, ensure_ascii=False), encoding="utf-8")
