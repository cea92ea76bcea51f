"""The interface of a training task: samples, their batches, and an evaluation."""

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
"""Samples whose tokens are counted for their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples of one pass.

    B samples, T tokens.
    """

    inputs: tuple[Tensor, ...]
    """Arguments of the model's forward pass, which returns the batch's mean loss."""
    tokens: Tensor
    """(B, T) int64, what the token embedding looks up."""
    weight: float
    """Weight of the batch's mean loss, such as its number of targets: a step's loss is the mean of
    its batches' losses, each with this weight."""


class Samples(ABC):
    """The training samples of a data folder, numbered from 0."""

    loss: Loss

    @abstractmethod
    def num_samples(self) -> int:
        """Return the number of samples of an epoch."""

    @abstractmethod
    def batch(self, chosen: Indices) -> Batch:
        """Return the batch of these samples. Raises DataError for damaged files."""

    @abstractmethod
    def expect(self, chosen: Indices) -> None:
        """Have the system read these samples from the disk meanwhile."""

    @abstractmethod
    def counts(self, chosen: Indices) -> Counts:
        """Return the counts of a batch of these samples, without reading its tokens."""

    def weight(self, chosen: Indices) -> float:
        """Return the weight that the loss of a batch of these samples has."""
        return self.loss.weight(self.counts(chosen))

    @abstractmethod
    def num_tokens(self, chosen: Indices) -> int:
        """Return the number of tokens of these samples, padding left out."""

    def arranged(self, chosen: Indices) -> Indices:
        """Return a step's samples in the order in which its passes and ranks divide them."""
        return chosen


class Task(ABC):
    """A prepared data folder as a run trains on it."""

    folder: Path
    meta: DataMeta
    train: Samples
    loss: Loss
    keeps_base: ClassVar[bool] = False
    """True if checkpoints say which weights the run started from, also without an adapter."""

    def fitted(self, model: CausalLM, *, seed: int, init: str) -> CausalLM:
        """Return the model with what the task needs of it; `init` names it in messages.

        Raises CheckpointError for a model that was trained for another task.
        """
        if isinstance(model, Classifier):
            raise CheckpointError(
                f"model.init = {init!r}: it is a classifier. Set task.kind=classify, or name a "
                "language model."
            )
        model.objective = None if self.loss.is_mean else self.loss
        return model

    def require_own(self, checkpoint: Path) -> None:  # noqa: B027 - few tasks ask
        """Raise CheckpointError where the run's `checkpoint` suits other data."""

    def take_base(self, base: BaseModel, *, resumes: bool) -> None:  # noqa: B027 - few tasks ask
        """Take what a run with `keeps_base` starts from; on rank 0, before anything is written.

        Raises CheckpointError for weights that do not suit the data.
        """

    def begin(self, model: CausalLM, how: EvalPass, *, dtype: Dtype, resumes: bool) -> bool:
        """Make what the steps need of the model as the run starts from it.

        Returns False when a rank was asked to stop meanwhile.
        """
        del model, how, dtype, resumes
        return True

    def tokenizer(self, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the tokenizer's files for the checkpoints, with what the task needs in them."""
        return files

    def mean_tokens(self) -> float:
        """Return the mean number of tokens of a training sample, padding left out."""
        count = self.train.num_samples()
        some = np.linspace(0, count - 1, min(count, _MEASURED), dtype=np.int64)
        return self.train.num_tokens(some) / len(some)

    @abstractmethod
    def has_range_hashes(self) -> bool:
        """Say whether what training reads is compared with meta.json."""

    @abstractmethod
    def evaluate(self, model: CausalLM, how: EvalPass) -> EvalMetrics | None:
        """Evaluate the model on the validation set; None when it was asked to stop."""
