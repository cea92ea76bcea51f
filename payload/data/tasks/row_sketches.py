"""Sketches of the rows' words for `--dedup near`, which an interrupted run keeps on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.data.rows.conversation import Message
from payload.data.selection.content_keys import Numbers
from payload.data.selection.near_duplicates import SKETCH_VALUES, Sketcher, near_groups
from payload.data.writing.resumable_token_files import (
    SKETCHES_NAME,
    ResumableTokenFiles,
    partial_path,
)

_SKETCH = np.dtype([("row", "<i8"), ("values", "<u4", (SKETCH_VALUES,))])
_NOT_WORDS = ("role", "type", "id", "tool_call_id")
"""Keys of messages with values that are not part of the conversation's text."""


class RowSketches:
    """The sketches of all rows, at 520 bytes per row. Empty if near duplicates are kept."""

    def __init__(self, *, is_needed: bool) -> None:
        self.is_needed = is_needed
        self._sketcher = Sketcher() if is_needed else None
        self._parts: list[npt.NDArray[Any]] = []
        self._new: list[tuple[int, npt.NDArray[np.uint32]]] = []
        self._store: ResumableTokenFiles | None = None

    def keep_in(self, store: ResumableTokenFiles | None) -> None:
        """Read an interrupted run's sketches from `store`. Append new sketches to `store` later."""
        self._store = store
        if self.is_needed and store is not None and store.has_shards:
            self._parts = [np.fromfile(partial_path(store.folder, SKETCHES_NAME), dtype=_SKETCH)]

    def forget(self) -> None:
        """Forget all sketches."""
        self._parts, self._new = [], []

    def add(self, row: int, texts: Iterator[str]) -> None:
        """Sketch the texts of a row."""
        if self._sketcher is not None:
            self._new.append((row, self._sketcher.sketch(texts)))

    def flush(self) -> None:
        """Write the sketches that were added. Call this before the store is committed."""
        if not self._new:
            return
        found = np.empty(len(self._new), dtype=_SKETCH)
        for place, each in enumerate(self._new):
            found[place] = each
        self._parts.append(found)
        self._new = []
        if self._store is not None:
            self._store.append(SKETCHES_NAME, found)

    def join(self, groups: Numbers, rows: Numbers) -> Numbers:
        """Return the group number of each of `rows`, with the groups of similar rows joined."""
        if not self.is_needed:
            return groups
        self.flush()
        found = np.concatenate([np.empty(0, dtype=_SKETCH), *self._parts])
        self._parts = [found]
        return near_groups(groups, found["values"][np.searchsorted(found["row"], rows)])


def message_texts(messages: tuple[Message, ...] | list[Message]) -> Iterator[str]:
    """Yield the texts of a conversation without system messages.

    Many rows have the same system message.
    """
    for message in messages:
        if message["role"] not in ("system", "developer"):
            yield from _texts(message)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key not in _NOT_WORDS:
                yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)
