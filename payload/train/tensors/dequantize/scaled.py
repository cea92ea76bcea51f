"""Weights in 8-bit floats, 8-bit integers or 4-bit floats, with a scale for each block.

The layouts are in `payload.formats.quantized.fp8` and `compressed_tensors`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from payload.formats.quantized.stored_weight import StoredWeight, refuse
from payload.train.tensors.dequantize.parts import ReadRows, Rows, floats_of_bytes, read_scales

_FOUR_BITS = 4


def rows(name: str, weight: StoredWeight, read: ReadRows) -> Rows:
    """Return the reader of a weight's rows; a row of a stack of matrices is a matrix."""
    *outer, num_rows, columns = weight.shape
    high, wide = weight.block
    grid = (*outer, -(-num_rows // high), -(-columns // wide))
    total = read_scales(name, weight, read, role="total") if "total" in weight.parts else None
    is_whole = grid[0] == 1 and not outer
    column_blocks = torch.arange(columns) // wide
    row_blocks = torch.arange(num_rows) // high

    def spread(found: Tensor, first: int, count: int) -> Tensor:
        """Return the scale or zero of each element in `count` rows from row `first` on."""
        if outer:
            found = found.view(count, *grid[1:])
            return found[..., row_blocks, :][..., column_blocks]
        return found[row_blocks[first : first + count] - first // high][:, column_blocks]

    def block_rows(first: int, count: int) -> tuple[int, int]:
        if outer:
            return first, count
        begin = 0 if is_whole else first // high
        return begin, (first + count - 1) // high + 1 - begin

    def some(first: int, count: int) -> Tensor:
        stored = read(weight.parts["values"], first, count)
        value = floats_of_bytes(stored) if weight.bits == _FOUR_BITS else stored.float()
        begin, size = block_rows(first, count)
        # A single scale can have the shape (), which has no rows.
        part = (0, None) if is_whole else (begin, size)
        shape = (size, *grid[1:])
        scales = read_scales(name, weight, read, *part).reshape(shape)
        if total is not None:
            scales = scales / total
            if not bool(scales.isfinite().all()):
                refuse(weight.parts["total"], name, "makes a scale infinite or NaN")
        if "zeros" in weight.parts:
            zeros = read(weight.parts["zeros"], *part).float().reshape(shape)
            value = value - spread(zeros, first, count)
        return value * spread(scales, first, count)

    return some
