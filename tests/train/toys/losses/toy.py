"""The mean of the squares of the tokens' losses: all that a new loss needs to be."""

from __future__ import annotations

import torch
from torch import Tensor

from payload.run_record.metrics_log import EvalMetrics
from payload.train.losses.base import Counts, Loss


class Squares(Loss):
    """Weighs targets by how badly the model predicts them."""

    def __call__(self, found: Tensor, targets: Tensor, *more: Tensor) -> Tensor:
        """Return the mean square of the losses (B, T) of text, whose tokens are all targets."""
        del targets, more
        return (found**2).mean()

    def weight(self, counts: Counts) -> float:
        """Return the number of targets."""
        return float(counts.targets)

    def sums(self, found: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the squares, and the number of tokens that are not padding."""
        squares = (found.double() ** 2).sum()
        return torch.stack((squares, (found > 0).sum().double())).cpu()

    def metrics(
        self, sums: Tensor, *more: Tensor, step: int, samples: int, tokens: int
    ) -> EvalMetrics:
        """Return the mean square."""
        return EvalMetrics(step=step, val_loss=float(sums[0] / sums[1]), val_tokens=int(sums[1]))


LOSS = Squares
