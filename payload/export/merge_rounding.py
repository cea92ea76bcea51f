"""Measures how much of an adapter's update is lost when the merged weights are rounded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from payload.export.arguments import Dtype

if TYPE_CHECKING:
    from torch import Tensor

_BOUND = 0.1
_Q8_BLOCK = 32
_KEEPING: tuple[Dtype, ...] = ("f16", "fp32")
"""The dtypes that `MergeRounding.note` can recommend."""


class MergeRounding:
    """Collects the rounding errors of all merged tensors, relative to the adapter's update.

    A short training changes a weight by less than the spacing of bf16 numbers, so rounding the
    merged weight can remove the change.
    """

    def __init__(self) -> None:
        """Create the object without any tensors."""
        self._update = 0.0
        self._errors: dict[Dtype, float] = {"bf16": 0.0, "f16": 0.0, "q8_0": 0.0, "fp32": 0.0}

    def add(self, base: Tensor, merged: Tensor) -> None:
        """Add one weight (outputs, inputs) before and after the merge, both in fp32."""
        import torch

        self._update += float((merged - base).square().sum(dtype=torch.float64))
        for dtype in self._errors:
            error = _rounded(merged, dtype) - merged
            self._errors[dtype] += float(error.square().sum(dtype=torch.float64))

    def error(self, dtype: Dtype) -> float:
        """Return the norm of the rounding error over the norm of the update; 0 if nothing is
        merged.

        The result is infinite if a value overflows in `dtype`.
        """
        return math.sqrt(self._errors[dtype] / self._update) if self._update else 0.0

    def note(self, dtype: Dtype) -> str | None:
        """Return a note if rounding to `dtype` loses a large part of the update."""
        error = self.error(dtype)
        if error <= _BOUND:
            return None
        better = [
            f"{each} ({self.error(each):.1%})" for each in _KEEPING if self.error(each) < error
        ]
        return (
            f"merged in {dtype}: rounding changes the adapter's update by {error:.0%}. To keep "
            f"more of it, export with --dtype {' or '.join(better)}"
        )


def _rounded(value: Tensor, dtype: Dtype) -> Tensor:
    """Return the values after rounding to `dtype`, as fp32."""
    import torch

    if dtype == "fp32":
        return value
    if dtype != "q8_0":
        return value.to(torch.bfloat16 if dtype == "bf16" else torch.float16).float()
    if value.shape[-1] % _Q8_BLOCK:
        return _rounded(value, "f16")
    blocks = value.reshape(*value.shape[:-1], -1, _Q8_BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    steps = torch.where(scale > 0, blocks / scale, 0).round()
    return (steps * scale.half().float()).flatten(-2)
