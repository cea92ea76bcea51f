"""Implementations of the output head and its loss: plain, fused, or split over tensor ranks.

Hidden states are (B, T, C), targets (B, T); targets equal to `IGNORED_TARGET` are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional

from payload.formats.data_folder import IGNORED_TARGET
from payload.train.models import split_head
from payload.train.models.split import TensorRanks


class HeadLoss(Protocol):
    """The output head and its loss."""

    def mean_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over the targets, a scalar."""

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every target, (B, T) fp32; 0 for ignored targets."""


class FusedLoss(Protocol):
    """Computes head and loss with the kernels or `ChunkedLoss`, without storing all logits."""

    def mean_loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over the targets, a scalar."""

    def token_losses(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every target, (B, T) fp32; 0 for ignored targets."""


class PlainHead:
    """Computes all logits, then the loss. This is the reference implementation."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        self._logits = logits

    def mean_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over the targets, a scalar."""
        logits = self._logits(hidden).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED_TARGET)

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every target, (B, T) fp32; 0 for ignored targets."""
        losses = functional.cross_entropy(
            self._logits(hidden).flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="none",
        )
        return losses.view_as(targets)


class FusedHead:
    """Computes the loss without storing all logits."""

    def __init__(self, weight: nn.Parameter, fused: FusedLoss) -> None:
        self._weight, self._fused = weight, fused

    def mean_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over the targets, a scalar."""
        return self._fused.mean_loss(hidden, self._weight, targets)

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every target, (B, T) fp32; 0 for ignored targets."""
        return self._fused.token_losses(hidden, self._weight, targets)


class SplitHead:
    """A head of `vocab_rows` rows that is split over `ranks`."""

    def __init__(self, weight: nn.Parameter, ranks: TensorRanks, *, vocab_rows: int) -> None:
        self._weight, self._ranks, self._vocab_rows = weight, ranks, vocab_rows

    def mean_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over the targets, a scalar."""
        return split_head.mean_loss(
            hidden, self._weight, targets, self._ranks, vocab_rows=self._vocab_rows
        )

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every target, (B, T) fp32, without gradients."""
        return split_head.token_losses(
            hidden, self._weight, targets, self._ranks, vocab_rows=self._vocab_rows
        )
