"""GPTQ linears; the layout is in `payload.formats.quantized.gptq`."""

from __future__ import annotations

from torch import Tensor

from payload.formats.quantized.stored_weight import StoredWeight
from payload.train.tensors.dequantize.parts import ReadRows, Rows, read_groups, read_scales, unpack


def rows(name: str, weight: StoredWeight, read: ReadRows) -> Rows:
    """Return the reader of a weight's rows. A row of the weight is a column in the file."""
    words, bits = read(weight.parts["values"]), weight.bits
    scales = read_scales(name, weight, read)
    zeros = unpack(read(weight.parts["zeros"]), bits).flatten(1)
    zeros = (zeros + weight.zero_offset) % 2**bits
    groups = read_groups(name, weight, read, groups=len(scales))

    def some(first: int, count: int) -> Tensor:
        own = slice(first, first + count)
        numbers = unpack(words[:, own], bits).transpose(1, 2).flatten(0, 1)
        centred: Tensor = numbers - zeros[:, own][groups]
        return (centred * scales[:, own][groups]).t()

    return some
