"""Opens the rows of the source that the command line selects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from payload.core.errors import UsageError
from payload.data.rows.file_rows import GLOBS, FileRows
from payload.data.rows.rows import Row, Rows
from payload.data.sources.source_flags import SourceRequest, check_flags, resolve_source


def open_rows(request: SourceRequest) -> Rows:
    """Return the object that reads the rows of a source, without opening the source.

    Raises UsageError for flags that the source does not support.
    """
    request = resolve_source(request)
    check_flags(request)
    if request.kind == "hf":
        return _HubRows(request)
    if request.kind not in GLOBS:
        raise UsageError(
            f"--source {request.kind} has no columns. For this task use one of "
            f"{', '.join([*GLOBS, 'hf'])}."
        )
    return FileRows(request)


class _HubRows(Rows):
    """Rows of a dataset of the Hugging Face hub, or of a local folder in the hub's formats."""

    def __init__(self, request: SourceRequest) -> None:
        from payload.data.sources.hub import HubSource

        super().__init__(request)
        self._hub = HubSource(request)
        self._valid: str | None = None
        """Name of the validation split. Its rows are read after the rows of the training split."""
        self.label = self._hub.label

    def identity(self) -> list[Any]:
        found = self._hub.identity()
        self.revision = self._hub.revision
        return [*found, *self.identity_of_columns()]

    def _read(self) -> Iterator[Row]:
        yield from self._tables(self._hub.rows(), where=self.label)
        self._valid = self._hub.valid_split()
        if self._valid is not None:
            # The same rule as for files that are named train and valid.
            self.first_val = self.next_number if self.first_val is None else self.first_val
            yield from self._tables(self._hub.rows(self._valid), where=self.label)

    def missing_shards(self) -> str | None:
        """Return a note about missing files, and about the splits."""
        return self._hub.note(valid=self._valid)
