"""The loss of an output head whose logits are capped, in chunks of tokens.

All logits never exist together. The backward pass recomputes a chunk's logits.
Shapes: B batch, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from payload.formats.data_folder import IGNORED_TARGET
from payload.models.spec import logits_tokens


class CappedHead:
    """Computes the loss with a function from hidden states (..., C) to capped logits (..., V)."""

    def __init__(self, logits: Callable[[Tensor], Tensor], *, rows: int) -> None:
        self._logits, self._rows = logits, rows

    def mean_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over targets (B, T), a scalar, from hidden (B, T, C)."""
        return self.token_losses(hidden, targets).sum() / (targets != IGNORED_TARGET).sum()

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every target, (B, T) fp32; 0 for ignored targets."""
        found = [
            checkpoint(self._losses, rows, some, use_reentrant=False)
            for rows, some in self._chunks(hidden, targets)
        ]
        return torch.cat(found).view_as(targets)

    def _chunks(self, hidden: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = logits_tokens(self._rows)
        rows = torch.split(hidden.flatten(0, 1), size)
        return zip(rows, torch.split(targets.flatten(), size), strict=True)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self._logits(hidden).float()
        return functional.cross_entropy(
            logits, targets, ignore_index=IGNORED_TARGET, reduction="none"
        )
