"""Computes weight gradients directly in their final memory, or adds to the values there.

Autograd allocates every gradient as a new tensor and adds it afterwards. For large weights, this is
an extra pass over memory in each micro-batch and an extra copy for the exchange between ranks. A
backward function that has added the gradient itself returns None. Hooks on the weight's node in
autograd's graph still run, and find the sum in `weight.grad`. Hooks on the weight itself do not
run.
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
    """Computes the gradients of the layers' weights into their final memory."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.place: Callable[[Tensor], Tensor] = _new_gradient
        """Returns the memory for a weight's gradient. A gradient exchange replaces this
        function."""

    def add(self, weight: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add the gradient of `weight` (R, C) in x (N, C) @ weight.T, from `grad` (N, R).

        `x` and `grad`, the output's gradient, are both bf16 or both fp32.
        """
        total, adds = self._total(weight)
        self.compute(grad, x, total, add=adds)

    def compute(self, grad: Tensor, x: Tensor, total: Tensor, *, add: bool) -> None:
        """Compute the transpose of `grad` (N, R) times x (N, C) into `total`.

        With `add`, the product is added to `total`.
        """
        if x.dtype is not torch.float32:
            self._library.weight_gradient(grad, x, total, add=add)
        elif add:
            total.addmm_(grad.t(), x)
        else:
            torch.mm(grad.t(), x, out=total)

    def add_stack(self, stack: Tensor, grads: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        """Add the gradient of a stack of weights (E, R, C). Each weight belongs to some rows of the
        input.

        `counts` has the rows of `grads` (M, R) and of `x` (M, C) that belong to each weight.
        """
        total, adds = self._total(stack)
        rows = list(counts)
        parts = zip(total, torch.split(grads, rows), torch.split(x, rows), strict=True)
        for matrix, grad, some in parts:
            if len(some):
                self._library.weight_gradient(grad, some, matrix, add=adds)
            elif not adds:
                matrix.zero_()

    def add_joined(self, weights: Sequence[Tensor], grad: Tensor, x: Tensor) -> None:
        """Add the gradients of several weights with the same input `x`. `grad` has the columns of
        all weights."""
        if x.dtype is torch.float32:
            parts = torch.split(grad, [len(each) for each in weights], dim=1)
            for weight, part in zip(weights, parts, strict=True):
                self.add(weight, part, x)
            return
        self._library.weight_gradients(grad, x, [self._total(each) for each in weights])

    def add_made(self, weight: Tensor, grad: Tensor, scale: float) -> None:
        """Add `grad` (fp32, of the weight's shape) times `scale` to the weight's gradient."""
        total, adds = self._total(weight)
        if adds:
            total.add_(grad, alpha=scale)
        else:
            torch.mul(grad, scale, out=total)

    def _total(self, weight: Tensor) -> tuple[Tensor, bool]:
        """Return the memory of a weight's gradient, and whether an earlier gradient is in it."""
        if weight.grad is not None:
            return _widened(weight, weight.grad), True
        weight.grad = self.place(weight)
        return weight.grad, False


class TokenGradient:
    """The gradient of the token embedding (V, C) that is also the output head.

    The gradient has two parts, which are computed far apart in the backward pass. This class adds
    them.
    """

    def __init__(self, library: Library | None) -> None:
        self.library = library
        self._lent: Tensor | None = None
        self._spare: Tensor | None = None

    def memory(self, weight: Tensor, elements: int) -> Tensor:
        """Return bf16 memory for a micro-batch's logits. The gradient of the logits overwrites
        them.

        The previous step's memory is reused if possible. When this large block was freed and
        allocated again, other tensors fragmented it, and the second step of a model of Qwen3-0.6B's
        shape needed more memory than the first.
        """
        spare, self._spare = self._spare, None
        if spare is None or len(spare) != elements or weight.grad is not None:
            spare = torch.empty(elements, dtype=torch.bfloat16)
        self._lent = spare
        return spare

    def updated(self) -> None:
        """Keep the gradient's memory for the next step; the update no longer needs it."""
        self._spare, self._lent = self._lent, None

    def head_gradient(self, weight: Tensor) -> Tensor:
        """Return memory for the head's gradient, which is then passed to `add_head`."""
        return _new_gradient(weight)

    def add_head(self, weight: Tensor, gradient: Tensor, scale: float) -> None:
        """Add the head's part, which comes first: `gradient` times `scale`; reuses `gradient`."""
        if weight.grad is None:
            made = gradient.mul_(scale) if scale != 1 else gradient
            weight.grad = made.to(gradient_dtype(weight) or made.dtype)
        else:
            _widened(weight, weight.grad).add_(gradient, alpha=scale)

    def add_rows(self, weight: Tensor, indices: Tensor, rows: Tensor) -> None:
        """Add the embedding's part, which comes last: `rows` (N, C) at the `indices` (N,)."""
        if weight.grad is None:
            weight.grad = _new_gradient(weight).zero_()
        if weight.grad.dtype is torch.bfloat16:
            _add_rows_rounded(weight.grad, indices, rows, self.library)
        else:
            add_rows(weight.grad, indices, rows, self.library)


def gradient_dtype(weight: Tensor) -> torch.dtype | None:
    """Return the dtype of a weight's gradient; None = the dtype of the weight."""
    # torch 2.8, used by the extra `intel`, lacks this attribute.
    dtype: torch.dtype | None = getattr(weight, "grad_dtype", None)
    return dtype


def _new_gradient(weight: Tensor) -> Tensor:
    """Return memory for a weight's gradient, in the gradient's dtype."""
    return torch.empty_like(weight, dtype=gradient_dtype(weight))


def _widened(weight: Tensor, grad: Tensor) -> Tensor:
    """Return `weight.grad` ready for an addition: converted to fp32 if necessary."""
    if grad.dtype is torch.bfloat16:
        weight.grad = None
        weight.grad_dtype = weight.dtype
        grad = weight.grad = grad.to(weight.dtype)
    return grad


def _add_rows_rounded(
    total: Tensor, indices: Tensor, rows: Tensor, library: Library | None
) -> None:
    """Add rows to the bf16 rows of `total`: each sum is computed in fp32 and rounded once."""
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
    """Return the rows of `weight` (V, C) for tokens (B, T): (B, T, C)."""
    return cast(Tensor, _Embed.apply(weight, tokens, gradient))


class _Embed(torch.autograd.Function):
    """Looks up rows of the weight; backward adds their gradient to the head's."""

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
