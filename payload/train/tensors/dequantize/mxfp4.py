"""MXFP4 experts; the layout is in `payload.formats.quantized.mxfp4`."""

from __future__ import annotations

from torch import Tensor

from payload.formats.quantized.stored_weight import StoredWeight
from payload.train.tensors.dequantize.parts import ReadRows, Rows, floats_of_bytes, read_scales


def rows(name: str, weight: StoredWeight, read: ReadRows) -> Rows:
    """Return the reader of a stack of experts; a row is an expert's matrix."""

    def some(first: int, count: int) -> Tensor:
        value = floats_of_bytes(read(weight.parts["values"], first, count))
        value *= read_scales(name, weight, read, first, count).unsqueeze(-1)
        return value.flatten(2).transpose(1, 2)

    return some
