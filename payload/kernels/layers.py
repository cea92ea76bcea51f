"""Layers of GPT-2, as autograd functions over the kernels.

The residual stream and all sums are fp32. Matmuls and the tensors between them are bf16 as with
autocast, or fp32, but with fewer passes over memory.

Shapes: B batch, T tokens, C width, H heads, N = B x T.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from payload.kernels.library import Library
from payload.kernels.linears import Grads, LayerContext, Linears, Projection, join


def add_norm(
    x: Tensor, added: Tensor | None, norm: nn.LayerNorm, context: LayerContext
) -> tuple[Tensor, Tensor]:
    """Return the residual sum x + added (N, C) in fp32, and its layer norm in `context.dtype`."""
    made = _AddNorm.apply(x, added, norm.weight, norm.bias, norm.eps, context)
    return cast("tuple[Tensor, Tensor]", made)


def attention(
    x: Tensor,
    qkv: Projection,
    out: Projection,
    heads: tuple[int, int, int],
    starts: Tensor | None,
    context: LayerContext,
) -> Tensor:
    """Return causal self-attention of x (N, C); `heads` is (B, T, H), `qkv` is (3 C, C).

    `starts` (B, T) has the index of the first token that each token attends to; None = 0.
    """
    layers = tuple(join((each,), context, keeps_copies=True) for each in (qkv, out))
    parameters = (*layers[0].parameters, *layers[1].parameters)
    made = _Attention.apply(x, *layers, heads, starts, context.library, *parameters)
    return cast(Tensor, made)


def mlp(x: Tensor, up: Projection, down: Projection, context: LayerContext) -> Tensor:
    """Return `down(gelu(up(x)))` for x (N, C), with the tanh form of GELU."""
    layers = tuple(join((each,), context, keeps_copies=True) for each in (up, down))
    parameters = (*layers[0].parameters, *layers[1].parameters)
    made = _Mlp.apply(x, *layers, context.library, *parameters)
    return cast(Tensor, made)


class _AddNorm(torch.autograd.Function):
    """Computes the residual sum and its layer norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        context: LayerContext,
    ) -> tuple[Tensor, Tensor]:
        library = context.library
        total, normed, mean, rstd = library.add_norm_forward(
            x, added, weight, bias, eps=eps, dtype=context.dtype
        )
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.library, ctx.adds, ctx.has_bias = library, added is not None, bias is not None
        ctx.set_materialize_grads(False)
        # Autograd requires a new tensor object for an output that equals an input.
        return total if added is not None else total.view_as(total), normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, grad_normed: Tensor) -> Grads:
        *saved, weight = ctx.saved_tensors
        grad_x, grad_added, grad_weight, grad_bias = ctx.library.add_norm_backward(
            tuple(saved), weight, grad_total, grad_normed, adds=ctx.adds
        )
        return grad_x, grad_added, grad_weight, grad_bias if ctx.has_bias else None, None, None


class _Attention(torch.autograd.Function):
    """Computes the projection to queries, keys and values, attention, and the output projection."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        qkv_layer: Linears,
        out_layer: Linears,
        heads: tuple[int, int, int],
        starts: Tensor | None,
        library: Library,
        *parameters: Tensor | None,
    ) -> Tensor:
        batch, length, head_count = heads
        made, kept_in = qkv_layer.forward(x)
        qkv = made.view(batch, length, 3, head_count, -1)
        mixed, log_sums = library.attention_forward(qkv, starts=starts)
        result, kept_out = out_layer.forward(mixed.view(len(x), -1))
        kept = x if qkv_layer.keeps_input else None
        ctx.save_for_backward(kept, qkv, mixed, log_sums, *kept_in, *kept_out)
        ctx.layers, ctx.library, ctx.starts = (qkv_layer, out_layer), library, starts
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        x, qkv, mixed, log_sums, *kept = ctx.saved_tensors
        kept_in, kept_out = kept[:2], kept[2:]
        qkv_layer, out_layer = ctx.layers
        grad_mixed, grad_low = out_layer.input_gradient(grad, kept_out)
        out_grads = out_layer.backward(grad, mixed.view_as(grad_mixed), kept_out, grad_low)
        grad_qkv = ctx.library.attention_backward(
            qkv, mixed, log_sums, grad_mixed.view_as(mixed), starts=ctx.starts
        )
        grad_in = grad_qkv.view(len(grad), -1)
        needs_x = ctx.needs_input_grad[0]
        grad_x, grad_low = qkv_layer.input_gradient(grad_in, kept_in, needed=needs_x)
        in_grads = qkv_layer.backward(grad_in, x, kept_in, grad_low)
        return grad_x if needs_x else None, None, None, None, None, None, *in_grads, *out_grads


class _Mlp(torch.autograd.Function):
    """Computes two matmuls with GELU in between; backward recomputes the output of GELU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up_layer: Linears,
        down_layer: Linears,
        library: Library,
        *parameters: Tensor | None,
    ) -> Tensor:
        wide, kept_up = up_layer.forward(x)
        result, kept_down = down_layer.forward(library.gelu_forward(wide))
        ctx.save_for_backward(x if up_layer.keeps_input else None, wide, *kept_up, *kept_down)
        ctx.layers, ctx.library = (up_layer, down_layer), library
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        x, wide, *kept = ctx.saved_tensors
        kept_up, kept_down = kept[:2], kept[2:]
        up_layer, down_layer = ctx.layers
        grad_wide, grad_low = down_layer.input_gradient(grad, kept_down)
        gelu = ctx.library.gelu_backward(wide, grad_wide)
        down_grads = down_layer.backward(grad, gelu, kept_down, grad_low)
        needs_x = ctx.needs_input_grad[0]
        grad_x, grad_low = up_layer.input_gradient(grad_wide, kept_up, needed=needs_x)
        up_grads = up_layer.backward(grad_wide, x, kept_up, grad_low)
        return grad_x if needs_x else None, None, None, None, *up_grads, *down_grads
