"""The split that a column of a row declares, such as `split` = "test"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from payload.data.sources.split_files import FileSplitName, split_in

SPLIT_COLUMNS = ("split", "_split", "data_split", "dataset_split")
_VALUE_CHARS = 64
"""Longer values are texts, not names of splits."""


def split_column(names: Iterable[str]) -> str | None:
    """Return the first of these columns that can declare a row's split, or None."""
    return next((name for name in names if name.casefold() in SPLIT_COLUMNS), None)


def split_of_row(row: Mapping[str, Any]) -> tuple[str, FileSplitName] | None:
    """Return the column that declares the row's split, and the split; None without a known
    split."""
    column = split_column(row)
    value = None if column is None else row[column]
    if column is None or not isinstance(value, str) or len(value) > _VALUE_CHARS:
        return None
    found = split_in(value)
    return None if found is None else (column, found)
