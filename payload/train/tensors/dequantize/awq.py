"""AWQ linears; the layout is in `payload.formats.quantized.awq`."""

from __future__ import annotations

import torch
from torch import Tensor

from payload.formats.quantized.awq import ORDER
from payload.formats.quantized.stored_weight import StoredWeight
from payload.train.tensors.dequantize.parts import ReadRows, Rows, read_groups, read_scales, unpack


def rows(name: str, weight: StoredWeight, read: ReadRows) -> Rows:
    """Return the reader of a weight's rows. A row of the weight is a column in the file."""
    words = read(weight.parts["values"])
    scales = read_scales(name, weight, read)
    zeros = _unpacked(read(weight.parts["zeros"]), weight.bits)
    groups = read_groups(name, weight, read, groups=len(scales))

    def some(first: int, count: int) -> Tensor:
        begin, own = first // len(ORDER), slice(first, first + count)
        end = -(-(first + count) // len(ORDER))
        numbers = _unpacked(words[:, begin:end], weight.bits)
        numbers = numbers.narrow(1, first - begin * len(ORDER), count)
        centred: Tensor = numbers - zeros[:, own][groups]
        return (centred * scales[:, own][groups]).t()

    return some


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words along the last dimension, and sort the values by the linear's outputs."""
    place = torch.tensor(ORDER).argsort()
    return unpack(words, bits)[..., place].flatten(-2)
