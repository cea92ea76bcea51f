"""The one table printer of the benchmarks: rows on stderr, each as soon as it is measured."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

_LEAST_WIDTH = 11
"""Least width of a column: a number of seven digits with its commas, and the gap."""
_GAP = 2


class Table:
    """A table with a label at the left of each row and right-aligned cells."""

    def __init__(
        self,
        *heads: str,
        title: str = "",
        labels: Iterable[str] = (),
        file: TextIO | None = None,
    ) -> None:
        """Print the heads, `title` over the labels; the longest of `labels` sets their width."""
        self._file = file or sys.stderr
        self._label_width = max(map(len, (title, *labels))) + _GAP
        self._widths = [max(_LEAST_WIDTH, len(head) + _GAP) for head in heads]
        self.row(title, *heads)

    def row(self, label: str, *cells: str) -> None:
        """Print one row; cells that are left out at its end stay empty."""
        # A cell that is wider than its column moves the others on, but never touches its neighbour.
        padded = [
            " " * _GAP + f"{cell:>{width - _GAP}}"
            for cell, width in zip(cells, self._widths, strict=False)
        ]
        line = f"{label:<{self._label_width}}" + "".join(padded)
        print(line.rstrip(), file=self._file, flush=True)

    def note(self, text: str) -> None:
        """Print a sentence below the rows."""
        print(text, file=self._file, flush=True)
