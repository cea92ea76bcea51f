"""The ways to compute the output head and its loss: split over ranks, by kernels, plain.

Hidden states are (B, T, C), targets (B, T); a target is ignored where it is `IGNORED_TARGET`.
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
        """Return the cross entropy of every target, (B, T) fp32; 0 where it is ignored."""


class FusedLoss(Protocol):
    """A head and loss in one: the kernels, or `chunked_loss`, which never have all logits."""

    def mean_loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the mean, as `HeadLoss` does."""

    def token_losses(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return each loss, as `HeadLoss` does."""


class PlainHead:
    """All logits first, then their loss: the reference."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        self._logits = logits

    def mean_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean."""
        logits = self._logits(hidden).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED_TARGET)

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return each loss."""
        losses = functional.cross_entropy(
            self._logits(hidden).flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="none",
        )
        return losses.view_as(targets)


class FusedHead:
    """A head whose loss is computed without all logits."""

    def __init__(self, weight: nn.Parameter, fused: FusedLoss) -> None:
        self._weight, self._fused = weight, fused

    def mean_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean."""
        return self._fused.mean_loss(hidden, self._weight, targets)

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return each loss."""
        return self._fused.token_losses(hidden, self._weight, targets)


class SplitHead:
    """A head of which each of the `ranks` has some of the `words`."""

    def __init__(self, weight: nn.Parameter, ranks: TensorRanks, *, words: int) -> None:
        self._weight, self._ranks, self._words = weight, ranks, words

    def mean_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean."""
        return split_head.mean_loss(hidden, self._weight, targets, self._ranks, words=self._words)

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return each loss, without gradients."""
        return split_head.token_losses(
            hidden, self._weight, targets, self._ranks, words=self._words
        )
