"""Direct preference optimization: rewards, margins and their loss.

The loss equals the loss of TRL's DPOTrainer with default settings: the negative log of the sigmoid
of a pair's margin. Source: Rafailov et al., Direct Preference Optimization, 2023
(arXiv:2305.18290). P pairs, T tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from payload.config.training_sections import TaskSection
from payload.formats.data_folder import DataMeta
from payload.run_record.metrics_log import StepMetrics
from payload.run_record.preference import PreferenceMetrics, PreferenceStep
from payload.train.losses.base import Counts, Loss


class Dpo(Loss):
    """The loss of preference pairs, computed from the losses of their answers' tokens."""

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self._sums = torch.zeros(2, dtype=torch.float64)

    @classmethod
    def of(cls, task: TaskSection, meta: DataMeta) -> Self:
        """Return the loss with the run's beta."""
        del meta
        return cls(task.beta)

    def __call__(self, found: Tensor, targets: Tensor, *more: Tensor) -> Tensor:
        """Return the mean loss of P pairs; `more` has the log-probabilities of the reference model
        (P, 2)."""
        del targets
        (reference,) = more
        gained = self._rewards(log_probs(found), reference)
        margins = gained[:, 0] - gained[:, 1]
        with torch.no_grad():
            self._sums += torch.stack(((margins > 0).sum(), margins.sum())).cpu()
        return -functional.logsigmoid(margins).mean().float()

    def weight(self, counts: Counts) -> float:
        """Return the number of pairs."""
        return float(counts.samples)

    def take_sums(self) -> Tensor:
        """Return the number of positive margins since the last call, and the margins' sum."""
        taken, self._sums = self._sums, torch.zeros(2, dtype=torch.float64)
        return taken

    def step_row(self, row: StepMetrics, sums: Tensor, *, samples: int) -> StepMetrics:
        """Return the step's row with the share of positive margins and the mean margin."""
        return PreferenceStep(
            **{each.name: getattr(row, each.name) for each in dataclasses.fields(row)},
            reward_accuracy=float(sums[0]) / samples,
            reward_margin=float(sums[1]) / samples,
        )

    def sums(self, found: Tensor, targets: Tensor) -> Tensor:
        """Return the answers' log-probabilities (P, 2)."""
        del targets
        return log_probs(found).cpu()

    def metrics(
        self, sums: Tensor, *more: Tensor, step: int, samples: int, tokens: int
    ) -> PreferenceMetrics:
        """Return loss, accuracy, margin and rewards from policy and reference log-probabilities."""
        (reference,) = more
        gained = self._rewards(sums, reference)
        margins = gained[:, 0] - gained[:, 1]
        chosen, rejected = gained.mean(0).tolist()
        return PreferenceMetrics(
            step=step,
            val_loss=float(-functional.logsigmoid(margins).mean()),
            val_tokens=tokens,
            val_pairs=samples,
            val_accuracy=float((margins > 0).double().mean()),
            val_margin=float(margins.mean()),
            val_chosen_reward=chosen,
            val_rejected_reward=rejected,
        )

    def _rewards(self, found: Tensor, reference: Tensor) -> Tensor:
        """Return the answers' rewards (P, 2)."""
        return self.beta * (found - reference)


def log_probs(losses: Tensor) -> Tensor:
    """Return the answers' log-probabilities (P, 2) float64 from their tokens' losses (2P, T)."""
    return -losses.sum(-1, dtype=torch.float64).view(2, -1).T


LOSS = Dpo
