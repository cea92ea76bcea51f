"""Packed integers of compressed-tensors; layout: `payload.formats.quantized.compressed_tensors`."""

from __future__ import annotations

import torch
from torch import Tensor

from payload.formats.quantized.stored_weight import StoredWeight
from payload.train.tensors.dequantize.parts import ReadRows, Rows, read_groups, read_scales, unpack


def rows(name: str, weight: StoredWeight, read: ReadRows) -> Rows:
    """Return the reader of a weight's rows."""
    outputs, inputs = weight.shape
    num_groups = -(-inputs // weight.block[1])
    offset = 2 ** (weight.bits - 1)
    scales = read_scales(name, weight, read).reshape(-1, num_groups).expand(outputs, num_groups)
    groups = read_groups(name, weight, read, groups=num_groups)
    zeros = torch.zeros(1, num_groups, dtype=torch.int32).expand(outputs, num_groups)
    if "zeros" in weight.parts:
        packed = unpack(read(weight.parts["zeros"]).t(), weight.bits).flatten(1)
        zeros = packed[:, :outputs].t() - offset

    def some(first: int, count: int) -> Tensor:
        words, own = read(weight.parts["values"], first, count), slice(first, first + count)
        numbers = unpack(words, weight.bits).flatten(1)[:, :inputs] - offset
        centred: Tensor = numbers - zeros[own][:, groups]
        return centred * scales[own][:, groups]

    return some
