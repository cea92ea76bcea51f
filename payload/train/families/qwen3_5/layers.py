"""The modules of a Qwen3.5 layer in plain torch, with transformers' names; the reference for the
kernels.

Shapes: B batch, T tokens of the input, C width, H query heads, D width of a head, V all values of
linear attention.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from payload.models.qwen3_5.config import LinearAttention as LinearSizes
from payload.models.qwen3_5.spec import Qwen35Spec
from payload.train.families.llama.layers import RMSNorm
from payload.train.families.llama.rope import Table, rotated
from payload.train.families.qwen3_5.caches import DeltaCache
from payload.train.families.qwen3_5.delta_rule import gated_delta_rule, one_token
from payload.train.families.qwen3_5.short_convolution import short_convolution
from payload.train.models.attention import attend
from payload.train.models.base import LayerModule
from payload.train.models.key_value_cache import LayerCache
from payload.train.models.uninitialised import Linear

AnyCache = LayerCache | DeltaCache


class Attention(nn.Module):
    """Causal self-attention with a gate on the output."""

    def __init__(self, spec: Qwen35Spec, *, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.dropout = spec.head_dim, dropout
        width, queries = spec.hidden_size, spec.num_attention_heads * spec.head_dim
        keys, bias = spec.num_key_value_heads * spec.head_dim, spec.attention_bias
        self.q_proj = Linear(width, 2 * queries, bias=bias)
        """Linear that makes, for each head, the query followed by the gate."""
        self.k_proj = Linear(width, keys, bias=bias)
        self.v_proj = Linear(width, keys, bias=bias)
        self.q_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps, offset=True)
        self.k_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps, offset=True)
        self.o_proj = Linear(queries, width, bias=bias)

    def forward(
        self,
        x: Tensor,
        rope: Table,
        cache: LayerCache | None,
        starts: Tensor | None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T, C) to (B, T, C).

        With `starts` (see `CausalLM.hidden`), `rope` has a row for each of the B x T tokens.
        `bounds` are described in `attend`.
        """
        if starts is not None:
            cos, sin = (each.view(*starts.shape, -1).unsqueeze(1) for each in rope)
            rope = cos, sin
        query, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        query = rotated(self.q_norm(query).transpose(1, 2), rope)
        key = rotated(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2), rope)
        value = self._heads(self.v_proj(x)).transpose(1, 2)
        if cache is not None:
            key, value = cache.extend(key, value)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(query, key, value, starts=starts, bounds=bounds, dropout=dropout)
        gated = mixed.transpose(1, 2) * torch.sigmoid(gate)
        projected: Tensor = self.o_proj(gated.flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        """Map (B, T, heads x D) to (B, T, heads, D)."""
        return x.view(*x.shape[:-1], -1, self.head_dim)


class Convolution(nn.Module):
    """The weight of the causal convolution, (channels, 1, taps)."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class LinearAttention(nn.Module):
    """Linear attention by the gated delta rule, after a convolution over the last tokens."""

    def __init__(self, spec: Qwen35Spec) -> None:
        super().__init__()
        width, sizes = spec.hidden_size, spec.linear
        self.sizes: LinearSizes = sizes
        self.dt_bias = nn.Parameter(torch.ones(sizes.value_heads))
        self.A_log = nn.Parameter(torch.zeros(sizes.value_heads))
        self.in_proj_qkv = Linear(width, sizes.mixed(), bias=False)
        self.in_proj_z = Linear(width, sizes.values(), bias=False)
        self.in_proj_b = Linear(width, sizes.value_heads, bias=False)
        self.in_proj_a = Linear(width, sizes.value_heads, bias=False)
        self.conv1d = Convolution(sizes.mixed(), sizes.taps)
        self.norm = RMSNorm(sizes.value_dim, eps=spec.rms_norm_eps, offset=False)
        self.out_proj = Linear(sizes.values(), width, bias=False)

    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the linears of the mixed input, the gate, the write strengths and the decays."""
        return self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a

    def forward(self, x: Tensor, cache: DeltaCache | None, starts: Tensor | None) -> Tensor:
        """Map (B, T, C) to (B, T, C). `CausalLM.hidden` describes `starts`."""
        mixed, gate, write, time = (each(x) for each in self.inputs())
        read = self.read(mixed, write, time, cache, starts)
        gated = self.norm(read).flatten(2) * functional.silu(gate)
        projected: Tensor = self.out_proj(gated)
        return projected

    def read(
        self,
        mixed: Tensor,
        write: Tensor,
        time: Tensor,
        cache: DeltaCache | None,
        starts: Tensor | None,
    ) -> Tensor:
        """Return the values that queries read, (B, T, heads, V / heads), from linears' outputs."""
        length, sizes = mixed.shape[1], self.sizes
        if cache is not None:
            mixed = cache.with_window(mixed, before=sizes.taps - 1)
        made = short_convolution(mixed, self.conv1d.weight, starts=starts)[:, -length:]
        widths = [sizes.keys(), sizes.keys(), sizes.values()]
        parts = torch.split(made, widths, dim=-1)
        heads = (sizes.key_heads, sizes.key_heads, sizes.value_heads)
        query, key, value = (
            part.view(*part.shape[:-1], count, -1) for part, count in zip(parts, heads, strict=True)
        )
        decay = -self.A_log.float().exp() * functional.softplus(time.float() + self.dt_bias)
        if cache is None:
            return gated_delta_rule(query, key, value, write, decay, starts=starts)[0]
        rule = one_token if length == 1 else gated_delta_rule
        found, cache.state = rule(query, key, value, write, decay, state=cache.state)
        return found


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=False)
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        inner = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        projected: Tensor = self.down_proj(inner)
        return projected


class Layer(LayerModule):
    """Full or linear attention, and an MLP."""

    def __init__(self, spec: Qwen35Spec, *, is_full: bool, dropout: float) -> None:
        super().__init__()
        width, eps = spec.hidden_size, spec.rms_norm_eps
        # In the order of the forward pass, as the gradient exchange requires.
        self.input_layernorm = RMSNorm(width, eps=eps, offset=True)
        self.self_attn: Attention | None = None
        self.linear_attn: LinearAttention | None = None
        if is_full:
            self.self_attn = Attention(spec, dropout=dropout)
        else:
            self.linear_attn = LinearAttention(spec)
        self.post_attention_layernorm = RMSNorm(width, eps=eps, offset=True)
        self.mlp = MLP(width, spec.intermediate_size)

    def forward(
        self,
        x: Tensor,
        rope: Table,
        cache: AnyCache | None,
        starts: Tensor | None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        x = x + self._mixed(self.input_layernorm(x), rope, cache, starts, bounds)
        added: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return added

    def _mixed(
        self,
        x: Tensor,
        rope: Table,
        cache: AnyCache | None,
        starts: Tensor | None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        found: Tensor
        if self.linear_attn is not None:
            assert not isinstance(cache, LayerCache)
            found = self.linear_attn(x, cache, starts)
        else:
            assert self.self_attn is not None and not isinstance(cache, DeltaCache)
            found = self.self_attn(x, rope, cache, starts, bounds)
        return found
