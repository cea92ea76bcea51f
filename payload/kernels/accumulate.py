"""Gradients of weights, made where they are wanted and added where those of earlier passes lie.

Autograd takes every gradient as a tensor of its own and adds it afterwards: for weights, whose
gradients are as large as they are, another pass over memory for each pass over the data, and one
more to where ranks exchange it. A backward function that has seen to it returns None; hooks of the
weight's node in autograd's graph run all the same and find the sum in `weight.grad` (those of the
weight itself do not).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from payload.kernels.library import Library


class WeightGradients:
    """Gradients of the layers' weights."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.place: Callable[[Tensor], Tensor] = _new_gradient
        """Where a weight's is made; an exchange between ranks puts its own here."""

    def add(self, weight: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add the gradient of `weight` (R, C) in x (N, C) @ weight.T, from `grad` (N, R).

        `x` and `grad`, the result's gradient, are bf16.
        """
        total, adds = self._total(weight)
        self._library.weight_gradient(grad, x, total, add=adds)

    def add_joined(self, weights: Sequence[Tensor], grad: Tensor, x: Tensor) -> None:
        """Add those of several weights of one x; the columns of `grad` are each one's in turn."""
        self._library.weight_gradients(grad, x, [self._total(each) for each in weights])

    def add_made(self, weight: Tensor, grad: Tensor, scale: float) -> None:
        """Add `grad` times `scale`; `grad`, of the weight's shape in fp32, is made already."""
        total, adds = self._total(weight)
        if adds:
            total.add_(grad, alpha=scale)
        else:
            torch.mul(grad, scale, out=total)

    def _total(self, weight: Tensor) -> tuple[Tensor, bool]:
        """Return where a weight's gradient is made, and whether an earlier pass's is there."""
        if weight.grad is not None:
            return _widened(weight, weight.grad), True
        weight.grad = self.place(weight)
        return weight.grad, False


class TokenGradient:
    """The gradient of the token embedding (V, C), which is the output head as well.

    It comes in two parts, far from each other in the backward pass; here they are added up.
    """

    def __init__(self, library: Library | None) -> None:
        self.library = library
        self._lent: Tensor | None = None
        self._spare: Tensor | None = None

    def memory(self, weight: Tensor, elements: int) -> Tensor:
        """Return bf16 memory for the logits of a pass, in which their gradient is made.

        It is that of the step before, where there was one. Freed and taken again, so large a piece
        found others in its place, and the second step of Qwen3-0.6B's shape took more than the
        first.
        """
        spare, self._spare = self._spare, None
        if spare is None or len(spare) != elements or weight.grad is not None:
            spare = torch.empty(elements, dtype=torch.bfloat16)
        self._lent = spare
        return spare

    def updated(self) -> None:
        """Keep the memory of the gradient, which the update has read, for the next step."""
        self._spare, self._lent = self._lent, None

    def head_place(self, weight: Tensor) -> Tensor:
        """Where the head's part is to be made, for `add_head`."""
        return _new_gradient(weight)

    def add_head(self, weight: Tensor, gradient: Tensor, scale: float) -> None:
        """The head's part, which comes first: `gradient`, which is given away, times `scale`."""
        if weight.grad is None:
            made = gradient.mul_(scale) if scale != 1 else gradient
            weight.grad = made.to(gradient_dtype(weight) or made.dtype)
        else:
            _widened(weight, weight.grad).add_(gradient, alpha=scale)

    def add_rows(self, weight: Tensor, indices: Tensor, rows: Tensor) -> None:
        """The embedding's part, which comes last: `rows` (N, C) to the rows at `indices` (N,)."""
        if weight.grad is None:
            weight.grad = _new_gradient(weight).zero_()
        if weight.grad.dtype is torch.bfloat16:
            _add_rows_rounded(weight.grad, indices, rows, self.library)
        else:
            add_rows(weight.grad, indices, rows, self.library)


def gradient_dtype(weight: Tensor) -> torch.dtype | None:
    """Return the dtype that a weight's gradient is kept in; None = the weight's own."""
    # torch 2.8, which the extra `intel` has, knows no such attribute.
    dtype: torch.dtype | None = getattr(weight, "grad_dtype", None)
    return dtype


def _new_gradient(weight: Tensor) -> Tensor:
    """Return memory for a weight's gradient, in the dtype that it is kept in."""
    return torch.empty_like(weight, dtype=gradient_dtype(weight))


def _widened(weight: Tensor, grad: Tensor) -> Tensor:
    """Return `weight.grad`, to which another one is added: in fp32, from now on."""
    if grad.dtype is torch.bfloat16:
        weight.grad = None
        weight.grad_dtype = weight.dtype
        grad = weight.grad = grad.to(weight.dtype)
    return grad


def _add_rows_rounded(
    total: Tensor, indices: Tensor, rows: Tensor, library: Library | None
) -> None:
    """Add rows to those of `total`, bf16: each sum is made in fp32 and rounded once."""
    found, places = torch.unique(indices, return_inverse=True)
    sums = total[found].float()
    add_rows(sums, places, rows, library)
    total[found] = sums.to(total.dtype)


def add_rows(total: Tensor, indices: Tensor, rows: Tensor, library: Library | None) -> None:
    """Add `rows` (N, C) to the rows of `total` (V, C) at `indices` (N,), in their order."""
    if library is None:
        total.index_add_(0, indices, rows)
    else:
        library.add_rows(total, indices, rows)


def embed(weight: Tensor, tokens: Tensor, gradient: TokenGradient) -> Tensor:
    """Rows of `weight` (V, C) for tokens (B, T): (B, T, C)."""
    return cast(Tensor, _Embed.apply(weight, tokens, gradient))


class _Embed(torch.autograd.Function):
    """Rows of the weight, whose gradient goes where the head's went before."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, gradient: TokenGradient) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.gradient = weight, gradient
        return functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        ctx.gradient.add_rows(ctx.weight, tokens.flatten(), grad.flatten(0, 1))
        return None, None, None
