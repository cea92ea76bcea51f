"""Mean cross entropy of the next token, over the targets that are not masked."""

from __future__ import annotations

import torch
from torch import Tensor

from payload.formats.data_folder import IGNORED_TARGET
from payload.run_record.metrics_log import EvalMetrics
from payload.train.losses.base import Counts, Loss


class NextToken(Loss):
    """The loss of plain text and of chat; in chat, only the assistant's tokens are targets."""

    is_mean = True

    def __call__(self, found: Tensor, targets: Tensor, *more: Tensor) -> Tensor:
        """Return the mean of the targets' losses (B, T)."""
        del more
        return found.sum() / (targets != IGNORED_TARGET).sum()

    def weight(self, counts: Counts) -> float:
        """Return the number of targets."""
        return float(counts.targets)

    def sums(self, found: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the targets' losses and the number of targets."""
        count = (targets != IGNORED_TARGET).sum()
        return torch.stack((found.sum(dtype=torch.float64), count.double())).cpu()

    def metrics(
        self, sums: Tensor, *more: Tensor, step: int, samples: int, tokens: int
    ) -> EvalMetrics:
        """Return the mean loss over all targets, so that a short last block weighs less."""
        del more, samples, tokens
        return EvalMetrics(
            step=step, val_loss=float(sums[0] / sums[1]), val_tokens=int(sums[1].item())
        )


LOSS = NextToken
