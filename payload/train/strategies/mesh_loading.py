"""Loads a model on a mesh of ranks: each rank reads only its part of each weight.

The part depends on the tensor rank (`Split`). With sharding, a rank reads only some rows of this
part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from payload.train.models.base import CausalLM
from payload.train.models.split import Split, bounds
from payload.train.tensors.lazy_tensors import LazyTensors, Part, PlannedTensors, part_of


class PartsReader:
    """The files of a whole model, from which a rank reads its parameters."""

    def __init__(self, model: CausalLM, folder: Path) -> None:
        """Record where each parameter of `model` is in the files, without reading values.

        Raises CheckpointError if the files in `folder` do not fit the model.
        """
        self._tensors = model.deferred_tensors()
        planned = PlannedTensors(folder, like=self._tensors)
        model.load_tensors(planned, where=str(folder))
        stored = {each.data_ptr(): (name, each) for name, each in planned.targets.items()}
        self._shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        self._stored: dict[str, tuple[str, bool]] = {}
        """Each parameter's name in the files, and whether the files store it transposed."""
        for name, parameter in model.named_parameters():
            stored_name, target = stored[parameter.data_ptr()]
            is_transposed = parameter.dim() == 2 and target.stride() != parameter.stride()
            self._stored[name] = stored_name, is_transposed

    def read(self, model: nn.Module, splits: dict[str, Split], *, index: int, size: int) -> None:
        """Read this rank's parameters of `model`, as tensor rank `index` of `size`."""
        for name, parameter in model.named_parameters():
            local, first = _rows(parameter)
            stored, is_transposed = self._stored[name]
            split, shape = splits.get(name), self._shapes[name]
            for target, *parts in _pieces(local, first, split, shape, index=index, size=size):
                if is_transposed:
                    swapped = (Part(dim=1 - each.dim, first=each.first) for each in parts)
                    self._tensors.copy_to(stored, target.t(), *swapped)
                else:
                    self._tensors.copy_to(stored, target, *parts)


def read_part(
    tensors: LazyTensors,
    stored: str,
    split: Split | None,
    *,
    index: int,
    size: int,
    own_rows: Callable[[int], tuple[int, int]],
) -> Tensor:
    """Split a stored tensor into `size` parts, and read this rank's rows of part `index`."""
    shape = tensors.shape(stored)
    split_shape = shape if split is None else split.part_shape(shape, index=index, size=size)
    start, end = own_rows(split_shape[0])
    part = torch.empty((end - start, *split_shape[1:]), dtype=tensors.dtype(stored))
    for target, *parts in _pieces(part, start, split, shape, index=index, size=size):
        tensors.copy_to(stored, target, *parts)
    return part


def _rows(parameter: Any) -> tuple[Tensor, int]:
    """Return this rank's rows of a parameter, and the index of the first row."""
    if not hasattr(parameter, "placements"):
        return parameter.detach(), 0
    return parameter.to_local().detach(), part_of(parameter).first


def _pieces(
    local: Tensor, first: int, split: Split | None, shape: tuple[int, ...], *, index: int, size: int
) -> Iterator[tuple[Any, ...]]:
    """Yield views of `local`, each with its position in the full tensor of `shape`.

    `local` holds rows of the part of tensor rank `index`, beginning with row `first`.
    """
    if split is None:
        yield local, Part(dim=0, first=first)
        return
    before = at = 0
    for length in split.lengths(shape):
        start, end = bounds(length, index=index, size=size)
        start, end, before = before + start, before + end, before + length
        if split.dim:
            columns = local.narrow(split.dim, at, end - start)
            yield columns, Part(dim=0, first=first), Part(dim=split.dim, first=start)
        else:
            low, high = max(at, first), min(at + end - start, first + len(local))
            if low < high:
                rows = local[low - first : high - first]
                yield rows, Part(dim=0, first=start + low - at)
        at += end - start
