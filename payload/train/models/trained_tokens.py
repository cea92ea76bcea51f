"""Rows of a frozen token embedding and output head that are trained: PEFT's trainable tokens.

N tokens, C width, V vocabulary. Source of the format: PEFT, tuners/trainable_tokens/layer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from payload.formats.data_folder import IGNORED_TARGET
from payload.models.spec import logits_tokens


class TrainedTokens(nn.Module):
    """Trained rows that replace the rows of `tokens`. The frozen weights are unchanged."""

    tokens: Tensor
    places: Tensor

    def __init__(
        self,
        tokens: Sequence[int],
        embedding: nn.Module,
        head: nn.Module | None,
        *,
        is_tied: bool,
    ) -> None:
        """Start from the rows of `embedding`, and of `head` if a separate head is trained, too.

        If `is_tied`, the head uses the rows of `embedding`.
        """
        super().__init__()
        self._is_tied = is_tied
        weight = embedding.weight
        assert isinstance(weight, Tensor)
        chosen = torch.tensor(tokens, device=weight.device)
        places = torch.full((len(weight),), -1, device=weight.device)
        places[chosen] = torch.arange(len(tokens), device=weight.device)
        self.register_buffer("tokens", chosen, persistent=False)
        self.register_buffer("places", places, persistent=False)
        self.embedding = nn.Parameter(weight.detach()[chosen].float())
        self.head: nn.Parameter | None = None
        if head is not None:
            assert isinstance(head.weight, Tensor)
            self.head = nn.Parameter(head.weight.detach()[chosen].float())
        self._hooks: list[Any] = []

    def watch(self, embedding: nn.Module, head: nn.Module | None) -> None:
        """Add hooks that apply the trained rows in these modules.

        The hooks replace the modules' outputs for the chosen tokens.
        """
        self._hooks.append(embedding.register_forward_hook(self._replace_embedded))
        if head is not None:
            self._hooks.append(
                head.register_forward_hook(lambda _, given, made: self.replace(made, given[0]))
            )

    def _replace_embedded(self, module: nn.Module, given: tuple[Tensor], made: Tensor) -> Tensor:
        places = self.places[given[0]]
        rows = functional.embedding(places.clamp(min=0), self.embedding)
        # Some embeddings of transformers scale their rows: Gemma's.
        scale = getattr(module, "embed_scale", None)
        if scale is not None:
            rows = rows * scale
        return torch.where((places >= 0).unsqueeze(-1), rows.to(made.dtype), made)

    def replace(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Replace the trained tokens' logits (..., V) by logits computed from `hidden` (..., C)."""
        rows = self.embedding if self._is_tied else self.head
        if rows is None:
            return logits
        made = functional.linear(hidden, rows.to(hidden.dtype))
        return logits.index_copy(-1, self.tokens, made.to(logits.dtype))

    def merge(self, embedding: nn.Module, head: nn.Module | None) -> None:
        """Write the rows into the weights of these modules, and stop replacing outputs."""
        with torch.no_grad():
            for module, rows in ((embedding, self.embedding), (head, self.head)):
                if module is not None and rows is not None:
                    assert isinstance(module.weight, Tensor)
                    module.weight[self.tokens] = rows.to(module.weight.dtype)
        for hook in self._hooks:
            hook.remove()


class TrainedTokensHead:
    """A frozen head with trained rows, and its loss in chunks of tokens.

    All logits never exist together: the backward pass recomputes a chunk's logits.
    """

    def __init__(self, weight: nn.Parameter, trained: TrainedTokens) -> None:
        self._weight, self._trained = weight, trained

    def mean_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over the targets, a scalar."""
        return self.token_losses(hidden, targets).sum() / (targets != IGNORED_TARGET).sum()

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every target, (B, T) fp32; 0 for ignored targets."""
        size = logits_tokens(len(self._weight))
        rows_of = torch.split(hidden.flatten(0, 1), size)
        chunks = zip(rows_of, torch.split(targets.flatten(), size), strict=True)
        found = [
            checkpoint(self._losses, rows, chosen, use_reentrant=False) for rows, chosen in chunks
        ]
        return torch.cat(found).view_as(targets)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        weight = self._weight.to(hidden.dtype)
        logits = self._trained.replace(functional.linear(hidden, weight), hidden).float()
        return functional.cross_entropy(
            logits, targets, ignore_index=IGNORED_TARGET, reduction="none"
        )
