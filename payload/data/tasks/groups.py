"""Groups of rows that stay together in one split."""

from __future__ import annotations

import json

import numpy as np

from payload.core.errors import DataError, UsageError
from payload.core.printable_text import shown
from payload.data.rows.rows import Row, Rows
from payload.data.sources.documents import Survey
from payload.data.writing.resumable_token_files import (
    GROUPS_NAME,
    ResumableTokenFiles,
    partial_path,
)


class Groups:
    """Gives rows with equal values in a column the same number, so that they stay in one split."""

    def __init__(self, column: str | None) -> None:
        self._column = column
        self._numbers: dict[str, int] = {}
        self._store: ResumableTokenFiles | None = None

    def keep_in(self, store: ResumableTokenFiles | None) -> None:
        """Read an interrupted run's groups from `store`. Append new groups to `store` later."""
        self._store = store
        if self._column is not None and store is not None and store.has_shards:
            with partial_path(store.folder, GROUPS_NAME).open(encoding="ascii") as file:
                self._numbers = {json.loads(line): number for number, line in enumerate(file)}

    def forget(self) -> None:
        """Forget all groups."""
        self._numbers = {}

    def number_of(self, row: Row) -> int:
        """Return the number of a row's group; without groups, the row's index. Raises DataError."""
        if self._column is None:
            return row.number
        if self._column not in row.values:
            keys = ", ".join(shown(key) for key in list(row.values)[:6])
            raise DataError(
                f"{row.where}: no column {self._column!r}; its columns: {keys}. Choose one with "
                "--group-column."
            )
        name = str(row.values[self._column])
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            if self._store is not None:
                line = f"{json.dumps(name)}\n".encode("ascii")
                self._store.append(GROUPS_NAME, np.frombuffer(line, dtype=np.uint8))
        return self._numbers[name]

    def columns(self) -> tuple[str, ...]:
        """Return the columns that define groups."""
        return () if self._column is None else (self._column,)

    def survey(self, rows: Rows) -> Survey:
        """Return the number of groups, or without --group-column the number of rows.

        Call it after all rows were read. Raises UsageError if --group-column is given and the
        files or a column declare the validation data.
        """
        if self._column is None:
            return rows.survey()
        if (split := rows.survey().split) is not None:
            raise UsageError(split.conflict("--group-column"))
        return Survey(documents=len(self._numbers), text_bytes=None)
