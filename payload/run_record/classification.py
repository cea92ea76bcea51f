"""CONTRACT: computes metrics of a classifier from its confusion matrix of exact counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from payload.run_record.metrics_log import EvalMetrics

MOST_LABELS_LOGGED = 64
"""Limit on the labels of a confusion matrix in metrics.jsonl, because a line has a length limit."""

Confusion = Sequence[Sequence[int]]
"""Number of texts by true label (row) and predicted label (column)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMetrics(EvalMetrics):
    """One evaluation of a classifier: a line of metrics.jsonl."""

    val_texts: int
    val_accuracy: float
    """Fraction of texts with a correct label."""
    val_f1: float
    """Macro F1: the unweighted mean over the labels."""
    val_confusion: tuple[tuple[int, ...], ...] = ()
    """The confusion matrix, with a row per true label; empty above MOST_LABELS_LOGGED labels."""

    def describe(self) -> str:
        """Return the result as one line of a log."""
        return (
            f"accuracy {self.val_accuracy:.2%}, macro F1 {self.val_f1:.4f}, validation loss "
            f"{self.val_loss:.4f} over {self.val_texts:,} texts"
        )


def accuracy(confusion: Confusion) -> float:
    """Return the fraction of texts on the diagonal."""
    return sum(row[place] for place, row in enumerate(confusion)) / sum(map(sum, confusion))


def f1_scores(confusion: Confusion) -> list[float]:
    """Return the F1 of each label, the harmonic mean of precision and recall; 0 for 0 / 0."""
    predicted = [sum(column) for column in zip(*confusion, strict=True)]
    found = []
    for label, row in enumerate(confusion):
        total = sum(row) + predicted[label]
        found.append(2 * row[label] / total if total else 0.0)
    return found


def macro_f1(confusion: Confusion) -> float:
    """Return the unweighted mean of F1 over the labels."""
    scores = f1_scores(confusion)
    return sum(scores) / len(scores)
