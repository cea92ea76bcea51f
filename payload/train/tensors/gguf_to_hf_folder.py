"""Converts GGUF files of the Llama family to a folder in the Hugging Face layout.

transformers' reader extracts fp32 weights and the tokenizer. The folder is kept in the user's
cache, so all readers of a model read the same layout and a file is converted only once.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from payload.core.errors import CheckpointError
from payload.core.printable_text import one_line
from payload.data.tokenizers.gguf import write_tokenizer
from payload.data.tokenizers.gguf_cache import converted, isolated_link
from payload.formats.hf_folder import CONFIG_FILE, WEIGHTS_FILE
from payload.models.gguf import gguf_config, read_gguf
from payload.models.gguf_header import read_header
from payload.train.tensors.tensor_file import write_tensors
from payload.train.tensors.transformers_import import import_shared_modules

_FIX = "Use a folder in the Hugging Face layout, with safetensors."


def folder_of_gguf(path: Path, *, cache: Path | None = None) -> Path:
    """Return a folder with the file's weights, config and tokenizer; create it if missing.

    `cache` is as in `converted`. Raises CheckpointError for a damaged file or an unsupported
    family.
    """
    num_params = read_gguf(path).num_params()

    def build(folder: Path) -> None:
        write_tokenizer(path, folder)
        _write_weights(path, folder, num_params=num_params)

    return converted(path, kind="model", build=build, cache=cache)


def _write_weights(path: Path, folder: Path, *, num_params: int) -> None:
    import torch

    import_shared_modules()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Hide transformers' progress bar in logs, which would store each of its updates.
    bar = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    try:
        with bar, isolated_link(path) as link:
            model: Any = AutoModelForCausalLM.from_pretrained(
                link.parent,
                gguf_file=link.name,
                dtype=torch.float32,
                local_files_only=True,
                # The default of Phi's config can be outside the vocabulary of the file.
                pad_token_id=None,
            )
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: transformers cannot read this file ({one_line(error).rstrip('.')}). {_FIX}"
        ) from None
    tensors = dict(model.named_parameters())
    if sum(each.numel() for each in tensors.values()) != num_params:
        raise CheckpointError(
            f"{path}: transformers reads tensor sizes that differ from the sizes in the header. "
            f"{_FIX}"
        )
    write_tensors(folder / WEIGHTS_FILE, tensors, metadata={"format": "pt"})
    # Write our own config: transformers' config omits RoPE scaling and includes the quantisation.
    config = gguf_config(read_header(path), where=str(path))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
