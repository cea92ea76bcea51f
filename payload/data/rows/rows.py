"""Rows of several columns, for tasks that need more than the text of a document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError
from payload.core.one_line import printable_line
from payload.core.printable_text import shown
from payload.data.rows.columns import METADATA, is_deep, without_nulls
from payload.data.rows.named_columns import NamedColumns
from payload.data.rows.row_splits import RowSplits
from payload.data.rows.tool_faults import fault_line
from payload.data.sources.documents import Survey
from payload.data.sources.source_flags import SourceRequest

_BATCH_CHARS = 2**22
_COLUMNS_SHOWN = 8
EARLY_ROWS = 10_000
"""Number of rows after which keys that the task does not read are reported, even if rows follow."""
_SKIP = "Correct the row, or skip such rows with --skip-bad."

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a source."""

    number: int
    """Index of the row, from 0; rows that are left out are not counted."""
    where: str
    """File and line, for messages."""
    values: Mapping[str, Any]
    place: int = 0
    """Position of the row in the source, from 1; rows that are left out are counted."""


class Rows(ABC):
    """The rows of one source. A bad row raises DataError; with `skip_bad`, it is only counted."""

    label: str
    """Kind and location of the source, for messages and meta.json."""
    revision: str | None = None

    def __init__(self, request: SourceRequest) -> None:
        self._skip_bad = request.skip_bad
        self.skipped: list[str] = []
        """One message for each skipped row, in the order of the rows."""
        self.num_skipped = 0
        self.num_rows = 0
        """Rows read so far, including bad rows."""
        self.first_val: int | None = None
        """Index of the first row in the validation files; None without such files."""
        self.file_starts: list[tuple[int, int]] = []
        """For each file so far, the index of its first row and the index of its --input."""
        self.next_number = 0
        """Index of the next row. If a row is left out, the row after it takes its index."""
        self._columns = NamedColumns(request.columns, request.ignored_keys)
        # With --split, the user has chosen the rows.
        self._splits = RowSplits(is_read=request.split is None)
        self._metadata: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._fault_examples: dict[str, str] = {}
        self._skipped_at: list[int] = []
        self._place = 0
        """Position of the newest row in the source, from 1."""
        self._first_place = 0
        """Position up to which an interrupted run has read the rows."""

    @abstractmethod
    def identity(self) -> list[Any]:
        """Return JSON that changes when the rows change.

        Raises DataError if the source is missing.
        """

    def identity_of_columns(self) -> list[Any]:
        """Return the part of `identity` that depends on the renamed columns and ignored keys."""
        return self._columns.identity()

    def read(self) -> Iterator[Row]:
        """Yield every row; call `identity` first.

        Raises DataError for a bad row, and for keys that the task does not read.
        """
        for row in self.stream():
            if row.place == EARLY_ROWS:
                self.require_read(row.place)
            yield row
        self.require_read()

    def stream(self) -> Iterator[Row]:
        """Yield every row except test rows; the caller calls `require_read`.

        Raises DataError for a bad row, and at the end if no row is for training.
        """
        for row in self._read():
            values = self._columns.convert(row.values)
            reason = self._splits.add(values, row.number)
            if reason is not None:
                self.leave_out(reason)
            else:
                yield row if values is row.values else replace(row, values=values)
        self._splits.require_training(self._place_of_rows())

    def state(self) -> dict[str, Any]:
        """Return JSON with which `restore` continues after the rows that were read so far."""
        return {
            "num_rows": self.num_rows,
            "next_number": self.next_number,
            "first_val": self.first_val,
            "file_starts": list(self.file_starts),
            "num_skipped": self.num_skipped,
            "skipped": list(zip(self._skipped_at, self.skipped, strict=True)),
            "metadata": dict(self._metadata),
            "unread": dict(self._unread),
            "left_out": dict(self._left_out),
            "faults": dict(self._faults),
            "fault_examples": dict(self._fault_examples),
            "columns": self._columns.state(),
            "splits": self._splits.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after the rows that `state` covers; call this before `read` or `stream`.

        The rows are read again, but not yielded.
        """
        self._place = 0
        self.num_rows = self._first_place = state["num_rows"]
        self.next_number, self.first_val = state["next_number"], state["first_val"]
        self.file_starts = [(number, index) for number, index in state["file_starts"]]
        self.num_skipped = state["num_skipped"]
        self._skipped_at = [place for place, _ in state["skipped"]]
        self.skipped = [message for _, message in state["skipped"]]
        self._fault_examples = dict(state["fault_examples"])
        for name in ("metadata", "unread", "left_out", "faults"):
            setattr(self, f"_{name}", Counter(state[name]))
        self._columns.restore(state["columns"])
        self._splits.restore(state["splits"])

    @abstractmethod
    def _read(self) -> Iterator[Row]:
        """Yield every row, with the column names of the source."""

    def recognised(self) -> list[str]:
        """Return lines about what was detected; call `identity` first."""
        return []

    def survey(self) -> Survey:
        """Return the number of rows, and the split if names of files or a column declare one.

        Call it after the last row.
        """
        return self._splits.survey(first_val=self.first_val, documents=self.next_number)

    def skip(self, where: str, complaint: str, *, place: int | None = None) -> None:
        """Skip the bad row at `place`, by default the newest row.

        Raises DataError if the user did not allow skipping.
        """
        message = f"{where}: {complaint}"
        if not self._skip_bad:
            raise DataError(f"{message} {_SKIP}")
        self.num_skipped += 1
        place = self._place if place is None else place
        index = bisect_right(self._skipped_at, place)
        self._skipped_at.insert(index, place)
        self.skipped.insert(index, message.encode("utf-8", "backslashreplace").decode("utf-8"))

    def keep_skipped(self, count: int) -> None:
        """Forget all messages about skipped rows except the first `count`."""
        del self._skipped_at[count:], self.skipped[count:]

    def leave_out(self, reason: str) -> None:
        """Count the newest row as left out, because its values exclude it from training.

        The row gets no number, so that a small validation split does not consist of such rows.
        """
        self._left_out[reason] += 1
        self.next_number -= 1
        self._splits.remove(self.next_number)

    def note_faults(self, faults: Iterable[str], where: str) -> None:
        """Count the faults of the row at `where`. The row is still used for training."""
        for fault in faults:
            self._faults[fault] += 1
            self._fault_examples.setdefault(fault, where)

    def note_unread(self, columns: Iterable[str], row: Mapping[str, Any]) -> None:
        """Count columns of a row that the task does not read."""
        for name in columns:
            if self._splits.reads(name, row[name]):
                continue
            (self._metadata if METADATA.fullmatch(name) else self._unread)[name] += 1

    def require_read(self, num_rows: int | None = None) -> None:
        """Raise DataError for keys that the task does not read, because training would lose their
        values.

        `num_rows` is the number of rows whose keys were counted. The default is all rows so far.
        """
        self._columns.require_found()
        if not self._unread:
            return
        first = self._unread.most_common(1)[0][0]
        raise DataError(
            f"{self._place_of_rows()}: in the first {num_rows or self.num_rows:,} rows, the task "
            f"does not read these columns: {_counted(self._unread)}. Training would lose their "
            "values. Map them to known names with --columns, or ignore each with "
            f"--ignore-key {printable_line(first)}."
        )

    def notes(self) -> list[str]:
        """Return notes for the user about the rows that were read."""
        shards = self.missing_shards()
        found = [] if shards is None else [shards]
        found += [f"left out {count:,} rows: {why}" for why, count in self._left_out.items()]
        for fault, count in self._faults.items():
            found.append(fault_line(fault, count, self._fault_examples[fault]))
        found += self._splits.notes()
        found += self._columns.notes()
        if self._metadata:
            found.append(f"ignored columns: {_counted(self._metadata)}")
        return [f"note: {each}" for each in found]

    def _place_of_rows(self) -> str:
        """Return the source's label for errors, without the prefix `auto: `."""
        return self.label.removeprefix("auto: ")

    def missing_shards(self) -> str | None:
        """Return a note about missing files of the source, if any."""
        return None

    def require_some(self) -> None:
        """Raise DataError if the source had no rows."""
        if not self.num_rows:
            raise DataError(f"{self._place_of_rows()}: no rows. Add rows, or use another source.")

    def inputs_of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the index of the --input that each of these rows is from.

        Call this after the last row.
        """
        if not self.file_starts:
            return np.zeros(len(numbers), dtype=np.int64)
        starts, inputs = (np.array(each) for each in zip(*self.file_starts, strict=True))
        found: npt.NDArray[np.int64] = inputs[np.searchsorted(starts, numbers, side="right") - 1]
        return found

    def _begin_file(self, index: int) -> None:
        """Record that a file of the input `index` begins.

        A file that an interrupted run recorded is skipped.
        """
        if self._place >= self._first_place:
            self.file_starts.append((self.next_number, index))

    def _row(self, where: str, values: Mapping[str, Any] | str) -> Iterator[Row]:
        """Count a row and yield it; `values` is an error message for a bad row."""
        self._place += 1
        if self._place <= self._first_place:
            return
        number = self.next_number
        self.num_rows += 1
        self.next_number += 1
        if not isinstance(values, str) and is_deep(values):
            values = "its values are nested too deeply."
        if isinstance(values, str):
            self.skip(where, values)
        else:
            yield Row(number=number, where=where, values=values, place=self._place)

    def _tables(self, tables: Iterator[Any], *, where: str) -> Iterator[Row]:
        from payload.data.sources.parquet import LostRows

        for table in tables:
            first = self._place
            if isinstance(table, LostRows):
                self._place += len(table)
                if self._place <= self._first_place:
                    continue
                self.skip(f"{where} rows {first + 1} to {first + len(table)}", table.reason)
                self.num_rows += len(table)
                self.next_number += len(table)
                continue
            for values in table:
                if not is_deep(values):
                    values = {name: without_nulls(value) for name, value in values.items()}
                yield from self._row(f"{where} row {self._place + 1}", values)


def in_batches(
    items: Iterable[_T | None], *, count: int, chars: Callable[[_T], int]
) -> Iterator[list[_T]]:
    """Yield the items that are not None, in lists of at most `count`, to tokenize together.

    `chars` returns the length of an item. The total length of a list is limited, because tokenizing
    needs about 150 bytes per token.
    """
    batch: list[_T] = []
    size = 0
    for item in items:
        if item is None:
            continue
        batch.append(item)
        size += chars(item)
        if len(batch) >= count or size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _counted(counts: Counter[str]) -> str:
    """Return the names with their numbers of rows, the most frequent name first."""
    names = [
        f"{shown(name)} ({count:,} rows)" for name, count in counts.most_common(_COLUMNS_SHOWN)
    ]
    more = len(counts) - len(names)
    return ", ".join(names) + (f" and {more} more columns" if more else "")
