"""The base of families that save and load under transformers' own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from payload.errors import CheckpointError
from payload.train.lazy_tensors import copy_in, shape_in
from payload.train.models.quantized import QuantizedLinear

# Who wrote the weights and in which dtype, and where a folder's own code is.
_NOT_KEPT = ("_name_or_path", "auto_map", "torch_dtype", "transformers_version")


def saved_config(raw: Mapping[str, Any], *, architecture: str) -> dict[str, Any]:
    """Return the content of a checkpoint's config.json: what was read, for fp32 weights."""
    kept = {key: value for key, value in raw.items() if key not in _NOT_KEPT}
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


def load_named(
    wanted: Mapping[str, Tensor | QuantizedLinear],
    tensors: Mapping[str, Tensor],
    *,
    unused: tuple[str, ...],
    where: str,
) -> None:
    """Copy `tensors` into those of the same name, one after another; quantised linears take theirs.

    Tensors may have more whose names end with one of `unused`. Raises CheckpointError, which names
    `where`, when some are missing or of another size.
    """
    found = {name for name in tensors if name in wanted or not name.endswith(unused)}
    missing, extra = sorted(set(wanted) - found), sorted(found - set(wanted))
    if missing or extra:
        raise CheckpointError(
            f"{where}: not the weights that config.json describes: "
            f"{describe_differences(missing=missing, unknown=extra)}. Name the folder of a whole "
            "model."
        )
    for name, target in wanted.items():
        shape = shape_in(tensors, name)
        size = target.size() if isinstance(target, QuantizedLinear) else tuple(target.shape)
        if shape != size:
            raise CheckpointError(
                f"{where}: {name} is {shape}, config.json says {size}. "
                "Name the folder of a whole model."
            )
        if isinstance(target, QuantizedLinear):
            target.take_from(tensors, name)
        else:
            copy_in(tensors, name, target)
