"""The interface of a loss: its value for a batch, its weight and its evaluation metrics.

A loss is one file of this package and one line in `payload/core/tasks.py`. The file assigns a
subclass of `Loss` to `LOSS`. A loss takes the output of the model's head: token losses or logits,
depending on the task. It does not depend on the model or on ranks. B samples, T tokens, K labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from payload.config.training_sections import TaskSection
from payload.formats.data_folder import DataMeta
from payload.run_record.metrics_log import EvalMetrics, StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of a batch, available without reading its tokens."""

    samples: int
    targets: int
    """Tokens or labels to predict."""
    labels: NDArray[np.int64] | None = None
    """The samples' labels, for tasks with one label per sample."""


class Loss(ABC):
    """The quantity that a task minimises."""

    is_mean: ClassVar[bool] = False
    """True if the loss is the mean over a batch's targets. The model's head computes this mean
    directly."""

    @classmethod
    def of(cls, task: TaskSection, meta: DataMeta) -> Self:
        """Return the loss with the run's settings. Raises ConfigError for invalid settings."""
        del task, meta
        return cls()

    @abstractmethod
    def __call__(self, found: Tensor, targets: Tensor, *more: Tensor) -> Tensor:
        """Return a batch's loss, a scalar.

        `found` holds the batch's token losses (B, T) or logits (B, K), and `more` the batch's other
        tensors.
        """

    @abstractmethod
    def weight(self, counts: Counts) -> float:
        """Return the weight of a batch's loss in a step's mean over micro-batches and ranks."""

    def take_sums(self) -> Tensor:
        """Return this rank's sums since the last call, as a float64 vector for `step_row`."""
        return torch.zeros(0, dtype=torch.float64)

    def step_row(self, row: StepMetrics, sums: Tensor, *, samples: int) -> StepMetrics:
        """Return a step's row of metrics, completed from the sums over all ranks."""
        del sums, samples
        return row

    @abstractmethod
    def sums(self, found: Tensor, targets: Tensor) -> Tensor:
        """Return a batch's contribution to an evaluation, float64 on the CPU.

        A token-level loss returns two numbers: the sum of the losses and the number of targets. The
        evaluation adds up both over all batches.
        """

    @abstractmethod
    def metrics(
        self, sums: Tensor, *more: Tensor, step: int, samples: int, tokens: int
    ) -> EvalMetrics:
        """Return the metrics of an evaluation from the sums over all batches and ranks.

        The evaluation read `samples` samples with `tokens` tokens in all; `more` holds further
        per-sample tensors.
        """
