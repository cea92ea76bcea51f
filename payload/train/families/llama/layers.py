"""The modules of a decoder layer in plain torch, with Hugging Face's names; the reference for
the kernels.

Shapes: B batch, T tokens of the input, C width, H query heads, K key heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from payload.models.llama.config import Activation
from payload.models.llama.config import Layer as LayerSpec
from payload.models.llama.spec import DecoderSpec
from payload.train.families.llama.activations import activated
from payload.train.families.llama.mixture import MixtureMLP
from payload.train.families.llama.rope import Table, rotated
from payload.train.models.attention import attend
from payload.train.models.base import LayerModule
from payload.train.models.key_value_cache import LayerCache
from payload.train.models.split import SplitModule, copy_to_ranks, own_masks, reduce_from_ranks
from payload.train.models.uninitialised import Linear


class RMSNorm(nn.Module):
    """Divides by the root mean square, in fp32, and multiplies by a scale."""

    def __init__(self, size: int, *, eps: float, offset: bool) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        """If set, the scale is 1 + weight, so zero weights give a scale of 1."""
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., size) to (..., size)."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        scale = self.weight.float()
        return (wide * (scale + 1 if self.offset else scale)).type_as(x)


class Attention(SplitModule):
    """Causal self-attention in which several query heads can share one key head."""

    def __init__(self, spec: DecoderSpec, layer: LayerSpec, *, dropout: float) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.scale = spec.attention_scale
        self.window = layer.window
        self.dropout = dropout
        width, queries = spec.hidden_size, spec.num_attention_heads * spec.head_dim
        keys = spec.num_key_value_heads * spec.head_dim
        self.queries_per_key = spec.num_attention_heads // spec.num_key_value_heads
        self.is_fused = spec.fused_projections
        if self.is_fused:
            self.qkv_proj = Linear(width, queries + 2 * keys, bias=spec.qkv_bias)
        else:
            self.q_proj = Linear(width, queries, bias=spec.qkv_bias)
            self.k_proj = Linear(width, keys, bias=spec.qkv_bias)
            self.v_proj = Linear(width, keys, bias=spec.qkv_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm:
            self.q_norm = make_norm(spec, size=spec.head_dim)
            self.k_norm = make_norm(spec, size=spec.head_dim)
        self.norms_jointly = spec.joint_qk_norm
        if self.norms_jointly:
            self.q_norm, self.k_norm = make_norm(spec, size=queries), make_norm(spec, size=keys)
        self.o_proj = Linear(queries, width, bias=spec.output_bias)

    def forward(
        self,
        x: Tensor,
        rope: Table | None,
        cache: LayerCache | None,
        starts: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T, C) to (B, T, C); a layer without positions needs no `rope`.

        With `starts` (see `CausalLM.hidden`), `rope` has a row for each of the B x T tokens.
        `bounds` are described in `attend`.
        """
        x = copy_to_ranks(x, self.ranks)
        made = [each(x) for each in self.inputs()]
        if self.is_fused:
            keys = made[0].shape[-1] // (self.queries_per_key + 2)
            made = list(torch.split(made[0], [self.queries_per_key * keys, keys, keys], dim=-1))
        norms = self.q_norm, self.k_norm
        query, key, value = made
        if self.norms_jointly:
            query, key = _normed(query, key, norms)
        query, key, value = map(self._heads, (query, key, value))
        if not self.norms_jointly:
            query, key = _normed(query, key, norms)
        if rope is not None and starts is not None:
            cos, sin = (each.view(*starts.shape, -1).unsqueeze(1) for each in rope)
            rope = cos, sin
        if rope is not None:
            query, key = rotated(query, rope), rotated(key, rope)
        if cache is not None:
            key, value = cache.extend(key, value)
        dropout = self.dropout if self.training else 0.0
        with own_masks(self.ranks, dropout=dropout):
            mixed = attend(
                query,
                key,
                value,
                starts=starts,
                bounds=bounds,
                window=self.window,
                dropout=dropout,
                scale=self.scale,
            )
        return reduce_from_ranks(mixed.transpose(1, 2).flatten(2), self.o_proj, self.ranks)

    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the linears of queries, keys and values: three linears, or one joint linear."""
        return (self.qkv_proj,) if self.is_fused else (self.q_proj, self.k_proj, self.v_proj)

    def _heads(self, x: Tensor) -> Tensor:
        """Map (B, T, heads x D) to (B, heads, T, D)."""
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)


def _normed(
    query: Tensor, key: Tensor, norms: tuple[RMSNorm | None, RMSNorm | None]
) -> tuple[Tensor, Tensor]:
    """Return the normed queries and keys, or the inputs without norms."""
    first, second = norms
    return (query, key) if first is None or second is None else (first(query), second(key))


class MLP(SplitModule):
    """A gated MLP: an activated linear times a second linear, then a linear back to the width."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.activation: Activation = spec.hidden_act
        width, inner = spec.hidden_size, spec.intermediate_size
        self.is_shared = spec.fused_mlp
        self.is_fused = spec.fused_projections or self.is_shared
        if self.is_shared:
            self.input_linear = Linear(width, 2 * inner, bias=spec.mlp_bias)
            self.output_linear = Linear(inner, width, bias=spec.mlp_bias)
            return
        if self.is_fused:
            self.gate_up_proj = Linear(width, 2 * inner, bias=spec.mlp_bias)
        else:
            self.gate_proj = Linear(width, inner, bias=spec.mlp_bias)
            self.up_proj = Linear(width, inner, bias=spec.mlp_bias)
        self.down_proj = Linear(inner, width, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        x = copy_to_ranks(x, self.ranks)
        wide = [each(x) for each in self.inputs()]
        gate, up = wide[0].chunk(2, dim=-1) if self.is_fused else wide
        inner = activated(gate, self.activation) * up
        return reduce_from_ranks(inner, self.output(), self.ranks)

    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the linears of gate and up: two linears, or one joint linear."""
        if not self.is_fused:
            return self.gate_proj, self.up_proj
        return (self.input_linear if self.is_shared else self.gate_up_proj,)

    def output(self) -> Linear:
        """Return the linear that maps back to width C."""
        return self.output_linear if self.is_shared else self.down_proj


class Layer(LayerModule):
    """Attention and MLP, each with a norm before it, after it (OLMo), or both (Gemma)."""

    def __init__(self, spec: DecoderSpec, layer: LayerSpec, *, dropout: float) -> None:
        super().__init__()
        # In the order of the forward pass, as the gradient exchange requires.
        self.residual_scale = spec.residual_scale
        self.input_layernorm: RMSNorm | None = None
        if spec.input_norms:
            self.input_layernorm = make_norm(spec, size=spec.hidden_size)
        self.self_attn = Attention(spec, layer, dropout=dropout)
        # The norm before the MLP; in Gemma and OLMo the one after the attention.
        self.post_attention_layernorm = make_norm(spec, size=spec.hidden_size)
        self.pre_feedforward_layernorm: RMSNorm | None = None
        self.post_feedforward_layernorm: RMSNorm | None = None
        if spec.input_norms and spec.output_norms:
            self.pre_feedforward_layernorm = make_norm(spec, size=spec.hidden_size)
        self.mlp: MLP | MixtureMLP | None = None
        self.shared_mlp: MLP | None = None
        if spec.fused_mlp:
            self.shared_mlp = MLP(spec)
        else:
            self.mlp = MLP(spec) if spec.mixture is None else MixtureMLP(spec, spec.mixture)
        if spec.output_norms:
            self.post_feedforward_layernorm = make_norm(spec, size=spec.hidden_size)

    def forward(
        self,
        x: Tensor,
        rope: Table | None,
        cache: LayerCache | None,
        starts: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        first = x if self.input_layernorm is None else self.input_layernorm(x)
        mixed = self.self_attn(first, rope, cache, starts, bounds)
        before, behind = self.pre_feedforward_layernorm, self.post_feedforward_layernorm
        if behind is None:
            x = x + self._scaled(mixed)
            added: Tensor = x + self._scaled(self.gated()(self.post_attention_layernorm(x)))
            return added
        x = x + self.post_attention_layernorm(mixed)
        added = x + behind(self.gated()(x if before is None else before(x)))
        return added

    def gated(self) -> MLP | MixtureMLP:
        """Return the MLP. Its attribute name depends on the model."""
        found = self.mlp if self.shared_mlp is None else self.shared_mlp
        assert found is not None, "a layer has one of them"
        return found

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.residual_scale == 1 else branch * self.residual_scale


def make_norm(spec: DecoderSpec, *, size: int) -> RMSNorm:
    """Return the model's kind of norm, initialised to scale by 1."""
    return RMSNorm(size, eps=spec.rms_norm_eps, offset=spec.norm_offset)
