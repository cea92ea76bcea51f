"""Classification: one label for each text, with an evaluation independent of the rank count."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from payload.config.run_config import RunConfig
from payload.core.dtype import Dtype
from payload.core.errors import CheckpointError
from payload.data.reading.blocks import Indices
from payload.data.reading.labelled import LabelledTexts, open_labelled
from payload.data.tokenizers.special_tokens import special_tokens, tokenizer_config
from payload.formats.data_folder import (
    TRAIN_NAME,
    VAL_NAME,
    ClassifyRecord,
    DataMeta,
    load_meta,
    require_task,
)
from payload.formats.hf_folder import classifier_config
from payload.run_record.metrics_log import EvalMetrics
from payload.train.losses.base import Counts, Loss
from payload.train.losses.registry import loss_of
from payload.train.models.base import CausalLM
from payload.train.models.classifier import Classifier, saved_labels, saved_pad_token
from payload.train.tasks.base import Batch, Samples, Task
from payload.train.tasks.evaluate import EvalPass, compute_batches
from payload.train.tasks.sample_order import equal_tokens, similar_lengths

log = logging.getLogger(__name__)

_TOKENIZER_CONFIG = "tokenizer_config.json"


def open_task(config: RunConfig) -> Task:
    """Open the run's data folder. Raises DataError, and ConfigError for wrong class weights."""
    folder = config.data.folder()
    meta = load_meta(folder)
    require_task(folder, meta, task="classify")
    return Classify(
        folder,
        meta,
        sequence_length=config.data.sequence_length,
        loss=loss_of(config.task, meta),
    )


class TextSamples(Samples):
    """Labelled texts; a batch is padded to its longest text."""

    def __init__(self, texts: LabelledTexts, loss: Loss) -> None:
        self._texts, self.loss = texts, loss
        self.are_packed = False
        """True if the model computes a micro-batch's texts without their padding."""

    def num_samples(self) -> int:
        """Return the number of texts."""
        return self._texts.num_texts()

    def batch(self, chosen: Indices) -> Batch:
        """Return the texts' padded tokens and labels. Raises DataError."""
        tokens, labels = self._texts.gather(chosen)
        return Batch(inputs=(tokens, labels), tokens=tokens, weight=self.weight(chosen))

    def prefetch(self, chosen: Indices) -> None:
        """Do nothing, because the system has read ahead the few hundred bytes of a text."""

    def counts(self, chosen: Indices) -> Counts:
        """Return the number of texts and their labels."""
        labels = self._texts.labels[chosen]
        return Counts(samples=len(chosen), targets=len(chosen), labels=labels)

    def num_tokens(self, chosen: Indices) -> int:
        """Return the number of tokens, without padding."""
        return int(self._texts.lengths[chosen].sum())

    def arrange_samples(self, chosen: Indices, *, micro_batch_size: int) -> Indices:
        """Return a step's texts in micro-batches with about the same number of tokens.

        If the model computes padding, micro-batches instead have texts of similar lengths.
        """
        lengths = self._texts.lengths[chosen]
        if self.are_packed:
            return equal_tokens(chosen, lengths, micro_batch_size=micro_batch_size)
        return similar_lengths(chosen, lengths)


class Classify(Task):
    """A folder written by `prepare --task classify`."""

    def __init__(self, folder: Path, meta: DataMeta, *, sequence_length: int, loss: Loss) -> None:
        assert meta.classify is not None
        self.folder, self.meta, self.loss = folder, meta, loss
        self._labels = meta.classify
        self._start_note: str | None = None
        """Line of the log about the initialisation of a new `score`; None for a loaded one."""
        texts, self._val = (
            open_labelled(folder / name, meta=meta, sequence_length=sequence_length)
            for name in (TRAIN_NAME, VAL_NAME)
        )
        self.train: TextSamples = TextSamples(texts, loss)
        truncated = texts.num_truncated + self._val.num_truncated
        if truncated:
            log.info(
                f"data      {truncated:,} of {texts.num_texts() + self._val.num_texts():,} texts "
                f"are longer than data.sequence_length = {sequence_length} and are cut off"
            )

    def has_range_hashes(self) -> bool:
        """Return whether meta.json has the range hashes that verify each read."""
        return self._val.check is not None

    def adapt_model(self, model: CausalLM, *, seed: int, init: str) -> CausalLM:
        """Return the model as a classifier. Raises CheckpointError if the data's labels differ."""
        labels = self._labels
        if not isinstance(model, Classifier):
            self._start_note = start_note(model, self._labels, folder=self.folder, init=init)
            torch.manual_seed(seed)
            model = Classifier(
                model,
                labels=labels.labels,
                pad_token=labels.pad_token,
                label_tokens=labels.label_tokens,
            )
        else:
            _require_same(model.labels, model.pad_token, labels, where=f"model.init = {init!r}")
        model.objective = self.loss
        self.train.are_packed = model.body.packs_documents
        return model

    def require_matching_checkpoint(self, checkpoint: Path) -> None:
        """Raise CheckpointError if the labels of the run's `checkpoint` differ from the labels of
        the data.

        The shapes of the weights can be equal, because the shapes depend only on the number of
        labels.
        """
        config, path = classifier_config(checkpoint)
        where = str(path)
        labels = saved_labels(config, where=where, is_own=True)
        pad_token = saved_pad_token(config, where=where)
        _require_same(labels, pad_token, self._labels, where=where, resumes=True)

    def begin(self, model: CausalLM, eval_pass: EvalPass, *, dtype: Dtype, resumes: bool) -> bool:
        """Log how a new classifier was initialised; do nothing on a resume."""
        del model, eval_pass, dtype
        if self._start_note is not None and not resumes:
            log.info(f"score     {self._start_note}")
        return True

    def tokenizer(self, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the tokenizer's files with the padding token that transformers needs."""
        named = special_tokens(tokenizer_config(files, folder=self.folder))
        if "eos_token" not in named or "pad_token" in named:
            return files
        raw = json.loads(files.get(_TOKENIZER_CONFIG, b"{}"))
        padded = json.dumps({**raw, "pad_token": named["eos_token"]}, ensure_ascii=False, indent=2)
        return {**files, _TOKENIZER_CONFIG: padded.encode()}

    def evaluate(self, model: CausalLM, eval_pass: EvalPass) -> EvalMetrics | None:
        """Return loss, accuracy, F1 and confusion matrix; None after a request to stop."""
        assert isinstance(model, Classifier)
        return evaluate_texts(model, self._val, eval_pass, self.loss)


def _require_same(
    labels: tuple[str, ...],
    pad_token: int,
    data: ClassifyRecord,
    *,
    where: str,
    resumes: bool = False,
) -> None:
    """Raise CheckpointError if a model's labels or padding token differ from the data's."""
    same = "Resume with the data that the run started with." if resumes else ""
    if labels != data.labels:
        fix = "Prepare the data with the same labels, or start from a model without labels."
        raise CheckpointError(
            f"{where}: its labels are {', '.join(labels[:8])}, but the labels of the data are "
            f"{', '.join(data.labels[:8])}. {same or fix}"
        )
    if pad_token != data.pad_token:
        fix = "Prepare the data with the model's tokenizer, or start from a model without labels."
        raise CheckpointError(
            f"{where}: its padding token is {pad_token}, but the padding token of the data is "
            f"{data.pad_token}. {same or fix}"
        )


def start_note(body: CausalLM, labels: ClassifyRecord, *, folder: Path, init: str) -> str:
    """Return the log line about the initialisation of `score` in a new classifier with this
    body."""
    if init == "scratch":
        return "starts from random values, like all weights of the model (model.init = 'scratch')"
    if not labels.label_tokens:
        return (
            f"starts from random values: {folder} has no tokens of the labels' names. Either an "
            "older version prepared this folder, or its tokenizer has no token for a name"
        )
    if body.head_weight() is None:
        return (
            "starts from random values: the model's output head has a bias, or its logits are "
            "scaled or capped"
        )
    return "starts from the labels' names"


def evaluate_texts(
    model: Classifier, texts: LabelledTexts, eval_pass: EvalPass, loss: Loss
) -> EvalMetrics | None:
    """Evaluate the texts in batches. Each rank computes some of the batches.

    The batches do not depend on the number of ranks. Ranks exchange the confusion counts and a
    separate float64 sum of losses for each batch, so the result is bitwise equal on any number of
    ranks. Return None after a request to stop.
    """
    size, count = eval_pass.micro_batch_size, len(model.labels)
    chosen = np.arange(_num_texts(texts, eval_pass.max_tokens))
    chosen = chosen[np.argsort(texts.lengths[chosen], kind="stable")]
    batches = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    confusion = torch.zeros(count * count, dtype=torch.float64)
    losses = torch.zeros(len(batches), dtype=torch.float64)

    def compute(batch: Indices) -> Tensor:
        tokens, labels = texts.gather(batch)
        return loss.sums(model.class_logits(tokens.to(eval_pass.world.device)).cpu(), labels)

    def keep(number: int, sums: Tensor) -> None:
        confusion.add_(sums[:-1])
        losses[number] = sums[-1]

    if not compute_batches(model, batches, eval_pass, compute, keep):
        return None
    total = torch.cat((confusion, losses))
    eval_pass.sum(total)
    sums = torch.cat((total[: len(confusion)], total[len(confusion) :].sum().view(1)))
    tokens = int(texts.lengths[chosen].sum())
    return loss.metrics(sums, step=eval_pass.step, samples=len(chosen), tokens=tokens)


def _num_texts(texts: LabelledTexts, max_tokens: int | None) -> int:
    """Return how many texts, from the first on, together reach `max_tokens`; None = all texts."""
    if max_tokens is None:
        return texts.num_texts()
    before = int(np.searchsorted(np.cumsum(texts.lengths), max_tokens))
    return min(before + 1, texts.num_texts())
