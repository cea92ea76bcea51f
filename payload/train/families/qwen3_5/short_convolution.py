"""A causal convolution over the last few tokens, separate for each channel, followed by SiLU.

oneDNN computes the convolution fast if a token's channels are adjacent in memory, but its gradients
are slow. So the gradient of the input is also computed as a convolution, and the gradient of the
weight as one sum for each tap. Shapes: B batch, T tokens, C channels, W taps.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def short_convolution(x: Tensor, weight: Tensor, *, starts: Tensor | None = None) -> Tensor:
    """Return SiLU of the convolution of x (B, T, C) with weight (C, 1, W), in the dtype of x.

    The last tap is the token itself. `CausalLM.hidden` describes `starts` (B, T): no window reaches
    beyond its document.
    """
    places = _places(starts, batch=x.shape[0], length=x.shape[1], before=weight.shape[-1] - 1)
    with torch.autocast(x.device.type, enabled=False):
        made = _ShortConvolution.apply(x.flatten(0, 1), weight, places.to(x.device))
    return cast(Tensor, made).view(x.shape)


def _places(starts: Tensor | None, *, batch: int, length: int, before: int) -> Tensor:
    """Return each token's row, (B x T,). Each document has `before` rows of zeros ahead of it."""
    numbers = torch.arange(batch * length)
    if starts is None:
        return numbers + before * (1 + numbers // length)
    own = torch.arange(length, device=starts.device)
    begins = (own == 0) | (starts != starts.roll(1, dims=1))
    return numbers.to(starts.device) + before * begins.flatten().cumsum(0)


class _ShortConvolution(torch.autograd.Function):
    """Computes the convolution and SiLU; the backward pass recomputes the convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, places)
        taps = weight.to(x.dtype).squeeze(1)
        return functional.silu(_convolved(_spread(x, places), taps, places))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, places = ctx.saved_tensors
        taps, before = weight.to(x.dtype).squeeze(1), weight.shape[-1] - 1
        spread = _spread(x, places)
        grad = torch.ops.aten.silu_backward(grad, _convolved(spread, taps, places))
        wide = _spread(grad, places, after=before)
        grad_x = _channelwise(wide, taps.flip(1)).index_select(0, places)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        ends = wide[before : len(spread)]
        sums = [(ends * spread[tap : tap + len(ends)]).sum(0) for tap in range(before + 1)]
        return grad_x, torch.stack(sums, dim=1).to(weight.dtype).view_as(weight), None


def _spread(x: Tensor, places: Tensor, *, after: int = 0) -> Tensor:
    """Return zeros with the rows of x (N, C) at `places`, and with `after` more rows at the end."""
    found = x.new_zeros(int(places[-1]) + 1 + after, x.shape[1])
    return found.index_copy_(0, places, x)


def _convolved(spread: Tensor, taps: Tensor, places: Tensor) -> Tensor:
    """Return the convolution of each token's window, (N, C)."""
    return _channelwise(spread, taps).index_select(0, places - (taps.shape[1] - 1))


def _channelwise(x: Tensor, taps: Tensor) -> Tensor:
    """Return the weighted sum of each window of W rows of x (R, C), as (R - W + 1, C).

    `taps` (C, W) has each channel's weights.
    """
    # With these strides, torch sees adjacent channels.
    image = x.unsqueeze(0).transpose(1, 2).unsqueeze(2)
    found = functional.conv2d(image, taps.unsqueeze(1).unsqueeze(2), groups=len(taps))
    return found.squeeze(2).transpose(1, 2).squeeze(0)
