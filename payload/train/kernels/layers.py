"""Layers of a transformer in bf16, as autograd functions over the kernels.

The residual stream is fp32, matmuls and what is between them are bf16, sums are fp32: what
autocast does, in fewer passes. B batch, T tokens, C width, H heads, N = B x T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from payload.train.kernels.accumulate import WeightGradients
from payload.train.kernels.library import Library
from payload.train.kernels.low_precision import Bf16Copies

_Grads = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What the layers' functions need."""

    library: Library
    copies: Bf16Copies
    gradients: WeightGradients


def add_norm(
    x: Tensor, added: Tensor | None, norm: nn.LayerNorm, context: LayerContext
) -> tuple[Tensor, Tensor]:
    """Return the residual sum x + added (N, C) fp32, and its layer norm, bf16."""
    made = _AddNorm.apply(x, added, norm.weight, norm.bias, norm.eps, context.library)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", made)


def attention(
    x: Tensor,
    qkv: nn.Linear,
    out: nn.Linear,
    heads: tuple[int, int, int],
    starts: Tensor | None,
    context: LayerContext,
) -> Tensor:
    """Return causal self-attention of x (N, C); `heads` is (B, T, H), `qkv` is (3 C, C).

    `starts` (B, T) are the first tokens that each one attends to; None = all before it.
    """
    weights = _weights(qkv, out)
    made = _Attention.apply(x, *weights, *map(context.copies.of, weights), heads, starts, context)  # type: ignore[no-untyped-call]
    return cast(Tensor, made)


def mlp(x: Tensor, up: nn.Linear, down: nn.Linear, context: LayerContext) -> Tensor:
    """Return `down` of GELU (its tanh form) of `up` of x (N, C)."""
    weights = _weights(up, down)
    made = _Mlp.apply(x, *weights, *map(context.copies.of, weights), context)  # type: ignore[no-untyped-call]
    return cast(Tensor, made)


def _weights(first: nn.Linear, second: nn.Linear) -> tuple[Tensor | None, ...]:
    return first.weight, first.bias, second.weight, second.bias


class _AddNorm(torch.autograd.Function):
    """The residual sum, and its layer norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        library: Library,
    ) -> tuple[Tensor, Tensor]:
        total, normed, mean, rstd = library.add_norm_forward(x, added, weight, bias, eps=eps)
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.library, ctx.adds, ctx.has_bias = library, added is not None, bias is not None
        ctx.set_materialize_grads(False)
        # Autograd wants an output that is an input to be another tensor.
        return total if added is not None else total.view_as(total), normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, grad_normed: Tensor) -> _Grads:
        *saved, weight = ctx.saved_tensors
        grad_x, grad_added, grad_weight, grad_bias = ctx.library.add_norm_backward(
            tuple(saved), weight, grad_total, grad_normed, adds=ctx.adds
        )
        return grad_x, grad_added, grad_weight, grad_bias if ctx.has_bias else None, None, None


class _Attention(torch.autograd.Function):
    """Queries, keys and values, attention, and the projection back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_in: Tensor,
        bias_in: Tensor | None,
        weight_out: Tensor,
        bias_out: Tensor | None,
        cast_in: Tensor,
        cast_bias_in: Tensor | None,
        cast_out: Tensor,
        cast_bias_out: Tensor | None,
        heads: tuple[int, int, int],
        starts: Tensor | None,
        context: LayerContext,
    ) -> Tensor:
        batch, length, head_count = heads
        qkv = functional.linear(x, cast_in, cast_bias_in)
        qkv = qkv.view(batch, length, 3, head_count, -1)
        mixed, log_sums = context.library.attention_forward(qkv, starts=starts)
        ctx.save_for_backward(x, qkv, mixed, log_sums, cast_in, cast_out)
        ctx.context, ctx.has_bias, ctx.starts = context, bias_in is not None, starts
        ctx.weights = (weight_in, weight_out)
        return functional.linear(mixed.view_as(x), cast_out, cast_bias_out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> _Grads:
        x, qkv, mixed, log_sums, cast_in, cast_out = ctx.saved_tensors
        weight_in, weight_out = ctx.weights
        ctx.context.gradients.add(weight_out, grad, mixed.view_as(x))
        grad_mixed = torch.mm(grad, cast_out).view_as(mixed)
        grad_qkv = ctx.context.library.attention_backward(
            qkv, mixed, log_sums, grad_mixed, starts=ctx.starts
        )
        grad_in = grad_qkv.view(len(x), -1)
        biases = _bias_gradients(ctx, grad_in, grad)
        ctx.context.gradients.add(weight_in, grad_in, x)
        weights = (None, biases[0], None, biases[1])
        return torch.mm(grad_in, cast_in), *weights, None, None, None, None, None, None, None


class _Mlp(torch.autograd.Function):
    """Two products with GELU between; GELU's output is made again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_up: Tensor,
        bias_up: Tensor | None,
        weight_down: Tensor,
        bias_down: Tensor | None,
        cast_up: Tensor,
        cast_bias_up: Tensor | None,
        cast_down: Tensor,
        cast_bias_down: Tensor | None,
        context: LayerContext,
    ) -> Tensor:
        wide = functional.linear(x, cast_up, cast_bias_up)
        ctx.save_for_backward(x, wide, cast_up, cast_down)
        ctx.context, ctx.has_bias = context, bias_up is not None
        ctx.weights = (weight_up, weight_down)
        return functional.linear(context.library.gelu_forward(wide), cast_down, cast_bias_down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> _Grads:
        x, wide, cast_up, cast_down = ctx.saved_tensors
        grad_wide = torch.mm(grad, cast_down)
        gelu = ctx.context.library.gelu_backward(wide, grad_wide)
        weight_up, weight_down = ctx.weights
        ctx.context.gradients.add(weight_down, grad, gelu)
        biases = _bias_gradients(ctx, grad_wide, grad)
        ctx.context.gradients.add(weight_up, grad_wide, x)
        weights = (None, biases[0], None, biases[1])
        return torch.mm(grad_wide, cast_up), *weights, None, None, None, None, None


def _bias_gradients(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if not ctx.has_bias:
        return None, None
    library: Library = ctx.context.library
    return library.sum_rows(first), library.sum_rows(second)
