"""The base of families that save and load under transformers' own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from payload.core.errors import CheckpointError
from payload.models.tensor_headers import FLOAT_DTYPES
from payload.train.models.quantized import QuantizedLinear
from payload.train.tensors.lazy_tensors import copy_in, kind_in, shape_in

# Who wrote the weights, and in which dtype.
_NOT_KEPT = ("_name_or_path", "torch_dtype", "transformers_version")
# Where a folder's own code is, and code of the hub that transformers would fetch and run.
_CODE = ("auto_map", "use_kernels", "kernel_config")
_CODE_PART = "_implementation"


def without_code(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the keys that choose code, also in its parts.

    `attn_implementation = "OWNER/NAME"` is a kernel on the hub.
    """
    return {
        key: without_code(value) if isinstance(value, Mapping) else value
        for key, value in raw.items()
        if key not in _CODE and _CODE_PART not in key
    }


def saved_config(raw: Mapping[str, Any], *, architecture: str) -> dict[str, Any]:
    """Return the content of a checkpoint's config.json: what was read, for fp32 weights."""
    kept = {key: value for key, value in without_code(raw).items() if key not in _NOT_KEPT}
    return {**kept, "architectures": [architecture], "dtype": "float32"}


def describe_differences(*, missing: Sequence[str], unknown: Sequence[str]) -> str:
    """Return how many tensors a model lacks and how many it has too many, each with a name."""
    found = (("missing", missing), ("unknown", unknown))
    return ", ".join(f"{len(names)} {what} (first: {names[0]})" for what, names in found if names)


def require_tied(tensors: Mapping[str, Tensor], *, head: str, embedding: str, where: str) -> None:
    """Refuse weights whose output head, where there is one, is not the embedding it is tied to.

    Raises CheckpointError, which names `where`.
    """
    has_both = head in tensors and embedding in tensors
    if has_both and not torch.equal(tensors[head], tensors[embedding]):
        raise CheckpointError(
            f"{where}: tie_word_embeddings = true, but {head} is not {embedding}. Set it to false "
            "in config.json to train both."
        )


def require_tensors(
    wanted: Mapping[str, Tensor | QuantizedLinear],
    tensors: Mapping[str, Tensor],
    *,
    where: str,
    unused: tuple[str, ...] = (),
    whose: str = "the weights that config.json describes",
    says: str = "config.json says",
    fix: str = "Name the folder of a whole model.",
) -> None:
    """Refuse tensors that are not those of a model: by name, shape, and whether they are floats.

    The one check of all that is trained, generated from, merged and exported. Tensors may have
    more whose names end with one of `unused`. `whose`, `says` and `fix` are words of the message.
    Raises CheckpointError, which names `where`.
    """
    found = {name for name in tensors if name in wanted or not name.endswith(unused)}
    missing, extra = sorted(set(wanted) - found), sorted(found - set(wanted))
    if missing or extra:
        differences = describe_differences(missing=missing, unknown=extra)
        raise CheckpointError(f"{where}: not {whose}: {differences}. {fix}")
    for name, target in wanted.items():
        shape = shape_in(tensors, name)
        if isinstance(target, QuantizedLinear):
            size: tuple[int, ...] = target.size()
            is_float = True
        else:
            size, is_float = tuple(target.shape), target.is_floating_point()
        if shape != size:
            raise CheckpointError(f"{where}: {name} is {shape}, {says} {size}. {fix}")
        if is_float:
            require_weight(tensors, name, where=where)


def require_weight(tensors: Mapping[str, Tensor], name: str, *, where: str) -> None:
    """Refuse a tensor of integers or of smaller floats: the codes of quantised weights.

    Raises CheckpointError, which names `where`.
    """
    kind = kind_in(tensors, name)
    if kind not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{where}: {name} is {kind}: quantised weights cannot be trained. Name the model in "
            "bf16 or fp32."
        )


def load_named(
    wanted: Mapping[str, Tensor | QuantizedLinear],
    tensors: Mapping[str, Tensor],
    *,
    unused: tuple[str, ...],
    where: str,
) -> None:
    """Copy `tensors` into those of the same name, one after another; quantised linears take theirs.

    Raises CheckpointError, as `require_tensors` does.
    """
    require_tensors(wanted, tensors, where=where, unused=unused)
    for name, target in wanted.items():
        if isinstance(target, QuantizedLinear):
            target.take_from(tensors, name)
        else:
            copy_in(tensors, name, target)
