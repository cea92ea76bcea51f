"""8-bit floats with scales: quant_method `fp8`, as in DeepSeek and Qwen3, and `fbgemm_fp8`.

A weight `NAME` in F8_E4M3 or F8_E5M2 has the shape of the original. Its scales are in
`NAME_scale_inv`, in `NAME_scale`, or in the module's `scale`. There is one scale for each block of
`weight_block_size`, for each output, or for the whole weight. In spite of its name,
`NAME_scale_inv` is a factor, not a divisor. Blocks at the edges can be smaller: DeepSeek's 576 rows
have 5 blocks of 128. Scales in F8_E8M0 or U8 are powers of two, 2 ** (byte - 127). DeepSeek-V4
stores experts in I8: two 4-bit floats in a byte, the first in the low bits.

Weight = value x scale, computed in fp32 and rounded once.
Source: transformers, integrations/finegrained_fp8.py; DeepSeek-V3, inference/fp8_cast_bf16.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from payload.core.errors import CheckpointError
from payload.core.validation.fields import checked
from payload.core.validation.records import build
from payload.formats.quantized.stored_weight import (
    CONFIG_FIX,
    Format,
    StoredWeight,
    refuse,
    stored,
)
from payload.formats.tensor_headers import FLOAT_DTYPES, TensorHeader

FLOAT8 = ("F8_E4M3", "F8_E5M2")
POWERS_OF_TWO = ("F8_E8M0", "U8")
_SCALES = (*FLOAT_DTYPES, *POWERS_OF_TWO)
_FP4_BLOCK = (1, 32)
"""Number of rows and columns that share a scale, for 4-bit floats. (For 8-bit floats,
`weight_block_size` sets these numbers.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    weight_block_size: tuple[int, int] | None = checked(None, low=1, high=2**20)


class Fp8(Format):
    """Weights in 8-bit floats."""

    unused = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")

    def __init__(self, config: Mapping[str, Any], *, where: str) -> None:
        """Read quantization_config. Raises CheckpointError for invalid block sizes."""
        read = build(_Settings, config, where=where, fix=CONFIG_FIX, error=CheckpointError)
        self._block = read.weight_block_size

    def describe(self) -> str:
        """Return the format and the block size."""
        return "fp8" if self._block is None else f"fp8 (block {self._block[0]}x{self._block[1]})"

    def weights(
        self, headers: Mapping[str, TensorHeader], *, dtype: str
    ) -> Iterator[tuple[str, StoredWeight]]:
        """Yield each weight in 8-bit floats, and each weight with two 4-bit floats in a byte."""
        for name, values in headers.items():
            scale = next((each for each in _scale_names(name) if each in headers), None)
            if scale is None and values.dtype in FLOAT8 and _is_weight(name):
                refuse(values, name, f"has no scales ({name}_scale_inv)")
            if scale is None or values.dtype not in (*FLOAT8, "I8"):
                continue
            shape, bits = values.shape, 8
            blocks = [self._block] if self._block else []
            if values.dtype == "I8":
                shape, bits, blocks = (*shape[:-1], shape[-1] * 2), 4, [_FP4_BLOCK]
            scales = headers[scale]
            block = scale_block(shape, scales, scale, configured=blocks)
            yield stored(
                name,
                values,
                parts={"scales": scales},
                layout="scaled",
                shape=shape,
                dtype=dtype,
                bits=bits,
                block=block,
            )


def scale_block(
    shape: tuple[int, ...],
    scales: TensorHeader,
    name: str,
    *,
    configured: Sequence[tuple[int, int]],
) -> tuple[int, int]:
    """Return the size of the blocks of a weight that share one scale, in rows and columns.

    The weight has the given `shape`. `scales` has a single number, one number for each row, or one
    for each block of a `configured` size. If config.json has no size, the blocks divide the weight
    evenly. Raises CheckpointError for shapes that do not fit.
    """
    if scales.dtype not in _SCALES:
        refuse(scales, name, f"is {scales.dtype}, which is not a dtype of scales")
    if len(shape) < 2 or 0 in shape:
        refuse(scales, name, f"belongs to a weight of the shape {list(shape)}")
    *outer, rows, columns = shape
    if scales.num_elements() == 1 and math.prod(outer) == 1:
        return rows, columns
    if scales.shape in ((*outer, rows), (*outer, rows, 1)):
        return 1, columns
    grid = scales.shape[-2:]
    if list(scales.shape[:-2]) != outer or len(grid) != 2 or 0 in grid:
        _refuse_grid(scales, name, shape)
    for high, wide in configured:
        if grid == (-(-rows // high), -(-columns // wide)):
            return high, wide
    if configured or rows % grid[0] or columns % grid[1]:
        _refuse_grid(scales, name, shape)
    return rows // grid[0], columns // grid[1]


def _refuse_grid(scales: TensorHeader, name: str, shape: tuple[int, ...]) -> None:
    refuse(
        scales,
        name,
        f"has the shape {list(scales.shape)}, which does not fit a weight of {list(shape)}",
    )


def _scale_names(name: str) -> tuple[str, ...]:
    module, _, last = name.rpartition(".")
    named = (f"{name}_scale_inv", f"{name}_scale")
    return (*named, f"{module}.scale", f"{module}.qscale_weight") if last == "weight" else named


def _is_weight(name: str) -> bool:
    """Return True for the name of a weight, and False for the name of scales."""
    return "scale" not in name.rpartition(".")[2]
