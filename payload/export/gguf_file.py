"""Writes a model and its tokenizer as one GGUF file.

Source of the format and of the tensor conversions: llama.cpp, docs/gguf.md and conversion/.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.export.arguments import Dtype
from payload.export.hf_weight_reader import WeightFiles, atomic_path, rounded
from payload.export.vocabulary import Vocabulary
from payload.models.gguf_export_plan import GgufPlan

if TYPE_CHECKING:
    import gguf
    import numpy as np
    from torch import Tensor

_POSITIONS = "position_embd.weight"
_NORM = "norm.weight"
_ROUTER = ".ffn_gate_inp.weight"
_FILE_TYPES: Mapping[Dtype, str] = {
    "bf16": "MOSTLY_BF16",
    "f16": "MOSTLY_F16",
    "q8_0": "MOSTLY_Q8_0",
    "fp32": "ALL_F32",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the file."""

    sources: tuple[str, ...]
    """Names of the tensors in the model; the matrices of experts become a stack."""
    target: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    part: int = 0
    """Index of this part among `parts` equal parts of the source's rows."""
    parts: int = 1


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
    """Write the file atomically; `progressed` receives the bytes of each tensor written.

    Matrices are in `dtype`, or in f16 if q8_0's block size of 32 does not divide their rows. Norms,
    biases, positions and routers are in fp32, as in llama.cpp's converter. Raises CheckpointError.
    """
    import gguf

    logging.getLogger("gguf").setLevel(logging.WARNING)
    entries = _entries(weights.shapes(), plan, dtype=dtype)
    with atomic_path(path) as partial:
        writer = gguf.GGUFWriter(partial, plan.architecture)
        _add_header(writer, plan, vocabulary, name=name, dtype=dtype)
        for entry in entries:
            writer.add_tensor_info(
                entry.target,
                entry.shape,
                # Always float32: with other dtypes, the writer would interpret the shape
                # differently.
                _float32(),
                _nbytes(entry.shape, entry.kind),
                raw_dtype=entry.kind,
            )
        for key, factors in plan.rope_factors.items():
            writer.add_tensor(key, _as_array(factors))
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for entry in entries:
                data = _data(_stacked([weights.read(name) for name in entry.sources]), entry, plan)
                writer.write_tensor_data(data)
                progressed(data.nbytes)
            for factors in plan.rope_factors.values():
                writer.write_tensor_data(_as_array(factors))
        finally:
            writer.close()


def _entries(
    shapes: Mapping[str, tuple[int, ...]], plan: GgufPlan, *, dtype: Dtype
) -> list[_Entry]:
    import gguf

    (architecture,) = (
        key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == plan.architecture
    )
    names = gguf.get_tensor_name_map(architecture, plan.num_layers)
    entries = []
    for source, sources in _sources(shapes, plan).items():
        shape = shapes[sources[0]]
        full = source if source.startswith(plan.prefix) else plan.prefix + source
        found = _names(full, plan)
        for part, name in enumerate(found):
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise CheckpointError(
                    f"tensor {shown(source)}: not supported by llama.cpp's {plan.architecture}. "
                    "Use --format hf."
                )
            size = shape[::-1] if source.endswith(plan.transposed) and plan.transposed else shape
            size = (size[0] // len(found), *size[1:])
            kind = _kind(target, size, dtype=dtype)
            size = size if sources == (source,) else (len(sources), *size)
            entries.append(_Entry(sources, target, size, kind, part, len(found)))
    return entries


def _sources(shapes: Mapping[str, tuple[int, ...]], plan: GgufPlan) -> dict[str, tuple[str, ...]]:
    """Return the model's tensors that make each tensor of the file: one, or one per expert."""
    found: dict[str, dict[int, str]] = {}
    for name in shapes:
        match = plan.stacks.search(name) if plan.stacks is not None else None
        start, end = (0, 0) if match is None else match.span(1)
        number = int(name[start:end] or 0)
        found.setdefault(name[:start] + name[end:].removeprefix("."), {})[number] = name
    return {key: tuple(names[each] for each in sorted(names)) for key, names in found.items()}


def _stacked(values: Sequence[Tensor]) -> Tensor:
    import torch

    return values[0] if len(values) == 1 else torch.stack(list(values))


def _names(source: str, plan: GgufPlan) -> list[str]:
    """Return the names under which llama.cpp's tables have the parts of a tensor."""
    module, _, kind = source.rpartition(".")
    for old, new in plan.renamed.items():
        if module.endswith(old):
            return [f"{module.removesuffix(old)}{each}.{kind}" for each in new]
    return [source]


def _kind(target: str, shape: tuple[int, ...], *, dtype: Dtype) -> gguf.GGMLQuantizationType:
    import gguf

    kinds = gguf.GGMLQuantizationType
    if len(shape) < 2 or target == _POSITIONS or target.endswith(_ROUTER) or dtype == "fp32":
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


def _data(value: Tensor, entry: _Entry, plan: GgufPlan) -> np.ndarray[Any, Any]:
    """Return the data of a tensor in the format of the file."""
    import gguf
    import torch

    value = value.chunk(entry.parts)[entry.part]
    if plan.transposed and entry.sources[0].endswith(plan.transposed):
        value = value.t()
    for end, heads in plan.rotated_heads.items():
        if entry.sources[0].endswith(end):
            value = _interleave_pairs(value, heads=heads)
    if plan.norm_shift and entry.sources[0].endswith(_NORM):
        value = value.float() + plan.norm_shift
    kinds = gguf.GGMLQuantizationType
    if entry.kind is kinds.F32:
        array = value.float().contiguous().numpy()
    elif entry.kind is kinds.BF16:
        array = rounded(entry.sources[0], value, "bf16").contiguous().view(torch.int16).numpy()
    elif entry.kind is kinds.F16:
        array = rounded(entry.sources[0], value, "f16").contiguous().numpy()
    else:
        array = gguf.quantize(value.float().contiguous().numpy(), entry.kind)
    return array


def _interleave_pairs(value: Tensor, *, heads: int) -> Tensor:
    """Reorder rows so that the two rows of each rotary pair are adjacent.

    The Hugging Face layout has the first rows of all pairs of a head, then the second rows.
    llama.cpp rotates adjacent rows, as in Meta's original checkpoints.
    """
    rows = value.shape[0] // heads // 2
    return value.reshape(heads, 2, rows, -1).transpose(1, 2).reshape(value.shape)


def _add_header(
    writer: gguf.GGUFWriter, plan: GgufPlan, vocabulary: Vocabulary, *, name: str, dtype: Dtype
) -> None:
    import gguf

    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
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
