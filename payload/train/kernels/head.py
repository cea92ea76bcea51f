"""The vocabulary head and its loss, without a second copy of the logits.

One buffer of logits in the products' dtype serves chunk after chunk of tokens; each chunk's logits
are overwritten by their gradient, from which both products of the backward pass are made at once.
N tokens, C width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from payload.data.blocks import IGNORED_TARGET
from payload.model_shape import LOGITS_TOKENS
from payload.train.kernels.accumulate import TokenGradient
from payload.train.kernels.library import Library

# Rows of which the pure torch pass holds fp32 copies at once.
_ROWS = 128
# Rows of logits begin at cache lines: products are faster than with GPT-2's odd 50257.
_ALIGNED = 64
# Vocabulary entries of one product. With all 50257 at once the logits' product ran at 0.27 TFLOP/s,
# so at 0.42, where square products of size 1024 have 0.43; the weight's gradient at 0.29 from rows
# that lie 100 kB apart, at 0.43 from a copy (two AVX-512 cores, 1024 tokens, 2026-11-21).
_SLICE = 2048


def mean_loss(
    hidden: Tensor, weight: Tensor, cast_weight: Tensor, targets: Tensor, gradient: TokenGradient
) -> Tensor:
    """Mean cross entropy of `hidden` (N, C) against `targets` (N,), a scalar fp32.

    `cast_weight` is `weight` (V, C) in the dtype of `hidden`, in which products are made.
    """
    loss = _MeanLoss.apply(hidden, weight, cast_weight, targets, gradient)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


def token_losses(
    hidden: Tensor, cast_weight: Tensor, targets: Tensor, library: Library | None
) -> Tensor:
    """Cross entropy of each target, (N,) fp32; 0 where it is `IGNORED_TARGET`. No gradients."""
    buffer = _buffer(hidden, vocabulary=cast_weight.shape[0])
    losses = torch.empty(len(targets))
    for start in range(0, len(targets), LOGITS_TOKENS):
        chunk = slice(start, start + LOGITS_TOKENS)
        logits = _logits(hidden[chunk], cast_weight, buffer)
        losses[chunk] = _cross_entropy(logits, targets[chunk], None, library)
    return losses


class _MeanLoss(torch.autograd.Function):
    """Gradients are made in the forward pass, where the logits are."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        cast_weight: Tensor,
        targets: Tensor,
        gradient: TokenGradient,
    ) -> Tensor:
        library = gradient.library
        count = int((targets != IGNORED_TARGET).sum())
        buffer = _buffer(hidden, vocabulary=weight.shape[0])
        losses = torch.empty(len(targets))
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.empty(weight.shape)
        for start in range(0, len(targets), LOGITS_TOKENS):
            chunk = slice(start, start + LOGITS_TOKENS)
            rows = hidden[chunk]
            logits = _logits(rows, cast_weight, buffer)
            losses[chunk] = _cross_entropy(logits, targets[chunk], 1 / max(count, 1), library)
            torch.mm(logits, cast_weight, out=grad_hidden[chunk])
            _add_weight_gradient(grad_weight, logits, rows, library, is_first=start == 0)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight, ctx.gradient = weight, gradient
        # Without a target the mean is 0 / 0, as it is in torch.
        return (losses.sum(dtype=torch.float64) / count).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = float(grad)
        # Made in the forward pass for this one backward pass, so they may be changed.
        ctx.gradient.add_head(ctx.weight, grad_weight, scale)
        if scale != 1:
            grad_hidden.mul_(scale)
        return grad_hidden, None, None, None, None


def _buffer(hidden: Tensor, *, vocabulary: int) -> Tensor:
    rows = min(len(hidden), LOGITS_TOKENS)
    stride = -(-vocabulary // _ALIGNED) * _ALIGNED
    return hidden.new_empty(rows, stride)[:, :vocabulary]


def _logits(rows: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    logits = buffer[: len(rows)]
    for start in range(0, len(weight), _SLICE):
        words = slice(start, start + _SLICE)
        torch.mm(rows, weight[words].t(), out=logits[:, words])
    return logits


def _add_weight_gradient(
    grad: Tensor, logits: Tensor, rows: Tensor, library: Library | None, *, is_first: bool
) -> None:
    for start in range(0, len(grad), _SLICE):
        words = slice(start, start + _SLICE)
        part = torch.mm(logits[:, words].contiguous().t(), rows)
        if is_first:
            grad[words].copy_(part)
        elif library is not None and part.dtype == torch.bfloat16:
            # torch takes three times as long to add numbers of two dtypes.
            library.widen_add(part, grad[words])
        else:
            grad[words].add_(part)


def _cross_entropy(
    logits: Tensor, targets: Tensor, grad_scale: float | None, library: Library | None
) -> Tensor:
    """Loss of each row, fp32; with a scale, `logits` become their gradient times it."""
    if library is not None:
        return library.cross_entropy(logits, targets, grad_scale=grad_scale)
    losses = torch.empty(len(targets))
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, start + _ROWS)
        values, wanted = logits[rows].float(), targets[rows].unsqueeze(1)
        is_ignored = wanted == IGNORED_TARGET
        wanted = wanted.masked_fill(is_ignored, 0)
        log_shares = values.log_softmax(dim=1)
        found = log_shares.gather(1, wanted).masked_fill(is_ignored, 0)
        losses[rows] = -found.squeeze(1)
        if grad_scale is not None:
            grad = log_shares.exp_()
            grad.scatter_add_(1, wanted, torch.full_like(found, -1))
            logits[rows] = grad.mul_(grad_scale).masked_fill_(is_ignored, 0)
    return losses
