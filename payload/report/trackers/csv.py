"""The tracker that writes metrics.csv for spreadsheets."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from payload.core.files import write_whole
from payload.report.trackers.base import About, Row, Tracker

_FILE = "metrics.csv"


class CsvTracker:
    """Writes a table with one line per row, and files with the settings and the results."""

    starts_over: ClassVar[bool] = True

    def __init__(self) -> None:
        self._folder = Path()
        self._names: list[str] = []
        self._rows: list[Row] = []

    def start(self, about: About) -> None:
        """Write the settings."""
        self._folder = about.folder
        write_whole(about.folder / "config.json", json.dumps(dict(about.config), indent=2) + "\n")

    def log(self, rows: Sequence[Row]) -> None:
        """Append rows. If a row has a new column, rewrite the file with this column."""
        self._rows += rows
        new = dict.fromkeys(name for row in rows for name in row if name not in self._names)
        if new:
            self._names += new
            write_whole(self._folder / _FILE, self._lines(self._rows, head=True), durable=False)
        else:
            with (self._folder / _FILE).open("a", encoding="utf-8", newline="") as file:
                file.write(self._lines(rows, head=False))

    def end(self, summary: Mapping[str, Any], report: Path | None) -> None:
        """Write the results; the report page is already in the run folder."""
        del report
        if summary:
            write_whole(self._folder / "summary.json", json.dumps(dict(summary), indent=2) + "\n")

    def _lines(self, rows: Sequence[Row], *, head: bool) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._names, lineterminator="\n")
        if head:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def make() -> Tracker:
    """Return a tracker."""
    return CsvTracker()
