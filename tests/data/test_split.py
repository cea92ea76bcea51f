"""The choice of the validation documents."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

from payload.core.errors import DataError
from payload.data.sources.split import choose_split, default_val_fraction


@pytest.mark.parametrize(("documents", "fraction"), [(2, 0.5), (1758, 0.02), (10_000, 0.0005)])
def test_validation_documents_are_those_of_train_test_split(
    documents: int, fraction: float
) -> None:
    split = choose_split(documents=documents, val_fraction=fraction, seed=2357)
    ours = np.flatnonzero(split.val_mask(np.arange(documents)))
    theirs = Dataset.from_dict({"number": range(documents)}).train_test_split(
        test_size=fraction, seed=2357, shuffle=True
    )["test"]["number"]
    assert ours.tolist() == sorted(theirs)


@pytest.mark.parametrize(
    ("documents", "chosen"),
    [(2, 1), (20, 2), (1000, 100), (1758, 101), (30_000, 99), (200_000, 100), (8_013_769, 4007)],
)
def test_small_sources_keep_more_of_their_documents_for_validation(
    documents: int, chosen: int
) -> None:
    fraction = default_val_fraction(documents)
    split = choose_split(documents=documents, val_fraction=fraction, seed=2357)
    assert split.val_mask(np.arange(documents)).sum() == chosen


def test_a_source_that_cannot_be_counted_has_nanogpts_share() -> None:
    assert default_val_fraction(None) == default_val_fraction(8_013_769) == 0.0005


def test_a_document_beyond_the_expected_number_is_for_training() -> None:
    split = choose_split(documents=4, val_fraction=0.25, seed=0)
    assert split.val_mask(np.arange(100)).sum() == 1


def test_unknown_number_of_documents_is_split_by_a_keyed_hash() -> None:
    numbers = np.arange(200_000)
    split = choose_split(documents=None, val_fraction=0.01, seed=1)
    chosen = split.val_mask(numbers)
    assert split.record.method == "hash"
    assert 1_800 < chosen.sum() < 2_200
    assert (split.val_mask(numbers[1_000:]) == chosen[1_000:]).all()
    other = choose_split(documents=None, val_fraction=0.01, seed=2).val_mask(numbers)
    assert (chosen & other).sum() < 100


@pytest.mark.parametrize(
    ("documents", "fraction", "message"),
    [
        (0, 0.5, "0 documents; training and validation need at least 2"),
        (1, 0.0005, "1 document; training and validation need at least 2"),
        (3, 0.9, "no training documents would remain of 3 documents. Use a lower"),
    ],
)
def test_too_few_documents_are_refused(documents: int, fraction: float, message: str) -> None:
    with pytest.raises(DataError, match=message):
        choose_split(documents=documents, val_fraction=fraction, seed=0)
