"""The interface of a training task: samples, batches and evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor

from payload.core.dtype import Dtype
from payload.core.errors import CheckpointError
from payload.data.reading.blocks import Indices
from payload.formats.data_folder import DataMeta
from payload.run_record.metrics_log import EvalMetrics
from payload.train.checkpoints.checkpoint import BaseModel
from payload.train.losses.base import Counts, Loss
from payload.train.models.base import CausalLM
from payload.train.models.classifier import Classifier
from payload.train.tasks.evaluate import EvalPass

_MEASURED = 4096
"""Number of samples from which the mean number of tokens is estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples of one micro-batch."""

    inputs: tuple[Tensor, ...]
    """Arguments of the model's forward pass, which returns the batch's mean loss."""
    tokens: Tensor
    """(B, T) int64, the indices for the token embedding."""
    weight: float
    """Weight of the batch's mean loss, such as its number of targets: a step's loss is the weighted
    mean of its batches' losses."""


class Samples(ABC):
    """The training samples of a data folder, numbered from 0."""

    loss: Loss

    @abstractmethod
    def num_samples(self) -> int:
        """Return the number of samples in an epoch."""

    @abstractmethod
    def batch(self, chosen: Indices) -> Batch:
        """Return the batch of these samples. Raises DataError for damaged files."""

    @abstractmethod
    def prefetch(self, chosen: Indices) -> None:
        """Prefetch these samples from disk."""

    @abstractmethod
    def counts(self, chosen: Indices) -> Counts:
        """Return the counts of a batch of these samples, without reading its tokens."""

    def weight(self, chosen: Indices) -> float:
        """Return the weight of a batch's loss, for a batch of these samples."""
        return self.loss.weight(self.counts(chosen))

    @abstractmethod
    def num_tokens(self, chosen: Indices) -> int:
        """Return the number of tokens of these samples, without padding."""

    def arrange_samples(self, chosen: Indices, *, micro_batch_size: int) -> Indices:
        """Return a step's samples in the order in which micro-batches and ranks take them."""
        del micro_batch_size
        return chosen


class Task(ABC):
    """A run's prepared data folder, with its samples and its evaluation."""

    folder: Path
    meta: DataMeta
    train: Samples
    loss: Loss
    keeps_base: ClassVar[bool] = False
    """True if checkpoints record the identity of the initial weights even without an adapter."""

    def adapt_model(self, model: CausalLM, *, seed: int, init: str) -> CausalLM:
        """Return the model adapted to the task; messages name the model `init`.

        Raises CheckpointError for a model that was trained for a different task.
        """
        if isinstance(model, Classifier):
            raise CheckpointError(
                f"model.init = {init!r}: a classifier. Set task.kind=classify, or choose a "
                "language model."
            )
        model.objective = None if self.loss.is_mean else self.loss
        return model

    def require_matching_checkpoint(self, checkpoint: Path) -> None:  # noqa: B027 - few tasks override it
        """Raise CheckpointError if the run's `checkpoint` does not fit the data."""

    def set_base(self, base: BaseModel, *, resumes: bool) -> None:  # noqa: B027 - few tasks override it
        """Record the initial weights of a run with `keeps_base`, on rank 0 before any write.

        Raises CheckpointError for weights that do not fit the data.
        """

    def begin(self, model: CausalLM, eval_pass: EvalPass, *, dtype: Dtype, resumes: bool) -> bool:
        """Prepare what training needs from the initial model. Called before the first step."""
        del model, eval_pass, dtype, resumes
        return True

    def tokenizer(self, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the tokenizer's files for checkpoints, with additions that the task needs."""
        return files

    def mean_tokens(self) -> float:
        """Return the mean number of tokens of a training sample, without padding."""
        count = self.train.num_samples()
        some = np.linspace(0, count - 1, min(count, _MEASURED), dtype=np.int64)
        return self.train.num_tokens(some) / len(some)

    @abstractmethod
    def has_range_hashes(self) -> bool:
        """Return whether meta.json has the range hashes that verify each read."""

    @abstractmethod
    def evaluate(self, model: CausalLM, eval_pass: EvalPass) -> EvalMetrics | None:
        """Evaluate the model on the validation set; return None after a request to stop."""
