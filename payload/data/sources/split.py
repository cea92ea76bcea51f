"""Chooses the documents for validation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError
from payload.formats.data_folder import SplitRecord

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

PERMUTATION_LIMIT = 50_000_000
"""Highest number of documents that are split by a permutation. For more documents, the permutation
would need over 0.4 GB of memory."""

NANOGPT_VAL_FRACTION = 0.0005
"""Smallest default fraction for validation. nanoGPT uses 0.0005 for openwebtext: 4,007 of 8 million
documents."""
_SMALL_VAL_FRACTION = 0.1
_VAL_DOCUMENTS = 100


class Split(Protocol):
    """A choice of documents for validation. The choice depends only on the documents' numbers."""

    @property
    def record(self) -> SplitRecord:
        """Record for meta.json."""

    def val_mask(self, numbers: Numbers) -> Mask:
        """Return the mask of the validation documents among `numbers`."""


@dataclass(frozen=True, slots=True)
class PermutationSplit:
    """Chooses the same documents as `datasets.Dataset.train_test_split`, as nanoGPT does.

    Source: datasets 5.2, arrow_dataset.py: the first ceil(fraction x n) of
    numpy.random.default_rng(seed).permutation(n).
    """

    record: SplitRecord
    chosen: Mask

    def val_mask(self, numbers: Numbers) -> Mask:
        """Return the mask of the validation documents.

        Documents beyond the permutation are not for validation.
        """
        inside = numbers < len(self.chosen)
        return inside & self.chosen[np.where(inside, numbers, 0)]


@dataclass(frozen=True, slots=True)
class HashSplit:
    """Chooses documents by a keyed hash of their numbers, if they cannot be counted in advance."""

    record: SplitRecord

    def val_mask(self, numbers: Numbers) -> Mask:
        """Return the mask of the validation documents among `numbers`."""
        key = _mix(np.array([self.record.seed], dtype=np.uint64))
        hashed = _mix(numbers.astype(np.uint64) ^ key)
        # 53 bits are exact in a double.
        return (hashed >> np.uint64(11)).astype(np.float64) < self.record.val_fraction * 2.0**53


@dataclass(frozen=True, slots=True)
class FileSplit:
    """Chooses the documents of the validation files, and the rows that a column declares for
    validation.

    The validation files are read last.
    """

    record: SplitRecord
    first_val: int
    marked: Numbers | None = None
    """Numbers of the rows that the column declares for validation."""
    column: str | None = None

    @classmethod
    def of(
        cls,
        *,
        first_val: int | None,
        documents: int,
        marked: Numbers | None = None,
        column: str | None = None,
    ) -> FileSplit:
        """Return the split of `documents` documents.

        Documents of the validation files begin at `first_val`.

        Without such files, pass None as `first_val`. Raises DataError if one of the parts is empty.
        """
        first_val = documents if first_val is None else first_val
        num_marked = 0 if marked is None else int((marked < first_val).sum())
        num_val = documents - first_val + num_marked
        if not 0 < num_val < documents:
            part = "training" if num_val else "validation"
            raise DataError(
                f"the files whose names declare {part} data have no rows. Add rows, or pass only "
                "the other files."
            )
        record = SplitRecord(method="files", val_fraction=num_val / documents, seed=0)
        return cls(record, first_val, marked, column)

    def val_mask(self, numbers: Numbers) -> Mask:
        """Return the mask of the validation documents among `numbers`."""
        found: Mask = numbers >= self.first_val
        return found if self.marked is None else found | np.isin(numbers, self.marked)

    def conflict(self, option: str) -> str:
        """Return the message for an option that would choose other validation data."""
        if self.column is not None:
            return (
                f"{option} cannot be used: the column {self.column!r} declares the validation "
                f"data. Leave out {option}, or ignore the column with --ignore-key {self.column}."
            )
        return (
            f"{option} cannot be used: the names of the files declare the validation data. Leave "
            f"out {option}, or pass only the training files."
        )


def default_val_fraction(documents: int | None) -> float:
    """Return the default fraction of documents for validation.

    `documents` is the number of documents; None means that the number is unknown.

    Up to 1,000 documents, a tenth is for validation. With more than 1,000, about 100 documents are
    for validation. The fraction is never below `NANOGPT_VAL_FRACTION`. If the number is unknown,
    this constant is the result.
    """
    if documents is None:
        return NANOGPT_VAL_FRACTION
    if documents * _SMALL_VAL_FRACTION <= _VAL_DOCUMENTS:
        return _SMALL_VAL_FRACTION
    # Rounded to two digits, so that --val-fraction can repeat the value in meta.json.
    return max(NANOGPT_VAL_FRACTION, float(f"{_VAL_DOCUMENTS / documents:.2g}"))


def more_validation(
    *, wanted: int, documents: int, most: float, current: float = 0.0
) -> str | None:
    """Return the fix for fewer than `wanted` validation documents, or None: a larger
    --val-fraction.

    None means that a fraction above `most` would be needed, or that the fraction `current` should
    already be sufficient.
    """
    share = math.ceil(100 * wanted / documents) / 100
    return f"Use --val-fraction {share:g} with --force." if current < share <= most else None


def choose_split(*, documents: int | None, val_fraction: float, seed: int) -> Split:
    """Return the split of `documents` documents, or of an unknown number (None).

    Raises DataError for too few documents.
    """
    if documents is None or documents > PERMUTATION_LIMIT:
        return HashSplit(SplitRecord(method="hash", val_fraction=val_fraction, seed=seed))
    if documents < 2:
        raise DataError(
            f"the source has {documents} document{'' if documents == 1 else 's'}; training and "
            "validation need at least 2. Add text, or divide it into documents: with --source "
            "text, put blank lines between them; with --source jsonl, write one JSON object per "
            "line."
        )
    num_val = math.ceil(val_fraction * documents)
    if num_val >= documents:
        raise DataError(
            f"--val-fraction {val_fraction}: no training documents would remain of {documents} "
            "documents. Use a lower value."
        )
    chosen = np.zeros(documents, dtype=np.bool_)
    chosen[np.random.default_rng(seed).permutation(documents)[:num_val]] = True
    record = SplitRecord(method="permutation", val_fraction=val_fraction, seed=seed)
    return PermutationSplit(record, chosen)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the values with their bits mixed, as by the generator SplitMix64.

    Source: https://prng.di.unimi.it/splitmix64.c.
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
