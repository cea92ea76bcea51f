"""Classification: a label for each text, and a validation that does not depend on the ranks.

K labels.
"""

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
from payload.formats.hf_folder import CONFIG_FILE, read_config
from payload.run_record.metrics_log import EvalMetrics
from payload.train.losses.base import Counts, Loss
from payload.train.losses.registry import loss_of
from payload.train.models.base import CausalLM
from payload.train.models.classifier import Classifier, saved_labels, saved_pad_token
from payload.train.tasks.base import Batch, Samples, Task
from payload.train.tasks.evaluate import EvalPass, compute_batches

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
    """Labelled texts; a batch is as long as its longest one."""

    def __init__(self, texts: LabelledTexts, loss: Loss) -> None:
        self._texts, self.loss = texts, loss

    def num_samples(self) -> int:
        """Return the number of texts."""
        return self._texts.num_texts()

    def batch(self, chosen: Indices) -> Batch:
        """Return the texts' padded tokens and labels. Raises DataError."""
        tokens, labels = self._texts.gather(chosen)
        return Batch(inputs=(tokens, labels), tokens=tokens, weight=self.weight(chosen))

    def expect(self, chosen: Indices) -> None:
        """Do nothing: a text is a few hundred bytes, which the system has read ahead."""

    def counts(self, chosen: Indices) -> Counts:
        """Return the number of texts, and their labels."""
        labels = self._texts.labels[chosen]
        return Counts(samples=len(chosen), targets=len(chosen), labels=labels)

    def num_tokens(self, chosen: Indices) -> int:
        """Return the number of tokens, padding left out."""
        return int(self._texts.lengths[chosen].sum())

    def arranged(self, chosen: Indices) -> Indices:
        """Return a step's texts by length, so that a pass has texts of about the same length."""
        return chosen[np.argsort(self._texts.lengths[chosen], kind="stable")]


class Classify(Task):
    """A folder that `prepare --task classify` wrote."""

    def __init__(self, folder: Path, meta: DataMeta, *, sequence_length: int, loss: Loss) -> None:
        assert meta.classify is not None
        self.folder, self.meta, self.loss = folder, meta, loss
        self._labels = meta.classify
        self._start_note: str | None = None
        """A new classifier's start of `score`, for the log; None for one that was loaded."""
        texts, self._val = (
            open_labelled(folder / name, meta=meta, sequence_length=sequence_length)
            for name in (TRAIN_NAME, VAL_NAME)
        )
        self.train = TextSamples(texts, loss)
        truncated = texts.num_truncated + self._val.num_truncated
        if truncated:
            log.info(
                f"data      {truncated:,} of {texts.num_texts() + self._val.num_texts():,} texts "
                f"are longer than data.sequence_length = {sequence_length} and lose their end"
            )

    def has_range_hashes(self) -> bool:
        """Say whether what training reads is compared with meta.json."""
        return self._val.check is not None

    def fitted(self, model: CausalLM, *, seed: int, init: str) -> CausalLM:
        """Return the model as a classifier. Raises CheckpointError for one of other labels."""
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
        return model

    def require_own(self, checkpoint: Path) -> None:
        """Raise CheckpointError where the run's `checkpoint` has other labels than the data.

        Its weights fit any labels of the same number.
        """
        config, where = read_config(checkpoint), str(checkpoint / CONFIG_FILE)
        labels = saved_labels(config, where=where, is_own=True)
        pad_token = saved_pad_token(config, where=where)
        _require_same(labels, pad_token, self._labels, where=where, resumes=True)

    def begin(self, model: CausalLM, how: EvalPass, *, dtype: Dtype, resumes: bool) -> bool:
        """Log what a new classifier starts from; a resumed run's adapter has it trained already."""
        del model, how, dtype
        if self._start_note is not None and not resumes:
            log.info(f"score     {self._start_note}")
        return True

    def tokenizer(self, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the tokenizer's files with the token that pads, as transformers needs for it."""
        named = special_tokens(tokenizer_config(files, folder=self.folder))
        if "eos_token" not in named or "pad_token" in named:
            return files
        raw = json.loads(files.get(_TOKENIZER_CONFIG, b"{}"))
        padded = json.dumps({**raw, "pad_token": named["eos_token"]}, ensure_ascii=False, indent=2)
        return {**files, _TOKENIZER_CONFIG: padded.encode()}

    def evaluate(self, model: CausalLM, how: EvalPass) -> EvalMetrics | None:
        """Return loss, accuracy, F1 and confusion matrix; None when asked to stop."""
        assert isinstance(model, Classifier)
        return evaluate_texts(model, self._val, how, self.loss)


def _require_same(
    labels: tuple[str, ...],
    pad_token: int,
    data: ClassifyRecord,
    *,
    where: str,
    resumes: bool = False,
) -> None:
    """Raise CheckpointError where a model's labels or its padding are not the data's."""
    same = "Resume with the data that the run was started with." if resumes else ""
    if labels != data.labels:
        fix = "Prepare the data with the same labels, or start from a model without them."
        raise CheckpointError(
            f"{where}: it classifies into {', '.join(labels[:8])}, the data's labels are "
            f"{', '.join(data.labels[:8])}. {same or fix}"
        )
    if pad_token != data.pad_token:
        fix = "Prepare the data with the model's tokenizer, or start from a model without labels."
        raise CheckpointError(
            f"{where}: it pads texts with token {pad_token}, the data with {data.pad_token}. "
            f"{same or fix}"
        )


def start_note(body: CausalLM, labels: ClassifyRecord, *, folder: Path, init: str) -> str:
    """Return what `score` of a new classifier with this body starts from."""
    if init == "scratch":
        return "starts from random numbers, like the whole model (model.init = 'scratch')"
    if not labels.label_tokens:
        return (
            f"starts from random numbers: {folder} has no tokens of the labels' names. Either an "
            "older version prepared it, or its tokenizer has none for a name"
        )
    if body.head_weight() is None:
        return (
            "starts from random numbers: the model's output head has a bias, or its logits are "
            "scaled or capped"
        )
    return "starts from the labels' names"


def evaluate_texts(
    model: Classifier, texts: LabelledTexts, how: EvalPass, loss: Loss
) -> EvalMetrics | None:
    """Classify the texts, shared by the ranks in batches that do not depend on their number.

    Ranks exchange counts, and each batch's sum of losses in float64 at a place of its own, so the
    result is equal to the last bit. None when a rank was asked to stop.
    """
    size, count = how.micro_batch_size, len(model.labels)
    chosen = np.arange(_num_texts(texts, how.max_tokens))
    chosen = chosen[np.argsort(texts.lengths[chosen], kind="stable")]
    batches = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    confusion = torch.zeros(count * count, dtype=torch.float64)
    losses = torch.zeros(len(batches), dtype=torch.float64)

    def compute(batch: Indices) -> Tensor:
        tokens, labels = texts.gather(batch)
        return loss.sums(model.class_logits(tokens.to(how.world.device)).cpu(), labels)

    def keep(number: int, sums: Tensor) -> None:
        confusion.add_(sums[:-1])
        losses[number] = sums[-1]

    if not compute_batches(model, batches, how, compute, keep):
        return None
    total = torch.cat((confusion, losses))
    how.sum(total)
    sums = torch.cat((total[: len(confusion)], total[len(confusion) :].sum().view(1)))
    tokens = int(texts.lengths[chosen].sum())
    return loss.metrics(sums, step=how.step, samples=len(chosen), tokens=tokens)


def _num_texts(texts: LabelledTexts, max_tokens: int | None) -> int:
    """Return how many of the first texts hold `max_tokens`, or all."""
    if max_tokens is None:
        return texts.num_texts()
    before = int(np.searchsorted(np.cumsum(texts.lengths), max_tokens))
    return min(before + 1, texts.num_texts())
