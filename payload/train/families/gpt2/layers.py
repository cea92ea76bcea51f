"""GPT-2's layer in plain torch, the reference for the kernels.

Shapes: B batch, T tokens of the input, C n_embd, H n_head.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from payload.models.gpt2.spec import Activation, Gpt2Spec
from payload.train.models.attention import attend
from payload.train.models.base import LayerModule
from payload.train.models.key_value_cache import LayerCache
from payload.train.models.split import SplitModule, copy_to_ranks, own_masks, reduce_from_ranks
from payload.train.models.uninitialised import Linear

NORM_EPS = 1e-5


class Attention(SplitModule):
    """Causal self-attention over all heads in one call."""

    def __init__(self, spec: Gpt2Spec, *, dropout: float) -> None:
        super().__init__()
        self.head_width = spec.n_embd // spec.n_head
        self.dropout = dropout
        self.c_attn = Linear(spec.n_embd, 3 * spec.n_embd, bias=spec.bias)
        self.c_proj = Linear(spec.n_embd, spec.n_embd, bias=spec.bias)

    def forward(
        self,
        x: Tensor,
        cache: LayerCache | None = None,
        starts: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T, C) to (B, T, C); `attend` describes `starts` and `bounds`."""
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, -1, self.head_width).transpose(1, 2)
            for part in self.c_attn(copy_to_ranks(x, self.ranks)).chunk(3, dim=2)
        )
        if cache is not None:
            key, value = cache.extend(key, value)
        dropout = self.dropout if self.training else 0.0
        with own_masks(self.ranks, dropout=dropout):
            mixed = attend(query, key, value, starts=starts, bounds=bounds, dropout=dropout)
        joined = mixed.transpose(1, 2).reshape(batch, length, -1)
        projected = reduce_from_ranks(joined, self.c_proj, self.ranks)
        return functional.dropout(projected, self.dropout, self.training)


class MLP(SplitModule):
    """Two matmuls with GELU in between."""

    def __init__(self, spec: Gpt2Spec, *, dropout: float, activation: Activation) -> None:
        super().__init__()
        self.dropout = dropout
        self.approximate = "tanh" if activation == "gelu_new" else "none"
        self.c_fc = Linear(spec.n_embd, 4 * spec.n_embd, bias=spec.bias)
        self.c_proj = Linear(4 * spec.n_embd, spec.n_embd, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        widened = functional.gelu(
            self.c_fc(copy_to_ranks(x, self.ranks)), approximate=self.approximate
        )
        projected = reduce_from_ranks(widened, self.c_proj, self.ranks)
        return functional.dropout(projected, self.dropout, self.training)


class Block(LayerModule):
    """One layer: attention and MLP, each with a norm before it and added to the residual stream."""

    def __init__(self, spec: Gpt2Spec, *, dropout: float, activation: Activation) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(spec.n_embd, eps=NORM_EPS, bias=spec.bias)
        self.attn = Attention(spec, dropout=dropout)
        self.ln_2 = nn.LayerNorm(spec.n_embd, eps=NORM_EPS, bias=spec.bias)
        self.mlp = MLP(spec, dropout=dropout, activation=activation)

    def forward(
        self,
        x: Tensor,
        cache: LayerCache | None = None,
        starts: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        x = x + self.attn(self.ln_1(x), cache, starts, bounds)
        added: Tensor = x + self.mlp(self.ln_2(x))
        return added
