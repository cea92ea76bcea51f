"""Writes a model and its tokenizer as one GGUF file.

Source of the format and of the tensor conversions: llama.cpp, docs/gguf.md and conversion/.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from payload.export.arguments import Dtype
from payload.export.hf_weight_reader import WeightFiles, atomic_path, rounded
from payload.export.vocabulary import Vocabulary
from payload.models.gguf_plan import FileTensor, GgufPlan

if TYPE_CHECKING:
    import gguf
    import numpy as np
    from torch import Tensor

_POSITIONS = "position_embd.weight"
_ROUTER = ".ffn_gate_inp.weight"
_PHI = re.compile(r"(phi)-?(3)", re.IGNORECASE)
"""Matches "phi3" in a model's name. For such a name, llama.cpp strips the space after special
tokens, and cannot load the file if the vocabulary lacks Phi-3's tokens. Source: llama.cpp,
src/llama-vocab.cpp."""
_FILE_TYPES: Mapping[Dtype, str] = {
    "bf16": "MOSTLY_BF16",
    "f16": "MOSTLY_F16",
    "q8_0": "MOSTLY_Q8_0",
    "fp32": "ALL_F32",
}


def write_gguf(
    path: Path,
    weights: WeightFiles,
    *,
    plan: GgufPlan,
    vocabulary: Vocabulary,
    name: str,
    dtype: Dtype,
    progressed: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the file atomically. `progressed` receives the size of each written tensor, in bytes.

    Matrices are in `dtype`. With q8_0, a matrix whose row length is not a multiple of 32 is in f16.
    Norms, biases, positions and routers are in fp32, as in llama.cpp's converter. Raises
    CheckpointError.
    """
    import gguf

    logging.getLogger("gguf").setLevel(logging.WARNING)
    entries = [
        (each, _kind(each.name, each.shape, dtype=dtype)) for each in plan.tensors(weights.shapes())
    ]
    with atomic_path(path) as partial:
        writer = gguf.GGUFWriter(partial, plan.architecture)
        _add_header(writer, plan, vocabulary, name=name, dtype=dtype)
        for entry, kind in entries:
            writer.add_tensor_info(
                entry.name,
                entry.shape,
                # Always float32: with other dtypes, the writer would interpret the shape
                # differently.
                _float32(),
                _nbytes(entry.shape, kind),
                raw_dtype=kind,
            )
        for key, factors in plan.rope_factors.items():
            writer.add_tensor(key, _as_array(factors))
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for entry, kind in entries:
                data = _data([weights.read(name) for name in entry.sources], entry, kind)
                writer.write_tensor_data(data)
                progressed(data.nbytes)
            for factors in plan.rope_factors.values():
                writer.write_tensor_data(_as_array(factors))
        finally:
            writer.close()


def _kind(name: str, shape: tuple[int, ...], *, dtype: Dtype) -> gguf.GGMLQuantizationType:
    import gguf

    kinds = gguf.GGMLQuantizationType
    if len(shape) < 2 or name == _POSITIONS or name.endswith(_ROUTER) or dtype == "fp32":
        return kinds.F32
    if dtype == "q8_0":
        block, _ = gguf.GGML_QUANT_SIZES[kinds.Q8_0]
        return kinds.Q8_0 if shape[-1] % block == 0 else kinds.F16
    return kinds.BF16 if dtype == "bf16" else kinds.F16


def _nbytes(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
    import gguf

    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    count = 1
    for size in shape:
        count *= size
    return count // block * nbytes


def _data(
    values: Sequence[Tensor], entry: FileTensor, kind: gguf.GGMLQuantizationType
) -> np.ndarray[Any, Any]:
    """Return the data of a tensor in the format of the file."""
    import gguf
    import torch

    value = torch.stack(list(values)) if len(entry.shape) > values[0].dim() else values[0]
    value = value.chunk(entry.parts)[entry.part]
    if entry.is_transposed:
        value = value.t()
    if entry.heads is not None:
        value = _interleave_pairs(value, heads=entry.heads)
    if entry.shift:
        value = value.float() + entry.shift
    kinds = gguf.GGMLQuantizationType
    if kind is kinds.F32:
        array = value.float().contiguous().numpy()
    elif kind is kinds.BF16:
        array = rounded(entry.sources[0], value, "bf16").contiguous().view(torch.int16).numpy()
    elif kind is kinds.F16:
        array = rounded(entry.sources[0], value, "f16").contiguous().numpy()
    else:
        array = gguf.quantize(value.float().contiguous().numpy(), kind)
    return array


def _interleave_pairs(value: Tensor, *, heads: int) -> Tensor:
    """Reorder the rows so that the two rows of each rotary pair are adjacent.

    For each head, the Hugging Face layout has the first rows of all pairs, then the second rows.
    llama.cpp rotates adjacent rows, as in Meta's original checkpoints.
    """
    rows = value.shape[0] // heads // 2
    return value.reshape(heads, 2, rows, -1).transpose(1, 2).reshape(value.shape)


def _add_header(
    writer: gguf.GGUFWriter, plan: GgufPlan, vocabulary: Vocabulary, *, name: str, dtype: Dtype
) -> None:
    import gguf

    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(_PHI.sub(r"\1 \2", name))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
    for key, value in plan.values.items():
        full = f"{plan.architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        else:
            writer.add_float32(full, value)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types([int(kind) for kind in vocabulary.kinds])
    if vocabulary.scores:
        writer.add_token_scores(list(vocabulary.scores))
    if vocabulary.merges:
        writer.add_token_merges(list(vocabulary.merges))
    for special, token in vocabulary.special.items():
        getattr(writer, f"add_{special}_token_id")(token)
    writer.add_add_bos_token(vocabulary.adds_bos)
    if vocabulary.adds_eos:
        writer.add_add_eos_token(True)
    if vocabulary.model == "llama":
        writer.add_add_space_prefix(vocabulary.adds_space)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)


def _float32() -> np.dtype[Any]:
    import numpy as np

    return np.dtype(np.float32)


def _as_array(values: tuple[float, ...]) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.asarray(values, dtype=np.float32)
