"""Layers of the Llama family in bf16, as autograd functions over the kernels.

The residual stream is fp32, matmuls and what is between them are bf16, sums are fp32. Projections
that read the same numbers are one matmul: queries, keys and values, and the gate and its partner.
B batch, T tokens, C width, H query heads, K key heads, D head width, N = B x T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from payload.train.kernels import decoder_passes as passes
from payload.train.kernels.decoder_passes import Gate, HeadSizes, NormScale, Rotation
from payload.train.kernels.layers import LayerContext
from payload.train.kernels.library import Library

_Grads = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm's parameter and numbers."""

    weight: Tensor
    eps: float
    offset: float
    """Constant added to the weight: 1 in Gemma, else 0."""

    def scale(self) -> NormScale:
        """Return what the kernels take."""
        return NormScale(self.weight.detach(), self.eps, self.offset)


@dataclass(frozen=True, slots=True)
class Attending:
    """Settings of a layer's attention: norms, rotary embedding and window."""

    batch: int
    sizes: HeadSizes
    """With documents, the tables of the rotation have a row for each of the B x T tokens."""
    scale: float
    rotation: Rotation | None
    """None in a layer without positions."""
    starts: Tensor | None
    """(B, T) the first token that each one attends to; None = all before it."""


def add_norm(
    x: Tensor, added: Tensor | None, norm: Norm, context: LayerContext
) -> tuple[Tensor, Tensor]:
    """Return the residual sum x + added (N, C) fp32, and its RMS norm, bf16."""
    made = _AddNorm.apply(x, added, norm.weight, norm, context.library)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", made)


def branch_norm(x: Tensor, norm: Norm, context: LayerContext) -> Tensor:
    """Return the RMS norm of a branch's result (N, C) bf16, which is then added."""
    made = _BranchNorm.apply(x, norm.weight, norm, context.library)  # type: ignore[no-untyped-call]
    return cast(Tensor, made)


def attention(
    x: Tensor,
    projections: tuple[nn.Linear, nn.Linear, nn.Linear],
    out: nn.Linear,
    norms: tuple[Norm, Norm] | None,
    how: Attending,
    context: LayerContext,
) -> Tensor:
    """Return causal self-attention of x (N, C); `norms` are of each query and each key."""
    joined = _Joined(projections, context)
    scales = () if norms is None else (norms[0].weight, norms[1].weight)
    scale = None
    if norms is not None:
        both = torch.stack([each.detach() for each in scales])
        scale = NormScale(both, norms[0].eps, norms[0].offset)
    parameters = (*joined.parameters, out.weight, out.bias, *scales)
    made = _Attention.apply(x, joined, _Joined((out,), context), scale, how, context, *parameters)  # type: ignore[no-untyped-call]
    return cast(Tensor, made)


def gated_mlp(
    x: Tensor,
    projections: tuple[nn.Linear, nn.Linear],
    down: nn.Linear,
    gate: Gate,
    context: LayerContext,
) -> Tensor:
    """Return `down` of activation(first projection) times the second one, of x (N, C)."""
    joined = _Joined(projections, context)
    parameters = (*joined.parameters, down.weight, down.bias)
    made = _GatedMlp.apply(x, joined, _Joined((down,), context), gate, context, *parameters)  # type: ignore[no-untyped-call]
    return cast(Tensor, made)


class _Joined:
    """Linear layers of the same input as one: their bf16 weights lie below each other.

    The bf16 weights are made for each matmul and not kept: rounding them takes a hundredth of a
    pass over 4 x 1024 tokens, and all of them together are 2 bytes a parameter.
    """

    def __init__(self, layers: tuple[nn.Linear, ...], context: LayerContext) -> None:
        self._context = context
        self._weights = tuple(each.weight for each in layers)
        self._biases = tuple(each.bias for each in layers if each.bias is not None)
        self.parameters = tuple(
            parameter for each in layers for parameter in (each.weight, each.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, C) to (N, R)."""
        bias = _below_each_other(self._biases) if self._biases else None
        return functional.linear(x, _below_each_other(self._weights), bias)

    def input_gradient(self, grad: Tensor) -> Tensor:
        """(N, R), the result's, to (N, C)."""
        return torch.mm(grad, _below_each_other(self._weights))

    def backward(self, grad: Tensor, x: Tensor) -> _Grads:
        """Add the weights' gradients where they belong; return those of `parameters`.

        `grad` is the result's, (N, R).
        """
        self._context.gradients.add_joined(self._weights, grad, x)
        if not self._biases:
            return (None,) * len(self.parameters)
        rows = [len(each) for each in self._weights]
        sums = torch.split(self._context.library.sum_rows(grad), rows)
        return tuple(each for bias in sums for each in (None, bias))


def _below_each_other(parameters: tuple[Tensor, ...]) -> Tensor:
    """Return the rows of all parameters in one bf16 tensor."""
    rows = [len(each) for each in parameters]
    joined = torch.empty(sum(rows), *parameters[0].shape[1:], dtype=torch.bfloat16)
    for each, part in zip(parameters, torch.split(joined, rows), strict=True):
        part.copy_(each.detach())
    return joined


class _AddNorm(torch.autograd.Function):
    """The residual sum, and its RMS norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, norm: Norm, library: Library
    ) -> tuple[Tensor, Tensor]:
        total, normed, rstd = passes.rms_norm_forward(library, x, added, norm.scale())
        ctx.save_for_backward(total, rstd)
        ctx.library, ctx.norm, ctx.adds = library, norm, added is not None
        ctx.set_materialize_grads(False)
        # Autograd wants an output that is an input to be another tensor.
        return total if added is not None else total.view_as(total), normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, grad_normed: Tensor) -> _Grads:
        total, rstd = ctx.saved_tensors
        # The gradient of the sum has this one reader, and is written over.
        grads = passes.rms_norm_backward(
            ctx.library, total, rstd, ctx.norm.scale(), grad_total, grad_normed, adds=ctx.adds
        )
        return *grads, None, None


class _BranchNorm(torch.autograd.Function):
    """The RMS norm of bf16 numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: Norm, library: Library) -> Tensor:
        _, normed, rstd = passes.rms_norm_forward(library, x, None, norm.scale())
        ctx.save_for_backward(x, rstd)
        ctx.library, ctx.norm = library, norm
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> _Grads:
        x, rstd = ctx.saved_tensors
        grad_x, _, grad_weight = passes.rms_norm_backward(
            ctx.library, x, rstd, ctx.norm.scale(), None, grad, adds=False
        )
        return grad_x, grad_weight, None, None


class _Attention(torch.autograd.Function):
    """Queries, keys and values, attention, and the projection back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        qkv_layers: _Joined,
        out_layer: _Joined,
        scale: NormScale | None,
        how: Attending,
        context: LayerContext,
        *parameters: Tensor | None,
    ) -> Tensor:
        qkv = qkv_layers.forward(x).view(len(x), -1, how.sizes.width)
        qk = None
        if scale is not None:
            qk = passes.norm_rotate_forward(context.library, qkv, scale, how.rotation, how.sizes)
        elif how.rotation is not None:
            passes.rotate(context.library, qkv, how.rotation, how.sizes, back=False)
        mixed, log_sums = context.library.grouped_attention_forward(
            _by_sequence(qkv, how), qk=qk if qk is None else _by_sequence(qk, how), **_options(how)
        )
        mixed = mixed.view(len(x), -1)
        ctx.save_for_backward(x, qkv, mixed, log_sums)
        ctx.layers, ctx.scale, ctx.how, ctx.context = (qkv_layers, out_layer), scale, how, context
        return out_layer.forward(mixed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> _Grads:
        x, qkv, mixed, log_sums = ctx.saved_tensors
        library, how, scale = ctx.context.library, ctx.how, ctx.scale
        qkv_layers, out_layer = ctx.layers
        out_grads = out_layer.backward(grad, mixed)
        grad_mixed = out_layer.input_gradient(grad)
        qk = None
        if scale is not None:
            # Not kept: a pass makes them again in less time than a layer's memory is worth.
            qk = passes.norm_rotate_forward(library, qkv, scale, how.rotation, how.sizes)
        grad_qkv = library.grouped_attention_backward(
            _by_sequence(qkv, how),
            _by_sequence(mixed, how),
            log_sums,
            _by_sequence(grad_mixed, how),
            qk=qk if qk is None else _by_sequence(qk, how),
            **_options(how),
        ).view_as(qkv)
        norm_grads: _Grads = ()
        if scale is not None:
            both = passes.norm_rotate_backward(
                library, qkv, scale, how.rotation, grad_qkv, how.sizes
            )
            norm_grads = tuple(both.unbind())
        elif how.rotation is not None:
            passes.rotate(library, grad_qkv, how.rotation, how.sizes, back=True)
        grad_in = grad_qkv.view(len(x), -1)
        in_grads = qkv_layers.backward(grad_in, x)
        grad_x = qkv_layers.input_gradient(grad_in)
        return grad_x, None, None, None, None, None, *in_grads, *out_grads, *norm_grads


class _GatedMlp(torch.autograd.Function):
    """The gate and its partner, and the way back; their result is computed again when needed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        wide_layers: _Joined,
        down_layer: _Joined,
        gate: Gate,
        context: LayerContext,
        *parameters: Tensor | None,
    ) -> Tensor:
        wide = wide_layers.forward(x)
        ctx.save_for_backward(x, wide)
        ctx.layers, ctx.gate, ctx.library = (wide_layers, down_layer), gate, context.library
        return down_layer.forward(passes.gated_forward(context.library, wide, gate))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> _Grads:
        x, wide = ctx.saved_tensors
        wide_layers, down_layer = ctx.layers
        inner = down_layer.input_gradient(grad)
        grad_wide = passes.gated_backward(ctx.library, wide, inner, ctx.gate)
        # `inner` has become what went into the way back.
        down_grads = down_layer.backward(grad, inner)
        wide_grads = wide_layers.backward(grad_wide, x)
        grad_x = wide_layers.input_gradient(grad_wide)
        return grad_x, None, None, None, None, *wide_grads, *down_grads


def _options(how: Attending) -> dict[str, Any]:
    return {"key_heads": how.sizes.key_heads, "scale": how.scale, "starts": how.starts}


def _by_sequence(x: Tensor, how: Attending) -> Tensor:
    """(N, ...) to (B, T, heads, D)."""
    return x.view(how.batch, len(x) // how.batch, -1, how.sizes.width)
