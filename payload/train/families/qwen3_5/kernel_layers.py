"""Computes Qwen3.5's layers with the kernels, or lists why the kernels cannot be used.

Shapes: N tokens of all sequences, B batch, T tokens of one sequence, C width, H query heads, K key
heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from payload.kernels.decoder_layers import Norm, add_norm, branch_norm, gated_mlp
from payload.kernels.linears import LayerContext
from payload.kernels.separate_layers import contiguous_gradient, grouped_attention, linears
from payload.models.qwen3_5.spec import Qwen35Spec
from payload.train.families.llama.layers import RMSNorm
from payload.train.families.llama.rope import Table, rotated
from payload.train.families.qwen3_5.layers import (
    MLP,
    Attention,
    Convolution,
    Layer,
    LinearAttention,
)
from payload.train.families.qwen3_5.linear_attention import DeltaWeights, linear_attention
from payload.train.models.kernel_support import layer_refusals, projection
from payload.train.models.uninitialised import Embedding, Linear

_KNOWN = (
    *(Attention, Convolution, Embedding, Layer, Linear, LinearAttention, MLP, RMSNorm),
    nn.ModuleList,
)
_WIDEST_HEAD = 256
"""Widest head for the kernels. They keep a block of keys in a core's cache."""


def joined(*, is_full: bool) -> tuple[tuple[str, ...], ...]:
    """Return the linears of a layer, grouped by input: each group is computed as one matmul."""
    inputs = tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a"))
    output = "linear_attn.out_proj"
    if is_full:
        inputs = tuple(f"self_attn.{name}_proj" for name in "qkv")
        output = "self_attn.o_proj"
    return inputs, (output,), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)


def refusals(body: nn.Module, spec: Qwen35Spec, *, dropout: float) -> Iterator[str]:
    """Yield the reasons why the layers run without kernels, one line each."""
    if dropout:
        yield f"dropout = {dropout}: the kernels have no dropout"
    if spec.head_dim > _WIDEST_HEAD:
        yield f"head_dim {spec.head_dim}: the kernels need a number up to {_WIDEST_HEAD}"
    yield from layer_refusals(body, known=_KNOWN)


def run_layers(
    body: nn.Module,
    x: Tensor,
    spec: Qwen35Spec,
    rope: Table,
    starts: Tensor | None,
    context: LayerContext,
    run_layer: Callable[..., Any],
) -> Tensor:
    """Map the embedded tokens (B, T, C) fp32 to the final norm's output in the context's dtype.

    `CausalLM.hidden` describes `starts`. The tables in `rope` are made for these starts.
    `run_layer` calls each layer.
    """
    batch, length = x.shape[:2]
    cos, sin = rope
    if starts is None:
        cos, sin = cos.repeat(batch, 1), sin.repeat(batch, 1)
    turns = cos.unsqueeze(1), sin.unsqueeze(1)

    def layer_of(layer: Layer, total: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        total, normed = add_norm(total, added, _norm(layer.input_layernorm), context)
        if layer.linear_attn is not None:
            mixed = delta(normed, layer.linear_attn)
        else:
            assert layer.self_attn is not None
            mixed = attend(normed, layer.self_attn)
        total, normed = add_norm(total, mixed, _norm(layer.post_attention_layernorm), context)
        wide = projection(layer.mlp.gate_proj), projection(layer.mlp.up_proj)
        return total, gated_mlp(normed, wide, projection(layer.mlp.down_proj), "silu", context)

    def delta(normed: Tensor, module: LinearAttention) -> Tensor:
        """Return the linear attention's output (N, C)."""
        made = linears(normed, tuple(map(projection, module.inputs())), context)
        norm = module.norm
        weights = DeltaWeights(
            module.conv1d.weight, module.A_log, module.dt_bias, norm.weight, norm.eps
        )
        gated = linear_attention(
            made.view(batch, length, -1),
            weights,
            module.sizes,
            starts=starts,
            library=context.library,
        )
        return linears(gated.flatten(0, 1), (projection(module.out_proj),), context)

    def attend(normed: Tensor, module: Attention) -> Tensor:
        """Return the full attention's output (N, C)."""
        own = (module.q_proj, module.k_proj, module.v_proj)
        made = linears(normed, tuple(map(projection, own)), context)
        queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads
        first, others = torch.split(made, [2 * queries, 2 * keys * spec.head_dim], dim=1)
        query, gate = first.view(len(made), -1, 2, spec.head_dim).unbind(2)
        key, value = others.view(len(made), 2, keys, -1).unbind(1)
        heads = (_turned(query, module.q_norm), _turned(key, module.k_norm), value)
        qkv = torch.cat(heads, dim=1).view(batch, length, -1, spec.head_dim)
        mixed = grouped_attention(
            qkv, key_heads=keys, scale=spec.head_dim**-0.5, starts=starts, context=context
        )
        gated = mixed.view_as(gate) * torch.sigmoid(gate)
        return linears(gated.flatten(1), (projection(module.o_proj),), context)

    def _turned(heads: Tensor, norm: RMSNorm) -> Tensor:
        """Return `heads` (N, heads, D) after norm and rotation."""
        return rotated(_normed(heads, norm, context), turns).to(context.dtype)

    with torch.autocast("cpu", enabled=False):
        total: Tensor = x.flatten(0, 1)
        added: Tensor | None = None
        for layer in cast("nn.ModuleList", body.layers):
            assert isinstance(layer, Layer)
            total, added = run_layer(layer.computed_by, layer_of, total, added)
        _, normed = add_norm(total, added, _norm(cast(RMSNorm, body.norm)), context)
        return normed.view(x.shape)


def _normed(x: Tensor, norm: RMSNorm, context: LayerContext) -> Tensor:
    """Return the RMS norm of each head of x (..., D)."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return contiguous_gradient(branch_norm(rows, _norm(norm), context)).view(x.shape)


def _norm(module: RMSNorm) -> Norm:
    return Norm(module.weight, module.eps, 1.0 if module.offset else 0.0)
