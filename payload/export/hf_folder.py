"""Writes a model in the Hugging Face layout, in 16 or 32 bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from payload.core.errors import CheckpointError
from payload.core.regular_files import read_bytes
from payload.export.hf_weight_reader import WeightFiles, atomic_path, rounded
from payload.formats.hf_folder import CONFIG_FILE, TOKENIZER_FILES, WEIGHTS_FILE, own_file
from payload.formats.quantized.weight_headers import without_quantization

if TYPE_CHECKING:
    from payload.train.tensors.copied_parts import CopiedParts

_NAMES = {"bf16": "bfloat16", "f16": "float16", "fp32": "float32"}


def write_hf(
    path: Path,
    weights: WeightFiles,
    *,
    config: Mapping[str, Any],
    source: Path,
    generation: Mapping[str, bytes],
    dtype: Literal["bf16", "f16", "fp32"],
    copied: CopiedParts | None = None,
    progressed: Callable[[int], None] = lambda _: None,
) -> None:
    """Atomically write a folder that transformers can load.

    The tokenizer files are copied from `source`. `generation` maps generation_config.json to its
    content; it is empty for a model without the file. `copied` has the parts of a multimodal model
    that are written unchanged. Raises CheckpointError.
    """
    from payload.train.tensors.tensor_file import write_tensors

    with atomic_path(path) as partial:
        partial.mkdir()
        tensors = {}
        for name in weights.shapes():
            tensors[name] = rounded(name, weights.read(name), dtype).contiguous()
            progressed(tensors[name].nbytes)
        # The library's own writer would make files that only this user can read.
        write_tensors(partial / WEIGHTS_FILE, tensors, metadata={"format": "pt"}, copied=copied)
        changed = _with_dtype(config, _NAMES[dtype], is_whole=copied is not None)
        (partial / CONFIG_FILE).write_text(changed, encoding="utf-8")
        processor = {} if copied is None else copied.files
        for name, content in {**processor, **generation}.items():
            (partial / name).write_bytes(content)
        for name in TOKENIZER_FILES:
            try:
                (partial / name).write_bytes(read_bytes(own_file(source, name)))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CheckpointError(
                    f"{source / name}: {error.strerror}. Use another checkpoint."
                ) from None


def _with_dtype(config: Mapping[str, Any], name: str, *, is_whole: bool) -> str:
    from payload.train.models.hf_layout import saved_whole_config, without_code

    plain = without_quantization(without_code(config))
    if is_whole:
        plain = saved_whole_config(plain, dtype=name)
    kept = {key: value for key, value in plain.items() if key != "torch_dtype"}
    return json.dumps({**kept, "dtype": name}, indent=2) + "\n"
