"""The modules of a Gemma 4 layer in plain torch, with transformers' names; the reference for the
kernels.

Shapes: B batch, T tokens of the input, C width, H query heads, K key heads, D width of a head,
P width of a layer's part of the second token embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from payload.models.gemma4.config import Layer as LayerSpec
from payload.models.gemma4.config import Rope
from payload.models.gemma4.spec import Gemma4Spec
from payload.train.families.llama.activations import activated
from payload.train.families.llama.layers import RMSNorm
from payload.train.families.llama.rope import Table, rotated
from payload.train.models.attention import attend
from payload.train.models.base import LayerModule
from payload.train.models.key_value_cache import LayerCache
from payload.train.models.uninitialised import Linear

Keys = tuple[Tensor, Tensor]
"""A layer's keys and values of all tokens, (B, K, T, D) each."""


def frequencies(rope: Rope, *, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of a head's elements, (D / 2,) fp32.

    The pairs that are not rotated have the angle 0.
    """
    exponents = torch.arange(0, 2 * rope.pairs, 2, dtype=torch.float32) / head_dim
    still = torch.zeros(head_dim // 2 - rope.pairs)
    return torch.cat((1.0 / (rope.theta**exponents), still)) / rope.factor


class Attention(nn.Module):
    """Causal self-attention. Keys and values are from this layer or from an earlier layer."""

    def __init__(self, spec: Gemma4Spec, layer: LayerSpec, *, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.window, self.eps = layer.head_dim, layer.window, spec.rms_norm_eps
        self.dropout = dropout
        width, bias = spec.hidden_size, spec.attention_bias
        queries = spec.num_attention_heads * layer.head_dim
        keys = layer.key_heads * layer.head_dim
        self.has_keys = layer.keys_from is None
        self.q_proj = Linear(width, queries, bias=bias)
        self.k_proj: Linear | None = None
        self.v_proj: Linear | None = None
        if self.has_keys:
            self.k_proj = Linear(width, keys, bias=bias)
            if layer.has_values:
                self.v_proj = Linear(width, keys, bias=bias)
        self.q_norm = RMSNorm(layer.head_dim, eps=self.eps, offset=False)
        self.k_norm: RMSNorm | None = None
        if self.has_keys:
            self.k_norm = RMSNorm(layer.head_dim, eps=self.eps, offset=False)
        self.o_proj = Linear(queries, width, bias=bias)

    def forward(
        self,
        x: Tensor,
        rope: Table,
        keys: Keys | None,
        cache: LayerCache | None,
        starts: Tensor | None,
        bounds: Tensor | None = None,
    ) -> tuple[Tensor, Keys]:
        """Map (B, T, C) to (B, T, C); also return the keys and values.

        A layer that computes no keys uses `keys`. With `starts` (see `CausalLM.hidden`), `rope` has
        a row for each of the B x T tokens. `bounds` are described in `attend`.
        """
        if starts is not None:
            cos, sin = (each.view(*starts.shape, -1).unsqueeze(1) for each in rope)
            rope = cos, sin
        query = rotated(self.q_norm(self._heads(self.q_proj(x))), rope)
        if keys is None:
            keys = self._keys(x, rope)
            if cache is not None:
                keys = cache.extend(*keys)
        mixed = attend(
            query,
            *keys,
            starts=starts,
            bounds=bounds,
            window=self.window,
            dropout=self.dropout if self.training else 0.0,
            scale=1.0,
        )
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected, keys

    def _keys(self, x: Tensor, rope: Table) -> Keys:
        """Return the keys and values of `x`; without a linear for values, keys are the values."""
        assert self.k_proj is not None and self.k_norm is not None
        made = self._heads(self.k_proj(x))
        value = made if self.v_proj is None else self._heads(self.v_proj(x))
        return rotated(self.k_norm(made), rope), unit_norm(value, eps=self.eps)

    def _heads(self, x: Tensor) -> Tensor:
        """Map (B, T, heads x D) to (B, heads, T, D)."""
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """A gated MLP: an activated linear times a second linear, then a linear back to the width."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=False)
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        inner = activated(self.gate_proj(x), "gelu_pytorch_tanh") * self.up_proj(x)
        projected: Tensor = self.down_proj(inner)
        return projected


class Layer(LayerModule):
    """Attention, MLP and, in small models, the layer's part of the second token embedding."""

    layer_scalar: Tensor

    def __init__(self, spec: Gemma4Spec, layer: LayerSpec, *, dropout: float) -> None:
        super().__init__()
        width, eps = spec.hidden_size, spec.rms_norm_eps

        def norm() -> RMSNorm:
            return RMSNorm(width, eps=eps, offset=False)

        # In the order of the forward pass, as the gradient exchange requires.
        self.input_layernorm = norm()
        self.self_attn = Attention(spec, layer, dropout=dropout)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = MLP(width, layer.inner)
        self.post_feedforward_layernorm = norm()
        self.has_part = bool(spec.ple_width)
        if self.has_part:
            self.per_layer_input_gate = Linear(width, spec.ple_width, bias=False)
            self.per_layer_projection = Linear(spec.ple_width, width, bias=False)
            self.post_per_layer_input_norm = norm()
        # A factor of the layer's output, which transformers does not train either.
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        x: Tensor,
        part: Tensor | None,
        rope: Table,
        keys: Keys | None,
        cache: LayerCache | None,
        starts: Tensor | None,
        bounds: Tensor | None = None,
    ) -> tuple[Tensor, Keys]:
        """Map (B, T, C) to (B, T, C), with the layer's `part` (B, T, P); also return the keys."""
        mixed, made = self.self_attn(self.input_layernorm(x), rope, keys, cache, starts, bounds)
        x = x + self.post_attention_layernorm(mixed)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if part is not None:
            x = x + self.post_per_layer_input_norm(self._projected(x, part))
        return x * self.layer_scalar, made

    def _projected(self, x: Tensor, part: Tensor) -> Tensor:
        gate = activated(self.per_layer_input_gate(x), "gelu_pytorch_tanh")
        projected: Tensor = self.per_layer_projection(gate * part)
        return projected


def unit_norm(x: Tensor, *, eps: float) -> Tensor:
    """Divide by the root mean square of the last dimension, in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).type_as(x)
