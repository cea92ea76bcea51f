"""Evaluates a classifier: loss, accuracy, F1 and confusion matrix."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from payload.core.errors import ConfigError, DataError
from payload.data.reading.labelled import LabelledTexts, open_labelled
from payload.formats.data_folder import VAL_NAME, DataMeta
from payload.run_record.classification import ClassMetrics, f1_scores
from payload.train.losses.classification import Classification
from payload.train.models.classifier import Classifier
from payload.train.ranks.world import World
from payload.train.tasks.classify import evaluate_texts
from payload.train.tasks.evaluate import EvalPass

_BATCH_TEXTS = 32
"""Texts in a batch. The number is fixed, so that results do not depend on the number of ranks."""


def open_texts(
    folder: Path, meta: DataMeta, model: Classifier, *, sequence_length: int
) -> LabelledTexts:
    """Return the validation texts. Raises DataError, and ConfigError if the length is too large."""
    if meta.classify is None:
        raise DataError(
            f"{folder}: prepared with --task {meta.task}, but the model is a classifier. Prepare "
            "the texts with --task classify."
        )
    if meta.classify.labels != model.labels:
        raise DataError(
            f"{folder}: its labels are {', '.join(meta.classify.labels[:8])}, but the classifier "
            f"has {', '.join(model.labels[:8])}. Prepare the texts with --task classify and the "
            "same labels."
        )
    context = model.spec.context()
    if sequence_length > context:
        raise ConfigError(
            f"--sequence-length {sequence_length}: the model's context is {context} tokens. Use at "
            f"most {context}."
        )
    texts = open_labelled(folder / VAL_NAME, meta=meta, sequence_length=sequence_length)
    # The model finds the end of a text by the model's padding token.
    return replace(texts, pad_token=model.pad_token)


def measure(
    model: Classifier,
    texts: LabelledTexts,
    world: World,
    *,
    max_tokens: int | None,
    autocast: Callable[[], AbstractContextManager[Any]],
    progress: Callable[[int, int], bool],
) -> ClassMetrics:
    """Return the metrics of the texts, bitwise equal for any number of ranks."""
    eval_pass = EvalPass(
        world=world,
        step=0,
        micro_batch_size=_BATCH_TEXTS,
        max_tokens=max_tokens,
        autocast=autocast,
        should_stop=progress,
    )
    found = evaluate_texts(model, texts, eval_pass, Classification())
    assert isinstance(found, ClassMetrics), "should_stop is never True here"
    return found


def as_json(result: ClassMetrics, labels: tuple[str, ...], **more: object) -> str:
    """Return the result as one line of JSON."""
    row = {
        "val_loss": result.val_loss,
        "val_texts": result.val_texts,
        "val_tokens": result.val_tokens,
        "accuracy": result.val_accuracy,
        "f1": result.val_f1,
        "labels": labels,
        "confusion": result.val_confusion,
    }
    return json.dumps({**more, **row})


def as_text(result: ClassMetrics, labels: tuple[str, ...], *, sequence_length: int) -> list[str]:
    """Return the result as text: overall metrics, then a row for each label."""
    lines = [
        f"texts       {result.val_texts:,} of the validation set, at most "
        f"{sequence_length:,} tokens of each",
        f"loss        {result.val_loss:.6f} nats a text",
        f"accuracy    {result.val_accuracy:.2%}",
        f"macro F1    {result.val_f1:.4f}",
    ]
    if not result.val_confusion:
        return lines
    size = max(map(len, labels))
    lines.append(f"{'label':{size}}  texts     F1  most often predicted as")
    scores = f1_scores(result.val_confusion)
    for label, row, score in zip(labels, result.val_confusion, scores, strict=True):
        others = [(count, name) for count, name in zip(row, labels, strict=True) if name != label]
        count, name = max(others, key=lambda each: each[0])
        confused_with = f"{name} ({count:,})" if count else "-"
        lines.append(f"{label:{size}}  {sum(row):5,}  {score:.3f}  {confused_with}")
    return lines
