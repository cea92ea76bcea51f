"""Computes a decoder's layers with the kernels, or lists why the kernels cannot be used.

Shapes: N tokens of all sequences, B batch, T tokens of one sequence, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from payload.kernels.decoder_layers import (
    AttentionSettings,
    Norm,
    add_norm,
    attention,
    branch_norm,
    gated_mlp,
)
from payload.kernels.decoder_pointwise import LONGEST_HEAD, Gate, HeadSizes, Rotation
from payload.kernels.experts import Pairs, experts
from payload.kernels.linears import LayerContext
from payload.models.llama.config import Layer as LayerSpec
from payload.models.llama.rope import Rope
from payload.models.llama.spec import DecoderSpec
from payload.train.families.llama.layers import MLP, Attention, Layer, RMSNorm
from payload.train.families.llama.mixture import Experts, MixtureMLP, Router, by_expert
from payload.train.families.llama.rope import Table
from payload.train.models.kernel_support import layer_refusals, projection
from payload.train.models.split import TensorRanks, copy_to_ranks, sum_with_bias
from payload.train.models.stage import OtherStageModule, Stage
from payload.train.models.uninitialised import Embedding, Linear

_KNOWN = (
    *(Attention, OtherStageModule, Embedding, Layer, Linear, MLP, RMSNorm, nn.ModuleList),
    *(Experts, MixtureMLP, Router),
)
_GATES: dict[str, Gate] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Limited by the block of keys that the kernels keep in a core's cache.
_WIDEST_HEAD = min(256, LONGEST_HEAD)


def joined(spec: DecoderSpec) -> tuple[tuple[str, ...], ...]:
    """Return the linears of a layer, grouped by input: each group is computed as one matmul."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    wide: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down = "mlp.down_proj"
    if spec.mixture is not None:
        return qkv, ("self_attn.o_proj",)
    if spec.fused_projections:
        qkv, wide = ("self_attn.qkv_proj",), ("mlp.gate_up_proj",)
    if spec.fused_mlp:
        wide, down = ("shared_mlp.input_linear",), "shared_mlp.output_linear"
    return qkv, ("self_attn.o_proj",), wide, (down,)


def run_layers(
    body: nn.Module,
    x: Tensor,
    spec: DecoderSpec,
    ropes: dict[Rope, Table],
    starts: Tensor | None,
    context: LayerContext,
    run_layer: Callable[..., Any] = lambda layer, *inputs: layer(*inputs),
    ranks: TensorRanks | None = None,
    stage: Stage | None = None,
) -> Tensor:
    """Map the embedded tokens to the output of the final norm, both (B, T, C).

    The embedded tokens are fp32. The output has the dtype of `context`. For `starts`, see
    `CausalLM.hidden`. The tables in `ropes` are made for these starts.
    `run_layer` calls each layer. With `ranks`, each rank has some of the heads and a part of the
    MLP. On a pipeline stage before the last one, return the residual stream after the stage's
    layers, in fp32.
    """

    def layer_of(
        layer: Layer, settings: AttentionSettings, total: Tensor, added: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        total, normed = add(total, added, layer.input_layernorm)
        mixed = _attention(normed, layer.self_attn, settings, context)
        before, behind = layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm
        if behind is None:
            total, normed = add(total, mixed, layer.post_attention_layernorm)
            return total, _mlp(normed, layer.gated(), context)
        mixed = branch_norm(mixed, _norm(layer.post_attention_layernorm), context)
        total, normed = add(total, mixed, before)
        return total, branch_norm(_mlp(normed, layer.gated(), context), _norm(behind), context)

    def add(total: Tensor, added: Tensor | None, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        """Return `total` + `added`, and the norm of this sum in the matmuls' dtype.

        Without a norm, the second result is the sum in the matmuls' dtype.
        """
        if norm is None:
            total = total if added is None else total + added
            return total, total.to(context.dtype)
        scale = spec.residual_scale
        return add_norm(total, added, _norm(norm), context, added_scale=scale)

    with torch.autocast("cpu", enabled=False):
        attending = _attending(
            spec,
            ropes,
            starts,
            batch=x.shape[0],
            length=x.shape[1],
            ranks=1 if ranks is None else ranks.size,
        )
        total: Tensor = x.flatten(0, 1)
        added: Tensor | None = None
        layers = cast("nn.ModuleList", body.layers)
        for number in range(len(spec.layers)) if stage is None else stage.layers:
            layer, what = layers[number], spec.layers[number]
            assert isinstance(layer, Layer)
            total, added = run_layer(layer.computed_by, layer_of, attending[what], total, added)
        if stage is not None and not stage.is_last():
            if added is not None:
                total = torch.add(total, added, alpha=spec.residual_scale)
            return total.view(x.shape)
        last = _norm(cast(RMSNorm, body.norm), divisor=spec.logits_divisor)
        _, normed = add_norm(total, added, last, context, added_scale=spec.residual_scale)
        return normed.view(x.shape)


def refusals(body: nn.Module, spec: DecoderSpec, *, dropout: float) -> list[str]:
    """Return the reasons why the layers run without kernels, one line each."""
    return list(_refusals(body, spec, dropout=dropout))


def _refusals(body: nn.Module, spec: DecoderSpec, *, dropout: float) -> Iterator[str]:
    if dropout:
        yield f"dropout = {dropout}: the kernels have no dropout"
    if spec.hidden_act not in _GATES:
        yield f"activation {spec.hidden_act}: the kernels have {' and '.join(_GATES)}"
    if spec.head_dim % 2 or spec.head_dim > _WIDEST_HEAD:
        yield f"head_dim {spec.head_dim}: the kernels need an even number up to {_WIDEST_HEAD}"
    yield from layer_refusals(body, known=_KNOWN)


def _attending(
    spec: DecoderSpec,
    ropes: dict[Rope, Table],
    documents: Tensor | None,
    *,
    batch: int,
    length: int,
    ranks: int,
) -> dict[LayerSpec, AttentionSettings]:
    """Return the attention settings of each kind of layer, on one of `ranks` tensor ranks."""
    rows = length if documents is None else batch * length
    heads, key_heads = spec.num_attention_heads // ranks, spec.num_key_value_heads // ranks
    sizes = HeadSizes(rows, heads, key_heads, spec.head_dim)
    found = {}
    for kind in set(spec.layers):
        rotation = None if kind.rope is None else Rotation(*ropes[kind.rope])
        starts = documents
        if kind.window is not None and kind.window < length:
            first = (torch.arange(length) - kind.window + 1).clamp_min(0)
            starts = first.repeat(batch, 1) if starts is None else starts.maximum(first)
        scale, joint = spec.attention_scale, spec.joint_qk_norm
        found[kind] = AttentionSettings(batch, sizes, scale, rotation, starts, joint)
    return found


def _norm(module: RMSNorm, *, divisor: float = 1.0) -> Norm:
    """Return a module's norm, with outputs divided by `divisor`."""
    weight = module.weight if divisor == 1 else module.weight / divisor
    return Norm(weight, module.eps, 1.0 / divisor if module.offset else 0.0)


def _attention(
    x: Tensor, module: Attention, settings: AttentionSettings, context: LayerContext
) -> Tensor:
    norms = None
    if module.q_norm is not None and module.k_norm is not None:
        norms = (_norm(module.q_norm), _norm(module.k_norm))
    qkv = tuple(map(projection, module.inputs()))
    ranks, last = module.ranks, module.o_proj
    out = projection(last, is_part=ranks is not None)
    mixed = attention(copy_to_ranks(x, ranks), qkv, out, norms, settings, context)
    return mixed if ranks is None else sum_with_bias(mixed, last.bias, ranks)


def _mlp(x: Tensor, module: MLP | MixtureMLP, context: LayerContext) -> Tensor:
    """Return the output of a layer's MLP for x (N, C)."""
    if isinstance(module, MixtureMLP) and context.dtype is torch.float32:
        # The kernels of the experts are for bf16 alone.
        return cast(Tensor, module(x.unsqueeze(0))).squeeze(0)
    if isinstance(module, MixtureMLP):
        weights, chosen = module.route(x)
        stacks = module.experts.gate_up_proj, module.experts.down_proj
        pairs = Pairs(*by_expert(chosen, experts=len(stacks[0])))
        return experts(x, weights, pairs, stacks, _GATES[module.experts.activation], context)
    gate = _GATES[module.activation]
    wide = tuple(map(projection, module.inputs()))
    ranks, last = module.ranks, module.output()
    down = projection(last, is_part=ranks is not None)
    result = gated_mlp(copy_to_ranks(x, ranks), wide, down, gate, context)
    return result if ranks is None else sum_with_bias(result, last.bias, ranks)
