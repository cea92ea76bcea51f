"""Chooses the rows for training and validation: duplicates, the split, then the weights.

The result depends only on the rows, the options and the seed. So the result is the same after an
interruption, and for any number of processes and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from payload.core.errors import DataError
from payload.core.one_line import printable_line
from payload.data.selection.content_keys import Mask, Numbers, first_of_each
from payload.data.sources.documents import Survey
from payload.data.sources.split import Split
from payload.formats.data_folder import Dedup, InputRecord, SelectionRecord

Splitter = Callable[[Numbers], tuple[Split, Mask]]
"""Takes row indices. Returns the split of these rows, and a mask of the validation rows."""

_MOST_REMOVED = 0.5
"""Largest fraction of the training rows that is removed because the rows are also in the validation
data. If a larger fraction would be removed, all rows are kept: a small example that repeats a few
rows would otherwise lose its training rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """The options that decide how often the model is trained on a row."""

    inputs: tuple[str, ...]
    """The paths of --input; without --input, the kind of the source."""
    weights: tuple[Fraction, ...] = ()
    """For each input, how often each of its rows occurs in an epoch; empty if all weights are 1."""
    dedup: Dedup | None = None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSelection:
    """The choice of rows: how often each row is written to the training or the validation file."""

    split: Split
    is_val: Mask
    copies: Numbers
    """For each row, how often the row is in its file; 0 for a row that was removed."""
    record: SelectionRecord | None
    """The record for meta.json; None if each row is in its file exactly once."""
    left_in_both: int
    """Number of training rows that are also in the validation data, but were not removed."""
    repeated: int
    """Number of rows that repeat an earlier row, counted before any row is removed."""
    dedup: Dedup | None

    def numbers(self, *, is_val: bool) -> Numbers:
        """Return the row indices of one file. A row with several copies occurs several times."""
        chosen = np.flatnonzero(self.is_val == is_val)
        return np.repeat(chosen, self.copies[chosen])

    def lines(self) -> list[str]:
        """Return lines for a dry run: the counts of each input, and the notes."""
        counts = [] if self.record is None else describe_selection(self.record)
        return [*counts, *(each.removeprefix("note: ").removesuffix(".") for each in self.notes())]

    def notes_on_both(self) -> list[str]:
        """Return a note about rows that are in both files, or no note."""
        if not self.left_in_both:
            return []
        why = "" if self.dedup == "none" else ", because more than half of the training rows are"
        return [
            f"note: {self.left_in_both:,} {_rows(self.left_in_both)} of the training file kept "
            f"although also in the validation file{why}. To keep each content once, use "
            "--dedup exact."
        ]

    def notes(self) -> tuple[str, ...]:
        """Return the notes about duplicates for the user."""
        found = self.notes_on_both()
        if self.repeated and self.dedup is None:
            found.append(
                f"note: {self.repeated:,} {_rows(self.repeated)} with the same content as an "
                "earlier row. To remove duplicates, use --dedup exact or --dedup near."
            )
        return tuple(found)


def split_by_units(choose: Callable[[Survey], Split], survey: Survey, units: Numbers) -> Splitter:
    """Return a splitter that keeps each unit in one split. A unit is a group of rows, or one row.

    `choose` returns the split for a given number of units. If only some of the rows are split, only
    the units of those rows are counted and numbered from 0.
    """

    def split_rows(chosen: Numbers) -> tuple[Split, Mask]:
        if len(chosen) == len(units):
            split = choose(survey)
            return split, split.val_mask(units)
        kept = np.unique(units[chosen])
        split = choose(replace(survey, documents=len(kept)))
        return split, split.val_mask(np.searchsorted(kept, units[chosen]))

    return split_rows


def select_rows(
    groups: Numbers,
    inputs: Numbers,
    split_rows: Splitter,
    mixing: Mixing,
    *,
    classes: Numbers | None = None,
) -> RowSelection:
    """Return how often the model is trained on each row.

    `groups` has the same number for duplicates. `inputs` has the index of each row's input.
    `classes` has the label of each row: no label may lose most of its training rows. Raises
    DataError.
    """
    split, is_val = split_rows(np.arange(len(groups)))
    by_file = split.record.method == "files"
    kept = np.ones(len(groups), dtype=np.bool_)
    is_deduplicated = mixing.dedup in ("exact", "near")
    if is_deduplicated:
        kept = first_of_each(groups, preferred=is_val & by_file)
        if not by_file and not kept.all():
            chosen = np.flatnonzero(kept)
            is_val = np.zeros(len(groups), dtype=np.bool_)
            split, is_val[chosen] = split_rows(chosen)
    in_both = kept & ~is_val & np.isin(groups, groups[kept & is_val])
    removed = np.zeros(len(groups), dtype=np.bool_)
    if mixing.dedup != "none":
        removed = _removable(in_both, kept & ~is_val, classes)
    is_train = kept & ~is_val & ~removed
    copies = (kept & is_val).astype(np.int64)
    records = []
    for number, name in enumerate(map(printable_line, mixing.inputs)):
        mine = inputs == number
        weight = mixing.weights[number] if mixing.weights else Fraction(1)
        trained = np.flatnonzero(is_train & mine)
        copies[trained] = _copies(
            len(trained), weight, seed=[mixing.seed, number], where=f"--input {name}"
        )
        records.append(
            InputRecord(
                input=name,
                weight=float(weight),
                rows=int(mine.sum()),
                duplicates=int((mine & ~kept).sum()),
                also_in_validation=int((mine & removed).sum()),
                val_rows=int((mine & kept & is_val).sum()),
                train_rows=len(trained),
                rows_an_epoch=int(copies[trained].sum()),
            )
        )
    is_plain = not mixing.weights and not is_deduplicated and not removed.any()
    record = SelectionRecord(dedup=mixing.dedup, inputs=tuple(records))
    return RowSelection(
        split=split,
        is_val=is_val,
        copies=copies,
        record=None if is_plain else record,
        left_in_both=int((in_both & ~removed).sum()),
        dedup=mixing.dedup,
        repeated=len(groups) - len(np.unique(groups)),
    )


def describe_selection(record: SelectionRecord) -> list[str]:
    """Return a line for each input, with its rows, the removed rows and its part of an epoch."""
    total = sum(each.rows_an_epoch for each in record.inputs) or 1
    lines = []
    for each in record.inputs:
        removed = [
            *([f"{each.duplicates:,} duplicates"] if record.dedup in ("exact", "near") else []),
            *(
                [f"{each.also_in_validation:,} training rows that are also validation rows"]
                if each.also_in_validation
                else []
            ),
        ]
        lines.append(
            f"{each.input}: {each.rows:,} rows"
            + (f"; removed {' and '.join(removed)}" if removed else "")
            + f"; {each.val_rows:,} for validation, {each.train_rows:,} for training with weight "
            f"{each.weight:g}: {each.rows_an_epoch:,} an epoch ({each.rows_an_epoch / total:.1%})"
        )
    return lines


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def _removable(in_both: Mask, is_train: Mask, classes: Numbers | None) -> Mask:
    """Return the mask of training rows to remove.

    A class that would lose most of its rows keeps all rows.
    """
    labels = np.zeros(len(in_both), dtype=np.int64) if classes is None else classes
    size = int(labels.max(initial=0)) + 1
    before, lost = (np.bincount(labels[mask], minlength=size) for mask in (is_train, in_both))
    removable: Mask = in_both & (lost <= _MOST_REMOVED * before)[labels]
    return removable


def _copies(count: int, weight: Fraction, *, seed: list[int], where: str) -> Numbers:
    """Return how often each of `count` rows is in an epoch: `weight` x `count` in total, rounded.

    If the weight is not a whole number, some rows have one more copy than others; a random
    permutation decides which. Raises DataError for a total of 0.
    """
    copies, more = divmod(round(weight * count), max(1, count))
    if count and not copies and not more:
        raise DataError(
            f"{where}: the weight {float(weight):g} takes none of {count:,} training rows. Raise "
            "the weight, or leave out the input."
        )
    found = np.full(count, copies, dtype=np.int64)
    found[np.random.default_rng(seed).permutation(count)[:more]] += 1
    return found
