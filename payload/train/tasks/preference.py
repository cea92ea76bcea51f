"""Direct preference optimization: trains on pairs of answers, relative to a reference model."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from payload.config.run_config import RunConfig
from payload.core.dtype import Dtype
from payload.core.errors import CheckpointError, DataError
from payload.data.reading.blocks import Indices
from payload.data.reading.pairs import Pairs, open_pairs
from payload.data.reference_logprobs import (
    LogProbs,
    Reference,
    ReferenceModel,
    read_reference,
    read_values,
    reference_command,
    write_reference,
)
from payload.formats.data_folder import DataMeta, load_meta
from payload.run_record.metrics_log import EvalMetrics
from payload.train.checkpoints.checkpoint import BaseModel
from payload.train.losses.base import Counts, Loss
from payload.train.losses.registry import loss_of
from payload.train.models.base import CausalLM
from payload.train.tasks.base import Batch, Samples, Task
from payload.train.tasks.evaluate import EvalPass
from payload.train.tasks.pair_evaluation import evaluate_pairs, reference_log_probs
from payload.train.tasks.sample_order import similar_lengths

log = logging.getLogger(__name__)


def open_task(config: RunConfig) -> Task:
    """Open the run's data folder. Raises DataError, ConfigError."""
    folder, length = config.data.folder(), config.data.sequence_length
    train, val = (
        open_pairs(folder, split="train", sequence_length=length),
        open_pairs(folder, split="val", sequence_length=length),
    )
    meta = load_meta(folder)
    return Preference(folder, meta, train, val, loss_of(config.task, meta))


class PairSamples(Samples):
    """Preference pairs; a batch is padded to its longest conversation."""

    def __init__(self, pairs: Pairs, loss: Loss) -> None:
        self._pairs, self.loss = pairs, loss
        self.reference: Tensor | None = None
        """The reference's log-probabilities, (pairs, 2) float64; None before `Preference.begin`."""

    def num_samples(self) -> int:
        """Return the number of pairs."""
        return self._pairs.num_pairs()

    def batch(self, chosen: Indices) -> Batch:
        """Return tokens, targets and starts of both conversations, and reference log-probabilities.

        Raises DataError.
        """
        assert self.reference is not None, "Preference.begin comes first"
        inputs = self._pairs.gather(chosen)
        known = self.reference[torch.from_numpy(chosen)]
        return Batch(inputs=(*inputs, known), tokens=inputs[0], weight=self.weight(chosen))

    def prefetch(self, chosen: Indices) -> None:
        """Do nothing, because the system has read ahead the few kilobytes of a pair."""

    def counts(self, chosen: Indices) -> Counts:
        """Return the number of pairs."""
        return Counts(samples=len(chosen), targets=len(chosen))

    def num_tokens(self, chosen: Indices) -> int:
        """Return the number of tokens of both conversations, without padding."""
        return self._pairs.num_tokens(chosen)

    def arrange_samples(self, chosen: Indices, *, micro_batch_size: int) -> Indices:
        """Return a step's pairs sorted by length, so that a micro-batch has similar lengths."""
        del micro_batch_size
        return similar_lengths(chosen, self._pairs.longest(chosen))


class Preference(Task):
    """A folder written by `prepare --task preference`."""

    keeps_base = True

    def __init__(self, folder: Path, meta: DataMeta, train: Pairs, val: Pairs, loss: Loss) -> None:
        self.folder, self.meta, self.loss = folder, meta, loss
        self.train: PairSamples = PairSamples(train, loss)
        self._pairs = train, val
        self._model: ReferenceModel | None = None
        self._val_reference: Tensor | None = None

    def has_range_hashes(self) -> bool:
        """Return whether meta.json has the range hashes that verify each read."""
        return all(pairs.is_checked() for pairs in self._pairs)

    def set_base(self, base: BaseModel, *, resumes: bool) -> None:
        """Record the run's initial weights, on rank 0.

        Raises CheckpointError if the stored reference belongs to a different model, or if a resumed
        run has no stored reference.
        """
        self._model = reference_model(base)
        if self._own_reference() is None and resumes:
            raise CheckpointError(
                f"{self.folder}: the reference log-probabilities of the run are missing. Compute "
                f"them again with: {reference_command(self.folder, self._model)}"
            )

    def begin(self, model: CausalLM, eval_pass: EvalPass, *, dtype: Dtype, resumes: bool) -> bool:
        """Read the log-probabilities of the reference model, or compute and store them before the
        first step.

        Return False after a request to stop. Raises DataError, CheckpointError.
        """
        stored = self._stored(dtype) if eval_pass.world.is_main else None
        is_there = eval_pass.world.broadcast(stored is not None, bool)
        found: Tensor | None
        if is_there:
            count = sum(pairs.num_pairs() for pairs in self._pairs)
            mine = torch.zeros(count, 2, dtype=torch.float64)
            found = eval_pass.world.sum(mine if stored is None else torch.from_numpy(stored))
        elif resumes:
            raise CheckpointError(
                f"{self.folder}: no reference log-probabilities in {dtype} are stored, and a "
                "resumed run no longer has its initial weights. Compute them with: "
                f"{self._again(dtype)}"
            )
        else:
            found = self._compute(model, eval_pass, dtype=dtype)
        if found is None:
            return False
        train = self._pairs[0].num_pairs()
        self.train.reference, self._val_reference = found[:train], found[train:]
        return True

    def evaluate(self, model: CausalLM, eval_pass: EvalPass) -> EvalMetrics | None:
        """Return loss, accuracy, margin and rewards; None after a request to stop."""
        assert self._val_reference is not None, "begin comes first"
        return evaluate_pairs(model, self._pairs[1], self._val_reference, eval_pass, self.loss)

    def _own_reference(self) -> Reference | None:
        """Return the stored reference.

        Raises CheckpointError if the reference belongs to a different model.

        Every read checks the model, because a run that started at the same time may have stored its
        own reference in the meantime.
        """
        assert self._model is not None, "set_base comes first"
        found = read_reference(self.folder, self.meta)
        if found is not None and not found.model.is_same(self._model):
            raise CheckpointError(
                f"{self.folder}: the stored reference log-probabilities are from "
                f"{_described(found.model)}, but the run starts from {_described(self._model)}. "
                "Give each run a copy of the folder, or replace the log-probabilities with: "
                f"{reference_command(self.folder, self._model)}"
            )
        return found

    def _stored(self, dtype: Dtype) -> LogProbs | None:
        found = self._own_reference()
        return None if found is None else read_values(self.folder, self.meta, found, dtype)

    def _compute(self, model: CausalLM, eval_pass: EvalPass, *, dtype: Dtype) -> Tensor | None:
        log.info(f"reference computing the log-probabilities of {self.folder}'s answers ({dtype})")
        found = reference_log_probs(model, self._pairs, eval_pass)
        if found is not None and eval_pass.world.is_main:
            assert self._model is not None, "set_base comes first on rank 0"
            self._own_reference()
            store(self.folder, self.meta, self._model, dtype=dtype, values=found)
        return found

    def _again(self, dtype: Dtype) -> str:
        return reference_command(self.folder, self._model, dtype=dtype)


def store(
    folder: Path, meta: DataMeta, model: ReferenceModel, *, dtype: Dtype, values: Tensor
) -> None:
    """Write log-probabilities into the data folder. Raises DataError, CheckpointError for NaN."""
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(
            f"{model.name()}: the log-probability of an answer in {folder} is not finite. Use "
            "other weights, or --dtype fp32."
        )
    write_reference(folder, meta, model=model, dtype=dtype, values=values.numpy())


def reference_model(base: BaseModel) -> ReferenceModel:
    """Return the description of the run's base model for reference.json."""
    return ReferenceModel(
        source=base.source,
        revision=base.revision,
        sha256=base.sha256,
        config_sha256=base.config_sha256,
        quantize=base.quantize,
    )


def stored_reference(
    folder: Path, meta: DataMeta, *, dtype: Dtype
) -> tuple[Reference, Dtype, Tensor]:
    """Return the stored reference, the dtype of its values, and the values for validation.

    Values can be stored in several dtypes; values in `dtype` are preferred. Raises DataError if no
    reference is stored.
    """
    found = read_reference(folder, meta)
    others: tuple[Dtype, ...] = ("bf16", "fp32")
    for each in (dtype, *others):
        values = None if found is None else read_values(folder, meta, found, each)
        if found is not None and values is not None:
            return found, each, torch.from_numpy(values[meta.train_documents :])
    raise DataError(
        f"{folder}: no reference log-probabilities are stored. Compute them with: "
        f"{reference_command(folder, None)}"
    )


def _described(model: ReferenceModel) -> str:
    quantized = "" if model.quantize == "none" else f" in {model.quantize}"
    config = f", config.json {model.config_sha256[:12]}" if model.config_sha256 else ""
    return f"{model.name()}{quantized} (sha256 {model.sha256[:12]}{config})"
