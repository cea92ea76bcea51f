"""The output head and its loss with the vocabulary split over ranks.

As in `kernels.head`, tokens are processed in chunks, and the gradient replaces a chunk's logits
immediately. For the softmax over the whole vocabulary, the ranks exchange three numbers per token.
N tokens, C width, V vocabulary rows of all ranks, W vocabulary rows of this rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from payload.formats.data_folder import IGNORED_TARGET
from payload.models.spec import logits_tokens
from payload.train.models.split import TensorRanks, bounds


def mean_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, ranks: TensorRanks, *, vocab_rows: int
) -> Tensor:
    """Return the mean cross entropy of `hidden` (B, T, C) against `targets` (B, T) on each rank.

    `weight` (W, C) is this rank's part of a head of `vocab_rows` rows.
    """
    flat, kind = hidden.flatten(0, 1), hidden.device.type
    dtype = _matmul_dtype(hidden)
    with torch.autocast(kind, enabled=False):
        loss = _MeanLoss.apply(flat.to(dtype), weight, targets.flatten(), ranks, vocab_rows)
    return cast(Tensor, loss)


def token_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, ranks: TensorRanks, *, vocab_rows: int
) -> Tensor:
    """Return each target's cross entropy, (B, T) fp32; 0 for ignored targets. No gradients."""
    dtype, flat = _matmul_dtype(hidden), targets.flatten()
    with torch.autocast(hidden.device.type, enabled=False), torch.no_grad():
        rows, cast_weight = hidden.flatten(0, 1).to(dtype), weight.to(dtype)
        losses = [
            _chunk(rows[chunk], cast_weight, flat[chunk], ranks, vocab_rows)[0]
            for chunk in _chunks(len(flat), vocab_rows)
        ]
    return torch.cat(losses).view_as(targets) if losses else targets.float()


class _MeanLoss(torch.autograd.Function):
    """Computes gradients in the forward pass, while the logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ranks: TensorRanks,
        vocab_rows: int,
    ) -> Tensor:
        count = int((targets != IGNORED_TARGET).sum())
        cast_weight = weight.to(hidden.dtype)
        losses = torch.empty(len(targets), device=hidden.device)
        grad_hidden = torch.empty(hidden.shape, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, device=hidden.device)
        for chunk in _chunks(len(targets), vocab_rows):
            rows = hidden[chunk]
            losses[chunk], grad = _chunk(rows, cast_weight, targets[chunk], ranks, vocab_rows)
            grad = grad.div_(max(count, 1)).to(hidden.dtype)
            grad_hidden[chunk] = (grad @ cast_weight).float()
            grad_weight.add_(grad.t() @ rows)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.ranks, ctx.dtype = ranks, hidden.dtype
        # Without targets the loss is 0 / 0, as in torch.
        return (losses.sum(dtype=torch.float64) / count).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # Each rank has only the gradient through its own vocabulary rows.
        total = ctx.ranks.sum(grad_hidden).mul_(grad).to(ctx.dtype)
        return total, grad_weight.mul_(grad), None, None, None


def _chunk(
    rows: Tensor, weight: Tensor, targets: Tensor, ranks: TensorRanks, vocab_rows: int
) -> tuple[Tensor, Tensor]:
    """Return the losses (N,) of rows (N, C), and the gradient of the losses' sum, (N, W).

    The gradient is with respect to the logits.
    """
    start, end = bounds(vocab_rows, index=ranks.index, size=ranks.size)
    logits = (rows @ weight.t()).float()
    if end > start:
        highest = ranks.sum(logits.max(dim=1).values, dist.ReduceOp.MAX)
    else:
        lowest = torch.full((len(rows),), -torch.inf, device=rows.device)
        highest = ranks.sum(lowest, dist.ReduceOp.MAX)
    logits.sub_(highest.unsqueeze(1))
    is_ignored = targets == IGNORED_TARGET
    is_own = (targets >= start) & (targets < end)
    at = (targets - start).masked_fill(~is_own, 0).unsqueeze(1)
    found = torch.zeros(len(rows), device=rows.device)
    if end > start:
        found = logits.gather(1, at).squeeze(1).masked_fill(~is_own, 0)
    shares = logits.exp_()
    both = ranks.sum(torch.stack((shares.sum(dim=1), found)))
    total, found = both
    losses = (total.log() - found).masked_fill(is_ignored, 0)
    grad = shares.div_(total.unsqueeze(1))
    if end > start:
        grad.scatter_add_(1, at, -is_own.float().unsqueeze(1))
    return losses, grad.masked_fill_(is_ignored.unsqueeze(1), 0)


def _chunks(tokens: int, vocab_rows: int) -> list[slice]:
    """Return slices of tokens. The logits of each slice fit in memory."""
    size = logits_tokens(vocab_rows)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _matmul_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
