"""Linears and attention as separate autograd functions, for layers of an unusual form.

For usual layers, `decoder_layers` computes linears, norms, rotation and attention in one function.
Shapes: B batch, T tokens, H query heads, K key heads, D head width, N = B x T.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from payload.kernels.library import Library
from payload.kernels.linears import Grads, LayerContext, Linears, Projection, join


def linears(x: Tensor, projections: tuple[Projection, ...], context: LayerContext) -> Tensor:
    """Return the outputs of the `projections` for x (N, I), side by side."""
    layers = join(projections, context)
    return cast(Tensor, _Linears.apply(x, layers, *layers.parameters))


def grouped_attention(
    qkv: Tensor, *, key_heads: int, scale: float, starts: Tensor | None, context: LayerContext
) -> Tensor:
    """Return causal attention (B, T, H, D) of qkv (B, T, H + 2 K, D).

    A token attends to the tokens from `starts` (B, T) up to itself; None = from the first token.
    """
    made = _Attention.apply(qkv, key_heads, scale, starts, context.library)
    return cast(Tensor, made)


def contiguous_gradient(x: Tensor) -> Tensor:
    """Return x. In the backward pass, its gradient is made contiguous for the kernel that computed
    x."""
    return cast(Tensor, _ContiguousGradient.apply(x))


class _Linears(torch.autograd.Function):
    """Computes linears with the same input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Linears, *parameters: Tensor | None) -> Tensor:
        result, kept = layers.forward(x)
        ctx.save_for_backward(x if layers.keeps_input else None, *kept)
        ctx.layers = layers
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        x, *kept = ctx.saved_tensors
        grad, needs_x = grad.contiguous(), ctx.needs_input_grad[0]
        grad_x, grad_low = ctx.layers.input_gradient(grad, tuple(kept), needed=needs_x)
        found = ctx.layers.backward(grad, x, tuple(kept), grad_low)
        return grad_x if needs_x else None, None, *found


class _Attention(torch.autograd.Function):
    """Computes causal attention."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        key_heads: int,
        scale: float,
        starts: Tensor | None,
        library: Library,
    ) -> Tensor:
        options: dict[str, Any] = {"key_heads": key_heads, "scale": scale, "starts": starts}
        mixed, log_sums = library.grouped_attention_forward(qkv, **options)
        ctx.save_for_backward(qkv, mixed, log_sums)
        ctx.library, ctx.options = library, options
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        qkv, mixed, log_sums = ctx.saved_tensors
        found = ctx.library.grouped_attention_backward(
            qkv, mixed, log_sums, grad.contiguous(), **ctx.options
        )
        return found, None, None, None, None


class _ContiguousGradient(torch.autograd.Function):
    """Computes the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()
