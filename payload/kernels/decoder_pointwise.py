"""The decoder's pointwise ops and norms on tensors: RMS norms, rotary embedding, gates.

Each function raises ValueError for tensors of a wrong dtype or shape, as in `library`.
N tokens of all sequences, T tokens of one, C width, H query heads, K key heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from payload.kernels.library import SUM_ROWS, Library, element, require_tensor

Gate = Literal["silu", "gelu_tanh"]
"""Activation of the gate: SiLU for SwiGLU, or the tanh form of GELU for GeGLU."""

LONGEST_HEAD = 512
"""Largest head width: a thread keeps a head on its stack (decoder.cpp)."""


@dataclass(frozen=True, slots=True)
class NormScale:
    """The scale of an RMS norm (weight + offset), and `eps`, which is added to the mean square."""

    weight: Tensor
    """The norm's weight: (C,) fp32. For queries and keys: (2, D) if each head is normed by itself,
    and ((H + K) D,) if all heads are normed together."""
    eps: float
    offset: float = 0.0
    """Number added to the weight: 1 in Gemma, where a weight of zero means a scale of 1."""


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes of qkv (N, H + 2 K, D) with sequences of `length` tokens."""

    length: int
    heads: int
    key_heads: int
    width: int

    def columns(self) -> int:
        """Return the number of columns of queries, keys and values together."""
        return (self.heads + 2 * self.key_heads) * self.width


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of each position's angles, (T, R / 2) fp32 each, for R rotated elements."""

    cos: Tensor
    sin: Tensor

    def pairs(self) -> int:
        """Return how many pairs of elements are rotated; they are at the start of each head."""
        return self.cos.shape[1]

    def require(self, sizes: HeadSizes) -> None:
        """Raise ValueError if the tables do not fit `sizes`."""
        pairs = min(self.pairs(), sizes.width // 2)
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            require_tensor(name, table, torch.float32, (sizes.length, pairs))


def rms_norm_forward(
    library: Library,
    x: Tensor,
    added: Tensor | None,
    scale: NormScale,
    *,
    added_scale: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (N, C) + added_scale * `added`, its RMS norm, and 1 / rms (N,).

    `added` and the norm are of `dtype`. `x` is fp32; without `added`, it can be bf16.
    """
    rows, width = x.shape
    is_branch = _require_norm(x, added, scale, dtype)
    normed, rstd = torch.empty(rows, width, dtype=dtype), torch.empty(rows)
    numbers = (scale.offset, scale.eps)
    if is_branch:
        tensors = (x, scale.weight, *numbers, normed, rstd)
        library.call_on(dtype, "branch_rms_norm_forward", *tensors, rows, width)
        return x, normed, rstd
    total = x if added is None else torch.empty_like(x)
    last = (total, normed, rstd, rows, width)
    inputs = (x, added, added_scale, scale.weight, *numbers)
    library.call_on(dtype, "rms_norm_forward", *inputs, *last)
    return total, normed, rstd


def rms_norm_backward(
    library: Library,
    total: Tensor,
    rstd: Tensor,
    scale: NormScale,
    grad_total: Tensor | None,
    grad_normed: Tensor,
    *,
    adds: bool,
    added_scale: float = 1.0,
    frozen: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, `added` (if `adds`) and the weight (if it is trained).

    `total` and `rstd` are from the forward pass. The gradient of x overwrites `grad_total` if it is
    given. If the gradients of x and `added` are equal, they are one tensor.
    """
    rows, width = total.shape
    dtype = element(grad_normed)
    is_branch = _require_norm(total, None, scale, dtype)
    require_tensor("rstd", rstd, torch.float32, (rows,))
    require_tensor("grad_normed", grad_normed, dtype, total.shape)
    parts = None if frozen else torch.empty(-(-rows // SUM_ROWS), width)
    if is_branch:
        if adds or grad_total is not None:
            raise ValueError("the norm of a bf16 tensor has no sum")
        grad_x = torch.empty_like(total)
        tensors = (total, rstd, scale.weight, scale.offset, grad_normed, grad_x, parts)
        library.call_on(dtype, "branch_rms_norm_backward", *tensors, rows, width)
        return grad_x, None, None if parts is None else parts.sum(dim=0)
    require_tensor("grad_total", grad_total, torch.float32, total.shape)
    grad_x = torch.empty_like(total) if grad_total is None else grad_total
    is_same = dtype is torch.float32 and added_scale == 1
    grad_added = torch.empty(rows, width, dtype=dtype) if adds and not is_same else None
    grads = (grad_total, grad_normed, grad_x, grad_added, added_scale, parts, rows, width)
    inputs = (total, rstd, scale.weight, scale.offset)
    library.call_on(dtype, "rms_norm_backward", *inputs, *grads)
    if adds and is_same:
        grad_added = grad_x
    return grad_x, grad_added, None if parts is None else parts.sum(dim=0)


def rotate(
    library: Library, qkv: Tensor, rotation: Rotation, sizes: HeadSizes, *, back: bool
) -> None:
    """Rotate the queries and keys in qkv (N, H + 2 K, D) in place; `back` inverts the rotation."""
    _require_heads(qkv, sizes)
    rotation.require(sizes)
    angles = (rotation.cos, rotation.sin, -1.0 if back else 1.0)
    library.call_on(qkv.dtype, "rotate", qkv, *angles, *_numbers(qkv, sizes), rotation.pairs())


def norm_rotate_forward(
    library: Library, qkv: Tensor, scale: NormScale, rotation: Rotation | None, sizes: HeadSizes
) -> Tensor:
    """Return normed and rotated queries and keys, (N, H + K, D), in the dtype of qkv.

    Without a rotation, they are only normed.
    """
    _require_heads(qkv, sizes)
    is_joint = _require_head_norms(scale, sizes)
    heads = sizes.heads + sizes.key_heads
    qk = qkv.new_empty(len(qkv), heads, sizes.width)
    numbers = (scale.weight, int(is_joint), scale.offset, scale.eps)
    angles = _angles(rotation, sizes)
    last = (*_numbers(qkv, sizes), 0 if rotation is None else rotation.pairs())
    library.call_on(qkv.dtype, "norm_rotate_forward", qkv, *numbers, *angles, qk, *last)
    return qk


def norm_rotate_backward(
    library: Library,
    qkv: Tensor,
    scale: NormScale,
    rotation: Rotation | None,
    grad: Tensor,
    sizes: HeadSizes,
) -> Tensor:
    """Convert `grad`, with the shape of qkv, from output to input gradients in place.

    Return the gradient of the scale's weight.
    """
    _require_heads(qkv, sizes)
    require_tensor("grad", grad, qkv.dtype, qkv.shape)
    is_joint = _require_head_norms(scale, sizes)
    parts = torch.empty(-(-len(qkv) // SUM_ROWS), *scale.weight.shape)
    numbers = (scale.weight, int(is_joint), scale.offset, scale.eps)
    sizes_last = (*_numbers(qkv, sizes), 0 if rotation is None else rotation.pairs())
    tensors = (*_angles(rotation, sizes), grad, parts)
    library.call_on(qkv.dtype, "norm_rotate_backward", qkv, *numbers, *tensors, *sizes_last)
    return parts.sum(dim=0)


def gated_forward(library: Library, wide: Tensor, gate: Gate) -> Tensor:
    """Return activation(gate) * up (N, I) for `wide` (N, 2 I), the columns of gate and up."""
    require_tensor("wide", wide, element(wide))
    rows, width = wide.shape
    y = wide.new_empty(rows, width // 2)
    is_gelu = int(gate == "gelu_tanh")
    library.call_on(wide.dtype, "gated_forward", wide, y, is_gelu, rows, width // 2)
    return y


def gated_backward(library: Library, wide: Tensor, grad: Tensor, gate: Gate) -> Tensor:
    """Return the gradient of `wide`; overwrite the output's gradient `grad` with the output."""
    require_tensor("wide", wide, element(wide))
    rows, width = wide.shape
    require_tensor("grad", grad, wide.dtype, (rows, width // 2))
    grad_wide = torch.empty_like(wide)
    is_gelu = int(gate == "gelu_tanh")
    library.call_on(wide.dtype, "gated_backward", wide, grad, grad_wide, is_gelu, rows, width // 2)
    return grad_wide


def _require_norm(x: Tensor, added: Tensor | None, scale: NormScale, dtype: torch.dtype) -> bool:
    """Raise ValueError for tensors that do not fit each other; return whether x is bf16."""
    is_bf16 = x.dtype is torch.bfloat16
    require_tensor("x", x, dtype if is_bf16 else torch.float32)
    if is_bf16 and added is not None:
        raise ValueError("a sum's first term must be fp32")
    require_tensor("added", added, dtype, x.shape)
    require_tensor("weight", scale.weight, torch.float32, (x.shape[1],))
    return is_bf16


def _require_heads(qkv: Tensor, sizes: HeadSizes) -> None:
    rows = len(qkv)
    heads = sizes.heads + 2 * sizes.key_heads
    require_tensor("qkv", qkv, element(qkv), (rows, heads, sizes.width))
    if sizes.width % 2 or sizes.width > LONGEST_HEAD or rows % sizes.length:
        raise ValueError(
            f"{sizes} with {rows} tokens: the width must be even and at most {LONGEST_HEAD}, and "
            "the length must divide the tokens"
        )


def _require_head_norms(scale: NormScale, sizes: HeadSizes) -> bool:
    """Raise ValueError for a wrong weight; return whether all heads are normed together."""
    is_joint = scale.weight.dim() == 1
    joint, single = ((sizes.heads + sizes.key_heads) * sizes.width,), (2, sizes.width)
    require_tensor("weight", scale.weight, torch.float32, joint if is_joint else single)
    return is_joint


def _angles(rotation: Rotation | None, sizes: HeadSizes) -> tuple[Tensor | None, Tensor | None]:
    if rotation is None:
        return None, None
    rotation.require(sizes)
    return rotation.cos, rotation.sin


def _numbers(qkv: Tensor, sizes: HeadSizes) -> tuple[int, ...]:
    return len(qkv), sizes.length, sizes.heads, sizes.key_heads, sizes.width
