"""Converts GGUF files of the Llama family to a folder in the Hugging Face layout.

The weights become fp32. The folder is kept in the user's cache, so all readers of a model read the
same layout and a file is converted only once.
"""

from __future__ import annotations

import json
from pathlib import Path

from payload.data.tokenizers.gguf import write_tokenizer
from payload.data.tokenizers.gguf_cache import converted
from payload.formats.hf_folder import CONFIG_FILE, WEIGHTS_FILE
from payload.models.gguf import gguf_config, gguf_tensors, read_gguf
from payload.models.gguf_header import read_header
from payload.train.tensors.tensor_file import write_tensors


def folder_of_gguf(path: Path, *, cache: Path | None = None) -> Path:
    """Return a folder with the file's weights, config and tokenizer; create it if missing.

    For `cache`, see `converted`. Raises CheckpointError for a damaged file or an unsupported
    family.
    """
    read_gguf(path)

    def build(folder: Path) -> None:
        write_tokenizer(path, folder)
        _write_weights(path, folder)

    return converted(path, kind="model", build=build, cache=cache)


def _write_weights(path: Path, folder: Path) -> None:
    import torch

    from payload.train.tensors.gguf_tensors import GgufTensors

    header, where = read_header(path), str(path)
    shapes = dict(read_gguf(path).tensor_shapes())
    tensors = GgufTensors(path, header, gguf_tensors(header, where=where))
    # Each tensor is read when it is written.
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {id(value): name for name, value in empty.items()}
    write_tensors(
        folder / WEIGHTS_FILE,
        empty,
        metadata={"format": "pt"},
        whole=lambda value: tensors.read(names[id(value)]),
    )
    config = gguf_config(header, where=where)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
