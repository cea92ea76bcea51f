"""GPT-2, with GPT-2's own names so that its weights load as they are.

B batch, T tokens in this pass, C n_embd, H n_head, V vocabulary.
Source: https://github.com/openai/gpt-2/blob/master/src/model.py.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from payload.data.blocks import IGNORED_TARGET
from payload.model_shape import ModelShape
from payload.train.kernels.kernels import Kernels

Activation = Literal["gelu_new", "gelu"]
"""Hugging Face's names: GPT-2's tanh approximation, and the exact function."""

_INIT_STD = 0.02
_INIT_STD_POSITIONS = 0.01
_NORM_EPS = 1e-5


class LayerCache:
    """One layer's keys and values of the tokens seen so far, (B, H, T, C / H) each."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values; return those of all tokens."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat((self.keys, keys), dim=2)
            values = torch.cat((self.values, values), dim=2)
        self.keys, self.values = keys, values
        return keys, values

    def num_tokens(self) -> int:
        """Tokens seen so far."""
        return 0 if self.keys is None else self.keys.shape[2]


class Linear(nn.Linear):
    """torch's, without its own random weights: `GPT` sets all. GPT-2's take torch a second."""

    def reset_parameters(self) -> None:
        """Leave the weights as the memory is."""


class Embedding(nn.Embedding):
    """The same for embeddings."""

    def reset_parameters(self) -> None:
        """Leave the weights as the memory is."""


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, shape: ModelShape, *, dropout: float) -> None:
        super().__init__()
        self.n_head = shape.n_head
        self.dropout = dropout
        self.c_attn = Linear(shape.n_embd, 3 * shape.n_embd, bias=shape.bias)
        self.c_proj = Linear(shape.n_embd, shape.n_embd, bias=shape.bias)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        if cache is not None:
            key, value = cache.extend(key, value)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if key.shape[2] == length else _continuation_mask(length, key.shape[2]),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=key.shape[2] == length,
        )
        joined = mixed.transpose(1, 2).reshape(batch, length, width)
        return functional.dropout(self.c_proj(joined), self.dropout, self.training)


def _continuation_mask(new: int, total: int) -> Tensor | None:
    """Which of `total` tokens each of the `new` last ones sees; None when it is all of them."""
    if new == 1:
        return None
    return torch.ones(new, total, dtype=torch.bool).tril(diagonal=total - new)


class MLP(nn.Module):
    """Two matrices with GELU between."""

    def __init__(self, shape: ModelShape, *, dropout: float, activation: Activation) -> None:
        super().__init__()
        self.dropout = dropout
        self.approximate = "tanh" if activation == "gelu_new" else "none"
        self.c_fc = Linear(shape.n_embd, 4 * shape.n_embd, bias=shape.bias)
        self.c_proj = Linear(4 * shape.n_embd, shape.n_embd, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        widened = functional.gelu(self.c_fc(x), approximate=self.approximate)
        return functional.dropout(self.c_proj(widened), self.dropout, self.training)


class Block(nn.Module):
    """One layer: norm, attention, norm, MLP, each pair added to the residual stream."""

    def __init__(self, shape: ModelShape, *, dropout: float, activation: Activation) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.n_embd, eps=_NORM_EPS, bias=shape.bias)
        self.attn = Attention(shape, dropout=dropout)
        self.ln_2 = nn.LayerNorm(shape.n_embd, eps=_NORM_EPS, bias=shape.bias)
        self.mlp = MLP(shape, dropout=dropout, activation=activation)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = x + self.attn(self.ln_1(x), cache)
        added: Tensor = x + self.mlp(self.ln_2(x))
        return added


class GPT(nn.Module):
    """The model. Weights are random, as GPT-2's were before training, or for the caller to set."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        dropout: float = 0.0,
        activation: Activation = "gelu_new",
        random: bool = True,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.activation = activation
        self.dropout = dropout
        self.kernels: Kernels | None = None
        """A faster way for a pass without caches; none = the plain modules, the reference."""
        self.wte = Embedding(shape.vocab_size, shape.n_embd)
        self.wpe = Embedding(shape.positions(), shape.n_embd)
        self.h = nn.ModuleList(
            Block(shape, dropout=dropout, activation=activation) for _ in range(shape.n_layer)
        )
        self.ln_f = nn.LayerNorm(shape.n_embd, eps=_NORM_EPS, bias=shape.bias)
        if random:
            self._initialise()

    def _initialise(self) -> None:
        # The paper scales the projections into the residual stream by one over the square root of
        # the number of residual layers; the other deviations are those of OpenAI's code.
        residual_std = _INIT_STD / math.sqrt(2 * self.shape.n_layer)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, 1.0 if is_norm_weight(name) else 0.0)
            elif name == "wpe.weight":
                nn.init.normal_(parameter, std=_INIT_STD_POSITIONS)
            else:
                nn.init.normal_(parameter, std=residual_std if "c_proj" in name else _INIT_STD)

    def hidden(self, tokens: Tensor, caches: list[LayerCache] | None = None) -> Tensor:
        """(B, T) token ids to (B, T, C), the final norm included.

        With `caches`, one a layer, `tokens` continue the ones seen before.
        """
        start = caches[0].num_tokens() if caches else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self._embedded(tokens) + self.wpe(positions)
        if self.kernels is not None and caches is None:
            fast = self.kernels.layers(self, x)
            if fast is not None:
                return fast
        x = functional.dropout(x, self.dropout, self.training)
        for i, block in enumerate(self.h):
            x = block(x, caches[i] if caches else None)
        normed: Tensor = self.ln_f(x)
        return normed

    def _embedded(self, tokens: Tensor) -> Tensor:
        if self.kernels is not None:
            return self.kernels.embed(self.wte.weight, tokens)
        embedded: Tensor = self.wte(tokens)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) to (..., V); the head is the token embedding."""
        return functional.linear(hidden, self.wte.weight)

    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of every target, (B, T) fp32; 0 where the target is `IGNORED_TARGET`."""
        if self.kernels is not None:
            return self.kernels.token_losses(self.hidden(tokens), self.wte.weight, targets)
        logits = self.logits(self.hidden(tokens))
        losses = functional.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="none",
        )
        return losses.view_as(targets)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy over the targets, a scalar.

        Raises nothing on its own; tokens and targets are (B, T) int64 within the vocabulary.
        """
        if self.kernels is not None:
            return self.kernels.mean_loss(self.hidden(tokens), self.wte.weight, targets)
        logits = self.logits(self.hidden(tokens))
        return functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET
        )


def is_norm_weight(name: str) -> bool:
    """Whether a parameter's name is a layer norm's scale."""
    return name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight"))
