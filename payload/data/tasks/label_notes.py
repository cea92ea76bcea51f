"""Notes about labelled texts: labels with few validation texts, duplicates, unequal labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from payload.data.sources.split import more_validation

_ENOUGH_VAL_TEXTS = 3
_MOST_VAL_SHARE = 0.3
_UNEQUAL = 3
"""Ratio from which class weights are suggested: texts of the most frequent label, divided by texts
of the least frequent label."""


def label_notes(
    texts: Sequence[bytes],
    numbers: npt.NDArray[np.int64],
    is_val: npt.NDArray[np.bool_],
    copies: npt.NDArray[np.int64],
    *,
    labels: Sequence[str],
    is_split_by_files: bool = False,
    is_deduplicated: bool = False,
    has_class_weights: bool = False,
    val_fraction: float = 0.0,
) -> tuple[str, ...]:
    """Return the notes.

    `numbers` are the label indices of `texts`, and `is_val` marks the validation texts.

    `copies` is the number of times that each text is in its file: 0 for a text that was removed.
    With `has_class_weights`, the run already has class weights, so no note suggests them.
    """
    totals, in_val, in_training = (
        np.bincount(np.repeat(numbers, copies * mask), minlength=len(labels))
        for mask in (True, is_val, ~is_val)
    )
    return (
        *_alone(
            in_val,
            totals,
            labels,
            is_split_by_files=is_split_by_files,
            val_fraction=val_fraction,
        ),
        *_duplicates(texts, numbers, is_deduplicated=is_deduplicated),
        *(() if has_class_weights else _unequal(in_training, labels)),
    )


def _alone(
    counts: npt.NDArray[np.int64],
    totals: npt.NDArray[np.int64],
    labels: Sequence[str],
    *,
    is_split_by_files: bool,
    val_fraction: float,
) -> list[str]:
    is_alone = counts == 1
    alone = [labels[int(number)] for number in np.flatnonzero(is_alone)]
    if not alone:
        return []
    others = f" and {len(alone) - 1:,} more labels have" if len(alone) > 1 else " has"
    rarest = int(totals[is_alone].min())
    share = more_validation(
        wanted=_ENOUGH_VAL_TEXTS, documents=rarest, most=_MOST_VAL_SHARE, current=val_fraction
    )
    fix = "Add texts." if is_split_by_files or share is None else f"Add texts, or u{share[1:]}"
    return [
        f"note: {alone[0]!r}{others} only one validation text, too few for a reliable accuracy. "
        f"{fix}"
    ]


def _duplicates(
    texts: Sequence[bytes], numbers: npt.NDArray[np.int64], *, is_deduplicated: bool
) -> list[str]:
    where: dict[bytes, list[int]] = {}
    for index, text in enumerate(texts):
        where.setdefault(text, []).append(index)
    groups = [np.array(each) for each in where.values() if len(each) > 1]
    repeated = sum(len(each) - 1 for each in groups)
    if not repeated:
        return []
    differ = sum(len(set(numbers[each].tolist())) > 1 for each in groups)
    found = []
    if not is_deduplicated:
        found.append(
            f"note: {_count(repeated, 'text repeats', 'texts repeat')} an earlier one. Duplicates "
            "distort the loss and the accuracy: remove them with --dedup exact."
        )
    if differ:
        found.append(
            f"note: {_count(differ, 'repeated text has', 'repeated texts have')} different labels. "
            "Keep one label for each text."
        )
    return found


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _unequal(counts: npt.NDArray[np.int64], labels: Sequence[str]) -> list[str]:
    most, least = int(counts.argmax()), int(counts.argmin())
    if counts[most] < _UNEQUAL * counts[least]:
        return []
    return [
        f"note: {labels[most]!r} has {int(counts[most]):,} training texts, {labels[least]!r} only "
        f"{int(counts[least]):,}. For equal weight of all labels in the loss, use the setting "
        "task.class_weights=balanced."
    ]
