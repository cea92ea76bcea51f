"""CONTRACT: what a confusion matrix says of a classifier. Pure arithmetic on whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from payload.run_record.metrics_log import EvalMetrics

MOST_LABELS_LOGGED = 64
"""A larger confusion matrix is left out of metrics.jsonl, whose lines have a limit."""

Confusion = Sequence[Sequence[int]]
"""Texts by their own label (row) and by the one that the classifier gave (column)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMetrics(EvalMetrics):
    """One evaluation of a classifier: a line of metrics.jsonl."""

    val_texts: int
    val_accuracy: float
    """Share of the texts that were given their own label."""
    val_f1: float
    """Macro F1: the mean over the labels, each weighing the same."""
    val_confusion: tuple[tuple[int, ...], ...] = ()
    """Rows are the texts' own labels; empty above MOST_LABELS_LOGGED labels."""

    def describe(self) -> str:
        """Return the result in words."""
        return (
            f"validation loss {self.val_loss:.4f}, accuracy {self.val_accuracy:.2%}, macro F1 "
            f"{self.val_f1:.4f} over {self.val_texts:,} texts"
        )


def accuracy(confusion: Confusion) -> float:
    """Return the share of texts on the diagonal."""
    return sum(row[place] for place, row in enumerate(confusion)) / sum(map(sum, confusion))


def f1_scores(confusion: Confusion) -> list[float]:
    """Return each label's F1, the harmonic mean of precision and recall; 0 where it is 0 / 0."""
    given = [sum(column) for column in zip(*confusion, strict=True)]
    found = []
    for label, row in enumerate(confusion):
        total = sum(row) + given[label]
        found.append(2 * row[label] / total if total else 0.0)
    return found


def macro_f1(confusion: Confusion) -> float:
    """Return the mean of the labels' F1."""
    scores = f1_scores(confusion)
    return sum(scores) / len(scores)
