"""The output head and its loss, without a second copy of the logits.

One buffer of logits in the matmuls' dtype serves all chunks of tokens. The gradient of a chunk's
logits overwrites the logits. Both matmuls of the backward pass follow immediately, from this
gradient. The buffer consists of slices of the vocabulary, (N, W) each, in separate memory: a matmul
reads or writes one contiguous slice, while rows of the full vocabulary would be 100 kB apart.

Shapes: N tokens, C width, V vocabulary, W vocabulary rows of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from payload.formats.data_folder import IGNORED_TARGET
from payload.kernels.accumulate import TokenGradient, gradient_dtype
from payload.kernels.library import Library, Slices
from payload.models.spec import logits_tokens

# Number of rows that the pure torch version copies to fp32 at a time.
_ROWS = 128
# Vocabulary rows of one matmul. With all 50257 rows together, the matmul of the logits ran at 0.27
# TFLOP/s, in slices at 0.42; square matmuls of size 1024 run at 0.43 (two AVX-512 cores, 1024
# tokens, 2026-11-21).
SLICE = 2048
# Number of slices of logits that are copied before the weight's gradient overwrites them. They take
# 32 MB for 1024 tokens, and have enough rows for every thread.
_COPIED_SLICES = 8


def mean_loss(
    hidden: Tensor, weight: Tensor, cast_weight: Tensor, targets: Tensor, gradient: TokenGradient
) -> Tensor:
    """Return the mean cross entropy of `hidden` (N, C) against `targets` (N,), a scalar fp32.

    `cast_weight` is `weight` (V, C) in fp32 or in the dtype of `hidden`, which the matmuls use. If
    `cast_weight` is in fp32, each matmul rounds its slice of the weight.
    """
    loss = _MeanLoss.apply(hidden, weight, cast_weight, targets, gradient)
    return cast(Tensor, loss)


def token_losses(
    hidden: Tensor, cast_weight: Tensor, targets: Tensor, library: Library | None
) -> Tensor:
    """Return the cross entropy of each target, (N,) fp32; 0 for `IGNORED_TARGET`. No gradients.

    `trained_losses` has gradients.
    """
    vocabulary = len(cast_weight)
    buffer = _buffer(hidden, vocabulary=vocabulary)
    losses = torch.empty(len(targets))
    for chunk in _chunks(len(targets), vocabulary):
        logits = _logits(hidden[chunk], cast_weight, buffer)
        losses[chunk] = _cross_entropy(
            logits, targets[chunk], library, vocabulary=vocabulary, grad_scale=None
        )
    return losses


def trained_losses(
    hidden: Tensor, weight: Tensor, cast_weight: Tensor, targets: Tensor, gradient: TokenGradient
) -> Tensor:
    """Return `token_losses` with gradients, for a loss that depends on all tokens' losses."""
    losses = _TokenLosses.apply(hidden, weight, cast_weight, targets, gradient)
    return cast(Tensor, losses)


class _TokenLosses(torch.autograd.Function):
    """Recomputes the logits in the backward pass, when the gradient of each loss is known."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        cast_weight: Tensor,
        targets: Tensor,
        gradient: TokenGradient,
    ) -> Tensor:
        ctx.save_for_backward(hidden, cast_weight, targets)
        ctx.weight, ctx.gradient = weight, gradient
        return token_losses(hidden, cast_weight, targets, gradient.library)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, cast_weight, targets = ctx.saved_tensors
        weight, gradient = ctx.weight, ctx.gradient
        library, vocabulary = gradient.library, len(cast_weight)
        buffer = _buffer(hidden, vocabulary=vocabulary)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = _weight_gradient_buffer(weight, gradient, tokens=len(targets))
        for chunk in _chunks(len(targets), vocabulary):
            rows, scale = hidden[chunk], grad[chunk].unsqueeze(1)
            logits = _logits(rows, cast_weight, buffer)
            _cross_entropy(logits, targets[chunk], library, vocabulary=vocabulary, grad_scale=1.0)
            grad_hidden[chunk] = _hidden_gradient(logits, cast_weight, library) * scale
            if grad_weight is not None:
                scaled = (rows * scale).to(rows.dtype)
                _add_weight_gradient(
                    grad_weight, logits, scaled, library, is_first=chunk.start == 0
                )
        if grad_weight is not None:
            gradient.add_head(weight, grad_weight, 1.0)
        return grad_hidden, None, None, None, None


class _MeanLoss(torch.autograd.Function):
    """Computes gradients in the forward pass, while the logits exist."""

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
        if not any(ctx.needs_input_grad):
            return _mean(token_losses(hidden, cast_weight, targets, library), count)
        vocabulary = len(weight)
        grad_weight: Tensor | None
        if shares := _shares_memory(hidden, weight, library):
            grad_weight, buffer = _shared_memory(hidden, weight, gradient)
        else:
            buffer = _buffer(hidden, vocabulary=vocabulary)
            grad_weight = _weight_gradient_buffer(weight, gradient, tokens=len(targets))
        losses = torch.empty(len(targets))
        grad_hidden = torch.empty_like(hidden)
        for chunk in _chunks(len(targets), vocabulary):
            rows = hidden[chunk]
            logits = _logits(rows, cast_weight, buffer)
            losses[chunk] = _cross_entropy(
                logits,
                targets[chunk],
                library,
                vocabulary=vocabulary,
                grad_scale=1 / max(count, 1),
            )
            grad_hidden[chunk] = _hidden_gradient(logits, cast_weight, library)
            if grad_weight is None:
                continue
            if shares and library is not None:
                _overwrite_logits(grad_weight, logits, rows, library)
            else:
                _add_weight_gradient(grad_weight, logits, rows, library, is_first=chunk.start == 0)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight, ctx.gradient = weight, gradient
        return _mean(losses, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = float(grad)
        # These were computed in the forward pass only for this use, so they can be overwritten.
        if grad_weight is not None:
            ctx.gradient.add_head(ctx.weight, grad_weight, scale)
        if scale != 1:
            grad_hidden.mul_(scale)
        return grad_hidden, None, None, None, None


def _weight_gradient_buffer(
    weight: Tensor, gradient: TokenGradient, *, tokens: int
) -> Tensor | None:
    """Return memory for the weight's gradient, or None if the weight is frozen."""
    if not weight.requires_grad:
        return None
    place = gradient.head_gradient(weight)
    # A sum over several chunks is in fp32; `add_head` rounds it.
    adds_up = place.dtype is torch.bfloat16 and tokens > logits_tokens(len(weight))
    return torch.empty(weight.shape) if adds_up else place


def _chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Yield slices of tokens that are small enough for their logits to fit in the buffer."""
    size = logits_tokens(vocabulary)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _mean(losses: Tensor, count: int) -> Tensor:
    # Without targets, the mean is 0 / 0, as in torch.
    return (losses.sum(dtype=torch.float64) / count).float()


def _buffer(hidden: Tensor, *, vocabulary: int) -> list[Tensor]:
    rows = min(len(hidden), logits_tokens(vocabulary))
    # A slice has one row more than needed: if slices began at distances of a power of two, a row's
    # elements in all slices would compete for a few cache sets.
    buffer = [hidden.new_empty(rows + 1, SLICE) for _ in range(-(-vocabulary // SLICE))]
    _clear_end(buffer, vocabulary)
    return buffer


def _clear_end(buffer: Slices, vocabulary: int) -> None:
    # With AMX, oneDNN 3.12 reads full tiles of the left operand and multiplies the elements after
    # the end of its rows by zero, so these must be finite (maybe_pre_process_k_tail).
    if used := vocabulary % SLICE:
        buffer[-1][:, used:] = 0


def _shares_memory(hidden: Tensor, weight: Tensor, library: Library | None) -> bool:
    """Return whether the weight's gradient can share the logits' memory."""
    tokens, width = hidden.shape
    is_kept_in_bf16 = weight.requires_grad and gradient_dtype(weight) is torch.bfloat16
    fits = tokens <= min(width, logits_tokens(len(weight)))
    has_products = library is not None and library.has_products
    return is_kept_in_bf16 and hidden.dtype is torch.bfloat16 and has_products and fits


def _shared_memory(
    hidden: Tensor, weight: Tensor, gradient: TokenGradient
) -> tuple[Tensor, list[Tensor]]:
    """Return memory for the weight's gradient (V, C), and slices of logits in the same memory.

    Slice by slice, a part (W, C) of the gradient overwrites the slice's logits (N, W). This
    requires N <= C. Each slice has one row more than its part, for the reason in `_buffer`, so a
    part covers its own slice and the end of the previous slice.
    """
    tokens, width = hidden.shape
    vocabulary, stride = len(weight), SLICE * (width + 1)
    memory = gradient.memory(weight, -(-vocabulary // SLICE) * stride)
    starts = range(0, len(memory), stride)
    buffer = [memory[start:][: tokens * SLICE].view(tokens, SLICE) for start in starts]
    _clear_end(buffer, vocabulary)
    return memory[: vocabulary * width].view(vocabulary, width), buffer


def _overwrite_logits(grad: Tensor, logits: Slices, rows: Tensor, library: Library) -> None:
    """Overwrite the logits with the weight's gradient, from copies of a few slices at a time."""
    for first in range(0, len(logits), _COPIED_SLICES):
        copies = [each.clone() for each in logits[first : first + _COPIED_SLICES]]
        part = grad[first * SLICE :][: len(copies) * SLICE]
        library.weight_gradient(copies, rows, part, add=False)


def _vocab_slices(vocabulary: int) -> Iterator[tuple[int, slice]]:
    """Yield the index of each slice, and the rows of the vocabulary in the slice."""
    for number, start in enumerate(range(0, vocabulary, SLICE)):
        yield number, slice(start, min(start + SLICE, vocabulary))


def _logits(rows: Tensor, weight: Tensor, buffer: Slices) -> Slices:
    logits = [each[: len(rows)] for each in buffer]
    for number, rows_of_slice in _vocab_slices(len(weight)):
        part = weight[rows_of_slice].to(rows.dtype)
        torch.mm(rows, part.t(), out=logits[number][:, : len(part)])
    return logits


def _hidden_gradient(logits: Slices, weight: Tensor, library: Library | None) -> Tensor:
    total = torch.zeros(len(logits[0]), weight.shape[1])
    for number, rows_of_slice in _vocab_slices(len(weight)):
        part = weight[rows_of_slice].to(logits[number].dtype)
        _add(total, torch.mm(logits[number][:, : len(part)], part), library)
    return total


def _add_weight_gradient(
    grad: Tensor, logits: Slices, rows: Tensor, library: Library | None, *, is_first: bool
) -> None:
    if library is not None and library.has_products and rows.dtype == torch.bfloat16:
        library.weight_gradient(logits, rows, grad, add=not is_first)
        return
    for number, rows_of_slice in _vocab_slices(len(grad)):
        total = grad[rows_of_slice]
        part = torch.mm(logits[number][:, : len(total)].t(), rows)
        if is_first:
            total.copy_(part)
        else:
            _add(total, part, library)


def _add(total: Tensor, part: Tensor, library: Library | None) -> None:
    if library is not None and part.dtype == torch.bfloat16:
        # torch takes three times as long to add tensors of two dtypes.
        library.widen_add(part, total)
    else:
        total.add_(part)


def _cross_entropy(
    logits: Slices,
    targets: Tensor,
    library: Library | None,
    *,
    vocabulary: int,
    grad_scale: float | None,
) -> Tensor:
    """Return the loss of each row, fp32; with a scale, overwrite `logits` with their gradient."""
    if library is not None:
        return library.cross_entropy(logits, targets, vocabulary=vocabulary, grad_scale=grad_scale)
    losses = torch.empty(len(targets))
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, start + _ROWS)
        slices, chosen = [each[rows] for each in logits], targets[rows].unsqueeze(1)
        values = torch.cat(slices, dim=1)[:, :vocabulary].float()
        is_ignored = chosen == IGNORED_TARGET
        chosen = chosen.masked_fill(is_ignored, 0)
        log_shares = values.log_softmax(dim=1)
        found = log_shares.gather(1, chosen).masked_fill(is_ignored, 0)
        losses[rows] = -found.squeeze(1)
        if grad_scale is not None:
            grad = log_shares.exp_()
            grad.scatter_add_(1, chosen, torch.full_like(found, -1))
            grad.mul_(grad_scale).masked_fill_(is_ignored, 0)
            for each, part in zip(
                slices, torch.split(grad, slices[0].shape[1], dim=1), strict=True
            ):
                each[:, : part.shape[1]] = part
    return losses
