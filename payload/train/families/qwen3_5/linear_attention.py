"""Linear attention by the gated delta rule, as one autograd function over the kernels.

Shapes: B batch, T tokens, H heads of values, G heads of queries and of keys, K and V widths of keys
and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from payload.kernels.library import SUM_ROWS, Library, element, require_starts, require_tensor
from payload.kernels.linears import Grads
from payload.models.qwen3_5.config import LinearAttention

_PIECE = 256
"""Number of channels for which one task computes the gradients of the convolution."""


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of linear attention between its linears."""

    convolution: Tensor
    """(channels, 1, taps); the last tap is the token itself."""
    log_rate: Tensor
    """Logarithm of each head's decay rate, (H,)."""
    time_bias: Tensor
    """Number added to a head's time, (H,)."""
    norm: Tensor
    """Weight of the norm of each head's output, (V,)."""
    eps: float
    """Number added to the mean square in the norm."""


def linear_attention(
    made: Tensor,
    weights: DeltaWeights,
    sizes: LinearAttention,
    *,
    starts: Tensor | None,
    library: Library,
) -> Tensor:
    """Return the gated output of linear attention, (B, T, H x V), in the dtype of `made`.

    `made` (B, T, ...) has the outputs of the linears side by side: queries, keys and values before
    the convolution, the gates, the logits of the write strengths (H) and the times (H). `starts`
    (B, T) int64 has the index of the first token of each token's document; None = 0 for all tokens.
    """
    parameters = (weights.convolution, weights.log_rate, weights.time_bias, weights.norm)
    found = _LinearAttention.apply(made, *parameters, weights.eps, sizes, starts, library)
    return cast(Tensor, found)


class _LinearAttention(torch.autograd.Function):
    """Computes convolution, delta rule, norm and gate; backward recomputes the rule's states."""

    @staticmethod
    def forward(
        ctx: Any,
        made: Tensor,
        convolution: Tensor,
        log_rate: Tensor,
        time_bias: Tensor,
        norm: Tensor,
        eps: float,
        sizes: LinearAttention,
        starts: Tensor | None,
        library: Library,
    ) -> Tensor:
        call = _Call(made, sizes, starts, library)
        mixed = call.convolve(_taps(convolution))
        write, time = call.factors()
        decay = _decay(log_rate, time, time_bias)
        read = call.rule(mixed, write, decay)
        ctx.save_for_backward(made, mixed, read, convolution, log_rate, time_bias, norm, starts)
        ctx.eps, ctx.sizes, ctx.library = eps, sizes, library
        return call.norm(read, norm.float(), eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        made, mixed, read, convolution, log_rate, time_bias, norm, starts = ctx.saved_tensors
        call = _Call(made, ctx.sizes, starts, ctx.library)
        grad_made = torch.empty_like(made)
        grad_read, grad_norm = call.norm_backward(
            read, norm.float(), ctx.eps, grad.contiguous(), grad_made
        )
        write, time = call.factors()
        decay = _decay(log_rate, time, time_bias)
        grad_mixed, grad_write, grad_decay = call.rule_backward(mixed, write, decay, grad_read)
        grad_taps = call.convolve_backward(_taps(convolution), grad_mixed, grad_made)
        rate = -log_rate.float().exp() * torch.sigmoid(time + time_bias)
        grad_time = grad_decay * rate
        heads = ctx.sizes.value_heads
        grad_made[..., -2 * heads : -heads] = grad_write
        grad_made[..., -heads:] = grad_time
        return (
            grad_made,
            grad_taps.t().unsqueeze(1).to(convolution.dtype),
            (grad_decay * decay).sum((0, 1)).to(log_rate.dtype),
            grad_time.sum((0, 1)).to(time_bias.dtype),
            grad_norm.to(norm.dtype),
            *(None,) * 4,
        )


class _Call:
    """Calls the kernels for one output of the linears. Raises ValueError for a wrong shape."""

    def __init__(
        self, made: Tensor, sizes: LinearAttention, starts: Tensor | None, library: Library
    ) -> None:
        batch, length, wide = made.shape
        self._made, self._sizes, self._starts, self._library = made, sizes, starts, library
        self._batch, self._length, self._wide = batch, length, wide
        columns = sizes.mixed() + sizes.values() + 2 * sizes.value_heads
        require_tensor("made", made, element(made), (batch, length, columns))
        require_starts(starts, batch, length)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the logits of the write strengths and the times, (B, T, H) fp32 each."""
        heads = self._sizes.value_heads
        write = self._made[..., -2 * heads : -heads].float().contiguous()
        return write, self._made[..., -heads:].float().contiguous()

    def convolve(self, taps: Tensor) -> Tensor:
        """Return queries, keys and values after the convolution and SiLU, side by side."""
        sizes = self._sizes
        require_tensor("the convolution", taps, torch.float32, (sizes.taps, sizes.mixed()))
        y = self._empty(self._sizes.mixed())
        self._call("short_convolution_forward", self._made, taps, self._starts, y, *self._widths())
        return y

    def convolve_backward(self, taps: Tensor, grad: Tensor, grad_made: Tensor) -> Tensor:
        """Return the gradient of the taps; write the input's gradient to `grad_made`."""
        parts = torch.empty(self._batch, *taps.shape)
        tasks = self._batch * -(-self._sizes.mixed() // _PIECE)
        ring = torch.empty(tasks, self._sizes.taps, _PIECE)
        tensors = (self._made, taps, self._starts, grad, grad_made, parts, ring)
        self._call("short_convolution_backward", *tensors, *self._widths())
        return parts.sum(0)

    def rule(self, mixed: Tensor, write: Tensor, decay: Tensor) -> Tensor:
        """Return the values that the queries read from the state, (B, T, H x V)."""
        size = self._batch, self._length, self._sizes.value_heads
        require_tensor("decay", decay, torch.float32, size)
        read = self._empty(self._sizes.values())
        tensors = (mixed, write, decay, self._starts, read)
        self._call("delta_rule_forward", *tensors, *self._heads())
        return read

    def rule_backward(
        self, mixed: Tensor, write: Tensor, decay: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the rule's inputs."""
        grads = torch.empty_like(mixed), torch.empty_like(write), torch.empty_like(decay)
        tensors = (mixed, write, decay, self._starts, grad, *grads)
        self._call("delta_rule_backward", *tensors, *self._heads())
        return grads

    def norm(self, read: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the norms of the heads, multiplied by SiLU of the gates."""
        require_tensor("weight", weight, torch.float32, (self._sizes.value_dim,))
        y = torch.empty_like(read)
        tensors = (read, weight, eps, self._made, y)
        self._call("gated_norm_forward", *tensors, *self._rows())
        return y

    def norm_backward(
        self, read: Tensor, weight: Tensor, eps: float, grad: Tensor, grad_made: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of `read` and `weight`; write gradients of gates to `grad_made`."""
        require_tensor("grad", grad, read.dtype, tuple(read.shape))
        grad_read = torch.empty_like(read)
        parts = torch.empty(-(-self._batch * self._length // SUM_ROWS), len(weight))
        tensors = (read, weight, eps, self._made, grad, grad_read, grad_made, parts)
        self._call("gated_norm_backward", *tensors, *self._rows())
        return grad_read, parts.sum(0)

    def _call(self, name: str, *arguments: Tensor | float | None) -> None:
        self._library.call_on(self._made.dtype, name, *arguments)

    def _empty(self, columns: int) -> Tensor:
        return self._made.new_empty(self._batch, self._length, columns)

    def _widths(self) -> tuple[int, ...]:
        sizes = self._sizes
        return self._batch, self._length, self._wide, sizes.mixed(), sizes.taps

    def _heads(self) -> tuple[int, ...]:
        sizes = self._sizes
        widths = sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim
        return self._batch, self._length, *widths

    def _rows(self) -> tuple[int, ...]:
        sizes = self._sizes
        rows = self._batch * self._length
        return rows, sizes.value_heads, sizes.value_dim, self._wide, sizes.mixed()


def _taps(convolution: Tensor) -> Tensor:
    """Return the convolution's weight as (taps, channels) fp32."""
    return convolution.detach().float().squeeze(1).t().contiguous()


def _decay(log_rate: Tensor, time: Tensor, time_bias: Tensor) -> Tensor:
    """Return the logarithms of the decays, (B, T, H) fp32."""
    return -log_rate.float().exp() * functional.softplus(time + time_bias)
