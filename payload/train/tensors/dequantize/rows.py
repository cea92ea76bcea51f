"""Reads rows of a quantised weight of any format as floats."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from payload.formats.quantized.stored_weight import Layout, StoredWeight, refuse
from payload.train.tensors.dequantize import awq, gptq, mxfp4, packed, scaled
from payload.train.tensors.dequantize.parts import ReadRows, Rows

_LAYOUTS: dict[Layout, Callable[[str, StoredWeight, ReadRows], Rows]] = {
    "scaled": scaled.rows,
    "mxfp4": mxfp4.rows,
    "gptq": gptq.rows,
    "awq": awq.rows,
    "packed": packed.rows,
}
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def open_rows(name: str, weight: StoredWeight, read: ReadRows) -> Rows:
    """Return a function that reads `count` rows of a weight from row `first` on, in its dtype.

    `read` reads rows of a stored tensor. Scales that belong to all rows are read here. Raises
    CheckpointError for invalid values.
    """
    exact = _LAYOUTS[weight.layout](name, weight, read)
    steps = [_DTYPES[each] for each in (weight.rounded_to, weight.dtype) if each in _DTYPES]

    def rounded(first: int, count: int) -> Tensor:
        value = exact(first, count)
        for dtype in steps:
            value = value.to(dtype)
        if not bool(value.isfinite().all()):
            refuse(weight, name, f"has NaN, infinity or a number too large for {weight.dtype}")
        return value

    return rounded
