"""Gradients of weights, added where those of earlier passes lie.

Autograd takes every gradient as a tensor of its own and adds it afterwards: for weights, whose
gradients are as large as they are, another pass over memory for each pass over the data. A backward
function that has added returns None; hooks of the weight's node in autograd's graph run all the
same and find the sum in `weight.grad` (those of the weight itself do not).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from payload.train.kernels.library import Library


def product_gradient(weight: Tensor, product: Tensor, library: Library) -> Tensor | None:
    """Add `product`, bf16, to the gradient of `weight`; the first one is left to autograd."""
    if weight.grad is None:
        return product.float()
    library.widen_add(product, weight.grad)
    return None


def add_scaled(weight: Tensor, gradient: Tensor, scale: float) -> None:
    """`gradient`, which is given away, times `scale` to the gradient of `weight`."""
    if weight.grad is None:
        weight.grad = gradient.mul_(scale) if scale != 1 else gradient
    else:
        weight.grad.add_(gradient, alpha=scale)


def embed(weight: Tensor, tokens: Tensor, library: Library | None) -> Tensor:
    """Rows of `weight` (V, C) for tokens (B, T): (B, T, C)."""
    return cast(Tensor, _Embed.apply(weight, tokens, library))  # type: ignore[no-untyped-call]


class _Embed(torch.autograd.Function):
    """The head's backward pass, which comes before, has left the same weight's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, library: Library | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.library = weight, library
        return functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        weight, library = ctx.weight, ctx.library
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        rows, indices = grad.flatten(0, 1), tokens.flatten()
        if library is None:
            weight.grad.index_add_(0, indices, rows)
        else:
            library.add_rows(weight.grad, indices, rows)
        return None, None, None
