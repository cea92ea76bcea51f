"""The tokenizer in a GGUF file, as the files of a folder in the Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path

from payload.core.errors import CheckpointError, is_failure
from payload.core.printable_text import one_line, shown
from payload.data.tokenizers.gguf_cache import alone, converted
from payload.data.tokenizers.pre_tokenizers import IGNORES_MERGES, pre_tokenizer
from payload.models.gguf import read_gguf
from payload.models.gguf_header import read_header

_FIX = "Name a folder in the Hugging Face layout."


def gguf_tokenizer_folder(path: Path) -> Path:
    """Return a folder with the tokenizer of a GGUF file. Raises CheckpointError."""
    read_gguf(path)
    return converted(path, kind="tokenizer", build=lambda folder: write_tokenizer(path, folder))


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write the file's tokenizer and chat template to `folder`.

    Raises CheckpointError for one that cannot be read, and OSError.
    """
    from transformers import AutoTokenizer

    try:
        with alone(path) as link:
            tokenizer = AutoTokenizer.from_pretrained(
                link.parent, gguf_file=link.name, local_files_only=True
            )
    except BaseException as error:
        if not is_failure(error):
            raise
        # The reader trusts the file: a damaged one makes it raise anything.
        raise CheckpointError(
            f"{path}: transformers cannot read its tokenizer ({one_line(error).rstrip('.')}). "
            f"{_FIX}"
        ) from None
    tokenizer.save_pretrained(folder)
    values = read_header(path).values
    if values.get("tokenizer.ggml.model") == "gpt2":
        _cut_words(folder / "tokenizer.json", values.get("tokenizer.ggml.pre"), where=str(path))


def _cut_words(path: Path, name: object, *, where: str) -> None:
    """Cut text into words as the file says: transformers' reader takes GPT-2's way for all."""
    step = pre_tokenizer(name)
    if step is None:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.pre = {shown(name)}: this way of cutting text into words is "
            f"not known here. {_FIX}"
        )
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["pre_tokenizer"] = step
    raw["model"]["ignore_merges"] = name in IGNORES_MERGES
    path.write_text(json.dumps(raw, ensure_ascii=False), encoding="utf-8")
