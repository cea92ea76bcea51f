"""Computes Gemma 4's layers with the kernels, or lists why the kernels cannot be used.

For heads that are too wide for the kernels' attention, torch computes the attention. Shapes: N
tokens of all sequences, B batch, T tokens of one sequence, C width, H query heads, K key heads, D
width of a head, L layers, P width of a layer's part of the second token embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from payload.kernels.decoder_layers import Norm, add_norm, branch_norm, gated_mlp
from payload.kernels.linears import LayerContext
from payload.kernels.separate_layers import contiguous_gradient, grouped_attention, linears
from payload.models.gemma4.config import Layer as LayerSpec
from payload.models.gemma4.config import Rope
from payload.models.gemma4.spec import Gemma4Spec
from payload.models.llama.config import Activation
from payload.train.families.gemma4.layers import MLP, Attention, Keys, Layer
from payload.train.families.llama.activations import activated
from payload.train.families.llama.layers import RMSNorm
from payload.train.families.llama.rope import Table, rotated
from payload.train.models.attention import attend
from payload.train.models.kernel_support import layer_refusals, projection
from payload.train.models.uninitialised import Embedding, Linear

_KNOWN = (Attention, Embedding, Layer, Linear, MLP, RMSNorm, nn.ModuleList)
_WIDEST_HEAD = 256
"""Widest head for the kernels. They keep a block of keys in a core's cache."""
_GATE: Activation = "gelu_pytorch_tanh"


def joined(layer: LayerSpec, *, has_part: bool) -> tuple[tuple[str, ...], ...]:
    """Return the linears of a layer, grouped by input: each group is computed as one matmul."""
    own = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    inputs = own[: 1 if layer.keys_from is not None else 2 + layer.has_values]
    found = (inputs, ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
    parts = (("per_layer_input_gate",), ("per_layer_projection",))
    return (*found, *parts) if has_part else found


def refusals(body: nn.Module, *, dropout: float) -> Iterator[str]:
    """Yield the reasons why the layers run without kernels, one line each."""
    if dropout:
        yield f"dropout = {dropout}: the kernels have no dropout"
    yield from layer_refusals(body, known=_KNOWN)


def run_layers(
    body: nn.Module,
    x: Tensor,
    parts: Tensor | None,
    spec: Gemma4Spec,
    ropes: dict[tuple[Rope, int], Table],
    starts: Tensor | None,
    context: LayerContext,
    run_layer: Callable[..., Any],
) -> Tensor:
    """Map the embedded tokens (B, T, C) fp32 to the final norm's output in the context's dtype.

    `parts` (B, T, L, P) are the layers' parts of the second embedding. `CausalLM.hidden` describes
    `starts`. The tables in `ropes` are made for these starts. `run_layer` calls each layer.
    """
    batch, length = x.shape[:2]

    def layer_of(
        layer: Layer, what: LayerSpec, total: Tensor, part: Tensor | None, keys: Keys | None
    ) -> tuple[Tensor, Keys]:
        total, normed = add_norm(total, None, _norm(layer.input_layernorm), context)
        mixed, made = own_attention(normed, layer.self_attn, what, keys)
        mixed = branch_norm(mixed, _norm(layer.post_attention_layernorm), context)
        total, normed = add_norm(total, mixed, _norm(layer.pre_feedforward_layernorm), context)
        mlp = layer.mlp
        wide = projection(mlp.gate_proj), projection(mlp.up_proj)
        found = gated_mlp(normed, wide, projection(mlp.down_proj), "gelu_tanh", context)
        total = total + branch_norm(found, _norm(layer.post_feedforward_layernorm), context)
        if part is not None:
            gate = linears(
                total.to(context.dtype), (projection(layer.per_layer_input_gate),), context
            )
            inner = activated(gate, _GATE) * part.to(context.dtype)
            found = linears(inner, (projection(layer.per_layer_projection),), context)
            total = total + branch_norm(found, _norm(layer.post_per_layer_input_norm), context)
        return total * layer.layer_scalar, made

    def own_attention(
        normed: Tensor, module: Attention, what: LayerSpec, keys: Keys | None
    ) -> tuple[Tensor, Keys]:
        """Return the attention's output (N, C), and the keys and values (N, K, D)."""
        cos, sin = ropes[what.rope, what.head_dim]
        if starts is None:
            cos, sin = cos.repeat(batch, 1), sin.repeat(batch, 1)
        rope = cos.unsqueeze(1), sin.unsqueeze(1)
        inputs = (module.q_proj, module.k_proj, module.v_proj)
        own = tuple(projection(each) for each in inputs if each is not None)
        made = linears(normed, own, context).view(len(normed), -1, what.head_dim)
        query = _turned(made[:, : spec.num_attention_heads], module.q_norm, rope, context)
        if keys is None:
            others = made[:, spec.num_attention_heads :]
            assert module.k_norm is not None
            key = _turned(others[:, : what.key_heads], module.k_norm, rope, context)
            # Without a linear for values, the last heads are the keys.
            ones = Norm(torch.ones(what.head_dim), spec.rms_norm_eps, 0.0)
            keys = key, _normed(others[:, -what.key_heads :], ones, context)
        mixed = _mixed(query, keys, what, starts, context, batch=batch)
        return linears(mixed, (projection(module.o_proj),), context), keys

    with torch.autocast("cpu", enabled=False):
        total: Tensor = x.flatten(0, 1)
        flat = None if parts is None else parts.flatten(0, 1)
        shared = {each.keys_from for each in spec.layers}
        made: dict[int, Keys] = {}
        layers = cast("nn.ModuleList", body.layers)
        for number, what in enumerate(spec.layers):
            layer = layers[number]
            assert isinstance(layer, Layer)
            part = None if flat is None else flat[:, number]
            keys = None if what.keys_from is None else made[what.keys_from]
            total, keys = run_layer(layer.computed_by, layer_of, what, total, part, keys)
            if number in shared:
                made[number] = keys
        _, normed = add_norm(total, None, _norm(cast(RMSNorm, body.norm)), context)
        return normed.view(batch, length, -1)


def _mixed(
    query: Tensor,
    keys: Keys,
    what: LayerSpec,
    documents: Tensor | None,
    context: LayerContext,
    *,
    batch: int,
) -> Tensor:
    """Return attention (N, H x D) of queries (N, H, D) over keys and values (N, K, D)."""
    length = len(query) // batch
    if what.head_dim > _WIDEST_HEAD:
        first, key, value = (
            each.view(batch, length, -1, what.head_dim).transpose(1, 2) for each in (query, *keys)
        )
        mixed = attend(first, key, value, starts=documents, window=what.window, scale=1.0)
        return mixed.transpose(1, 2).reshape(len(query), -1)
    starts = documents
    if what.window is not None and what.window < length:
        reach = (torch.arange(length) - what.window + 1).clamp_min(0)
        starts = reach.repeat(batch, 1) if starts is None else starts.maximum(reach)
    qkv = torch.cat((query, *keys), dim=1).view(batch, length, -1, what.head_dim)
    mixed = grouped_attention(
        qkv, key_heads=what.key_heads, scale=1.0, starts=starts, context=context
    )
    return mixed.view(len(query), -1)


def _turned(x: Tensor, norm: RMSNorm, rope: Table, context: LayerContext) -> Tensor:
    """Return the heads `x` after norm and rotation, in the context's dtype."""
    return rotated(_normed(x, _norm(norm), context), rope).to(context.dtype)


def _normed(x: Tensor, norm: Norm, context: LayerContext) -> Tensor:
    """Return the RMS norm of each head of x (N, heads, D)."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return contiguous_gradient(branch_norm(rows, norm, context)).view(x.shape)


def _norm(module: RMSNorm) -> Norm:
    return Norm(module.weight, module.eps, 0.0)
