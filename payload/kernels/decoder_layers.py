"""Layers of the Llama family, as autograd functions over the kernels.

The residual stream and all sums are fp32. Matmuls and the tensors between them are bf16, or fp32.
Projections with the same input are computed together: queries, keys and values; gate and up.
Shapes: B batch, T tokens, C width, H query heads, K key heads, D head width, N = B x T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from payload.kernels import decoder_pointwise as pointwise
from payload.kernels.decoder_pointwise import Gate, HeadSizes, NormScale, Rotation
from payload.kernels.linears import Grads, LayerContext, Linears, Projection, join


@dataclass(frozen=True, slots=True)
class Norm:
    """The weight and the constants of an RMS norm."""

    weight: Tensor
    eps: float
    offset: float
    """Constant added to the weight: 1 in Gemma, otherwise 0."""

    def scale(self) -> NormScale:
        """Return the norm in the form that the kernels need."""
        return NormScale(self.weight.detach(), self.eps, self.offset)


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Settings of a layer's attention: norms, rotary embedding and window."""

    batch: int
    sizes: HeadSizes
    """Sizes of the heads. With packed documents, `length` is B x T, because the tables of the
    rotation have one row per token."""
    scale: float
    rotation: Rotation | None
    """Tables of the rotary embedding; None in a layer without a rotary embedding."""
    starts: Tensor | None
    """Shape (B, T): index of the first token that each token attends to; None = 0 for all
    tokens."""
    joint_norms: bool = False
    """True if the norms of queries and keys span all heads of a kind."""


def add_norm(
    x: Tensor,
    added: Tensor | None,
    norm: Norm,
    context: LayerContext,
    *,
    added_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the residual sum x + added_scale * added (N, C) in fp32, and its RMS norm in the
    context's dtype."""
    made = _AddNorm.apply(x, added, norm.weight, norm, added_scale, context)
    return cast("tuple[Tensor, Tensor]", made)


def branch_norm(x: Tensor, norm: Norm, context: LayerContext) -> Tensor:
    """Return the RMS norm of a branch's output (N, C), before the residual addition."""
    made = _BranchNorm.apply(x, norm.weight, norm, context)
    return cast(Tensor, made)


def attention(
    x: Tensor,
    projections: tuple[Projection, ...],
    out: Projection,
    norms: tuple[Norm, Norm] | None,
    settings: AttentionSettings,
    context: LayerContext,
) -> Tensor:
    """Return causal self-attention of x (N, C); `norms` are for the queries and for the keys.

    The `projections` together make the queries, keys and values.
    """
    qkv_layers, out_layer = join(projections, context), join((out,), context)
    scales = () if norms is None else (norms[0].weight, norms[1].weight)
    scale = None
    if norms is not None:
        join_norms = torch.cat if settings.joint_norms else torch.stack
        both = join_norms([each.detach() for each in scales])
        scale = NormScale(both, norms[0].eps, norms[0].offset)
    parameters = (*qkv_layers.parameters, *out_layer.parameters, *scales)
    made = _Attention.apply(x, qkv_layers, out_layer, scale, settings, context, *parameters)
    return cast(Tensor, made)


def gated_mlp(
    x: Tensor,
    projections: tuple[Projection, ...],
    down: Projection,
    gate: Gate,
    context: LayerContext,
) -> Tensor:
    """Return `down(activation(first(x)) * second(x))` for x (N, C).

    The `projections` together make `first` and `second`, the gate and up.
    """
    wide_layers, down_layer = join(projections, context), join((down,), context)
    parameters = (*wide_layers.parameters, *down_layer.parameters)
    made = _GatedMlp.apply(x, wide_layers, down_layer, gate, context, *parameters)
    return cast(Tensor, made)


class _AddNorm(torch.autograd.Function):
    """Computes the residual sum and its RMS norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        norm: Norm,
        added_scale: float,
        context: LayerContext,
    ) -> tuple[Tensor, Tensor]:
        library = context.library
        total, normed, rstd = pointwise.rms_norm_forward(
            library, x, added, norm.scale(), added_scale=added_scale, dtype=context.dtype
        )
        ctx.save_for_backward(total, rstd)
        ctx.library, ctx.norm, ctx.adds = library, norm, added is not None
        ctx.added_scale = added_scale
        ctx.set_materialize_grads(False)
        # Autograd requires a new tensor object for an output that equals an input.
        return total if added is not None else total.view_as(total), normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, grad_normed: Tensor) -> Grads:
        total, rstd = ctx.saved_tensors
        # The gradient of the sum has no other reader, so it is overwritten.
        grads = pointwise.rms_norm_backward(
            ctx.library,
            total,
            rstd,
            ctx.norm.scale(),
            grad_total,
            grad_normed,
            adds=ctx.adds,
            added_scale=ctx.added_scale,
            frozen=not ctx.needs_input_grad[2],
        )
        return *grads, None, None, None


class _BranchNorm(torch.autograd.Function):
    """Computes the RMS norm of a tensor of the matmuls' dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: Norm, context: LayerContext) -> Tensor:
        library = context.library
        _, normed, rstd = pointwise.rms_norm_forward(
            library, x, None, norm.scale(), dtype=context.dtype
        )
        ctx.save_for_backward(x, rstd)
        ctx.library, ctx.norm = library, norm
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        x, rstd = ctx.saved_tensors
        grad_x, _, grad_weight = pointwise.rms_norm_backward(
            ctx.library,
            x,
            rstd,
            ctx.norm.scale(),
            None,
            grad,
            adds=False,
            frozen=not ctx.needs_input_grad[1],
        )
        return grad_x, grad_weight, None, None


class _Attention(torch.autograd.Function):
    """Computes the projection to queries, keys and values, attention, and the output projection."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        qkv_layers: Linears,
        out_layer: Linears,
        scale: NormScale | None,
        settings: AttentionSettings,
        context: LayerContext,
        *parameters: Tensor | None,
    ) -> Tensor:
        made, kept_in = qkv_layers.forward(x)
        qkv = made.view(len(x), -1, settings.sizes.width)
        qk = None
        if scale is not None:
            qk = pointwise.norm_rotate_forward(
                context.library, qkv, scale, settings.rotation, settings.sizes
            )
        elif settings.rotation is not None:
            pointwise.rotate(context.library, qkv, settings.rotation, settings.sizes, back=False)
        mixed, log_sums = context.library.grouped_attention_forward(
            _by_sequence(qkv, settings),
            qk=qk if qk is None else _by_sequence(qk, settings),
            **_options(settings),
        )
        mixed = mixed.view(len(x), -1)
        result, kept_out = out_layer.forward(mixed)
        kept = x if qkv_layers.keeps_input else None
        ctx.save_for_backward(kept, qkv, mixed, log_sums, *kept_in, *kept_out)
        ctx.layers, ctx.scale, ctx.settings, ctx.context = (
            (qkv_layers, out_layer),
            scale,
            settings,
            context,
        )
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        x, qkv, mixed, log_sums, *kept = ctx.saved_tensors
        kept_in, kept_out = kept[:2], kept[2:]
        library, settings, scale = ctx.context.library, ctx.settings, ctx.scale
        qkv_layers, out_layer = ctx.layers
        grad_mixed, grad_low = out_layer.input_gradient(grad, kept_out)
        out_grads = out_layer.backward(grad, mixed, kept_out, grad_low)
        qk = None
        if scale is not None:
            # Normed queries and keys are recomputed: this takes little time and saves their memory.
            qk = pointwise.norm_rotate_forward(
                library, qkv, scale, settings.rotation, settings.sizes
            )
        grad_qkv = library.grouped_attention_backward(
            _by_sequence(qkv, settings),
            _by_sequence(mixed, settings),
            log_sums,
            _by_sequence(grad_mixed, settings),
            qk=qk if qk is None else _by_sequence(qk, settings),
            **_options(settings),
        ).view_as(qkv)
        norm_grads: Grads = ()
        if scale is not None:
            both = pointwise.norm_rotate_backward(
                library, qkv, scale, settings.rotation, grad_qkv, settings.sizes
            )
            sizes = settings.sizes
            kinds = [sizes.heads * sizes.width, sizes.key_heads * sizes.width]
            norm_grads = torch.split(both, kinds) if settings.joint_norms else tuple(both.unbind())
        elif settings.rotation is not None:
            pointwise.rotate(library, grad_qkv, settings.rotation, settings.sizes, back=True)
        grad_in = grad_qkv.view(len(grad), -1)
        needs_x = ctx.needs_input_grad[0]
        grad_x, grad_low = qkv_layers.input_gradient(grad_in, kept_in, needed=needs_x)
        in_grads = qkv_layers.backward(grad_in, x, kept_in, grad_low)
        first = (grad_x if needs_x else None, None, None, None, None, None)
        return *first, *in_grads, *out_grads, *norm_grads


class _GatedMlp(torch.autograd.Function):
    """Computes gate, up and down projections; backward recomputes the product of gate and up."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        wide_layers: Linears,
        down_layer: Linears,
        gate: Gate,
        context: LayerContext,
        *parameters: Tensor | None,
    ) -> Tensor:
        wide, kept_wide = wide_layers.forward(x)
        result, kept_down = down_layer.forward(pointwise.gated_forward(context.library, wide, gate))
        kept = x if wide_layers.keeps_input else None
        ctx.save_for_backward(kept, wide, *kept_wide, *kept_down)
        ctx.layers, ctx.gate, ctx.library = (wide_layers, down_layer), gate, context.library
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        x, wide, *kept = ctx.saved_tensors
        kept_wide, kept_down = kept[:2], kept[2:]
        wide_layers, down_layer = ctx.layers
        inner, grad_low = down_layer.input_gradient(grad, kept_down)
        grad_wide = pointwise.gated_backward(ctx.library, wide, inner, ctx.gate)
        # `inner` now holds the input of the down projection.
        down_grads = down_layer.backward(grad, inner, kept_down, grad_low)
        needs_x = ctx.needs_input_grad[0]
        grad_x, grad_low = wide_layers.input_gradient(grad_wide, kept_wide, needed=needs_x)
        wide_grads = wide_layers.backward(grad_wide, x, kept_wide, grad_low)
        return grad_x if needs_x else None, None, None, None, None, *wide_grads, *down_grads


def _options(settings: AttentionSettings) -> dict[str, Any]:
    return {
        "key_heads": settings.sizes.key_heads,
        "scale": settings.scale,
        "starts": settings.starts,
    }


def _by_sequence(x: Tensor, settings: AttentionSettings) -> Tensor:
    """Reshape (N, ...) to (B, T, heads, D)."""
    return x.view(settings.batch, len(x) // settings.batch, -1, settings.sizes.width)
