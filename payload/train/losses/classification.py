"""Cross entropy of a text's label, weighted by class. B texts, K labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from payload.config.training_sections import TaskSection
from payload.core.errors import ConfigError
from payload.formats.data_folder import DataMeta
from payload.run_record.classification import MOST_LABELS_LOGGED, ClassMetrics, accuracy, macro_f1
from payload.train.losses.base import Counts, Loss


class Classification(Loss):
    """The loss of a text's label, computed from the logits (B, K)."""

    def __init__(self, class_weights: Sequence[float] | None = None) -> None:
        """Use these class weights; None = equal weights."""
        self._weights = None if class_weights is None else np.array(class_weights)

    @classmethod
    def of(cls, task: TaskSection, meta: DataMeta) -> Self:
        """Return the loss with the run's class weights. Raises ConfigError for invalid weights."""
        return cls(class_weights(task.class_weights, meta))

    def __call__(self, found: Tensor, targets: Tensor, *more: Tensor) -> Tensor:
        """Return the mean cross entropy of labels (B,), weighted by class, from logits (B, K)."""
        del more
        weights = None
        if self._weights is not None:
            weights = torch.tensor(self._weights, dtype=torch.float32, device=found.device)
        return functional.cross_entropy(found, targets, weight=weights)

    def weight(self, counts: Counts) -> float:
        """Return the sum of the texts' class weights."""
        if self._weights is None:
            return float(counts.samples)
        assert counts.labels is not None, "each text has a label"
        return float(self._weights[counts.labels].sum())

    def sums(self, found: Tensor, targets: Tensor) -> Tensor:
        """Return the confusion matrix (K * K), by label and prediction, and the sum of losses.

        Evaluation weighs all texts equally, regardless of the class weights.
        """
        count = found.shape[-1]
        confusion = torch.zeros(count, count, dtype=torch.float64)
        ones = torch.ones(len(targets), dtype=torch.float64)
        confusion.index_put_((targets, found.argmax(-1)), ones, accumulate=True)
        each = functional.cross_entropy(found, targets, reduction="none")
        return torch.cat((confusion.flatten(), each.sum(dtype=torch.float64).view(1)))

    def metrics(
        self, sums: Tensor, *more: Tensor, step: int, samples: int, tokens: int
    ) -> ClassMetrics:
        """Return loss, accuracy, F1 and confusion matrix."""
        del more
        count = math.isqrt(len(sums) - 1)
        rows = sums[:-1].view(count, count).to(torch.int64).tolist()
        return ClassMetrics(
            step=step,
            val_loss=float(sums[-1]) / samples,
            val_tokens=tokens,
            val_texts=samples,
            val_accuracy=accuracy(rows),
            val_f1=macro_f1(rows),
            val_confusion=tuple(map(tuple, rows)) if count <= MOST_LABELS_LOGGED else (),
        )


def class_weights(setting: str, meta: DataMeta) -> tuple[float, ...] | None:
    """Return the weight of each class in the loss; None = equal weights.

    `balanced` gives every class the same total weight: texts / (classes x texts of the class).
    Raises ConfigError.
    """
    assert meta.classify is not None
    labels, counts = meta.classify.labels, meta.classify.train_counts
    if setting == "none":
        return None
    if setting == "balanced":
        return tuple(sum(counts) / (len(counts) * count) for count in counts)
    try:
        found = tuple(float(each) for each in setting.split(","))
    except ValueError:
        found = ()
    if len(found) != len(labels) or not all(0 < each < float("inf") for each in found):
        raise ConfigError(
            f"task.class_weights = {setting!r}: use 'none', 'balanced', or {len(labels)} positive "
            f"numbers separated by commas (the weights of {', '.join(labels[:8])})."
        )
    return found


LOSS = Classification
