"""The output head and its loss in chunks of tokens, so that all logits never exist together.

It is used on devices without this project's kernels. Shapes: B batch, T tokens, C width, V
vocabulary, N tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from payload.formats.data_folder import IGNORED_TARGET
from payload.models.spec import logits_tokens
from payload.train.models.autocast import matmul_dtype

OfLogits = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""See `_losses_and_gradient`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss:
    """Computes head and loss in chunks of tokens."""

    compiles: bool = False
    """True if torch.compile compiles what is computed from the logits."""

    def mean_loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over targets (B, T), a scalar, from hidden (B, T, C).

        The forward pass also computes the gradients: each chunk's logits are computed only once.
        """
        if torch.is_grad_enabled():
            function: Any = _MeanLoss.apply
            of_logits = _compiled() if self.compiles else _losses_and_gradient
            found: Tensor = function(hidden, weight, targets, of_logits)
            return found
        return self.token_losses(hidden, weight, targets).sum() / _count(targets)

    def token_losses(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every target, (B, T) fp32; 0 for ignored targets."""

        def logits(rows: Tensor) -> Tensor:
            return functional.linear(rows, weight)

        return losses_in_chunks(hidden, targets, logits=logits, vocab_size=weight.shape[0])


def losses_in_chunks(
    hidden: Tensor, targets: Tensor, *, logits: Callable[[Tensor], Tensor], vocab_size: int
) -> Tensor:
    """Return the cross entropy of every target, (B, T) fp32; 0 for ignored targets.

    `logits` maps hidden states (N, C) to logits (N, V). The backward pass computes a chunk's logits
    again.
    """

    def losses(rows: Tensor, chunk_targets: Tensor) -> Tensor:
        return functional.cross_entropy(
            logits(rows).float(), chunk_targets, ignore_index=IGNORED_TARGET, reduction="none"
        )

    found = [
        checkpoint(losses, rows, some, use_reentrant=False)
        for rows, some in _chunks(hidden, targets, vocab_size=vocab_size)
    ]
    return torch.cat(found).view_as(targets)


class _MeanLoss(torch.autograd.Function):
    """`ChunkedLoss.mean_loss` with gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, of_logits: OfLogits
    ) -> Tensor:
        dtype = matmul_dtype(hidden)
        matrix = weight.to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        of_hidden: list[Tensor] = []
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        for rows, chunk_targets in _chunks(hidden.to(dtype), targets, vocab_size=len(weight)):
            losses, gradient = of_logits(rows @ matrix.T, chunk_targets)
            total += losses.sum()
            of_hidden.append(gradient @ matrix)
            if of_weight is not None:
                of_weight += gradient.T @ rows
        count = _count(targets)
        ctx.save_for_backward(torch.cat(of_hidden).view_as(hidden), of_weight, count)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        of_hidden, of_weight, count = ctx.saved_tensors
        factor = outer / count
        first, second = ctx.dtypes
        # In place: this runs once, and the head's gradient is large.
        weighted = None if of_weight is None else of_weight.mul_(factor).to(second)
        return of_hidden.mul_(factor).to(first), weighted, None, None


def _losses_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses (N,) of targets (N,), and the gradient of their sum for logits (N, V)."""
    wide = logits.float()
    normaliser = wide.logsumexp(1)
    is_target = targets != IGNORED_TARGET
    places, columns = torch.arange(len(targets), device=targets.device), targets.clamp_min(0)
    losses = torch.where(is_target, normaliser - wide[places, columns], 0.0)
    gradient = (wide - normaliser.unsqueeze(1)).exp_()
    gradient[places, columns] -= 1.0
    gradient *= is_target.unsqueeze(1)
    return losses, gradient.to(logits.dtype)


@cache
def _compiled() -> OfLogits:
    return torch.compile(_losses_and_gradient)


def _chunks(hidden: Tensor, targets: Tensor, *, vocab_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    size = logits_tokens(vocab_size)
    rows = torch.split(hidden.flatten(0, 1), size)
    return zip(rows, torch.split(targets.flatten(), size), strict=True)


def _count(targets: Tensor) -> Tensor:
    """Return the number of targets that are not ignored."""
    return (targets != IGNORED_TARGET).sum()
