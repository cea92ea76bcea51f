"""Loading and saving with transformers' own names and layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from payload.core.errors import CheckpointError
from payload.formats.tensor_headers import FLOAT_DTYPES
from payload.train.models.quantized import QuantizedLinear
from payload.train.tensors.lazy_tensors import copy_in, kind_in, shape_in

# Keys on the origin and dtype of the weights that were read.
_NOT_KEPT = ("_name_or_path", "torch_dtype", "transformers_version")
# References to code in the model's folder or on the hub, which transformers would run.
_CODE = ("auto_map", "use_kernels", "kernel_config")
_CODE_PART = "_implementation"


def without_code(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the keys that select code to run, at any level of nesting.

    For example, `attn_implementation = "OWNER/NAME"` would run a kernel from the hub.
    """
    return {
        key: without_code(value) if isinstance(value, Mapping) else value
        for key, value in raw.items()
        if key not in _CODE and _CODE_PART not in key
    }


def saved_config(raw: Mapping[str, Any], *, architecture: str) -> dict[str, Any]:
    """Return the config.json of a checkpoint: the model's own config.json, changed for fp32
    weights."""
    kept = {key: value for key, value in without_code(raw).items() if key not in _NOT_KEPT}
    return {**kept, "architectures": [architecture], "dtype": "float32"}


def saved_whole_config(raw: Mapping[str, Any], *, dtype: str = "float32") -> dict[str, Any]:
    """Return the config.json of a multimodal checkpoint with text model weights in `dtype`.

    The class that loads the checkpoint stays the same.
    """
    kept = {key: value for key, value in without_code(raw).items() if key not in _NOT_KEPT}
    text = kept.get("text_config")
    if isinstance(text, Mapping):
        named = {key: value for key, value in text.items() if key not in _NOT_KEPT}
        kept["text_config"] = {**named, "dtype": dtype}
    return {**kept, "dtype": dtype}


def describe_differences(*, missing: Sequence[str], unknown: Sequence[str]) -> str:
    """Return how many tensors are missing and unknown, with the first name of each kind."""
    found = (("missing", missing), ("unknown", unknown))
    return ", ".join(f"{len(names)} {what} (first: {names[0]})" for what, names in found if names)


def require_tied(tensors: Mapping[str, Tensor], *, head: str, embedding: str, where: str) -> None:
    """Raise CheckpointError if an output head among the tensors differs from its tied embedding.

    The error names `where`.
    """
    has_both = head in tensors and embedding in tensors
    if has_both and not torch.equal(tensors[head], tensors[embedding]):
        raise CheckpointError(
            f"{where}: tie_word_embeddings = true, but {head} differs from {embedding}. Set "
            "tie_word_embeddings to false in config.json to train both tensors."
        )


def require_tensors(
    expected: Mapping[str, Tensor | QuantizedLinear],
    tensors: Mapping[str, Tensor],
    *,
    where: str,
    unused: tuple[str, ...] = (),
    subject: str = "the weights that config.json describes",
    source: str = "config.json requires",
    fix: str = "Use a folder with the model's config.json and all its weight files.",
) -> None:
    """Raise CheckpointError unless the tensors have a model's names and shapes and are floats.

    Training, generation, merging and export all use this check. Extra tensors are allowed if their
    names end with one of `unused`. `subject`, `source` and `fix` are parts of the message. The
    error names `where`.
    """
    found = {name for name in tensors if name in expected or not name.endswith(unused)}
    missing, extra = sorted(set(expected) - found), sorted(found - set(expected))
    if missing or extra:
        differences = describe_differences(missing=missing, unknown=extra)
        raise CheckpointError(f"{where}: does not contain {subject}: {differences}. {fix}")
    for name, target in expected.items():
        shape = shape_in(tensors, name)
        if isinstance(target, QuantizedLinear):
            size: tuple[int, ...] = target.size()
            is_float = True
        else:
            size, is_float = tuple(target.shape), target.is_floating_point()
        if shape != size:
            raise CheckpointError(
                f"{where}: {name} has the shape {shape}, but {source} {size}. {fix}"
            )
        if is_float:
            require_weight(tensors, name, where=where)


def require_weight(tensors: Mapping[str, Tensor], name: str, *, where: str) -> None:
    """Raise CheckpointError for a tensor of integers or 8-bit floats: a quantised weight.

    The error names `where`.
    """
    kind = kind_in(tensors, name)
    if kind not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{where}: {name} is {kind}: quantised weights cannot be trained. Use the model in "
            "bf16 or fp32."
        )


def load_named(
    expected: Mapping[str, Tensor | QuantizedLinear],
    tensors: Mapping[str, Tensor],
    *,
    unused: tuple[str, ...],
    where: str,
) -> None:
    """Copy `tensors` one by one to the tensors or quantised linears of the same name in `expected`.

    Raises CheckpointError like `require_tensors`.
    """
    require_tensors(expected, tensors, where=where, unused=unused)
    for name, target in expected.items():
        if isinstance(target, QuantizedLinear):
            target.load_weight(tensors, name)
        else:
            copy_in(tensors, name, target)
