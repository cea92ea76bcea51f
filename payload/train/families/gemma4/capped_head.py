"""The loss of an output head whose logits are capped, in chunks of tokens.

Shapes: B batch, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from payload.formats.data_folder import IGNORED_TARGET
from payload.train.models.chunked_loss import losses_in_chunks


class CappedHead:
    """Computes the loss with a function from hidden states (..., C) to capped logits (..., V)."""

    def __init__(self, logits: Callable[[Tensor], Tensor], *, rows: int) -> None:
        self._logits, self._rows = logits, rows

    def mean_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over targets (B, T), a scalar, from hidden (B, T, C)."""
        return self.token_losses(hidden, targets).sum() / (targets != IGNORED_TARGET).sum()

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every target, (B, T) fp32; 0 for ignored targets."""
        return losses_in_chunks(hidden, targets, logits=self._logits, vocab_size=self._rows)
