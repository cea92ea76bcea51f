"""A layer's MLP as a mixture of experts, and the layout of its weights in a checkpoint.

Shapes: B batch, T tokens of the input, N = B x T, C width, E experts, K experts of a token, I width
of an expert's gate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from payload.models.llama.mixture import Mixture
from payload.models.llama.spec import DecoderSpec
from payload.train.families.llama.activations import activated
from payload.train.tensors.transformers_import import import_shared_modules

_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)\Z")


class Router(nn.Module):
    """Chooses the experts of each token. Its weight has the name of transformers' router."""

    def __init__(self, spec: DecoderSpec, mixture: Mixture) -> None:
        super().__init__()
        self.active, self.normalises = mixture.active, mixture.normalises
        self.weight = nn.Parameter(torch.empty(mixture.experts, spec.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores of all experts (N, E) for x (N, C).

        Also return the weights and the indices of each token's K experts, (N, K) each.
        """
        logits = functional.linear(x, self.weight.to(x.dtype))
        chances = functional.softmax(logits, dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(chances, self.active, dim=-1)
        if self.normalises:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen


class Experts(nn.Module):
    """The matrices of all experts of a layer, as stacks."""

    def __init__(self, spec: DecoderSpec, mixture: Mixture) -> None:
        super().__init__()
        width, inner = spec.hidden_size, mixture.inner
        self.activation = spec.hidden_act
        self.gate_up_proj = nn.Parameter(torch.empty(mixture.experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(mixture.experts, width, inner))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Map x (N, C) to each token's weighted sum of expert outputs, (N, C)."""
        order, tokens, counts = by_expert(chosen, experts=len(self.gate_up_proj))
        made = []
        # A slice of a stack would have a gradient of the size of the stack.
        stacks = zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        for some, (wide, down) in zip(torch.split(x[tokens], counts), stacks, strict=True):
            if len(some):
                gate, up = functional.linear(some, wide).chunk(2, dim=-1)
                inner = activated(gate, self.activation) * up
                made.append(functional.linear(inner, down))
        weighted = torch.cat(made) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, tokens, weighted.to(x.dtype))


class MixtureMLP(nn.Module):
    """A router, and the experts from which the router selects some for each token."""

    def __init__(self, spec: DecoderSpec, mixture: Mixture) -> None:
        super().__init__()
        self.gate = Router(spec, mixture)
        self.experts = Experts(spec, mixture)
        self.keeps_scores = False
        """True if the next forward pass keeps the router's scores for the load-balancing loss."""
        self._scores: Tensor | None = None
        self._num_tokens = torch.zeros(mixture.experts, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        flat = x.flatten(0, 1)
        weights, chosen = self.route(flat)
        mixed: Tensor = self.experts(flat, chosen, weights)
        return mixed.view(x.shape)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of each token's experts, (N, K), for x (N, C)."""
        scores, weights, chosen = self.gate(x)
        if self.keeps_scores:
            self._scores = scores
        if self.training and torch.is_grad_enabled():
            # A checkpointed layer runs again in the backward pass, so its tokens count twice.
            found = torch.bincount(chosen.flatten(), minlength=len(self._num_tokens))
            self._num_tokens += found.cpu()
        return weights, chosen

    def take_scores(self) -> Tensor | None:
        """Return the kept scores (N, E) of the last forward pass; a second call returns None."""
        scores, self._scores = self._scores, None
        self.keeps_scores = False
        return scores

    def take_num_tokens(self) -> Tensor:
        """Return the number of tokens of each expert in training since the last call, (E,)."""
        found, self._num_tokens = self._num_tokens, torch.zeros_like(self._num_tokens)
        return found


def by_expert(chosen: Tensor, *, experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """Sort the pairs of a token and one of its experts (N, K) by expert.

    Return the order of the pairs, the token of each pair, and each expert's number of pairs.
    """
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    return order, order // chosen.shape[1], cast("list[int]", counts.tolist())


def mixtures(body: nn.Module) -> list[MixtureMLP]:
    """Return the mixtures of all layers."""
    return [each for each in body.modules() if isinstance(each, MixtureMLP)]


def balancing_loss(body: nn.Module, mixture: Mixture, padding: Tensor | None) -> Tensor | None:
    """Return the weighted load-balancing loss of the last forward pass, or None.

    The tokens at which `padding` (B, T) is True do not count.

    Source: Fedus et al., Switch Transformers, https://arxiv.org/abs/2101.03961, equations 4 to 6.
    """
    scores = [
        each for each in (layer.take_scores() for layer in mixtures(body)) if each is not None
    ]
    if not scores:
        return None
    import_shared_modules()
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    # Its annotation is for a single layer.
    function: Any = load_balancing_loss_func
    mask = None if padding is None else ~padding
    found: Tensor = function(tuple(scores), mixture.experts, mixture.active, mask)
    return mixture.balance * found


def stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with a checkpoint's names, with separate matrices for each expert."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        match = _STACK.match(name)
        found |= {name: value} if match is None else dict(_of_experts(match[1], match[2], value))
    return found


def _of_experts(path: str, part: str, stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    for number in range(len(stack)):
        matrix, place = stack[number], f"{path}.{number}"
        if part == "down_proj":
            yield f"{place}.down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{place}.gate_proj.weight", gate
            yield f"{place}.up_proj.weight", up


def has_stacks(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a checkpoint stores experts as stacks; transformers also reads stacks."""
    return any(_STACK.match(name) for name in tensors)
