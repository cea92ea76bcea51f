"""Reads the tensors of a GGUF file as the tensors of the model, in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from payload.models.gguf_header import GgufHeader
from payload.models.gguf_plan import FileTensor


class GgufTensors:
    """The tensors of a model in a GGUF file, by their names in the Hugging Face layout."""

    def __init__(self, path: Path, header: GgufHeader, stored: Iterable[FileTensor]) -> None:
        """Open the file; `stored` describes its tensors."""
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._header = header
        self._parts: dict[str, list[FileTensor]] = {}
        for each in stored:
            for source in each.sources:
                self._parts.setdefault(source, []).append(each)

    def read(self, name: str) -> Tensor:
        """Return one tensor of the model, dequantised and in transformers' order."""
        parts = sorted(self._parts[name], key=lambda each: each.part)
        values = [self._restored(each, name) for each in parts]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _restored(self, stored: FileTensor, name: str) -> Tensor:
        """Return the values of one tensor of the file, or of one matrix of a stack."""
        place, shape = self._header.places[stored.name], stored.shape
        data = self._bytes[place.start : place.start + place.num_bytes]
        if len(stored.sources) > 1:
            data, shape = (
                data.reshape(len(stored.sources), -1)[stored.sources.index(name)],
                shape[1:],
            )
        rows = data.reshape(math.prod(shape[:-1]), -1)
        found = gguf.dequantize(rows, gguf.GGMLQuantizationType(place.kind))
        value = torch.from_numpy(np.array(found, dtype=np.float32)).view(shape)
        if stored.shift:
            value -= stored.shift
        if stored.heads is not None:
            value = _separate_pairs(value, heads=stored.heads)
        return value.t().contiguous() if stored.is_transposed else value


def _separate_pairs(value: Tensor, *, heads: int) -> Tensor:
    """Reorder rows so that a head has the first rows of all rotary pairs, then the second rows."""
    rows = value.shape[0] // heads // 2
    return value.view(heads, rows, 2, -1).transpose(1, 2).reshape(value.shape)
