"""Counts the rows of a source by the split that a column declares, such as `split`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from payload.core.errors import DataError
from payload.core.printable_text import shown
from payload.data.sources.documents import Survey
from payload.data.sources.split import FileSplit
from payload.data.sources.split_columns import SPLIT_COLUMNS, split_of_row


class RowSplits:
    """Counts the rows of one source by the split that each row declares.

    The model is never trained on validation rows or test rows.
    """

    def __init__(self, *, is_read: bool) -> None:
        """`is_read` is False if a row's split column is ignored."""
        self._is_read = is_read
        self._column = SPLIT_COLUMNS[0]
        self._counts: Counter[str] = Counter()
        self._valid: list[list[int]] = []
        """Ranges of row indices, as [start, end): the rows that the column declares for
        validation."""

    def add(self, row: Mapping[str, Any], number: int) -> str | None:
        """Count a row. Test rows are left out: return the reason for a test row, otherwise None."""
        found = split_of_row(row) if self._is_read else None
        self._counts["train" if found is None else found[1]] += 1
        if found is None or found[1] == "train":
            return None
        self._column, split = found
        if split == "test":
            value = shown(row[self._column])
            return f"{self._column} = {value} (to train them: --ignore-key {self._column})"
        if self._valid and self._valid[-1][1] == number:
            self._valid[-1][1] += 1
        else:
            self._valid.append([number, number + 1])
        return None

    def remove(self, number: int) -> None:
        """Forget the newest row. The next row gets the same `number`."""
        if self._valid and self._valid[-1][1] == number + 1:
            self._valid[-1][1] = number
            if self._valid[-1][0] == number:
                del self._valid[-1]

    def reads(self, column: str, value: object) -> bool:
        """Return True if the value of this column declares a split."""
        return self._is_read and split_of_row({column: value}) is not None

    def require_training(self, label: str) -> None:
        """Raise DataError if every row is a test row or for validation."""
        valid, test = self._counts["valid"], self._counts["test"]
        if (valid or test) and not self._counts["train"]:
            raise DataError(
                f"{label}: no row is for training: the column {shown(self._column)} declares "
                f"{valid:,} validation and {test:,} test rows. To train on these rows, ignore "
                f"the column with --ignore-key {self._column}."
            )

    def survey(self, *, first_val: int | None, documents: int) -> Survey:
        """Return the number of rows, and the split that the files and the column declare."""
        split = None
        if first_val is not None or self._valid:
            numbers = [np.arange(start, end, dtype=np.int64) for start, end in self._valid]
            split = FileSplit.of(
                first_val=first_val,
                documents=documents,
                marked=np.concatenate(numbers) if numbers else None,
                column=self._column if numbers else None,
            )
        return Survey(documents=documents, text_bytes=None, split=split)

    def notes(self) -> list[str]:
        """Return a note about the rows for validation."""
        if not self._valid:
            return []
        count = sum(end - start for start, end in self._valid)
        return [
            f"{count:,} {'row is' if count == 1 else 'rows are'} for validation by the column "
            f"{shown(self._column)} (to ignore it: --ignore-key {self._column})"
        ]

    def state(self) -> dict[str, Any]:
        """Return JSON for `restore`."""
        valid = [list(each) for each in self._valid]
        return {"column": self._column, "counts": dict(self._counts), "valid": valid}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after the rows of an interrupted run."""
        self._column, self._counts = state["column"], Counter(state["counts"])
        self._valid = [list(each) for each in state["valid"]]
