"""Reads a model's embedding and output head, and adds rows for tokens that the files lack."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from payload.train.tensors.lazy_tensors import LazyTensors, Part

_ROWS_AT_ONCE = 4096


class TensorsWithNewRows(LazyTensors):
    """The tensors of a folder, with new rows in the embedding and the output head.

    Each new row is the mean of all rows that precede the new rows, as in `CausalLM.add_tokens`.
    """

    def __init__(self, path: Path, *, modules: Collection[str], first: int, rows: int) -> None:
        """Set the new rows, from index `first` up to `rows`.

        `modules` are the names, without a path, of the modules that get new rows.
        """
        super().__init__(path)
        self._first, self._end = first, rows
        ends = {f"{each}.weight" for each in modules}
        self._grown = {name for name in self if ".".join(name.split(".")[-2:]) in ends}
        self._means: dict[str, Tensor] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, with its new rows."""
        rows, *others = super().shape(name) or (1,)
        if name not in self._grown:
            return super().shape(name)
        return (max(rows, self._end), *others)

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor in its own dtype."""
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.copy_to(name, tensor)
        return tensor

    def copy_to(self, name: str, target: Tensor, *parts: Part) -> None:
        """Copy a tensor, or a part of it, into `target`, as `LazyTensors.copy_to` does."""
        if name not in self._grown:
            super().copy_to(name, target, *parts)
            return
        begin = sum(each.first for each in parts if each.dim == 0)
        others = [each for each in parts if each.dim]
        for low, high in ((0, self._first), (self._end, self.shape(name)[0])):
            start, end = max(low, begin), min(high, begin + len(target))
            if start < end:
                rows = target[start - begin : end - begin]
                super().copy_to(name, rows, Part(dim=0, first=start), *others)
        start, end = max(self._first, begin), min(self._end, begin + len(target))
        if start < end:
            mean = self._mean(name)
            for each in others:
                mean = mean.narrow(each.dim - 1, each.first, target.shape[each.dim])
            with torch.no_grad():
                target[start - begin : end - begin] = mean

    def _mean(self, name: str) -> Tensor:
        """Return the mean in fp32 of all rows before the new rows.

        Only a few rows are in memory at a time.
        """
        if name not in self._means:
            width = self.shape(name)[1]
            total = torch.zeros(width, dtype=torch.float64)
            for start in range(0, self._first, _ROWS_AT_ONCE):
                rows = torch.empty(min(_ROWS_AT_ONCE, self._first - start), width)
                super().copy_to(name, rows, Part(dim=0, first=start))
                total += rows.sum(0, dtype=torch.float64)
            self._means[name] = (total / self._first).float()
        return self._means[name]
